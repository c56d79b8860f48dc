"""Measures this checkout on a bare CUDA machine: `python -m bench.gpu`, see `__main__`."""

from bench.gpu.needs import use_checkout

use_checkout()
