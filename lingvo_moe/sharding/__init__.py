"""Sharding: layouts of logical axes over a device mesh, and the annotations that XLA's SPMD partitioner reads."""
