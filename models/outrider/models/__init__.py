"""Holds what all parts share: errors, bundles, tokenizers, sampling, acceptance, model runtimes, the wire's messages.

Knows neither the engine nor the agent. Importing this package loads no model library; each runtime imports its own on
first use.
"""

import os

# ONNX Runtime notes what runs it, and reports it, from its import on (on Linux, too).
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
