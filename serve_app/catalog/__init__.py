"""Catalog: models and adapters on disk, aliases, and the resolution of names."""
