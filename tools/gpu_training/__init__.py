"""Training on an accelerator's machine that has no TensorFlow: programs are made here and run with JAX there."""

PROGRAMS = ("train", "evaluate")
FACTS = "facts.json"
WEIGHTS = "initial.safetensors"
