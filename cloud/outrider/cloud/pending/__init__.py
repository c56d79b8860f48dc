"""Pending drafts, and the decisions about them, for any engine."""
