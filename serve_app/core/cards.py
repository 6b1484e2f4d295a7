"""What a replica says of itself: its model, its adapters, its limits, and adapters as they lie on disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from serve_app.core.delta import Load
from serve_app.core.errors import ContextOverflow
from serve_app.core.ledger import News, UsageReport
from serve_app.core.names import MAX_MIXED_ADAPTERS, ModelRef, Part
from serve_app.core.prompt import ImageCard
from serve_app.core.request import ConstraintKind, EmbeddingForm, GenerationRequest, HeadForm, SamplerName
from serve_app.core.tools import ReasoningParserName, ToolParserName

# Where a vocabulary sets no bound, a text may be so long: room for one of a few long words, or of much white space.
DEFAULT_CHARS_PER_TOKEN = 32
DEFAULT_MIN_CHARS = 1_000_000

ToolPrompt = Literal["template", "prompt", "ignore", "refuse"]
OtherSampling = Literal[
    "dynamic_temperature", "mirostat", "logit_bias", "allowed_token_ids", "bad_words", "sampler_order"
]  # fmt: skip
SamplingKind = SamplerName | OtherSampling
"""A sampler, or another way to decide which token is drawn; `sampler_order` is any order but the usual one."""
AdapterKind = Literal["plain", "scaled", "mixed"]
"""One adapter as it was trained, one with a scale that the client chose, several at once."""
RecordingKind = Literal["hidden_states", "routed_experts", "embeddings"]
EngineName = Literal["own", "vllm"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Replicas of a model. wanted: that there are to be;  starting: that load;  draining: that end with their work"""

    wanted: int
    starting: int
    draining: int


NO_SCALES: Mapping[str, Scale] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLength:
    """A prompt that fits is never refused where the vocabulary says how much text a token can hold. Elsewhere, and
    where the prompt is to be truncated and so may be of any length, `max_chars` is the bound.

    max_model_len:   in tokens
    chars_per_token: the most characters of a text that end up in one token; None where nothing bounds them
    """

    model_name: str
    max_model_len: int
    max_chars: int
    chars_per_token: int | None

    @classmethod
    def of(
        cls, model_name: str, *, max_model_len: int, chars_per_token: int | None, max_chars: int | None
    ) -> PromptLength:
        """max_chars: None is 32 characters per token of the context, and a million at least"""
        return cls(
            model_name=model_name,
            max_model_len=max_model_len,
            max_chars=max_chars or max(DEFAULT_MIN_CHARS, DEFAULT_CHARS_PER_TOKEN * max_model_len),
            chars_per_token=chars_per_token,
        )

    def check(self, request: GenerationRequest) -> None:
        """Raise ContextOverflow where the prompt is too long to fit, or to be cut into tokens; costs nothing."""
        num_chars = request.num_chars
        if request.context.takes_any_length:
            if num_chars > self.max_chars:
                raise self._too_long(request, num_chars, self.max_chars, "are cut into tokens to be truncated")
            return
        num_ids = request.prompt.num_ids
        if num_ids > self.max_model_len:
            raise self.overflow(request, f"has {num_ids} tokens", {"n_prompt_tokens": num_ids})
        most = self._most_chars(num_ids)
        if num_chars > most:
            raise self._too_long(request, num_chars, most, f"can fit the context of {self.model_name}")

    def overflow(self, request: GenerationRequest, found: str, facts: dict[str, int]) -> ContextOverflow:
        """Return the refusal of a prompt that is too long.

        found: how long the prompt is, behind its number
        """
        remedy = "" if request.context.takes_any_length else ', or send "truncate_sequence": true'
        name = request.context.prompt_name
        context = f"{self.max_model_len} tokens for prompt and completion together"
        return ContextOverflow.refusing(
            name,
            must=f"fit the context of {self.model_name}, which is {context}",
            found=f"{name} {request.prompt_index}, which {found} and exceeds the available context size",
            remedy=f"Shorten it{remedy}.",
            facts={**facts, "n_ctx": self.max_model_len},
        )

    def _most_chars(self, num_ids: int) -> int:
        """Return how many characters of text may fit beside so many tokens."""
        if self.chars_per_token is None:
            return self.max_chars
        return (self.max_model_len - num_ids) * self.chars_per_token

    def _too_long(self, request: GenerationRequest, num_chars: int, most: int, why: str) -> ContextOverflow:
        found = f"has {num_chars} characters, of which at most {most} {why}"
        return self.overflow(request, found, {"n_prompt_chars": num_chars, "max_prompt_chars": most})


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterCard:
    """One adapter found on disk, usable or not.

    version: digest of its files
    reason:  why it cannot be used; None for a usable one
    may_come: whether it may become usable if the replica is told of it again, as its files could not be fetched
    created: Unix seconds of its weights
    keeps_prefix: keys and values are the base's, so that prefixes are shared with it
    canary:  another version, which is staged, and its share of the requests for the name; None if there is none
    """

    name: str
    version: str
    rank: int = 0
    reason: str | None = None
    may_come: bool = False
    root: str = ""
    created: int = 0
    keeps_prefix: bool = False
    canary: tuple[str, float] | None = None

    @property
    def is_usable(self) -> bool:
        return self.reason is None

    def part(self, scale: float) -> Part:
        """Return this adapter at a scale, as a part of a mix."""
        return Part(adapter=self.name, version=self.version, scale=scale, keeps_prefix=self.keeps_prefix)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerCard:
    """A tokenizer's class and special tokens.

    special_tokens: pairs of a name (`eos_token`, `bos_token`, …) and the token's text
    """

    kind: str = ""
    special_tokens: tuple[tuple[str, str], ...] = ()


