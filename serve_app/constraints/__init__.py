"""Constraints: what a client demands of a text, compiled to masks over a model's tokens."""
