"""Benchmarks of the kernels: `python -m replayssm_kernels.bench --help`."""
