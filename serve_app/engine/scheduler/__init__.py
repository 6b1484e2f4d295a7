"""Whose turn it is, where more is wanted than a step can compute: no torch, no clock, nothing but core."""
