"""Kernels: optional CPU and GPU kernels behind `interface.py`. Without them torch computes the same."""
