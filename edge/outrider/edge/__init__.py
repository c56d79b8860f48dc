"""The on-device agent: drafts, streams drafts up, takes the target's commits. Imports no torch."""
