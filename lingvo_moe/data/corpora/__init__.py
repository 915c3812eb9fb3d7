"""Corpora made from published packages and the files of users: read, cleaned, divided and written."""
