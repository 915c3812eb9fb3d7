"""Decoding: the search for translations."""
