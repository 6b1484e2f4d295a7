"""What a prompt's length alone says of whether it fits a context, before it is cut into tokens."""

from __future__ import annotations

from dataclasses import dataclass

from serve_app.core.errors import ContextOverflow
from serve_app.core.request import GenerationRequest

# Where a vocabulary sets no bound, a text may be so long: room for one of a few long words, or of much white space.
DEFAULT_CHARS_PER_TOKEN = 32
DEFAULT_MIN_CHARS = 1_000_000


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
        """found: how long the prompt is, behind its number"""
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
        """Characters of text that may fit beside so many tokens."""
        if self.chars_per_token is None:
            return self.max_chars
        return (self.max_model_len - num_ids) * self.chars_per_token

    def _too_long(self, request: GenerationRequest, num_chars: int, most: int, why: str) -> ContextOverflow:
        found = f"has {num_chars} characters, of which at most {most} {why}"
        return self.overflow(request, found, {"n_prompt_chars": num_chars, "max_prompt_chars": most})
