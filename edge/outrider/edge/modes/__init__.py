"""Generation modes: how drafting and the link work together."""
