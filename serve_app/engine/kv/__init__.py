"""Where keys and values live: slots, logical blocks and the prefix index."""
