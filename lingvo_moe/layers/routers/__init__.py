"""Routers: which experts take which tokens. Importing the package registers those of the library."""

from lingvo_moe.layers.routers import expert_choice, switch, top_2, top_k

__all__ = ["expert_choice", "switch", "top_2", "top_k"]
