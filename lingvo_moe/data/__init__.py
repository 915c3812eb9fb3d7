"""Corpora, tokenizers and packed batches of examples, of texts, speech and generated volumes."""
