"""Kernels of our own, for CPUs and GPUs, behind `interface.py`; without a folder of them torch computes the same."""
