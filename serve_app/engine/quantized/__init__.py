"""Checkpoints whose weights are stored in few bits: they become numbers again as they are loaded."""
