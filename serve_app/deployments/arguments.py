"""What may be written under `args` and `user_config` of the applications in a cluster file."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt

from serve_app.api.dialects import DIALECTS, UNION
from serve_app.core.ledger import Price, Prices
from serve_app.core.request import Pooling
from serve_app.core.tools import ReasoningParserName, ToolParserName
from serve_app.observe.switch import TraceSettings
from serve_app.tenants.keys import DEFAULT_PEPPER


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


Origin = Annotated[str, Field(pattern=r"^(\*|https?://[^/\s?#]+)$")]
BaseName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,95}$")]


class ModelArgs(BaseModel):
    """One base model. Serve restarts the replicas of its application when one of these changes, and no others.

    name:     how clients address it; also the name of its application
    path:     folder with config.json, safetensors weights and a tokenizer; `builtin:demo` is the embedded model
    adapters: folder with one sub-folder per adapter; relative to where the cluster was started; null is none
    dialect:  of requests to this model that name none; null is that of the router
    chat_template: a file with a chat template in Jinja, or the template itself; null is the folder's own, "" is none
    tools_without_template: what becomes of tools that the chat template does not show: "prompt" shows them by a default
              text, "ignore" leaves them out and says so, "refuse" answers 400; "auto" is "prompt", or "ignore" where
              `tool_parser` says that the model has a form of its own
    tool_parser: the form in which the model writes calls of tools in chats; null is the one that its template shows
    default_sampling: `model`: parameters that are not sent are what the folder's generation_config.json says, in
              dialects that have it so; `none`: they are the dialect's
    reasoning_parser: the form in which the model thinks in chats; null is the one that its template shows, none is none
    pooling:  what of a prompt's hidden states is its embedding, as their "mean" or the "last"; "auto" is what the
              folder says for sentence-transformers, else the mean; null gives none

    The rest is described at serve_app.engine.config.EngineConfig.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: BaseName
    path: Annotated[str, Field(min_length=1)]
    adapters: str | None = None
    dialect: DialectName | None = None
    chat_template: str | None = None
    tools_without_template: Literal["auto", "prompt", "ignore", "refuse"] = "auto"
    tool_parser: ToolParserName | None = None
    default_sampling: Literal["model", "none"] = "model"
    reasoning_parser: ReasoningParserName | None = None
    pooling: Literal["auto"] | Pooling | None = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    weights: Literal["int8", "int4"] | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    max_model_len: PositiveInt | None = None
    max_num_sequences: PositiveInt = 64
    max_batch_tokens: PositiveInt = 512
    max_logit_rows: PositiveInt = 64
    kv_cache_bytes: PositiveInt | Literal["auto"] = "auto"
    kv_storage: Literal["auto", "lanes", "pages"] = "auto"
    kernels: Literal["auto", "flashinfer", "triton", "torch"] = "auto"
    graphs: Literal["auto", "none"] = "auto"
    run_ahead: Literal["auto", "none"] = "auto"
    block_size: PositiveInt = 16
    max_adapters: Annotated[int, Field(ge=0)] = 16
    max_waiting: Annotated[int, Field(ge=0)] = 1024
    threads: PositiveInt | None = None
    niceness: Annotated[int, Field(ge=0, le=19)] = 5
    tensor_parallel: PositiveInt = 1
    max_step_stretch: Annotated[float, Field(gt=1)] = 1.75
    min_prompt_tokens: PositiveInt = 8
    max_bypass_s: Annotated[float, Field(ge=0)] = 5.0
    prefill_weight: PositiveFloat = 1.0
    decode_weight: PositiveFloat = 2.0
    swap_weight: Annotated[float, Field(ge=0)] = 256.0
    turn_quantum: Annotated[float, Field(ge=0)] = 256.0
    class_age_s: PositiveFloat = 5.0
    max_turn_wait_s: PositiveFloat = 30.0
    lease_s: Annotated[float, Field(ge=2)] = 10.0
    prefix_cache: bool = True
    max_forced_tokens: Annotated[int, Field(ge=0)] = 32
    speculation: Literal["none", "requested", "prompt_lookup"] = "requested"
    max_draft_tokens: PositiveInt = 8
    max_tokenized_chars: PositiveInt | None = None
    max_waiting_chars: PositiveInt = 64 << 20
    max_outbox_deltas: PositiveInt = 4096
    max_outbox_bytes: PositiveInt = 64 << 20
    images: bool = True
    max_image_pixels: PositiveInt = 25_000_000
    max_waiting_image_bytes: PositiveInt = 256 << 20
    image_cache_bytes: Annotated[int, Field(ge=0)] = 256 << 20
    return_hidden_states: bool = False
    return_routed_experts: bool = False
    max_recorded_bytes: PositiveInt = 4 << 20


class RouterArgs(BaseModel):
    """What of the router needs a restart; all else is in RouterSettings.

    store:  of tenants and keys: `sqlite:///serve_app.db`, a file beside where the cluster was started, or
            `postgresql+psycopg://user@host/name`; null is none, and then nobody is asked for a key
    pepper: file with the secret under which digests of keys are made, unless SERVE_APP_PEPPER holds it; it is made
            with the store
    ledger_days: for so many days the ledger keeps a row of each request; sums by day stay for ever
    """

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)  # a store may have a password

    store: Annotated[str, Field(min_length=1), AfterValidator(known_store)] | None = None
    pepper: Annotated[str, Field(min_length=1)] = DEFAULT_PEPPER
    ledger_days: PositiveInt = 90


