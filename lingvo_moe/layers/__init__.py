"""Layers: frozen dataclasses that declare weights and compute with them."""
