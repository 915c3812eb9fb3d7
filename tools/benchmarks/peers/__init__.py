"""The same measurements of other implementations, each run in its own environment."""
