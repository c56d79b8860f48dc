"""The cascade: a mid-size verifier here, the target's own verifier upstream. docs/cascade.md has the whole."""
