"""Core types: what every package speaks of. Standard library only, frozen dataclasses, nothing that waits."""
