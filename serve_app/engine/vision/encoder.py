"""Looks at the images of requests before these are tokenised, in threads that give way to the engine's."""

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
from serve_app.engine.vision.images import Read, Seen
from serve_app.engine.vision.tower import Eyes


class SeenImages:
    """By the salt of whoever may find them, or the time of an answer would tell one tenant what another has sent, and
    the digest of their files. Of the flow that has most the one used longest ago goes first. Threads may share it.

    max_bytes: of their embeddings together; an image larger than that is not kept
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._kept: OrderedDict[tuple[str, bytes], tuple[str, Seen]] = OrderedDict()
        self._lock = threading.Lock()
        self.num_bytes = 0
        self.num_hits = 0

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, digest: bytes, *, salt: str) -> Seen | None:
        with self._lock:
            if (salt, digest) not in self._kept:
                return None
            self._kept.move_to_end((salt, digest))
            self.num_hits += 1
            return self._kept[salt, digest][1]

    def keep(self, seen: Seen, *, salt: str, flow: str) -> None:
        """flow: that asked for it"""
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


RETRY_S = 5

Looks = Mapping[str, tuple[Seen, ...]]
"""What was seen of each request's images, by its id."""


class Looking:
    """Decodes images in one thread and computes their embeddings in another, one at a time each.

    An image that is kept from before waits for neither. Lives on the event loop.

    max_waiting_bytes: of image files whose turn has not come; more are refused
    num_seen: images whose embeddings were computed
    """

    def __init__(self, eyes: Eyes, *, kept: SeenImages, max_model_len: int, max_waiting_bytes: int) -> None:
        self.kept = kept
        self.num_seen = 0
        self._eyes = eyes
        self._max_model_len = max_model_len
        self._max_waiting_bytes = max_waiting_bytes
        self._num_waiting_bytes = 0
        self._in_memory = asyncio.Semaphore(2)
        self._readers = ThreadPoolExecutor(1, thread_name_prefix="images", initializer=give_way, initargs=(LONG_WORK,))
        self._seers = ThreadPoolExecutor(1, thread_name_prefix="eyes", initializer=give_way, initargs=(LONG_WORK,))

    @property
    def marks(self) -> Eyes:
        """Return what knows how prompts name images."""
        return self._eyes

    async def encode(self, requests: Items[GenerationRequest], is_wanted: Callable[[str], bool]) -> Looks:
        """See every image of the requests; of one that nobody wants any more, none.

        Raises InvalidRequest where an image cannot be read, ContextOverflow where they overfill the context, and
        Overloaded where too many wait.
        """
        num_bytes = sum(len(image.data) for request in requests for image in request.prompt.images)
        if num_bytes and num_bytes + self._num_waiting_bytes > self._max_waiting_bytes:
            raise Overloaded("Too many images wait to be seen.", None, {"retry_after_s": RETRY_S})
        self._num_waiting_bytes += num_bytes
        try:
            return {each.request_id: await self._look(each, partial(is_wanted, each.request_id)) for each in requests}
        finally:
            self._num_waiting_bytes -= num_bytes

    def close(self) -> None:
        """Wait for what runs; what has not begun is dropped."""
        for pool in (self._readers, self._seers):
            pool.shutdown(cancel_futures=True)

    async def _look(self, request: GenerationRequest, is_wanted: Callable[[], bool]) -> tuple[Seen, ...]:
        """Nothing where it is not wanted any more: what headers say of all, then what all take, and only then one after
        the other.
        """
        loop, images = asyncio.get_running_loop(), request.prompt.images
        known = [await loop.run_in_executor(self._readers, self._find, request, image) for image in images]
        if known.count(None) > 1:
            await self._count(request, known, is_wanted)
        seen: list[Seen] = []
        for image, each in zip(images, known, strict=True):
            if (found := each or await self._see(request, image, is_wanted)) is None:
                return ()
            seen.append(found)
        self._check_length(request, [len(each.rows) for each in seen])
        return tuple(seen)

    async def _count(
        self, request: GenerationRequest, known: Items[Seen | None], is_wanted: Callable[[], bool]
    ) -> None:
        """Decode all images once more than they are seen, only to check that they fit."""
        loop, num_rows = asyncio.get_running_loop(), list[int]()
        for image, each in zip(request.prompt.images, known, strict=True):
            if not is_wanted():
                return
            if each is None:
                num_rows.append(await loop.run_in_executor(self._readers, self._eyes.count, image))
            else:
                num_rows.append(len(each.rows))
            self._check_length(request, num_rows)

    def _find(self, request: GenerationRequest, image: Image) -> Seen | None:
        """An image that was seen before; of any other, at least its header is sound."""
        seen = self.kept.find(image.digest, salt=request.cache_salt)
        if seen is None:
            self._eyes.check(image)
        return seen

    async def _see(self, request: GenerationRequest, image: Image, is_wanted: Callable[[], bool]) -> Seen | None:
        """One is decoded while another is seen, and no more of them are in memory."""
        loop = asyncio.get_running_loop()
        async with self._in_memory:
            read = await loop.run_in_executor(self._readers, self._read, request, image, is_wanted)
            if not isinstance(read, Read):
                return read
            return await loop.run_in_executor(self._seers, self._seen, request, read)

    def _read(self, request: GenerationRequest, image: Image, is_wanted: Callable[[], bool]) -> Seen | Read | None:
        """Another request may have had it seen meanwhile."""
        if not is_wanted():
            return None
        return self.kept.find(image.digest, salt=request.cache_salt) or self._eyes.read(image)

    def _seen(self, request: GenerationRequest, read: Read) -> Seen:
        seen = self.kept.find(read.digest, salt=request.cache_salt)
        if seen is None:
            seen = self._eyes.see(read)
            self.num_seen += 1
            self.kept.keep(seen, salt=request.cache_salt, flow=request.share.flow)
        return seen

    def _check_length(self, request: GenerationRequest, counts: Items[int]) -> None:
        """counts: rows of the first images"""
        num_rows, context = sum(counts), self._max_model_len
        if num_rows > context:
            raise ContextOverflow.refusing(
                "prompt",
                must=f"fit the context, which is {context} tokens for prompt, images and completion together",
                found=f"prompt {request.prompt_index}, whose first {len(counts)} images take {num_rows}",
                facts={"n_prompt_tokens": num_rows, "n_ctx": context},
            )


def make_looking(model: LoadedModel, config: EngineConfig) -> Looking | None:
    """Of a model that sees."""
    if model.eyes is None:
        return None
    kept, most = SeenImages(config.image_cache_bytes), config.max_waiting_image_bytes
    return Looking(model.eyes, kept=kept, max_model_len=model.max_model_len, max_waiting_bytes=most)


def image_card(model: LoadedModel) -> ImageCard | None:
    """What the routers are told; None of a model of text."""
    if model.eyes is not None:
        return ImageCard(marker=model.eyes.marker)
    return None if model.blindness is None else ImageCard(reason=model.blindness)
