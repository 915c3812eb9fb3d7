"""From catalogs to a corpus of texts or speech, tokenizers and packed batches of examples; and generated volumes."""
