"""Quantised weights: how checkpoints store them, and linears that compute with them."""
