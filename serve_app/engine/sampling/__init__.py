"""Sampling: from logits to tokens, with candidates, truncation, counter-based draws and log-probabilities."""
