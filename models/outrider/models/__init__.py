"""The shared floor of Outrider: errors, bundles, tokenizers, sampling, acceptance and model runtimes.

Nothing here knows of the network, of the engine or of the agent. Importing this package loads no model library;
each runtime imports its own on first use.
"""
