"""Tokenizers, and initial embeddings whose pieces have vectors like those of their translations."""
