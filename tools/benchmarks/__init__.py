"""Benchmarks of this library beside other implementations."""
