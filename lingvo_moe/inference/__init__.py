"""Translation, its scores, and perplexity, with trained models."""
