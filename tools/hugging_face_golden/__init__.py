"""Golden values of Hugging Face's translators: tiny random models, computed by its own code."""
