"""What a replica says of itself: its model, its adapters, its limits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from serve_app.core.constraint import ConstraintKind
from serve_app.core.delta import Load
from serve_app.core.flow_usage import UsageReport
from serve_app.core.images import ImageCard
from serve_app.core.ledger import News
from serve_app.core.names import MAX_MIXED_ADAPTERS, ModelRef, Part
from serve_app.core.prompt_length import PromptLength
from serve_app.core.recording import EmbeddingForm
from serve_app.core.request import SamplerName
from serve_app.core.tools import ReasoningParserName, ToolParserName

ToolPrompt = Literal["template", "prompt", "ignore", "refuse"]
OtherSampling = Literal[
    "dynamic_temperature", "mirostat", "logit_bias", "allowed_token_ids", "bad_words", "sampler_order"
]  # fmt: skip
SamplingKind = SamplerName | OtherSampling
"""A sampler, or another way to decide which token is drawn; `sampler_order` is any order but the usual one."""
AdapterKind = Literal["plain", "scaled", "mixed"]
"""One adapter as it was trained, one with a scale that the client chose, several at once."""
RecordingKind = Literal["hidden_states", "routed_experts", "embeddings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterCard:
    """One adapter found on disk, usable or not.

    version: digest of its files
    reason:  why it cannot be used; None for a usable one
    created: Unix seconds of its weights
    keeps_prefix: keys and values are the base's, so that prefixes are shared with it
    """

    name: str
    version: str
    rank: int = 0
    reason: str | None = None
    root: str = ""
    created: int = 0
    keeps_prefix: bool = False

    @property
    def is_usable(self) -> bool:
        return self.reason is None

    def part(self, scale: float) -> Part:
        """So much of it."""
        return Part(adapter=self.name, version=self.version, scale=scale, keeps_prefix=self.keeps_prefix)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerCard:
    """How a tokenizer calls itself and its special tokens.

    special_tokens: pairs of a name (`eos_token`, `bos_token`, …) and the token's text
    """

    kind: str = ""
    special_tokens: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordCard:
    """What of a model's computations is given away, as its operator configured it.

    embedding:       how it embeds texts; None does not
    hidden_size:     numbers of a hidden state, and so of an embedding
    embedding_sizes: to which the model was trained to have its embeddings cut; 0 among them stands for any
    """

    returns_hidden_states: bool = False
    returns_routed_experts: bool = False
    embedding: EmbeddingForm | None = None
    hidden_size: int = 0
    embedding_sizes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What an engine can do for a request. The router refuses a request that needs more."""

    sampling: frozenset[SamplingKind] = frozenset((*get_args(SamplerName), *get_args(OtherSampling)))
    constraints: frozenset[ConstraintKind] = frozenset(get_args(ConstraintKind))
    adapters: frozenset[AdapterKind] = frozenset(get_args(AdapterKind))
    recordings: frozenset[RecordingKind] = frozenset(get_args(RecordingKind))


EVERYTHING = Capabilities()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """A base model as it is served.

    created: Unix seconds of its weights;  root: where they came from
    max_model_len: context in tokens, prompt and completion together
    dialect: of requests to it that name none; None is the service's own
    max_num_sequences, max_waiting: how many sequences one replica computes together, and how many more it queues
    kv_cache_bytes: what one replica may hold in keys and values
    tool_parser: the form that its calls of tools have; None is the one that the template shows
    reasoning_parser: the form that its thoughts have; None as before
    chat_template: of the model's folder, as it is written there; "" is none
    tool_template: for chats with tools, where that is another one
    tool_prompt: what shows tools in a chat: its template, a default text of ours, or nothing; or they are refused
    default_sampling: parameters that its folder recommends, for requests that do not send them
    records: what of its computations it gives away
    tokenizer: its class and the special tokens that it has a name for
    images: what a model with eyes says of images; None is a model of text
    max_mixed_adapters: in one mix; all of them have to be resident at once
    fills_gaps: whether it has the tokens with which a text behind a gap is told
    prompt_length: what it refuses by length alone; None is not known
    capabilities: what its engine can do; a card that does not say so has an engine that can do everything
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
    capabilities: Capabilities = EVERYTHING

    @property
    def usable_adapters(self) -> tuple[AdapterCard, ...]:
        """Those that can be asked for; an adapter's place here is its number in `lora`."""
        return tuple(card for card in self.adapters if card.is_usable)

    def template_for(self, *, has_tools: bool) -> str:
        """The chat template of a chat with tools, or without."""
        return (self.tool_template if has_tools else "") or self.chat_template

    def has(self, model: ModelRef) -> bool:
        """Whether it has every adapter of the model in its version, and as many at once."""
        cards = [(self.adapter(part.adapter), part.version) for part in model.parts]
        return len(cards) <= max(1, self.max_mixed_adapters) and all(
            card is not None and card.is_usable and card.version == version for card, version in cards
        )

    def adapter(self, name: str) -> AdapterCard | None:
        return next((card for card in self.adapters if card.name == name), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaCard:
    """One replica of a base model.

    usage: of the first flows by name, of all others together
    news:  what was spent since whoever asks heard of it last
    """

    replica_id: str
    model: ModelCard
    load: Load = field(default_factory=Load)
    usage: UsageReport = field(default_factory=UsageReport)
    news: News = field(default_factory=News)
