"""Drafts ahead. Knows no network."""
