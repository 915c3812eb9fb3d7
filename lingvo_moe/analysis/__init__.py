"""Figures of a compiled program: memory, collectives and time on a TPU slice or a GPU cluster; the fastest settings."""