class LimitSettings(BaseModel):
    """Bounds on one request, described at serve_app.api.limits.WireLimits."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_depth: PositiveInt = 64
    max_model_chars: PositiveInt = 512
    max_models: PositiveInt = 16
    max_prompts: PositiveInt = 256
    max_inputs: PositiveInt = 1024
    max_prompt_chars: PositiveInt = 4_000_000
    max_prompt_ids: PositiveInt = 1_000_000
    max_messages: PositiveInt = 4096
    max_n: PositiveInt = 128
    max_choices: PositiveInt = 2048
    max_total_tokens: PositiveInt = 16_777_216
    max_logprobs: PositiveInt = 5
    max_stop_strings: PositiveInt = 64
    max_stop_chars: PositiveInt = 1024
    max_stop_token_ids: PositiveInt = 1024
    max_logit_bias: PositiveInt = 16_384
    max_constraint_chars: PositiveInt = 262_144
    max_extra_files: PositiveInt = 256
    max_images: PositiveInt = 32
    max_image_bytes: PositiveInt = 10_485_760


class PriceSettings(BaseModel):
    """Per million tokens, in the one currency of the file; cached prompt tokens cost as others do where null."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    prompt: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    cached: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    completion: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0


class TracingSettings(BaseModel):
    """Where traces of requests are sent to.

    endpoint: of an OTLP receiver over HTTP, `http://127.0.0.1:4318`; null is what OTEL_EXPORTER_OTLP_ENDPOINT says
    sample:   share of the traces that are kept, from 0 to 1; where a client sent a `traceparent`, that decides
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    endpoint: Annotated[str, Field(pattern=r"^https?://[^\s]+$")] | None = None
    sample: Annotated[float, Field(ge=0, le=1)] = 1.0


class RouterSettings(BaseModel):
    """The router's `user_config`: taken over by running replicas within a second, nothing restarts.

    aliases:        further names of models, `alias: base`, `alias: base:adapter` or a mix of adapters
    timeout_s:      how long one request may take in all
    max_body_bytes: of a request's body
    keep_alive_s:   after so long without an event a stream gets a comment line, so that nothing closes it as idle
    dialect:        of requests that name none, to models that have none of their own
    max_wait_s:     a request whose first step is predicted to come later is refused with 503 and Retry-After
    max_open_requests:  served at once, those still read included; keep it below Serve's own max_ongoing_requests, whose
                    refusals are no JSON
    max_pending_events: of a stream that wait for a client which reads slowly
    slow_reader:    what is done beyond: `pause` has the engine wait, `abort` ends the stream with an error
    max_stall_s:    a client that reads nothing for so long is given up, and its place is free
    cors_origins:   web pages of these origins may call, `https://app.example.org` or `*` for any; none by default
    accept_any_model: in the dialect llama.cpp the only model answers to any name, as there
    auth:           `keys` asks every request but for /health, / and the console's files for a key; `none` asks nobody,
                    on a loopback host only; null is `keys` where args has a store, else `none`
    auth_grace_s:   for so long a router goes by the tenants and keys that it has heard of last where it cannot ask;
                    then requests are refused with 503
    prices:         what a million tokens cost, `base:adapter: {prompt: 0.5, cached: 0.1, completion: 1.5}`; `base` is
                    also of its adapters, `*` of every model; what has no price costs nothing
    idempotency_s:  a request that comes again under its Idempotency-Key within so long gets the answer that was given;
                    0 ignores the header
    tracing:        where traces go to, `{endpoint: "http://127.0.0.1:4318", sample: 0.1}`; null is nowhere, unless
                    OTEL_EXPORTER_OTLP_ENDPOINT is set where the router runs
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    aliases: dict[str, str] = Field(default_factory=dict)
    timeout_s: PositiveFloat = 600.0
    max_body_bytes: PositiveInt = 16 * 1024 * 1024
    keep_alive_s: PositiveFloat = 15.0
    dialect: DialectName = UNION.name
    max_wait_s: PositiveFloat = 30.0
    max_open_requests: PositiveInt = 4096
    max_pending_events: PositiveInt = 1024
    slow_reader: Literal["pause", "abort"] = "pause"
    max_stall_s: PositiveFloat = 60.0
    cors_origins: tuple[Origin, ...] = ()
    accept_any_model: bool = True
    auth: Literal["none", "keys"] | None = None
    auth_grace_s: PositiveFloat = 300.0
    prices: dict[str, PriceSettings] = Field(default_factory=dict)
    idempotency_s: Annotated[float, Field(ge=0)] = 3600.0
    tracing: TracingSettings | None = None
    limits: LimitSettings = LimitSettings()

    @property
    def traces(self) -> TraceSettings | None:
        return None if self.tracing is None else TraceSettings(**self.tracing.model_dump())

    @property
    def known_prices(self) -> Prices:
        return Prices(by_model={name: Price(**each.model_dump()) for name, each in self.prices.items()})

    def asks_for_keys(self, *, has_accounts: bool) -> bool:
        """has_accounts: whether the application has a store of tenants"""
        return has_accounts if self.auth is None else self.auth == "keys"
