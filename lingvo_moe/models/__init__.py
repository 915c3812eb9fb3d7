"""Models: the translation Transformer and the language model."""
