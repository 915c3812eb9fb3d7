"""The registered models: one module for each family."""
