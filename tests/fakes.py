"""Shared fakes: a backend in memory whose replies are a function of the request, and the cards of small models."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from serve_app.core.adapters import AdapterSet
from serve_app.core.backend import NOTHING
from serve_app.core.cards import AdapterCard, ModelCard, RecordCard, ReplicaCard
from serve_app.core.delta import (
    Delta,
    Finish,
    FinishReason,
    Frame,
    Load,
    PromptReport,
    TokenLogprob,
    TopLogprob,
)
from serve_app.core.errors import Resumed, ServeError
from serve_app.core.ledger import News, Spent
from serve_app.core.progress import Past
from serve_app.core.prompt import Image, Tokenization, TokenizeRequest
from serve_app.core.recording import Recording
from serve_app.core.request import EmbeddingForm, GenerationRequest
from serve_app.replica.keeping import Keeping


async def settle(num_turns: int = 30) -> None:
    """Let every task of this loop come as far as it can in so many turns, however slow the machine is."""
    for _ in range(num_turns):
        await asyncio.sleep(0)


EOS = 2
VOCAB_SIZE = 1000
HIDDEN_SIZE = 4
DELTA_NS = 1000
"""Of a step's time, for each delta that it gave."""
NUM_OF_ALL = 7
"""Likeliest tokens where all are asked for."""

Script = Callable[[GenerationRequest, int], list[str]]
"""The words of a completion, by request and sample; end of sequence follows the last."""


def counting_script(request: GenerationRequest, sample: int) -> list[str]:
    """Forty words that name prompt, sample and position: ` p0s1w2`; adapters sign with their name."""
    signature = f"{request.model.adapter}-" if request.model.adapter else ""
    return [f" {signature}p{request.prompt_index}s{sample}w{position}" for position in range(40)]


def model_card(name: str = "tiny", *adapters: AdapterCard, vocab_size: int = VOCAB_SIZE) -> ModelCard:
    return ModelCard(
        name=name,
        root=f"models/{name}",
        created=1_700_000_000,
        max_model_len=512,
        vocab_size=vocab_size,
        adapters=adapters,
        records=RecordCard(embedding=EmbeddingForm(), hidden_size=HIDDEN_SIZE),
    )


def adapter_card(name: str, version: str = "v1", *, reason: str | None = None) -> AdapterCard:
    return AdapterCard(name=name, version=version, rank=4, reason=reason, root=f"adapters/{name}")


def replica_card(replica_id: str = "replica-0", model: ModelCard | None = None) -> ReplicaCard:
    return ReplicaCard(replica_id=replica_id, model=model or model_card(), load=Load(num_blocks=100))


@dataclass(slots=True)
class FakeSequence:
    """One continuation that is being recited."""

    request: GenerationRequest
    sample: int
    words: list[str]
    position: int = 0
    num_chars: int = 0
    is_first: bool = True
    begun_at: int = 0
    num_counted: int = 0


@dataclass(slots=True)
class Outbox:
    """Frames for one router; None ends its stream, an exception breaks it."""

    frames: asyncio.Queue[Frame | Exception | None] = field(default_factory=asyncio.Queue)


