"""Constraints: compiles what a client demands of a text into masks over a model's tokens."""
