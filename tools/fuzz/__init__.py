"""Fuzz tests of every command line and file format."""
