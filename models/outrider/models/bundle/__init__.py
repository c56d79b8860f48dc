"""Bundles on disk: manifest, files, and what a draft is expected to gain."""
