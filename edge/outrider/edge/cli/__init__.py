"""Commands of `outrider`, and their screens."""
