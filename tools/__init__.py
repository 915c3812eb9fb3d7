"""Command-line tools around the library: corpora, plans, benchmarks, soak and fuzz tests."""
