"""A benchmark on an accelerator: programs are made where TensorFlow is, and run where only JAX and NumPy are."""

PROGRAMS = ("init", "train", "decode")
FACTS = "facts.json"
