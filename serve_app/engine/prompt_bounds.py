"""Refuses prompts that cannot fit the context before they are cut into tokens."""

from __future__ import annotations

from serve_app.core.errors import ContextOverflow
from serve_app.core.request import GenerationRequest
from serve_app.text.tokenizer import TextTokenizer

# Where a vocabulary sets no bound, a text may be so long: room for one of a few long words, or of much white space.
DEFAULT_CHARS_PER_TOKEN = 32
DEFAULT_MIN_CHARS = 1_000_000
# Of a text longer than this many characters per token of the context, the beginning is counted first. What stands
# behind a place in a text changes the tokens before it only nearby; half of them is more than it ever takes back.
HEAD_CHARS_PER_TOKEN = 16
HEAD_MARGIN = 2


class PromptBounds:
    """Bounds the work that a prompt can make by its length in characters. Threads may share it.

    A prompt that fits is never refused where the vocabulary says how much text a token can hold. Elsewhere, and where
    the prompt is to be truncated and so may be of any length, `max_chars` is the bound.

    max_chars: None is 32 characters per token of the context, and a million at least
    """

    def __init__(
        self, tokenizer: TextTokenizer, *, model_name: str, max_model_len: int, max_chars: int | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._model_name = model_name
        self._max_model_len = max_model_len
        self.max_chars = max_chars or max(DEFAULT_MIN_CHARS, DEFAULT_CHARS_PER_TOKEN * max_model_len)

    def check_length(self, request: GenerationRequest) -> None:
        """Raise ContextOverflow where the prompt is too long to fit, or to be cut into tokens; costs nothing."""
        num_chars = request.num_chars
        if request.context.takes_any_length:
            if num_chars > self.max_chars:
                raise self._too_long(request, num_chars, self.max_chars, "are cut into tokens to be truncated")
            return
        num_ids = request.prompt.num_ids
        if num_ids > self._max_model_len:
            raise self._overflow(request, f"has {num_ids} tokens", {"n_prompt_tokens": num_ids})
        most = self._most_chars(num_ids)
        if num_chars > most:
            raise self._too_long(request, num_chars, most, f"can fit the context of {self._model_name}")

    def check_heads(self, request: GenerationRequest) -> None:
        """Count the beginning of each long text, and raise ContextOverflow where it leaves the rest no chance."""
        if request.context.takes_any_length:
            return
        num_head = HEAD_CHARS_PER_TOKEN * self._max_model_len
        for text in request.texts:
            if len(text) > num_head:
                num_tokens = self._tokenizer.count(text[:num_head])
                if num_tokens > HEAD_MARGIN * self._max_model_len:
                    found = f"has {len(text)} characters, of which {num_head} alone are {num_tokens} tokens"
                    raise self._overflow(request, found, {"n_prompt_chars": len(text)})

    def _most_chars(self, num_ids: int) -> int:
        """Characters of text that may fit beside so many tokens."""
        chars_per_token = self._tokenizer.chars_per_token
        if chars_per_token is None:
            return self.max_chars
        return (self._max_model_len - num_ids) * chars_per_token

    def _too_long(self, request: GenerationRequest, num_chars: int, most: int, why: str) -> ContextOverflow:
        found = f"has {num_chars} characters, of which at most {most} {why}"
        return self._overflow(request, found, {"n_prompt_chars": num_chars, "max_prompt_chars": most})

    def _overflow(self, request: GenerationRequest, found: str, facts: dict[str, int]) -> ContextOverflow:
        context = self._max_model_len
        return context_overflow(request, found, model_name=self._model_name, max_model_len=context, facts=facts)


def context_overflow(
    request: GenerationRequest, found: str, *, model_name: str, max_model_len: int, facts: dict[str, int]
) -> ContextOverflow:
    """found: how long the prompt is, behind its number"""
    remedy = "" if request.context.takes_any_length else ', or send "truncate_sequence": true'
    return ContextOverflow.refusing(
        request.context.prompt_name,
        must=f"fit the context of {model_name}, which is {max_model_len} tokens for prompt and completion together",
        found=f"prompt {request.prompt_index}, which {found} and exceeds the available context size",
        remedy=f"Shorten it{remedy}.",
        facts={**facts, "n_ctx": max_model_len},
    )
