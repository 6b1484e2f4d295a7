"""Kernels for CPUs, compiled for the machine that they run on; nothing else of the engine imports llvmlite."""