class FakeBackend:
    """A replica that recites scripts, one word per step and sequence.

    Steps come by themselves, one per turn of the event loop, unless `is_stepped`: then `step` makes them. What is
    paused takes no part in them.
    `spent` by flow and `spent_on` by request are what a replica counts, and stay.
    `refusal` refuses every submission; while `submit_gate` is not set, submissions wait. `tail` ends every prompt.
    `stage_refusal` refuses every adapter that is staged; `staged` has the others by version, and stays.
    """

    def __init__(
        self,
        card: ReplicaCard | None = None,
        *,
        script: Script = counting_script,
        is_stepped: bool = False,
        tail: str = "",
    ) -> None:
        self.card = card or replica_card()
        self.script = script
        self.is_stepped = is_stepped
        self.tail = tail
        self.refusal: Exception | None = None
        self.stage_refusal: Exception | None = None
        self.staged: dict[str, AdapterCard] = {}
        self.submit_gate = asyncio.Event()
        self.submit_gate.set()
        self.submissions: list[tuple[GenerationRequest, ...]] = []
        self.aborted: list[str] = []
        self.paused: set[str] = set()
        self.num_attached = 0
        self._live: dict[str, list[FakeSequence]] = {}
        self._routers: dict[str, str] = {}
        self._outboxes: dict[str, Outbox] = {}
        self._stepper: asyncio.Task[None] | None = None
        self._has_died = False
        self.keeping = Keeping(64 << 20, time.monotonic)
        self.spent: dict[str, Spent] = {}
        self.spent_on: dict[str, Spent] = {}

    @property
    def num_live(self) -> int:
        """Sequences that are being recited."""
        return sum(len(sequences) for sequences in self._live.values())

    @property
    def load(self) -> Load:
        return Load(
            num_running=self.num_live,
            num_blocks=100,
            num_free_blocks=100 - self.num_live,
            spent=tuple(self.spent.values()),
        )

    async def hello(self, router_id: str, heard: Mapping[str, int] = NOTHING) -> ReplicaCard:
        return replace(self.card, news=News(spent=tuple(self.spent.values()), until=1))

    async def attach(self, router_id: str) -> AsyncGenerator[Frame, None]:
        if self._has_died:
            raise ConnectionError("the process is gone")
        self.num_attached += 1
        outbox = self._outbox(router_id)
        try:
            while True:
                frame = await outbox.frames.get()
                if frame is None:
                    return
                if isinstance(frame, Exception):
                    raise frame
                yield frame
        finally:
            self.num_attached -= 1

    async def submit(self, router_id: str, requests: Sequence[GenerationRequest]) -> bool:
        await self.submit_gate.wait()
        if self._has_died:
            raise ConnectionError("the process is gone")
        if self.refusal is not None:
            raise self.refusal
        self.submissions.append(tuple(requests))
        self.keeping.begin(requests)
        for request in requests:
            assert request.request_id not in self._live, f"{request.request_id} was submitted twice"
            self._routers[request.request_id] = router_id
            self._live[request.request_id] = [self._sequence(request, s) for s in request.samples]
        if not self.is_stepped and self._stepper is None:
            self._stepper = asyncio.get_running_loop().create_task(self._run())
        return self.keeping.make_room(requests)

    async def abort(self, router_id: str, request_ids: Sequence[str]) -> None:
        if self._has_died:
            raise ConnectionError("the process is gone")
        self.aborted += request_ids
        self.keeping.leave(request_ids)
        for request_id in request_ids:
            self._live.pop(request_id, None)

    async def pause(self, router_id: str, request_ids: Sequence[str]) -> None:
        if self._has_died:
            raise ConnectionError("the process is gone")
        self.paused |= self._live.keys() & set(request_ids)

    async def resume(self, router_id: str, request_ids: Sequence[str]) -> None:
        if self._has_died:
            raise ConnectionError("the process is gone")
        self.paused -= set(request_ids)

    async def recall(self, response_id: str, owner: str, claim: str) -> tuple[Past, ...]:
        if self._has_died:
            raise ConnectionError("the process is gone")
        found = self.keeping.find(response_id, owner, claim)
        for past in found if claim else ():
            request_id = past.request.request_id
            if self._live.pop(request_id, None):
                self.keeping.leave([request_id])
                self.send(self._routers[request_id], Delta(request_id=request_id, sample=0, error=Resumed("elsewhere")))
        return tuple(replace(past, numerics=self.card.model.numerics if past.deltas else "") for past in found)

    async def tokenize(self, request: TokenizeRequest) -> Tokenization:
        """A token per character, its code point; the end of sequence stands for all special tokens."""
        await self.submit_gate.wait()
        if self._has_died:
            raise ConnectionError("the process is gone")
        token_ids = (*((EOS,) if request.adds_special else ()), *map(ord, request.text))
        pieces = tuple(chr(token_id).encode() for token_id in token_ids) if request.with_pieces else None
        return Tokenization(token_ids=token_ids, pieces=pieces)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        await self.submit_gate.wait()
        if self._has_died:
            raise ConnectionError("the process is gone")
        return "".join(map(chr, token_ids))

    async def stage_adapter(self, name: str, path: str, version: str) -> AdapterCard:
        if self._has_died:
            raise ConnectionError("the process is gone")
        if self.stage_refusal is not None:
            raise self.stage_refusal
        self.staged[version] = AdapterCard(name=name, version=version, rank=4, root=path)
        return self.staged[version]

    async def apply_adapters(self, published: AdapterSet) -> ModelCard:
        """Serve what is published and what lies in the folder; the versions before stay at hand."""
        if self._has_died:
            raise ConnectionError("the process is gone")
        model = self.card.model
        if published.revision > model.adapters_revision:
            ours = published.of(model.name)
            hidden = {each.name for each in ours} | published.withdrawn_of(model.name)
            kept = tuple(card for card in model.adapters if card.name not in hidden)
            served = tuple(
                AdapterCard(
                    name=each.name,
                    version=each.version,
                    rank=4,
                    root=each.path,
                    canary=None if each.canary is None else (each.canary.version, each.canary.share),
                )
                for each in ours
            )
            before = tuple(
                AdapterCard(name=each.name, version=each.previous[0], rank=4, root=each.previous[1])
                for each in ours
                if each.previous is not None
            ) + tuple(
                AdapterCard(name=each.name, version=each.canary.version, rank=4, root=each.canary.path)
                for each in ours
                if each.canary is not None
            )
            model = replace(model, adapters=kept + served, staged=before, adapters_revision=published.revision)
            self.card = replace(self.card, model=model)
        return self.card.model

    def step(self) -> None:
        """Recite one word of every sequence and send a frame to each router."""
        deltas: dict[str, list[Delta]] = {}
        for request_id, sequences in list(self._live.items()):
            for sequence in list(sequences) if request_id not in self.paused else ():
                delta = self._advance(sequence)
                flow = sequence.request.share.flow
                counted = delta if sequence.position > sequence.num_counted else replace(delta, token_ids=())
                counted = replace(counted, prompt=None) if sequence.num_counted else counted
                self.spent[flow] = _grown(self.spent.get(flow), counted, flow=flow)
                self.spent_on[request_id] = _grown(self.spent_on.get(request_id), counted, flow=flow)
                deltas.setdefault(self._routers[request_id], []).append(delta)
                if delta.finish is not None:
                    sequences.remove(sequence)
            if not sequences:
                del self._live[request_id]
        for router_id, of_router in deltas.items():
            self.keeping.note(of_router)
            self.send(router_id, *of_router)

    def send(self, router_id: str, *deltas: Delta) -> None:
        """Send these deltas, whatever they are."""
        self._outbox(router_id).frames.put_nowait(Frame(deltas=deltas, load=self.load))

    def fail(self, error: ServeError) -> None:
        """Lose every sequence to an error, one error delta each."""
        for request_id, sequences in list(self._live.items()):
            lost = [Delta(request_id=request_id, sample=s.sample, error=error) for s in sequences]
            self.send(self._routers[request_id], *lost)
        self._live.clear()

    def end_stream(self, router_id: str) -> None:
        """End a router's stream and what it has here, as where nothing was heard of it."""
        self._live = {each: self._live[each] for each in self._live if self._routers[each] != router_id}
        self._outbox(router_id).frames.put_nowait(None)

    def die(self, error: Exception | None = None) -> None:
        """Break every stream, by an exception or (None) by its end; refuse all calls from now on."""
        self._has_died = True
        self._live.clear()
        for outbox in self._outboxes.values():
            outbox.frames.put_nowait(error)

    async def _run(self) -> None:
        while self._live:
            self.step()
            await asyncio.sleep(0)
        self._stepper = None

    def _outbox(self, router_id: str) -> Outbox:
        return self._outboxes.setdefault(router_id, Outbox())

    def _sequence(self, request: GenerationRequest, sample: int) -> FakeSequence:
        sequence = FakeSequence(request=request, sample=sample, words=self.script(request, sample))
        sequence.is_first = not request.is_reported
        continued = request.continued[sample] if request.continued else None
        for word in sequence.words[: 0 if continued is None else len(continued.token_ids)]:
            sequence.position += 1
            sequence.num_chars += len(word)
        sequence.begun_at = sequence.position
        sequence.num_counted = 0 if continued is None else continued.num_counted
        return sequence

    def _advance(self, sequence: FakeSequence) -> Delta:
        request, limit = sequence.request, sequence.request.stop.max_tokens
        report = _report(request, self.tail) if sequence.sample == 0 and sequence.is_first else None
        sequence.is_first = False
        if limit == 0:
            return self._end(sequence, FinishReason.LENGTH, None, report=report)
        if sequence.position == len(sequence.words):
            sequence.position += 1  # the end of sequence is a token that is not shown
            return self._end(sequence, FinishReason.STOP, EOS, report=report)
        word = sequence.words[sequence.position]
        stop = next((s for s in request.stop.strings if s in word), None)
        shown = word if stop is None else word[: word.index(stop)]
        finish = None
        if stop is not None:
            finish = _finish(FinishReason.STOP, stop, num_tokens=sequence.position + 1, begun_at=sequence.begun_at)
        elif limit is not None and sequence.position + 1 == limit:
            finish = _finish(FinishReason.LENGTH, None, num_tokens=limit, begun_at=sequence.begun_at)
        logprobs: tuple[TokenLogprob, ...] = ()
        if request.logprobs is not None and shown:
            logprobs = (_logprob(word, sequence.position, offset=sequence.num_chars, num_top=request.logprobs.top),)
        sequence.position += 1
        sequence.num_chars += len(shown)
        return Delta(
            request_id=request.request_id,
            sample=sequence.sample,
            text=shown,
            token_ids=(100 + sequence.position,),
            logprobs=logprobs,
            prompt=report,
            finish=finish,
            recording=None if finish is None else _recording(request, sequence.sample),
        )

    @staticmethod
    def _end(
        sequence: FakeSequence, reason: FinishReason, matched: int | None, *, report: PromptReport | None
    ) -> Delta:
        return Delta(
            request_id=sequence.request.request_id,
            sample=sequence.sample,
            token_ids=() if matched is None else (matched,),
            prompt=report,
            finish=_finish(reason, matched, num_tokens=sequence.position, begun_at=sequence.begun_at),
            recording=_recording(sequence.request, sequence.sample),
        )


