"""Serves a cascade: a mid-size verifier here, the target's own verifier upstream. See docs/cascade.md."""
