"""Weights in few bits: how checkpoints store them, and linears that compute with them."""
