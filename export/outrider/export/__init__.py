"""Turns models into checked bundles."""
