"""Talks to verifiers. Knows no model."""
