"""Eyes that see when a test lets them."""

from __future__ import annotations

import threading

from serve_app.core.prompt import Image
from serve_app.engine.decoder.loading import LoadedModel
from serve_app.engine.vision.images import Read, Seen
from serve_app.engine.vision.support import Sight
from serve_app.engine.vision.tower import Eyes


class GatedEyes(Eyes):
    """Those of a model, which wait for `gate`; it is open at first. num_read: images that were decoded"""

    def __init__(self, model: LoadedModel, sight: Sight) -> None:
        assert model.eyes is not None
        super().__init__(model.eyes.tower, sight, marker=model.eyes.marker, max_pixels=100_000)
        self.gate = threading.Event()
        self.gate.set()
        self.num_read = 0

    def read(self, image: Image) -> Read:
        self.num_read += 1
        return super().read(image)

    def see(self, read: Read) -> Seen:
        assert self.gate.wait(30)
        return super().see(read)
