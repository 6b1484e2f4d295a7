"""Tokenizes for clients who want no completion, beside the engine and behind nobody's prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from collections.abc import Sequence as Items
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

from serve_app.core.errors import InvalidRequest, Overloaded
from serve_app.core.prompt import Conversation, Rendering, Tokenization, TokenizeRequest
from serve_app.text.tokenizer import TextTokenizer

MAX_WAITING = 32
Result = TypeVar("Result")


class Tokenizations:
    """Has a thread of its own, so that the prompt of a completion never waits for one of these.

    max_chars: of one text
    render:    what the model's chat template makes of a conversation
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        *,
        max_chars: int,
        render: Callable[[Conversation], Awaitable[Rendering]],
    ) -> None:
        self._tokenizer = tokenizer
        self._render = render
        self._max_chars = max_chars
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="tokenize")
        self._num_waiting = 0

    async def tokenize(self, request: TokenizeRequest) -> Tokenization:
        """Raises InvalidRequest where the text is too long, Overloaded where too many wait."""
        foreign: tuple[int, ...] = ()
        if request.conversation is not None:
            if images := request.conversation.images:
                alone = "be absent, as how many tokens an image has is known when it is seen"
                raise InvalidRequest.refusing(images[0].name, must=alone, found="an image")
            rendering = await self._render(request.conversation)
            request, foreign = replace(request, text=rendering.text), rendering.foreign
        if len(request.text) > self._max_chars:
            raise InvalidRequest.refusing(
                request.param,
                must=f"be at most {self._max_chars} characters to be cut into tokens (the model's max_tokenized_chars)",
                found=str(len(request.text)),
                facts={"n_prompt_chars": len(request.text), "max_tokenized_chars": self._max_chars},
            )
        found = await self._run(lambda: self._tokenizer.tokenize(request, foreign))
        return found if request.conversation is None else replace(found, text=request.text)

    async def detokenize(self, token_ids: Items[int]) -> str:
        """Raises Overloaded where too many wait."""
        return await self._run(lambda: self._tokenizer.untokenize(token_ids))

    def close(self) -> None:
        self._pool.shutdown()

    async def _run(self, work: Callable[[], Result]) -> Result:
        if self._num_waiting >= MAX_WAITING:
            raise Overloaded(f"More than {MAX_WAITING} texts wait to be tokenized.", None, {"retry_after_s": 1})
        self._num_waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        finally:
            self._num_waiting -= 1
