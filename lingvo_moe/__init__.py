"""A model zoo of giant sparsely-gated Mixture-of-Experts Transformers, after GShard and GSPMD."""

import glob
import os

# XLA's and TensorFlow's C++ start-up logs say nothing a user can act on, and hide what the program itself prints. Both read
# this when they are first imported, which is why it stands here.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

# libtpu, which `plan` compiles with, asks the network about its TPU whenever JAX starts, and reports at length that there is none.
# The patterns are where Linux shows a TPU's chips; where there are none, these are the answers.
if not (glob.glob("/dev/accel*") or glob.glob("/dev/vfio/[0-9]*")):
    for variable, answer in (
        ("TPU_SKIP_MDS_QUERY", "1"),
        ("TPU_WORKER_HOSTNAMES", "localhost"),
        ("TPU_ACCELERATOR_TYPE", "v3-8"),
    ):
        os.environ.setdefault(variable, answer)
