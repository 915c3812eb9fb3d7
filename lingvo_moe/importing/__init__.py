"""Models that other programs trained, for `checkpoint convert`: translators in Hugging Face's format."""
