"""The training loop, its callbacks, checkpoints and diagnosis."""
