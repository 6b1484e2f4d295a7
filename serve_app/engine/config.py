"""The settings of one engine; what a platform team may tune per model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from serve_app.engine.scheduler.policy import Rules

SPARE_PART = 4
"""One spare place for so many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """One base model and the limits it is served within.

    name:              the base model's name as clients write it
    path:              folder with config.json, safetensors weights and a tokenizer
    dtype:             "auto" is the checkpoint's own, or float32 on a CPU that has no instructions for that
    weights:           "int8" or "int4" keeps those of linears in so many bits, whatever the checkpoint has; None keeps
                       what it has, in `dtype`
    device:            "auto" is cuda where there is one, else cpu
    max_model_len:     context in tokens; None is the model's own
    max_num_sequences: sequences computed together; and a quarter more where others have taken all places, for flows
                       that have less than their share
    max_batch_tokens:  tokens computed per step, decode and prompt chunks together
    max_logit_rows:    rows of prompt scoring per step, which bounds the memory that logits take
    kv_cache_bytes:    budget for keys and values, live and cached together, of all shards; "auto" is a quarter of the
                       memory that is free once the weights are there (of a GPU's, 85 %), and no more than all sequences
                       could fill
    kv_storage:        "lanes" are contiguous, "pages" are shared; "auto" is pages on cuda, else lanes
    kernels:           who computes attention over pages and what adapters change; "torch" gathers pages first, "auto"
                       is flashinfer on cuda where that is installed, else triton, whose kernels pass a check at start,
                       else torch; flashinfer leaves some layers, graphs and adapters to triton
    graphs:            whether steps that decode are recorded and launched as a whole; "auto" is on cuda where kernels
                       follow the block tables, and the model is one of the loop's and whole
    run_ahead:         whether a step may be launched while the one before is computed, where nothing but its tokens is
                       needed; "auto" is on cuda, where the model is whole
    block_size:        positions per block; the unit of accounting and of prefix hits
    max_adapters:      adapters resident at once
    max_waiting:       sequences queued beyond those running; more are refused
    threads:           torch threads; None is one per CPU of the process, divided among its shards
    niceness:          of the threads that compute steps on CPUs, beside the proxies and routers of their machine
    tensor_parallel:   devices of one node that the model is divided among, a process for each; 1 is whole
    max_step_stretch:  while some sequences decode, a step that computes prompts too should take at most so many times
                       one that does not; by up to four times as much more where many short prompts wait beside few
                       sequences that decode, all of flows that such prompts are of, as those are served sooner then;
                       where others decode, too, the oldest prompt of each flow counts. Sequences that nobody reads
                       before their end are spared no short prompt of their own flow where nothing else decodes.
                       Sequences of a flow beyond those that another has, which waits for no more, may stretch a step by
                       half as much, or as far as prompts may one of the sequences of the flow that has the fewest
    min_prompt_tokens: which such a step may compute however long it takes, so that prompts get on
    max_bypass_s:      a queued sequence that lacks blocks or an adapter's slot may be overtaken for so long
    prefill_weight:    what a token of a prompt counts as where flows share this replica
    decode_weight:     what a token that is drawn counts as
    swap_weight:       what the flow that has an adapter brought is charged for it
    turn_quantum:      so much more than others a flow may get before its turn ends, so that resident adapters and warm
                       prefixes are used; how unequal flows may be besides
    class_age_s:       a flow of a lower class that had no turn for so long counts as of the next higher one
    max_turn_wait_s:   a flow that waits and had no turn for so long is next, whatever it was served
    lease_s:           a router not heard of for so many seconds is taken for dead
    prefix_cache:      whether prefixes that were computed are kept for later requests
    max_forced_tokens: that a constraint leaves no choice about, appended at once; 0 draws each of them
    speculation:       which tokens are guessed and computed along with the next one, where that pays; the text is the
                       same. "prompt_lookup": what followed the last few tokens where they occurred before; "requested":
                       only for requests that ask for it, as by a prediction; "none": nothing
    max_draft_tokens:  guesses of one sequence in one step
    max_tokenized_chars: characters of a text that is cut into tokens although nothing says that it fits: one to be
                       truncated, one for /tokenize, one of a tokenizer that deletes text. None: 32 for each token of
                       the context, a million at least
    max_waiting_chars: of prompts of more than 32,768 characters that wait to be cut into tokens; more are refused until
                       there is room, longer ones before shorter ones, and where one flow has half of it
    max_outbox_deltas: pending for a router that reads slowly; beyond it those of one sequence are joined
    max_outbox_bytes:  pending for a router that does not read; beyond it its requests end with an error
    images:            whether a model that takes images does so here; without, its towers are not even loaded
    max_image_pixels:  of one image, as its header says, before it is decoded
    max_waiting_image_bytes: of image files that wait to be seen; more are refused until there is room
    image_cache_bytes: for embeddings of images that were seen, for the next prompt that has them
    return_hidden_states: whether clients may ask for hidden states
    return_routed_experts: whether clients may ask which experts were chosen
    max_recorded_bytes: of hidden states and chosen experts that one prompt with its completions may ask for; a step in
                       which many such completions end may be that many times as much for `max_outbox_bytes`
    """

    name: str
    path: str
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    weights: Literal["int8", "int4"] | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    max_model_len: int | None = None
    max_num_sequences: int = 64
    max_batch_tokens: int = 512
    max_logit_rows: int = 64
    kv_cache_bytes: int | Literal["auto"] = "auto"
    kv_storage: Literal["auto", "lanes", "pages"] = "auto"
    kernels: Literal["auto", "flashinfer", "triton", "torch"] = "auto"
    graphs: Literal["auto", "none"] = "auto"
    run_ahead: Literal["auto", "none"] = "auto"
    block_size: int = 16
    max_adapters: int = 16
    max_waiting: int = 1024
    threads: int | None = None
    niceness: int = 5
    tensor_parallel: int = 1
    max_step_stretch: float = 1.75
    min_prompt_tokens: int = 8
    max_bypass_s: float = 5.0
    prefill_weight: float = 1.0
    decode_weight: float = 2.0
    swap_weight: float = 256.0
    turn_quantum: float = 256.0
    class_age_s: float = 5.0
    max_turn_wait_s: float = 30.0
    lease_s: float = 10.0
    prefix_cache: bool = True
    max_forced_tokens: int = 32
    speculation: Literal["none", "requested", "prompt_lookup"] = "requested"
    max_draft_tokens: int = 8
    max_tokenized_chars: int | None = None
    max_waiting_chars: int = 64 << 20
    max_outbox_deltas: int = 4096
    max_outbox_bytes: int = 64 << 20
    images: bool = True
    max_image_pixels: int = 25_000_000
    max_waiting_image_bytes: int = 256 << 20
    image_cache_bytes: int = 256 << 20
    return_hidden_states: bool = False
    return_routed_experts: bool = False
    max_recorded_bytes: int = 4 << 20

    @property
    def num_spare_places(self) -> int:
        """For sequences of flows that have less than their share."""
        return self.max_num_sequences // SPARE_PART

    @property
    def num_places(self) -> int:
        """Sequences that may be computed together at most."""
        return self.max_num_sequences + self.num_spare_places

    @property
    def fairness(self) -> Rules:
        """How flows share this replica."""
        return Rules(
            prefill_weight=self.prefill_weight,
            decode_weight=self.decode_weight,
            swap_weight=self.swap_weight,
            quantum=self.turn_quantum,
            age_s=self.class_age_s,
            max_wait_s=self.max_turn_wait_s,
        )

    def is_paged(self, device_type: str) -> bool:
        """Whether keys and values are kept in pages on such a device."""
        return device_type != "cpu" if self.kv_storage == "auto" else self.kv_storage == "pages"
