"""Validates a cluster file strictly; Serve itself accepts unknown keys at every level without a word."""
