"""Bundles on disk: manifest, files, draft heads, and what a draft is expected to gain."""
