"""Speculation: what a sequence seems to copy is guessed, computed along with it, and drawn as ever."""
