"""Decoder: loads a model and computes a step's logits, by a loop of our own or by transformers' modules."""
