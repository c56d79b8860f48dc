"""Commands of `outrider-export`, and what they print."""
