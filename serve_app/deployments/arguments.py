"""What may be written under `args` and `user_config` of the applications in a cluster file."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    PlainValidator,
    Tag,
    model_validator,
)

from serve_app.api.dialects import DIALECTS, UNION
from serve_app.api.limits import WireLimits
from serve_app.catalog.aliases import Alias, read_alias
from serve_app.catalog.files import CatalogError
from serve_app.catalog.sources import is_address, parse_source
from serve_app.core.batches import DEFAULT_FOLDER, FILES_DAYS
from serve_app.core.bounded import Amount, PositiveFloat, PositiveInt
from serve_app.core.cards import AdapterCard, ModelCard, RecordCard
from serve_app.core.ledger import Price, Prices
from serve_app.core.request import Pooling
from serve_app.core.tools import ReasoningParserName, ToolParserName
from serve_app.engine.config import EngineConfig
from serve_app.http.settings import ClientSettings
from serve_app.observe.switch import TraceSettings
from serve_app.router.admission import AdmissionSettings
from serve_app.router.placement import PlacementPolicy
from serve_app.router.rollout import RolloutSettings
from serve_app.router.run import RunSettings
from serve_app.tenants.keys import DEFAULT_PEPPER
from serve_app.tenants.published import DEFAULT_FILE

GONE = {"kv_storage": "changes nothing any more: keys and values are in pages on every device; leave it out"}
"""Settings of a model in earlier versions. A file that has one is served without it; the check says so."""


def known_dialect(name: str) -> str:
    if name not in DIALECTS:
        raise ValueError(f"must be one of {', '.join(DIALECTS)}")
    return name


DialectName = Annotated[str, AfterValidator(known_dialect)]


def known_store(url: str) -> str:
    """Raises ValueError for a store that no driver here can open; nothing is opened."""
    from serve_app.tenants.errors import TenancyError
    from serve_app.tenants.store import engine_of  # imported here: it brings SQLAlchemy, which takes time

    try:
        engine_of(url).dispose()
    except TenancyError as error:
        raise ValueError(str(error)) from None
    return url


AliasSetting = Annotated[Alias, PlainValidator(read_alias)]


def known_root(root: str) -> str:
    """Raises ValueError for an address that no adapter is fetched from."""
    if is_address(root):
        try:
            parse_source(root)
        except CatalogError as error:
            raise ValueError(f"must be a folder or an address to fetch from: {error}") from None
    return root


AdapterRoot = Annotated[str, Field(min_length=1), AfterValidator(known_root)]
Origin = Annotated[str, Field(pattern=r"^(\*|https?://[^/\s?#]+)$")]
BaseName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,95}$")]


class AdapterFolder(BaseModel, frozen=True, extra="forbid"):
    """Where adapters of a model lie.

    path:  folder with one sub-folder per adapter
    watch: whether routers publish each sub-folder by themselves, as soon as it is complete
    """

    path: Annotated[str, Field(min_length=1)]
    watch: bool = False


def _written_as(found: object) -> str:
    return "folder" if isinstance(found, dict | AdapterFolder) else "path"


Adapters = Annotated[Annotated[str, Tag("path")] | Annotated[AdapterFolder, Tag("folder")], Discriminator(_written_as)]


class ModelArgs(BaseModel, EngineConfig, frozen=True, extra="forbid"):
    """One base model. If one of these changes, Serve restarts the replicas of its application and no others.

    name:     how clients address it; also the name of its application
    path:     folder with config.json, safetensors weights and a tokenizer; `builtin:demo` is the embedded model
    adapters: folder with one sub-folder per adapter, relative to where the cluster was started; null is none.
              `{path: adapters/demo, watch: true}` publishes each sub-folder as soon as it is complete
    dialect:  of requests to this model that name none; null is the router's
    chat_template: a file with a chat template in Jinja, or the template itself; null is the folder's own, "" is none
    tools_without_template: what to do with tools that the chat template does not show. "prompt" shows them by a default
              text, "ignore" leaves them out and says so, "refuse" answers 400; "auto" is "prompt", or "ignore" if
              `tool_parser` says that the model has a form of its own
    tool_parser: the form in which the model writes tool calls in chats; null is the one that its template shows
    default_sampling: `model` takes parameters that a request leaves out from the folder's generation_config.json, in
              dialects that do so; `none` takes the dialect's
    reasoning_parser: the form in which the model thinks in chats; null is the one that its template shows, if any
    pooling:  how a prompt's hidden states become its embedding: their "mean" or the "last"; "auto" is what the folder
              says for sentence-transformers, else the mean; null gives no embeddings

    The rest is declared at serve_app.engine.config.EngineConfig.
    """

    name: BaseName
    path: Annotated[str, Field(min_length=1)]
    adapters: Adapters | None = None
    dialect: DialectName | None = None
    chat_template: str | None = None
    tools_without_template: Literal["auto", "prompt", "ignore", "refuse"] = "auto"
    tool_parser: ToolParserName | None = None
    default_sampling: Literal["model", "none"] = "model"
    reasoning_parser: ReasoningParserName | None = None
    pooling: Literal["auto"] | Pooling | None = "auto"

    @model_validator(mode="before")
    @classmethod
    def _without_what_is_gone(cls, given: Any) -> Any:
        is_table = isinstance(given, dict)
        return {name: value for name, value in given.items() if name not in GONE} if is_table else given

    @property
    def adapters_folder(self) -> Path | None:
        """Return the folder of adapters; None if there is none."""
        if self.adapters is None:
            return None
        return Path(self.adapters if isinstance(self.adapters, str) else self.adapters.path)

    @property
    def card(self) -> ModelCard:
        """Return what is known of the model before it is loaded; whether its adapters can be used is not."""
        folder, length = self.adapters_folder, self.max_model_len or 0
        found: list[Path] = []
        with suppress(OSError):  # the model's machine may see the folder
            found = sorted(each for each in folder.iterdir() if each.is_dir()) if folder else []
        is_ours = self.engine == "own"  # vLLM records nothing
        return ModelCard(
            name=self.name,
            root=self.path,
            created=0,
            max_model_len=length,
            vocab_size=0,
            adapters=tuple(AdapterCard(name=each.name, version="", root=str(each)) for each in found),
            records=RecordCard(
                returns_hidden_states=is_ours and self.return_hidden_states,
                returns_routed_experts=is_ours and self.return_routed_experts,
            ),
        )

    @property
    def watches_adapters(self) -> bool:
        """Return whether that folder's adapters are published by themselves."""
        return isinstance(self.adapters, AdapterFolder) and self.adapters.watch


