"""Runs one machine as two: a cloud process, a slow network, faults."""
