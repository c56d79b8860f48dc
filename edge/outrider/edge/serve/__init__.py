"""Serves a local OpenAI-compatible endpoint: requests in, drafted generations of the cloud's target out."""