class RouterArgs(BaseModel):
    """What of the router needs a restart; all else is in RouterSettings.

    store:  of tenants and keys: `sqlite:///serve_app.db`, a file beside where the cluster was started, or
            `postgresql+psycopg://user@host/name`; null is none, and then nobody is asked for a key
    pepper: file with the secret under which digests of keys are made, unless SERVE_APP_PEPPER holds it; it is made
            with the store
    ledger_days: for so many days the ledger keeps a row of each request; sums by day stay for ever
    files_days: for so many days the service keeps a file that says nothing else (`expires_after`), and a batch after
            the end of its completion window
    files:  folder of the files of batches if there is a store; all routers share it, so on several machines it is a
            shared folder
    adapters_file: keeps what adapters were published if there is no store; it is beside where the cluster was started,
            and all routers have to be on that machine
    """

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)  # a store may have a password

    store: Annotated[str, Field(min_length=1), AfterValidator(known_store)] | None = None
    pepper: Annotated[str, Field(min_length=1)] = DEFAULT_PEPPER
    ledger_days: PositiveInt = 90
    files_days: PositiveInt = FILES_DAYS
    files: Annotated[str, Field(min_length=1)] = DEFAULT_FOLDER
    adapters_file: Annotated[str, Field(min_length=1)] = DEFAULT_FILE


class LimitSettings(BaseModel, WireLimits, frozen=True, extra="forbid"):
    """Bounds on one request, described at serve_app.api.limits.WireLimits."""


