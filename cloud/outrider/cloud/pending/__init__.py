"""Pending drafts of a sequence and the decisions about them, for any engine."""
