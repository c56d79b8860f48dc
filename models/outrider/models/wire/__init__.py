"""The messages of the wire, and what they are made of."""
