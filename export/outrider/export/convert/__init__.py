"""Converts models: one module per file format and precision."""
