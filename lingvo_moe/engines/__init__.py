"""Engines: what runs programs on devices."""
