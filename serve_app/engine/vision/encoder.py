"""Encodes the images of requests before tokenization, in threads of lower priority than the engine's."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from serve_app.core.errors import ContextOverflow, Overloaded
from serve_app.core.machine import LONG_WORK, give_way
from serve_app.core.prompt import Image, ImageCard
from serve_app.core.request import GenerationRequest
from serve_app.core.shares import CacheEntry, next_to_evict
from serve_app.engine.config import EngineConfig
from serve_app.engine.decoder.loading import LoadedModel
from serve_app.engine.vision.images import DecodedImage, ImageEmbeddings
from serve_app.engine.vision.tower import VisionTower

RETRY_S = 5
Encoded = Mapping[str, tuple[ImageEmbeddings, ...]]
"""The images of each request by its id."""


class ImageCache:
    """Keeps encoded images within a budget of bytes. Threads may share it.

    The key has the request's cache salt. Without it the time of an answer would tell one tenant what another has sent.
    The flow that holds most loses its least recently used image first.

    max_bytes: of their embeddings together; an image larger than that is not kept
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._kept: OrderedDict[tuple[str, bytes], tuple[str, ImageEmbeddings]] = OrderedDict()
        self._lock = threading.Lock()
        self.num_bytes = 0
        self.num_hits = 0

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, digest: bytes, *, salt: str) -> ImageEmbeddings | None:
        with self._lock:
            if (salt, digest) not in self._kept:
                return None
            self._kept.move_to_end((salt, digest))
            self.num_hits += 1
            return self._kept[salt, digest][1]

    def keep(self, seen: ImageEmbeddings, *, salt: str, flow: str) -> None:
        """Cache an image. flow: that asked for it"""
        with self._lock:
            if (salt, seen.digest) in self._kept or seen.num_bytes > self._max_bytes:
                return
            self._kept[salt, seen.digest] = flow, seen
            self.num_bytes += seen.num_bytes
            while self.num_bytes > self._max_bytes:
                self._forget_one()

    def _forget_one(self) -> None:
        key = next_to_evict(
            CacheEntry(key=key, flow=flow, size=seen.num_bytes) for key, (flow, seen) in self._kept.items()
        )
        assert key is not None, "there are bytes of none"
        _, oldest = self._kept.pop(key)
        self.num_bytes -= oldest.num_bytes


