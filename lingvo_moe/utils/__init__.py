"""Helpers without knowledge of models: progress bars, output files, safe paths."""
