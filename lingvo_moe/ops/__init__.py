"""Per-platform implementations of matmuls, attention, dispatch and random numbers."""