class VisionEncoder:
    """Decodes images in one thread and encodes them in another, one at a time each. Lives on the event loop.

    A cached image waits for neither thread.

    kept: the cache
    max_waiting_bytes: of image files that wait; more are refused
    num_encoded: images whose embeddings were computed
    """

    def __init__(self, tower: VisionTower, *, kept: ImageCache, max_model_len: int, max_waiting_bytes: int) -> None:
        self.kept = kept
        self.num_encoded = 0
        self._tower = tower
        self._max_model_len = max_model_len
        self._max_waiting_bytes = max_waiting_bytes
        self._num_waiting_bytes = 0
        self._in_memory = asyncio.Semaphore(2)
        self._decoders = ThreadPoolExecutor(1, thread_name_prefix="images", initializer=give_way, initargs=(LONG_WORK,))
        self._encoders = ThreadPoolExecutor(1, thread_name_prefix="tower", initializer=give_way, initargs=(LONG_WORK,))

    @property
    def marks(self) -> VisionTower:
        """Return how prompts name images."""
        return self._tower

    async def encode(self, requests: Items[GenerationRequest], is_wanted: Callable[[str], bool]) -> Encoded:
        """Encode every image of the requests, but none of a request that is no longer wanted.

        Raises InvalidRequest if an image cannot be read, ContextOverflow if the images overfill the context, and
        Overloaded if too many wait.
        """
        num_bytes = sum(len(image.data) for request in requests for image in request.prompt.images)
        if num_bytes and num_bytes + self._num_waiting_bytes > self._max_waiting_bytes:
            raise Overloaded("Too many images wait to be encoded.", None, {"retry_after_s": RETRY_S})
        self._num_waiting_bytes += num_bytes
        try:
            return {each.request_id: await self._encode(each, partial(is_wanted, each.request_id)) for each in requests}
        finally:
            self._num_waiting_bytes -= num_bytes

    def close(self) -> None:
        """Wait for what runs; what has not begun is dropped."""
        for pool in (self._decoders, self._encoders):
            pool.shutdown(cancel_futures=True)

    async def _encode(self, request: GenerationRequest, is_wanted: Callable[[], bool]) -> tuple[ImageEmbeddings, ...]:
        """Encode one request's images; return none once it is no longer wanted.

        1. look each image up in the cache and check the headers of the rest;
        2. count the rows that all of them take;
        3. encode one after the other.
        """
        loop, images = asyncio.get_running_loop(), request.prompt.images
        known = [await loop.run_in_executor(self._decoders, self._find, request, image) for image in images]
        if known.count(None) > 1:
            await self._count(request, known, is_wanted)
        seen: list[ImageEmbeddings] = []
        for image, each in zip(images, known, strict=True):
            if (found := each or await self._encode_one(request, image, is_wanted)) is None:
                return ()
            seen.append(found)
        self._check_length(request, [len(each.rows) for each in seen])
        return tuple(seen)

    async def _count(
        self, request: GenerationRequest, known: Items[ImageEmbeddings | None], is_wanted: Callable[[], bool]
    ) -> None:
        """Decode all images once, only to check that their rows fit the context."""
        loop, num_rows = asyncio.get_running_loop(), list[int]()
        for image, each in zip(request.prompt.images, known, strict=True):
            if not is_wanted():
                return
            if each is None:
                num_rows.append(await loop.run_in_executor(self._decoders, self._tower.count, image))
            else:
                num_rows.append(len(each.rows))
            self._check_length(request, num_rows)

    def _find(self, request: GenerationRequest, image: Image) -> ImageEmbeddings | None:
        """Return a cached image. Of any other check the header and return None."""
        seen = self.kept.find(image.digest, salt=request.cache_salt)
        if seen is None:
            self._tower.check(image)
        return seen

    async def _encode_one(
        self, request: GenerationRequest, image: Image, is_wanted: Callable[[], bool]
    ) -> ImageEmbeddings | None:
        """Decode and encode an image. At most two decoded images are in memory."""
        loop = asyncio.get_running_loop()
        async with self._in_memory:
            read = await loop.run_in_executor(self._decoders, self._decode, request, image, is_wanted)
            if not isinstance(read, DecodedImage):
                return read
            return await loop.run_in_executor(self._encoders, self._run_tower, request, read)

    def _decode(
        self, request: GenerationRequest, image: Image, is_wanted: Callable[[], bool]
    ) -> ImageEmbeddings | DecodedImage | None:
        """Decode an image, unless another request had it encoded meanwhile."""
        if not is_wanted():
            return None
        return self.kept.find(image.digest, salt=request.cache_salt) or self._tower.decode(image)

    def _run_tower(self, request: GenerationRequest, read: DecodedImage) -> ImageEmbeddings:
        seen = self.kept.find(read.digest, salt=request.cache_salt)
        if seen is None:
            seen = self._tower.encode(read)
            self.num_encoded += 1
            self.kept.keep(seen, salt=request.cache_salt, flow=request.share.flow)
        return seen

    def _check_length(self, request: GenerationRequest, counts: Items[int]) -> None:
        """Raise ContextOverflow if the first images, of so many rows each, overfill the context."""
        num_rows, context = sum(counts), self._max_model_len
        if num_rows > context:
            raise ContextOverflow.refusing(
                "prompt",
                must=f"fit the context, which is {context} tokens for prompt, images and completion together",
                found=f"prompt {request.prompt_index}, whose first {len(counts)} images take {num_rows}",
                facts={"n_prompt_tokens": num_rows, "n_ctx": context},
            )


def make_encoder(model: LoadedModel, config: EngineConfig) -> VisionEncoder | None:
    """Make the encoder of a model that takes images."""
    if model.tower is None:
        return None
    kept, most = ImageCache(config.image_cache_bytes), config.max_waiting_image_bytes
    return VisionEncoder(model.tower, kept=kept, max_model_len=model.max_model_len, max_waiting_bytes=most)


def image_card(model: LoadedModel) -> ImageCard | None:
    """Return what routers are told of images; None for a model of text."""
    if model.tower is not None:
        return ImageCard(marker=model.tower.marker)
    return None if model.why_no_images is None else ImageCard(reason=model.why_no_images)
