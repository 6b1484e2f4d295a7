"""What gives way where a prompt and its completion do not fit the model's context, or are not wanted whole."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextParams:
    """What is done where prompt and completion do not fit the model's context.

    truncates_prompt:     a prompt that leaves no room loses its beginning, to half of the context at most where the
                          completion has no limit or may be shortened; otherwise it is refused
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

    def num_wanted(self, num_tokens: int, *, max_tokens: int | None, max_model_len: int) -> int:
        """How many of a prompt's tokens are wanted, whether all fit or not."""
        most = self.max_prompt_tokens
        if most is None:
            return num_tokens
        if most:
            return min(num_tokens, most)
        if max_tokens is not None:
            return min(num_tokens, max(1, max_model_len - max_tokens))
        return num_tokens if num_tokens < max_model_len else max(1, max_model_len // 2)

    def num_kept(self, num_tokens: int, *, max_tokens: int | None, max_model_len: int) -> int:
        """How many of a prompt's tokens stay: all, unless it leaves no room and may be cut.

        The last `context - max_tokens` tokens stay. Where the completion has no limit, or may be shortened, at least
        half of the context stays the prompt's; otherwise at least one token.
        """
        if not self.truncates_prompt or not leaves_no_room(num_tokens, max_tokens, max_model_len=max_model_len):
            return num_tokens
        least = max_model_len // 2 if self.shortens_completion or max_tokens is None else 0
        room = 0 if max_tokens is None else max_model_len - max_tokens
        return min(num_tokens, max(1, least, room))


def leaves_no_room(num_tokens: int, max_tokens: int | None, *, max_model_len: int) -> bool:
    """Whether a prompt of so many tokens leaves none for what is to be generated."""
    room = max_model_len - num_tokens
    return room < 0 or (room == 0 and max_tokens != 0)
