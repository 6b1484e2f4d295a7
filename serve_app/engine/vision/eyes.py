"""The part of a model that sees, taken out of it: from a decoded image to what a prompt holds of it."""

from __future__ import annotations

from copy import copy, deepcopy
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from serve_app.core.errors import EngineFailed, InvalidRequest
from serve_app.core.prompt import Image
from serve_app.engine.config import EngineConfig
from serve_app.engine.vision.files import decode, open_image, without_own_bound
from serve_app.engine.vision.judgement import Sight
from serve_app.engine.vision.kinds import Inputs
from serve_app.engine.vision.seen import Read, Seen


class Eyes:
    """What sees, with a configuration of its own; nothing of it is a part of the model any more.

    token_id:   that stands for each row of embeddings;  marker: its text
    max_pixels: of one image
    """

    def __init__(self, tower: PreTrainedModel, sight: Sight, *, marker: str, max_pixels: int) -> None:
        without_own_bound()
        self.tower = tower
        self.marker = marker
        self.token_id = int(tower.config.image_token_id)
        self._kind = sight.kind
        self._processor = sight.processor
        self._max_pixels = max_pixels

    @property
    def around(self) -> tuple[str, str]:
        """Texts before and behind an image, where a client wrote its place alone."""
        return self._kind.around

    def check(self, image: Image) -> None:
        """Look at an image's header alone. Raises InvalidRequest."""
        open_image(image, max_pixels=self._max_pixels)

    def count(self, image: Image) -> int:
        """Rows of embeddings that an image takes in a prompt. Raises InvalidRequest."""
        return self._kind.text(self.tower.config, self.marker, self._inputs(image)).count(self.marker)

    def read(self, image: Image) -> Read:
        """Decode an image and make of it what the tower takes. Raises InvalidRequest."""
        inputs = self._inputs(image)
        text = self._kind.text(self.tower.config, self.marker, inputs)
        return Read(
            digest=image.digest,
            text=text,
            num_rows=text.count(self.marker),
            grid=self._kind.grid(self.tower.config, inputs),
            inputs={name: inputs[name] for name in self._kind.takes if name in inputs},
        )

    @torch.inference_mode()
    def see(self, read: Read) -> Seen:
        """Compute an image's embeddings; takes as long as a long prompt."""
        module: Any = self.tower
        inputs = {name: tensor.to(module.device) for name, tensor in read.inputs.items()}
        rows = torch.cat(list(module.get_image_features(**inputs).pooler_output), dim=0).to(module.dtype)
        if len(rows) != read.num_rows:
            raise EngineFailed(f"the model sees {len(rows)} embeddings where its text has {read.num_rows} places")
        return Seen(digest=read.digest, text=read.text, grid=read.grid, rows=rows)

    def _inputs(self, image: Image) -> Inputs:
        opened = decode(open_image(image, max_pixels=self._max_pixels), image)
        try:
            inputs: Inputs = self._processor(images=opened, return_tensors="pt", **dict.fromkeys(self._kind.asks, True))
        except ValueError as error:  # of sizes that it makes nothing of
            raise InvalidRequest.refusing(
                image.name, must="be of a size that the model takes", found=f"{opened.width} × {opened.height}: {error}"
            ) from error
        return inputs


def open_eyes(module: PreTrainedModel, sight: Sight, config: EngineConfig) -> Eyes | str:
    """Take the eyes out of a model that was loaded with them; say why where its tokenizer has no token for an image."""
    tower = take_out(module, sight)
    token_id = int(tower.config.image_token_id)
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_file=str(Path(config.path) / "tokenizer.json"))
    marker: str | None = tokenizer.convert_ids_to_tokens(token_id)
    if marker is None:
        return f"its tokenizer has no token {token_id}, which its config.json has for images"
    return Eyes(tower, sight, marker=marker, max_pixels=config.max_image_pixels)


def take_out(module: PreTrainedModel, sight: Sight) -> PreTrainedModel:
    """Take the modules that see out of a model, and give a copy of its base that has nothing but them.

    The copy has a configuration of its own, so that attention of the one is never attention of the other.
    """
    base: Any = module.model
    tower: PreTrainedModel = copy(base)
    tower._modules = {name: base._modules[name] for name in sight.kind.modules}
    for name in sight.kind.modules:
        base._modules[name] = None
    known: dict[int, Any] = {}
    for each in tower.modules():
        config: Any = getattr(each, "config", None)
        if isinstance(config, PreTrainedConfig):
            each.config = deepcopy(config, known)
    tower.set_attn_implementation({"vision_config": "sdpa"})
    return tower