STATES, EXPERTS = "return_hidden_states", "return_routed_experts"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordCard:
    """Which results of a model's computation clients may get, as its operator configured it.

    embedding:       how it embeds texts; None if it does not
    hidden_size:     numbers of a hidden state, and so of an embedding
    embedding_sizes: to which its embeddings may be cut, by its training; 0 among them stands for any
    head:            how its classification head reads texts; None if it has none, and completes them
    """

    returns_hidden_states: bool = False
    returns_routed_experts: bool = False
    embedding: EmbeddingForm | None = None
    hidden_size: int = 0
    embedding_sizes: tuple[int, ...] = ()
    head: HeadForm | None = None

    @property
    def refuses(self) -> tuple[str, ...]:
        """Return, of the parameters that ask for recordings, those that the model refuses."""
        allowed = {STATES: self.returns_hidden_states, EXPERTS: self.returns_routed_experts}
        return tuple(name for name, is_allowed in allowed.items() if not is_allowed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What an engine can do for a request. The router refuses a request that needs more."""

    sampling: frozenset[SamplingKind] = frozenset((*get_args(SamplerName), *get_args(OtherSampling)))
    constraints: frozenset[ConstraintKind] = frozenset(get_args(ConstraintKind))
    adapters: frozenset[AdapterKind] = frozenset(get_args(AdapterKind))
    recordings: frozenset[RecordingKind] = frozenset(get_args(RecordingKind))

    @property
    def lacks(self) -> tuple[str, ...]:
        """Return the kinds that this engine cannot do and ours can, as clients are told of them."""
        absent = {words_of(kind) for each in fields(self) for kind in each.default - getattr(self, each.name)}
        return tuple(sorted(absent))


def words_of(kind: str) -> str:
    """Return what a kind is called in sentences and lists."""
    return f"{kind} adapters" if kind in get_args(AdapterKind) else kind


EVERYTHING = Capabilities()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """A base model as it is served.

    created: Unix seconds of its weights;  root: where they came from
    max_model_len: context in tokens, prompt and completion together
    dialect: of requests to it that name none; None is the service's own
    max_num_sequences, max_waiting: how many sequences one replica computes together, and how many more it queues
    kv_cache_bytes: what one replica may hold in keys and values
    block_size: tokens of one block of those; 0 if unknown
    staged: adapters in versions that their names do not mean, which requests can pin: those before the last change
        and those in use
    adapters_revision: of the `AdapterSet` that was applied last; 0 before the first
    adapters_root: absolute folder of its adapters, below which more may be published; "" is none
    watches_adapters: whether routers publish by themselves what is complete in that folder
    tool_parser: the form that its calls of tools have; None is the one that the template shows
    reasoning_parser: the form that its thoughts have; None as before
    chat_template: of the model's folder, as it is written there; "" is none
    tool_template: for chats with tools, where that is another one
    tool_prompt: what shows tools in a chat: the template, our default text, or nothing; `refuse` refuses them
    default_sampling: parameters that its folder recommends, for requests that do not send them
    records: which recordings of its computations clients may get
    tokenizer: its class and the special tokens that it has a name for
    images: what a vision model says of images; None for a text model
    max_mixed_adapters: in one mix; all of them have to be resident at once
    fills_gaps: whether it has the tokens of fill-in-the-middle
    prompt_length: which prompts it refuses by length alone; None if unknown
    engine:  what computes it
    capabilities: what its engine can do; a card that does not say so has an engine that can do everything
    numerics: its weights, the type that they are computed in, its context and its templates: where it is equal,
        completions of another replica go on as they would there
    """

    name: str
    root: str
    created: int
    max_model_len: int
    vocab_size: int
    adapters: tuple[AdapterCard, ...] = ()
    dialect: str | None = None
    max_num_sequences: int = 0
    max_waiting: int = 0
    kv_cache_bytes: int = 0
    block_size: int = 0
    staged: tuple[AdapterCard, ...] = ()
    adapters_revision: int = 0
    adapters_root: str = ""
    watches_adapters: bool = False
    chat_template: str = ""
    tool_template: str = ""
    tool_prompt: ToolPrompt = "template"
    tool_parser: ToolParserName | None = None
    default_sampling: tuple[tuple[str, float], ...] = ()
    reasoning_parser: ReasoningParserName | None = None
    records: RecordCard = field(default_factory=RecordCard)
    tokenizer: TokenizerCard = field(default_factory=TokenizerCard)
    images: ImageCard | None = None
    max_mixed_adapters: int = MAX_MIXED_ADAPTERS
    fills_gaps: bool = False
    prompt_length: PromptLength | None = None
    engine: EngineName = "own"
    capabilities: Capabilities = EVERYTHING
    numerics: str = ""

    @property
    def usable_adapters(self) -> tuple[AdapterCard, ...]:
        """Those that can be asked for; an adapter's place here is its number in `lora`."""
        return tuple(card for card in self.adapters if card.is_usable)

    def template_for(self, *, has_tools: bool) -> str:
        """Return the chat template for a chat with or without tools."""
        return (self.tool_template if has_tools else "") or self.chat_template

    def has(self, model: ModelRef) -> bool:
        """Return whether the model has every adapter of a reference, in its version, and may hold so many at once."""
        return len(model.parts) <= max(1, self.max_mixed_adapters) and all(
            any(card.version == part.version and card.is_usable for card in self.versions(part.adapter))
            for part in model.parts
        )

    def adapter(self, name: str) -> AdapterCard | None:
        return next((card for card in self.adapters if card.name == name), None)

    def versions(self, name: str) -> tuple[AdapterCard, ...]:
        """Return every version of an adapter that is at hand, the one that its name means first."""
        return tuple(card for card in (*self.adapters, *self.staged) if card.name == name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Residency:
    """Which adapter versions a replica holds in slots, and what it takes to bring another one; None is unknown.

    versions:  in slots, or on their way there
    num_slots: versions that fit at once; 0 where the replica does not say
    load_s:    mean seconds from the request for a version until it was ready; None before the first
    num_loads: versions brought into a slot since the replica began
    num_hits:  sequences since then that found their version in a slot
    num_bytes: memory that adapters take on the model's device
    max_bytes: which resident adapters may take there together; None is not bounded
    """

    versions: tuple[str, ...] = ()
    num_slots: int = 0
    load_s: float | None = None
    num_loads: int = 0
    num_hits: int = 0
    num_bytes: int | None = None
    max_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptCard:
    """Streams that are kept for their clients though nothing more of them is computed.

    num_bytes: of those that run, too;  num_forgotten: before their time, as there was no room
    """

    num_streams: int = 0
    num_bytes: int = 0
    num_forgotten: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaCard:
    """One replica of a base model.

    usage: of the first flows by name, and of all others together
    news:  what flows spent since the router that asks last heard of it
    residency: of adapters
    prefixes: names of those that other routers sent since the one that asks last asked (`core/prefixes.py`)
    num_routers_behind: routers with a lease that were not yet told of the card's `adapters_revision`
    """

    replica_id: str
    model: ModelCard
    load: Load = field(default_factory=Load)
    usage: UsageReport = field(default_factory=UsageReport)
    news: News = field(default_factory=News)
    residency: Residency = field(default_factory=Residency)
    prefixes: tuple[bytes, ...] = ()
    num_routers_behind: int = 0
    kept: KeptCard = field(default_factory=KeptCard)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterRecord:
    """One adapter found on disk.

    version: digest of configuration and weights; "" where they could not be read
    weights: the file of its tensors;  weights_digest: the SHA-256 of its contents, in hexadecimal digits
    fields:  its adapter_config.json; what they mean for a model is for the engine to say
    tensors: the shape of each tensor, by its name in the file
    reason:  why it cannot be used; None for a usable one
    created: Unix seconds of its weights
    """

    name: str
    path: Path
    version: str = ""
    weights: Path | None = None
    weights_digest: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    reason: str | None = None
    created: int = 0

    @property
    def is_usable(self) -> bool:
        return self.reason is None

    def card(self) -> AdapterCard:
        """Give what routers and clients are told of it."""
        rank = self.fields.get("r", 0)
        return AdapterCard(
            name=self.name,
            version=self.version,
            rank=rank if type(rank) is int else 0,
            reason=self.reason,
            root=str(self.path),
            created=self.created,
        )
