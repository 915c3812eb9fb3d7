"""A model zoo of giant sparsely-gated Mixture-of-Experts Transformers, after GShard and GSPMD."""
