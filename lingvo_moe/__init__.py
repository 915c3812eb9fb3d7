"""A model zoo of giant sparsely-gated Mixture-of-Experts Transformers, after GShard and GSPMD."""

import os

# XLA's and TensorFlow's C++ start-up logs say nothing a user can act on, and hide what the program itself prints. Both read
# this when they are first imported, which is why it stands here.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
