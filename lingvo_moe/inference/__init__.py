"""Translation, its scores, and the held-out loss, with trained models."""
