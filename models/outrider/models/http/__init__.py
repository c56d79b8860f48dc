"""Shared by all our HTTP endpoints: OpenAI messages, event streams, limits, keys. Only servers load it."""
