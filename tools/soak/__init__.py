"""Soak tests: training that survives kills."""