class PriceSettings(BaseModel, Price, frozen=True, extra="forbid", allow_inf_nan=False):
    """Price per million tokens, in the one currency of the file; null prices cached prompt tokens like the others."""


class TracingSettings(BaseModel, TraceSettings, frozen=True, extra="forbid"):
    """Where traces of requests go.

    endpoint: OTLP receiver over HTTP, `http://127.0.0.1:4318`; null is what OTEL_EXPORTER_OTLP_ENDPOINT says
    sample:   share of traces that are kept, 0 to 1; a client's `traceparent` decides for its own request
    """

    endpoint: Annotated[str, Field(pattern=r"^https?://[^\s]+$")] | None = None
    sample: Annotated[float, Field(ge=0, le=1)] = 1.0


class CanarySettings(BaseModel, RolloutSettings, frozen=True, extra="forbid", allow_inf_nan=False):
    """When a canary gets more requests, and when it ends, described at serve_app.router.rollout.RolloutSettings."""


class RouterSettings(BaseModel, ClientSettings, AdmissionSettings, RunSettings, frozen=True, extra="forbid"):
    """The router's `user_config`: running replicas take it over within a second, nothing restarts.

    aliases:        further names of models, `alias: base`, `alias: base:adapter` or a mix of adapters; of several
                    targets each answers as often as its weight says, `alias: {"base:adapter": 95, "base:other": 5}`;
                    `alias: {to: …, shadow: {"base:new": 10}}` has 10 % of the requests computed by another one, too,
                    unseen
    dialect:        of requests that name none, to models that have none of their own
    placement:      which replica gets a prompt: `warm` is where it costs least, prefixes and adapters that are there
                    considered; `least_work` has the fewest sequences for its size; `power_of_two` is the better one of
                    two random replicas by that measure; `random` is any
    adapter_roots:  folders and addresses (`s3://bucket/team`; also gs, az, hf and https) below which adapters may be
                    published, besides `adapters` of each model
    accept_any_model: in the dialect llama.cpp the only model answers to any name, as there
    auth:           `keys` asks every request for a key, except for /health, /ready, / and the console's files; `none`
                    asks nobody, on a loopback host only; null is `keys` if args has a store, else `none`
    auth_grace_s:   how long a router relies on the tenants and keys it heard of last if it cannot ask; after that it
                    refuses requests with 503
    gateway_metrics: whether /metrics answers without a key, too, and then tells queues, KV cache and resident adapters
                    alone, in the names of vLLM: a gateway's endpoint picker has no key
    prices:         price per million tokens, `base:adapter: {prompt: 0.5, cached: 0.1, completion: 1.5}`; `base` covers
                    its adapters too, `*` every model; what has no price costs nothing
    idempotency_s:  how long a repeated Idempotency-Key gets the answer that was given; 0 ignores the header
    rollout:        when a canary gets a larger share or ends; `requests: 200` compares so many at each share
    tracing:        where traces go, `{endpoint: "http://127.0.0.1:4318", sample: 0.1}`; null is nowhere, unless
                    OTEL_EXPORTER_OTLP_ENDPOINT is set for the router's process
    """

    aliases: dict[str, AliasSetting] = Field(default_factory=dict)
    dialect: DialectName = UNION.name
    placement: PlacementPolicy = "warm"
    cors_origins: tuple[Origin, ...] = ()
    adapter_roots: tuple[AdapterRoot, ...] = ()
    accept_any_model: bool = True
    auth: Literal["none", "keys"] | None = None
    auth_grace_s: PositiveFloat = 300.0
    gateway_metrics: bool = False
    prices: dict[str, PriceSettings] = Field(default_factory=dict)
    idempotency_s: Amount = 3600.0
    rollout: CanarySettings = CanarySettings()
    tracing: TracingSettings | None = None
    limits: LimitSettings = LimitSettings()

    @property
    def known_prices(self) -> Prices:
        return Prices(by_model={name: Price(**each.model_dump()) for name, each in self.prices.items()})

    def asks_for_keys(self, *, has_accounts: bool) -> bool:
        """has_accounts: whether the application has a store of tenants"""
        return has_accounts if self.auth is None else self.auth == "keys"
