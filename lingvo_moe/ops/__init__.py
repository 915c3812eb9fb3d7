"""Tensor functions below the layers: per-platform forms of products, dispatch, random numbers."""
