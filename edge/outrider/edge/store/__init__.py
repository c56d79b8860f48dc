"""Keeps drafts that were pulled from servers: chooses, downloads, finds them again."""
