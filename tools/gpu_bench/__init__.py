"""A benchmark on an accelerator: programs are made with TensorFlow, and run with JAX and NumPy alone."""

PROGRAMS = ("init", "train", "decode")
FACTS = "facts.json"
