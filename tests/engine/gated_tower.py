"""A vision tower that encodes when a test lets it."""

from __future__ import annotations

import threading

from serve_app.core.prompt import Image
from serve_app.engine.decoder.loading import LoadedModel
from serve_app.engine.vision.images import DecodedImage, ImageEmbeddings
from serve_app.engine.vision.support import VisionSupport
from serve_app.engine.vision.tower import VisionTower


class GatedTower(VisionTower):
    """Those of a model, which wait for `gate`; it is open at first. num_read: images that were decoded"""

    def __init__(self, model: LoadedModel, vision: VisionSupport) -> None:
        assert model.tower is not None
        super().__init__(model.tower.module, vision, marker=model.tower.marker, max_pixels=100_000)
        self.gate = threading.Event()
        self.gate.set()
        self.num_read = 0

    def decode(self, image: Image) -> DecodedImage:
        self.num_read += 1
        return super().decode(image)

    def encode(self, read: DecodedImage) -> ImageEmbeddings:
        assert self.gate.wait(30)
        return super().encode(read)