def _finish(reason: FinishReason, matched: str | int | None, *, num_tokens: int, begun_at: int) -> Finish:
    """A delta each, and one at least; those before were another replica's."""
    engine_ns = DELTA_NS * max(1, num_tokens - begun_at)
    return Finish(reason=reason, matched_stop=matched, num_tokens=num_tokens, engine_ns=engine_ns)


def _grown(before: Spent | None, delta: Delta, *, flow: str) -> Spent:
    """With what this delta cost."""
    spent, report = before or Spent(flow=flow), delta.prompt
    return Spent(
        flow=flow,
        prompt_tokens=spent.prompt_tokens + (0 if report is None else report.num_tokens),
        cached_tokens=spent.cached_tokens + (0 if report is None else report.num_cached_tokens),
        completion_tokens=spent.completion_tokens + len(delta.token_ids),
        engine_ns=spent.engine_ns + DELTA_NS,
    )


def _recording(request: GenerationRequest, sample: int) -> Recording | None:
    """One state that names prompt and sample."""
    if request.record is None:
        return None
    state = array("f", [request.prompt_index, sample, 0.5, 0.25][: request.record.dimensions])
    return Recording(hidden_states=state.tobytes(), num_states=1)


def prompt_words(request: GenerationRequest) -> list[str]:
    """The fake's tokens of a prompt: words of text with the blank before them, ids as `<id>`, images as markers."""
    words: list[str] = []
    for part in request.prompt.parts:
        if isinstance(part, str):
            words += [f" {word}" if i else word for i, word in enumerate(part.split(" "))]
        elif isinstance(part, Image):
            words.append(part.marker)
        else:
            words += [f"<{token_id}>" for token_id in part]
    return words


