"""From translation catalogs to a corpus, tokenizers, and packed batches of examples."""
