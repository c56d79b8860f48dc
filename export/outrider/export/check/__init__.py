"""Runs what was exported and compares it with its source."""
