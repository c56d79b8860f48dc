"""Measures the product on a bare CUDA machine: `python -m bench.gpu`, see `__main__`."""
