"""How long the parts of a completion took, as llama.cpp reports it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """prompt_s: until the first token was there;  predicted_s: from then to the last

    num_prompt_tokens: those computed, without those that were cached
    """

    num_cached_tokens: int
    num_prompt_tokens: int
    num_predicted_tokens: int
    prompt_s: float
    predicted_s: float

    def body(self) -> dict[str, object]:
        return {
            "cache_n": self.num_cached_tokens,
            "prompt_n": self.num_prompt_tokens,
            **_phase("prompt", self.num_prompt_tokens, self.prompt_s),
            "predicted_n": self.num_predicted_tokens,
            **_phase("predicted", self.num_predicted_tokens, self.predicted_s),
        }


def _phase(name: str, num_tokens: int, seconds: float) -> dict[str, object]:
    """Milliseconds in all and per token, and the rate; 0 where there was nothing to divide by."""
    return {
        f"{name}_ms": round(1000 * seconds, 3),
        f"{name}_per_token_ms": round(1000 * seconds / num_tokens, 3) if num_tokens else 0.0,
        f"{name}_per_second": round(num_tokens / seconds, 3) if seconds else 0.0,
    }
