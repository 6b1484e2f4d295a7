"""Vision: encodes a client's images into rows of embeddings, in threads beside the engine's steps."""
