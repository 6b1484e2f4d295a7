"""THE NOUNS: what every room speaks of. Standard library only, frozen dataclasses, nothing that waits."""
