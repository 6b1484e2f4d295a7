"""VisionTower: a client's image file becomes rows of embeddings, in threads of their own, off the engine's steps."""
