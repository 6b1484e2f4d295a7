"""Kernels for GPUs and what launches them; nothing else of the engine imports triton."""
