"""Attacks on a running server and on the local endpoint, one module per group of rows; `bench.abuse` runs them.

They know wire formats and commands only, never the code under attack, so that they run on any version of it.
"""
