"""A model's chat template at work: conversations in, texts of prompts out, beside everything else."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context

from serve_app.core.errors import InvalidRequest, Overloaded
from serve_app.core.prompt import Conversation, Rendering
from serve_app.templates.limits import DEFAULT_LIMITS, TemplateLimits
from serve_app.templates.renderer import Renderer
from serve_app.templates.rendering import Refused, Work


class ChatTemplate:
    """Lives on one event loop, with threads that wait for the process. A short conversation never waits for long ones.

    template, tool_template: of all chats, and of those with tools where that is another one; "" is none
    tells_form, special_names, special_tokens: of the model's tokenizer, see `Work`
    """

    def __init__(
        self,
        template: str,
        *,
        tool_template: str = "",
        tells_form: bool | None = True,
        model_name: str,
        special_names: tuple[str, ...] = (),
        special_tokens: Mapping[str, str] | None = None,
        limits: TemplateLimits = DEFAULT_LIMITS,
    ) -> None:
        self._has_template = bool(template or tool_template)
        self._model_name = model_name
        self._limits = limits
        self._renderer = Renderer(
            Work(
                template=template,
                tool_template=tool_template,
                tells_form=tells_form,
                special_names=special_names,
                special_tokens=dict(special_tokens or {}),
                limits=limits,
            )
        )
        self._pools = [
            ThreadPoolExecutor(num_threads, thread_name_prefix=f"template-{name}")
            for name, num_threads in zip(("short", "long"), limits.max_renderings, strict=True)
        ]
        self._num_waiting = 0

    async def warm(self) -> None:
        """Do beforehand what the first conversation would wait for: the process, and the template in it."""
        if self._has_template:
            await asyncio.get_running_loop().run_in_executor(self._pools[0], self._renderer.begin)

    def shows_tools(self) -> bool:
        """Whether the template writes tools that it is given; True also where that cannot be found out. Blocks."""
        return not self._has_template or self._renderer.shows_tools()

    async def render(self, conversation: Conversation) -> Rendering:
        """Raises InvalidRequest where nothing comes of it, Overloaded where too many wait."""
        if not self._has_template:
            raise without_template(conversation.name, self._model_name)
        if self._num_waiting >= self._limits.max_waiting:
            raise Overloaded(
                f"More than {self._limits.max_waiting} chats wait to be rendered.", None, {"retry_after_s": 1}
            )
        pool = self._pools[len(conversation.source) > self._limits.short_chars]
        self._num_waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(
                pool, copy_context().run, self._renderer.render, conversation
            )
        except Refused as refused:
            must = f"be what the chat template of {self._model_name} takes"
            raise InvalidRequest.refusing(conversation.name, must=must, found=f"that {refused}") from refused
        finally:
            self._num_waiting -= 1

    def close(self) -> None:
        """End the threads and the process."""
        self._renderer.close()
        for pool in self._pools:
            pool.shutdown(wait=False, cancel_futures=True)


def without_template(name: str, model_name: str) -> InvalidRequest:
    """The refusal of a conversation with a model that has no template."""
    return InvalidRequest.refusing(
        name,
        must="be sent to a model that has a chat template",
        found=f"that {model_name} has none",
        remedy=(
            "Whoever runs the service gives it one by `chat_template` in the `args` of its application; without one,"
            " send a `prompt` to /v1/completions."
        ),
    )