def _report(request: GenerationRequest, tail: str) -> PromptReport:
    words = prompt_words(request)
    logprobs = None
    if request.logprobs is not None and request.logprobs.prompt:
        offsets = [len("".join(words[:i])) for i in range(len(words))]
        logprobs = tuple(
            _logprob(word, i, offset=offsets[i], num_top=request.logprobs.top, is_predicted=i > 0)
            for i, word in enumerate(words)
        )
    return PromptReport(
        num_tokens=len(words),
        num_cached_tokens=len(words) // 2,
        text="".join(words) if request.echo else None,
        logprobs=logprobs,
        tail=tail if request.reports_tail else "",
    )


def _logprob(word: str, position: int, *, offset: int, num_top: int | None, is_predicted: bool = True) -> TokenLogprob:
    """The word is second likeliest: one better stands above it."""
    if not is_predicted:
        return TokenLogprob(token_id=100 + position, text=word, logprob=None, offset=offset)
    likeliest = [
        TopLogprob(token_id=900 + rank, text=word if rank == 1 else f"{word}#{rank}", logprob=-0.25 - rank)
        for rank in range(NUM_OF_ALL if num_top is None else num_top)
    ]
    return TokenLogprob(token_id=100 + position, text=word, logprob=-1.25, offset=offset, top=tuple(likeliest))
