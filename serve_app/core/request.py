"""What is to be generated: a prompt with its sampling, stopping and logprob parameters, all checked."""

from __future__ import annotations

from dataclasses import dataclass, field

from serve_app.core.names import ModelRef


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen. Neutral values switch a part off.

    temperature: below 1e-6 is greedy; otherwise the logits are divided by it, before any truncation
    top_k:       keep the k likeliest tokens; 0 keeps all
    top_p:       keep the smallest likeliest set whose probability reaches top_p; 1 keeps all
    min_p:       keep tokens with at least min_p times the probability of the likeliest; 0 keeps all
    seed:        64 bits; with the prompt's index, the sample and the position it decides every draw
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    @property
    def is_greedy(self) -> bool:
        return self.temperature < 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class StopParams:
    """When a sequence ends.

    max_tokens: at most so many generated tokens; None is until the context ends; 0 computes the prompt only
    strings:    end where the earliest of these begins in the generated text; none is empty
    """

    max_tokens: int | None = 16
    strings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobParams:
    """Which log-probabilities are reported, always of the raw distribution.

    top:    so many likeliest tokens beside the chosen one, per position
    prompt: also of the prompt's own tokens
    """

    top: int = 0
    prompt: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """Text and token ids in their order. A leading text part gets the tokenizer's BOS, later ones do not."""

    parts: tuple[str | tuple[int, ...], ...]

    @property
    def text(self) -> str | None:
        """The prompt as text where it is nothing but text, else None."""
        if len(self.parts) == 1 and isinstance(self.parts[0], str):
            return self.parts[0]
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One prompt of a client's request with everything needed to complete it `n` times.

    request_id:   unique in the cluster
    prompt_index: which of the client's prompts this is; part of the key of every random draw
    echo:         the first delta carries the prompt's text
    """

    request_id: str
    model: ModelRef
    prompt: Prompt
    prompt_index: int = 0
    n: int = 1
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop: StopParams = field(default_factory=StopParams)
    logprobs: LogprobParams | None = None
    echo: bool = False
