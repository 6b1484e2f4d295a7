"""Adapters inside the engine: reading them, and the masked bank that applies them."""
