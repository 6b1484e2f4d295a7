"""What gives way where a prompt and its completion do not fit the model's context, or are not wanted whole."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextParams:
    """What is done where prompt and completion do not fit the model's context.

    truncates_prompt:     a prompt that leaves no room loses its beginning, to half of the context at most where the
                          completion may be shortened; otherwise it is refused
    max_prompt_tokens:    of any prompt so many tokens are kept; None is all, 0 what the completion leaves of it
    keeps_beginning:      those are its first ones, not its last
    shortens_completion:  fewer tokens are generated; otherwise the request is refused
    prompt_name, max_tokens_name: what the client called its prompt and its limit, for refusals
    """

    truncates_prompt: bool = False
    max_prompt_tokens: int | None = None
    keeps_beginning: bool = False
    shortens_completion: bool = True
    prompt_name: str = "prompt"
    max_tokens_name: str = "max_tokens"

    @property
    def takes_any_length(self) -> bool:
        """Whether a prompt of any length may come to fit."""
        return self.truncates_prompt or self.max_prompt_tokens is not None
