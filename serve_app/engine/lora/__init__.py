"""Adapters inside the engine: what is known of them, who sits in which slot, and the bank that applies them."""
