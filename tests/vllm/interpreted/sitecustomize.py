"""Lets vLLM's V2 model runner run without a GPU: Triton's interpreter stands for its compiler for CPUs.

Python imports it at the start of each process whose PYTHONPATH has this directory.
"""

from __future__ import annotations

import os

if os.environ.get("OUTRIDER_INTERPRET"):
    os.environ["TRITON_INTERPRET"] = "1"
    import triton.backends

    class _Driver:
        @staticmethod
        def is_active() -> bool:
            return True

    triton.backends.backends.clear()
    triton.backends.backends["cpu"] = triton.backends.Backend(compiler=None, driver=_Driver)
