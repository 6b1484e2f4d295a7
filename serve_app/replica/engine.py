"""The engine as a replica sees it: what it is asked, and the value that a prepared request is. No torch.

`serve_app.engine.driver.ReplicaEngine` is ours. Another engine needs these calls and a card with its capabilities.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from serve_app.constraints.vocabulary import Matcher
from serve_app.core.cards import AdapterCard, AdapterRecord, ModelCard, Residency
from serve_app.core.delta import Delta, Load
from serve_app.core.ledger import News, UsageReport
from serve_app.core.request import GenerationRequest
from serve_app.text.detokenizer import Detokenizer

Deliver = Callable[[list[Delta], Load], None]
"""Takes what a step gave and how busy the engine is after it; called in a thread of the engine's."""


class Settings(Protocol):
    """The settings of an engine that its replica reads; `EngineConfig` describes them."""

    @property
    def max_num_sequences(self) -> int: ...
    @property
    def max_waiting(self) -> int: ...
    @property
    def max_tokenized_chars(self) -> int | None: ...
    @property
    def max_waiting_chars(self) -> int: ...
    @property
    def max_outbox_deltas(self) -> int: ...
    @property
    def max_outbox_bytes(self) -> int: ...
    @property
    def resume_bytes(self) -> int: ...
    @property
    def lease_s(self) -> float: ...


class EncodedImage(Protocol):
    """An image whose embeddings are computed. The rest of it is known to the engine alone.

    text:     what stands in the prompt for the image, with the image token's text `num_rows` times
    num_rows: embeddings, each in the place of one image token
    """

    @property
    def text(self) -> str: ...
    @property
    def num_rows(self) -> int: ...


class ImageMarks(Protocol):
    """How a model's prompts name images.

    marker: text of the image token;  token_id: its id
    around: texts before and behind an image whose place alone was written
    """

    @property
    def marker(self) -> str: ...
    @property
    def token_id(self) -> int: ...
    @property
    def around(self) -> tuple[str, str]: ...


class ImageEncoder(Protocol):
    """Computes the embeddings of requests' images before their prompts are tokenized."""

    @property
    def marks(self) -> ImageMarks: ...

    async def encode(
        self, requests: Items[GenerationRequest], is_wanted: Callable[[str], bool]
    ) -> Mapping[str, tuple[EncodedImage, ...]]:
        """Return the images of each request by its id. Skip a request once `is_wanted` says no to its id.

        Raises InvalidRequest, ContextOverflow, Overloaded.
        """
        ...

    def close(self) -> None:
        """Wait for running work and drop the rest."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRequest:
    """A request in tokens, within the model's context.

    request:      its sampling and stop parameters are in token ids, too
    max_tokens:   bound on generated tokens, the context's end considered
    num_dropped_tokens: of the prompt's beginning, which are not in `token_ids`
    shown_prompt: where the prompt that is echoed stands among `token_ids`
    detokenizers: one for each completion
    matchers:     of the constraint, one for each completion; empty without a constraint
    images:       of the prompt, as the engine's image encoder gave them
    prediction:   tokens that the client expects to be generated
    """

    request: GenerationRequest
    token_ids: Items[int]
    max_tokens: int
    num_dropped_tokens: int
    shown_prompt: range
    detokenizers: Items[Detokenizer]
    matchers: Items[Matcher] = ()
    images: tuple[Any, ...] = ()
    prediction: tuple[int, ...] = ()


class Adapters(Protocol):
    """Takes adapters in while the engine computes. Futures are of threads of the engine's."""

    def stage(self, record: AdapterRecord) -> Future[AdapterCard]:
        """Bring an adapter into memory and try it. Fails with AdapterUnusable, or Overloaded while there is no room."""
        ...

    def bind(self, record: AdapterRecord) -> Future[AdapterCard]:
        """Make an adapter known that was tried before; it is read when it is used. Fails with AdapterUnusable."""
        ...

    def is_resident(self, version: str) -> bool:
        """Return whether an adapter is in memory."""
        ...

    def keep(self, versions: frozenset[str]) -> None:
        """Let these leave memory last, and no others: their files were overwritten."""
        ...

    def drop(self, versions: frozenset[str]) -> Future[frozenset[str]]:
        """Forget adapters but for those in use; the future gives those that are gone."""
        ...


class Engine(Protocol):
    """One loaded model with its adapters. The replica calls it from its event loop, unless said otherwise.

    card:   what it says of the model, its adapters and its own capabilities
    adapters: takes more of them in
    images: the image encoder of a model that takes images, else None
    eos_token_ids: tokens that end a text
    """

    @property
    def config(self) -> Settings: ...
    @property
    def card(self) -> ModelCard: ...
    @property
    def adapters(self) -> Adapters: ...
    @property
    def images(self) -> ImageEncoder | None: ...
    @property
    def eos_token_ids(self) -> frozenset[int]: ...
    @property
    def load(self) -> Load: ...

    @property
    def usage(self) -> UsageReport:
        """What was computed for each flow."""
        ...

    @property
    def residency(self) -> Residency:
        """Which adapter versions are resident."""
        ...

    def news(self, since: int) -> News:
        """Return what was spent since a listener heard the last news."""
        ...

    def start(self, deliver: Deliver) -> None:
        """Begin to compute; call it once."""
        ...

    def warm(self) -> None:
        """Begin with what makes steps faster and is not needed for the first."""
        ...

    def give_back_memory(self) -> bool:
        """Return memory that start-up freed to the operating system; blocks. Return False if there was none."""
        ...

    def sequences(self, prepared: PreparedRequest) -> Any:
        """Make of a request what `submit` takes; called in a worker thread.

        Raises InvalidRequest where the request asks for more than it may.
        """
        ...

    def submit(self, requests: Items[Any]) -> None:
        """Queue requests, each as `sequences` made it."""
        ...

    def abort(self, request_ids: frozenset[str]) -> None:
        """End requests; ignore unknown ids."""
        ...

    def pause(self, request_ids: frozenset[str]) -> None:
        """Take requests out of the batch until they are resumed; ignore unknown ids."""
        ...

    def resume(self, request_ids: frozenset[str]) -> None:
        """Let paused requests go on."""
        ...

    def check(self) -> None:
        """Raise EngineFailed where `check_engine` does, or where a step hangs."""
        ...

    def check_engine(self) -> None:
        """Raise EngineFailed where the engine cannot go on."""
        ...

    def close(self) -> None:
        """Stop after the current step and free the model; blocks. Requests that still run are lost."""
        ...
