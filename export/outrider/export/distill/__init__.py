"""Trains a draft on its target's own text: `outrider-export distill`."""
