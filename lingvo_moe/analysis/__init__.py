"""Figures of a compiled program: memory, collectives and time on a TPU slice, and the fastest settings."""
