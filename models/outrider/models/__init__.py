"""Holds what all parts share: errors, bundles, tokenizers, sampling, acceptance, model runtimes, the wire's messages.

Knows neither the engine nor the agent. Importing this package loads no model library; each runtime imports its own on
first use.
"""
