"""The settings of one engine: what a platform team may tune per model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le

from serve_app.core.bounded import Amount, Count, PositiveFloat, PositiveInt
from serve_app.engine.scheduler.policy import Rules

SPARE_PART = 4
"""One spare place for so many."""


@dataclass(frozen=True, kw_only=True)  # no slots, so that what a cluster file says of a model can inherit the fields
class EngineConfig:
    """One base model and its limits: type, bounds and default of every setting that a platform team may tune.

    name:              the base model's name as clients write it
    path:              folder with config.json, safetensors weights and a tokenizer
    dtype:             "auto" is the checkpoint's own, or float32 on a CPU without instructions for that
    weights:           "int8" or "int4" stores the weights of linear layers in that many bits, whatever the checkpoint
                       has; None keeps the checkpoint's, in `dtype`
    device:            "auto" is cuda if there is one, else cpu
    max_model_len:     context length in tokens; None is the model's own
    max_num_sequences: sequences computed together; 64 adds up to 16 more if other tenants hold every place, for tenants
                       that have less than their share
    max_batch_tokens:  tokens computed per step, decode and prefill chunks together
    max_logit_rows:    rows of prompt scoring per step, which bounds the memory of logits
    kv_cache_bytes:    budget of the KV cache of all shards, live and cached. "auto" is a quarter of the memory that is
                       free once the weights are loaded (85 % on a GPU), at most what all sequences could fill
    kernels:           which kernels compute attention and adapters; "torch" gathers pages first, on CPUs where our own
                       kernel does not serve. "auto" is flashinfer on cuda if it is installed, else triton if its
                       kernels pass a check, else torch. flashinfer leaves some layers, graphs and adapters to triton
    graphs:            whether decode steps are captured as CUDA graphs and replayed; "auto" is on cuda, if the kernels
                       follow the block tables, the model runs in the decoder loop and is not sharded
    run_ahead:         whether a step may launch while the one before is computed, if it needs nothing but its tokens;
                       "auto" is on cuda, if the model is not sharded
    block_size:        positions per KV block, the unit of accounting and of prefix hits
    max_adapters:      adapters resident at once
    adapter_bytes:     budget of resident adapters, of all shards. An adapter takes inputs + outputs of each linear that
                       it changes, times its rank, rounded up to a power of two. "auto" is `max_adapters` times the
                       largest adapter at start, or, if that is more, as many of rank 64 on all linears, for which an
                       eighth of the free memory is the most
    max_waiting:       sequences queued beyond those running; the engine refuses more
    threads:           torch threads; None is one per CPU that `num_cpus` of the deployment sets aside, or of the node
                       if that is less than one, divided among the replica's shards
    niceness:          of the threads that compute steps on CPUs, so that proxies and routers on the machine go first;
                       "auto" is 5, and 0 of vLLM, whose threads wait awake for longer
    tensor_parallel:   devices of one node that share the model, one process each; 1 does not shard it
    max_step_stretch:  1.75 lets a mixed step take 1.75 times a decode-only step. Up to eight times as much more if many
                       short prompts wait, few sequences decode, and every decoding flow has such a prompt; if other
                       flows decode too, the oldest prompt of each flow counts. Sequences that nobody reads before their
                       end do not hold back short prompts of their own flow if nothing else decodes. Sequences that a
                       flow has beyond another flow's, if that one waits for no more, may stretch a step by half as
                       much, or as far as prompts may stretch a sequence of the flow that has the fewest
    min_prompt_tokens: prompt tokens that a mixed step may always compute, so that prompts make progress
    max_bypass_s:      how long others may overtake a queued sequence that lacks blocks or an adapter slot
    prefill_weight:    cost of a prompt token in fair queueing
    decode_weight:     cost of a drawn token in fair queueing
    swap_weight:       cost that a flow is charged for having an adapter loaded
    turn_quantum:      how much more service than others a flow may get before its turn ends, so that resident adapters
                       and warm prefixes are used; it bounds how unequal flows may be
    class_age_s:       a flow of a lower class that had no turn for this long counts as of the next higher class
    max_turn_wait_s:   a waiting flow that had no turn for this long is next, whatever it was served
    lease_s:           the replica takes a router that is silent for this long for dead
    prefix_cache:      whether computed prefixes are kept for later requests
    max_forced_tokens: tokens without alternative under a constraint that are appended at once; 0 draws each of them
    speculation:       which tokens are guessed and computed along with the next one, if that pays; the text is the
                       same. "prompt_lookup" guesses what followed the last few tokens where they occurred before;
                       "requested" guesses only for requests that ask for it, as by a prediction; "none" never does
    max_draft_tokens:  guesses for one sequence in one step
    max_tokenized_chars: longest text that is tokenized although it may not fit the context: one to be truncated, one
                       for /tokenize, one of a tokenizer that deletes text. None: 32 per token of the context, at least
                       a million
    max_waiting_chars: characters of prompts over 32,768 characters that may wait for the tokenizer; the replica refuses
                       more until there is room, longer ones first, and those of a flow that has half of it
    max_outbox_deltas: deltas pending for a router that reads slowly; beyond that, those of one sequence are merged
    max_outbox_bytes:  bytes pending for a router that does not read; beyond that, its requests end with an error
    resume_bytes:      kept of streams, so that clients that lost them can fetch them (`resume_s` of the router); beyond
                       that the oldest that ended or were left are forgotten, and no more are kept
    images:            whether a model that takes images does so here; false does not even load its vision encoder
    max_image_pixels:  pixels of one image, as its header says, before it is decoded
    max_waiting_image_bytes: bytes of image files that may wait for the vision encoder; the replica refuses more
    image_cache_bytes: cache of image embeddings, for the next prompt with the same image
    return_hidden_states: whether clients may ask for hidden states
    return_routed_experts: whether clients may ask which experts were chosen
    max_recorded_bytes: hidden states and chosen experts that one prompt with its completions may ask for; a step in
                       which many such completions end may add as many times that to `max_outbox_bytes`
    engine:            what computes the model: "own" is serve_app's engine, "vllm" is vLLM, which has to be installed
    vllm:              further options of vLLM by the names of its `EngineArgs`, `{gpu_memory_utilization: 0.9}`
    """

    name: str
    path: str
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    weights: Literal["int8", "int4"] | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    max_model_len: PositiveInt | None = None
    max_num_sequences: PositiveInt = 64
    max_batch_tokens: PositiveInt = 512
    max_logit_rows: PositiveInt = 64
    kv_cache_bytes: PositiveInt | Literal["auto"] = "auto"
    kernels: Literal["auto", "flashinfer", "triton", "torch"] = "auto"
    graphs: Literal["auto", "none"] = "auto"
    run_ahead: Literal["auto", "none"] = "auto"
    block_size: PositiveInt = 16
    max_adapters: Count = 16
    adapter_bytes: PositiveInt | Literal["auto"] = "auto"
    max_waiting: Count = 1024
    threads: PositiveInt | None = None
    niceness: Annotated[int, Ge(0), Le(19)] | Literal["auto"] = "auto"
    tensor_parallel: PositiveInt = 1
    max_step_stretch: Annotated[float, Gt(1)] = 1.75
    min_prompt_tokens: PositiveInt = 8
    max_bypass_s: Amount = 5.0
    prefill_weight: PositiveFloat = 1.0
    decode_weight: PositiveFloat = 2.0
    swap_weight: Amount = 256.0
    turn_quantum: Amount = 256.0
    class_age_s: PositiveFloat = 5.0
    max_turn_wait_s: PositiveFloat = 30.0
    lease_s: Annotated[float, Ge(2)] = 10.0
    prefix_cache: bool = True
    max_forced_tokens: Count = 32
    speculation: Literal["none", "requested", "prompt_lookup"] = "requested"
    max_draft_tokens: PositiveInt = 8
    max_tokenized_chars: PositiveInt | None = None
    max_waiting_chars: PositiveInt = 64 << 20
    max_outbox_deltas: PositiveInt = 4096
    max_outbox_bytes: PositiveInt = 64 << 20
    resume_bytes: Count = 64 << 20
    images: bool = True
    max_image_pixels: PositiveInt = 25_000_000
    max_waiting_image_bytes: PositiveInt = 256 << 20
    image_cache_bytes: Count = 256 << 20
    return_hidden_states: bool = False
    return_routed_experts: bool = False
    max_recorded_bytes: PositiveInt = 4 << 20
    engine: Literal["own", "vllm"] = "own"
    vllm: Mapping[str, Any] | None = None

    @property
    def step_niceness(self) -> int:
        """Return the niceness of the threads that compute steps on CPUs."""
        if self.niceness == "auto":
            return 5 if self.engine == "own" else 0
        return self.niceness

    @property
    def num_spare_places(self) -> int:
        """Return the places beyond `max_num_sequences`, for flows that have less than their share."""
        return self.max_num_sequences // SPARE_PART

    @property
    def num_places(self) -> int:
        """Return how many sequences may be computed together at most."""
        return self.max_num_sequences + self.num_spare_places

    @property
    def fairness(self) -> Rules:
        """Return how flows share this replica."""
        return Rules(
            prefill_weight=self.prefill_weight,
            decode_weight=self.decode_weight,
            swap_weight=self.swap_weight,
            quantum=self.turn_quantum,
            age_s=self.class_age_s,
            max_wait_s=self.max_turn_wait_s,
        )
