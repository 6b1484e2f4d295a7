"""Check: validates a cluster file strictly. Serve itself silently accepts unknown keys at every level."""
