"""Replica: takes requests in, prepares their prompts, and sends deltas back, whatever engine computes them."""
