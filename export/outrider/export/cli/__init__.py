"""Holds the commands of `outrider-export`, and what they print."""
