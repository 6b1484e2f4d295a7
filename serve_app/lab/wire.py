"""Requests over the `openai` client: bodies and chunks as they are, failures in the service's own words."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar
from urllib.parse import quote

import openai

from serve_app.cli.client import DIALECT_HEADER, END, PAUSES_S
from serve_app.lab.completion import Asked, plain, prompts_of, shown_prompt
from serve_app.lab.errors import is_of_a_proxy, translated

T = TypeVar("T")
Route = Literal["completions", "chat"]
TIMEOUT_S = 600.0
NUM_RETRIES, NUM_PATIENT_RETRIES = 2, 12
"""Of what the service refuses for the moment; it says when to come again. The second is for grids."""
PATHS: Mapping[Route, str] = {"completions": "completions", "chat": "chat/completions"}
EVENTS = "text/event-stream"
HEADERS = {"seed": "x-seed", "served": "x-served-model", "ignored": "x-ignored-parameters"}
"""What is told of an answer, by the headers that tell it."""
MAX_PROMPTS = 256
"""Of one request, by the service's own default."""

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A body, and what the service told beside it."""

    body: Mapping[str, Any]
    told: Mapping[str, str]


class Wire:
    """Speaks to one service. Every failure is a ServiceError."""

    def __init__(self, url: str, key: str, http_client: Any = None) -> None:
        self._url = url
        self._openai = openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key=key, http_client=http_client, timeout=TIMEOUT_S, max_retries=NUM_RETRIES
        )
        self._patient = self._openai.with_options(max_retries=NUM_PATIENT_RETRIES)

    async def answer(
        self, route: Route, body: Mapping[str, Any], dialect: str | None = None, *, is_patient: bool = False
    ) -> Answer:
        """Send a request and wait for the whole of its answer."""
        asking = self._patient if is_patient else self._openai
        with self._told_by_the_service():
            create = partial(
                _create(asking, route, with_raw=True), extra_body=dict(body), extra_headers=_headers(dialect)
            )
            raw = await (_asked_of_the_service(create) if is_patient else create())
        return Answer(body=json.loads(raw.text), told=_told(raw.headers))

    async def chunks(
        self, route: Route, body: Mapping[str, Any], dialect: str | None = None
    ) -> AsyncIterator[Mapping[str, Any]]:
        """Send a request and yield its answer as it comes; closing it frees the service.

        Where the stream breaks off, the rest of it is fetched.
        """
        whole = {**body, "stream": True, "stream_options": {"include_usage": True}}
        headers = {**_headers(dialect), "Accept": EVENTS}
        response_id = last_id = ""
        with self._told_by_the_service():
            for pause_s in (*PAUSES_S, None):
                try:
                    if response_id:
                        stream = await self._rest(route, response_id, last_id)
                    else:
                        create = _create(self._openai, route, with_raw=False)
                        stream = await create(stream=True, extra_body=whole, extra_headers=headers)
                    async with aclosing(_events(stream)) as events:
                        async for last_id, chunk in events:
                            response_id = str(chunk.get("id") or "") if last_id else ""
                            yield chunk
                    return
                except (openai.APIConnectionError, openai.InternalServerError):
                    if pause_s is None or not response_id:
                        raise
                await asyncio.sleep(pause_s)

    async def _rest(self, route: Route, response_id: str, last_id: str) -> openai.AsyncStream[Any]:
        """Fetch a stream behind an event."""
        headers = {"Accept": EVENTS, "Last-Event-ID": last_id}
        stream: openai.AsyncStream[Any] = await self._openai.get(
            f"{self._url}/v1/{PATHS[route]}/{quote(response_id, safe='')}",
            cast_to=object,
            options={"headers": headers},
            stream=True,
            stream_cls=openai.AsyncStream[Any],
        )
        return stream

    async def models(self) -> list[Mapping[str, Any]]:
        """Return every name that can be sent as `model`."""
        found: list[Mapping[str, Any]] = json.loads(await self.text("/v1/models"))["data"]
        return found

    async def text(self, path: str) -> str:
        """Return what is read at a path of the service."""
        with self._told_by_the_service():
            return str(await self._openai.get(f"{self._url}{path}", cast_to=str))

    async def send(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
        """Send a request to a path of the service, with a JSON body if there is one. method: post, patch or delete

        It is sent once: what failed may have been carried out, and twice is not the same as once.
        """
        options: dict[str, Any] = {} if body is None else {"body": dict(body)}
        return await self._sent(self._openai.with_options(max_retries=0), method, path, options)

    async def ask(self, path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Send a question, which changes nothing; it comes again as one of a grid does."""
        return await self._sent(self._patient, "post", path, {"body": dict(body)})

    async def _sent(
        self, asking: openai.AsyncOpenAI, method: str, path: str, options: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        with self._told_by_the_service():
            told = await getattr(asking, method)(f"{self._url}{path}", cast_to=object, **options)
        assert isinstance(told, dict)
        return told

    async def close(self) -> None:
        await self._openai.close()

    @contextmanager
    def _told_by_the_service(self) -> Iterator[None]:
        """Raise failures of the client as a ServiceError."""
        try:
            yield
        except openai.OpenAIError as error:
            raise translated(error, self._url) from error


async def _asked_of_the_service(create: Callable[[], Awaitable[T]]) -> T:
    """Ask again while nobody but a proxy answers: it knows no router while a service begins or ends."""
    for pause_s in PAUSES_S:
        try:
            return await create()
        except openai.NotFoundError as error:
            if not is_of_a_proxy(error):
                raise
        await asyncio.sleep(pause_s)
    return await create()


def _create(asking: openai.AsyncOpenAI, route: Route, *, with_raw: bool) -> Any:
    """The client's own parameters are left to the body, which takes every parameter of the service."""
    resource: Any = asking.completions if route == "completions" else asking.chat.completions
    create = resource.with_raw_response.create if with_raw else resource.create
    required: dict[str, object] = {"prompt": ""} if route == "completions" else {"messages": []}
    return partial(create, model="", **required)


async def _events(stream: openai.AsyncStream[Any]) -> AsyncGenerator[tuple[str, Mapping[str, Any]]]:
    """Yield id and data of each event up to the end. Raises openai.APIError, and APIConnectionError before the end."""
    request, last_id = stream.response.request, ""
    async with stream:
        try:
            async for line in stream.response.aiter_lines():
                if line.startswith("id:"):
                    last_id = line[3:].strip()
                data = line[5:].strip() if line.startswith("data:") else ""
                if data == END:
                    return
                if data:
                    chunk = json.loads(data)
                    if "error" in chunk:
                        raise openai.APIError("The stream failed.", request, body=chunk["error"])
                    yield last_id, chunk
        except openai.OpenAIError:
            raise
        except Exception as error:  # of the connection, whatever library it is made with
            raise openai.APIConnectionError(request=request) from error
    raise openai.APIConnectionError(request=request)


def _headers(dialect: str | None) -> dict[str, str]:
    return {} if dialect is None else {DIALECT_HEADER: dialect}


def _told(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: headers[header] for name, header in HEADERS.items() if header in headers}


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """body: what is sent;  dialect: that it is read in, None for the service's own"""

    route: Route
    body: Mapping[str, Any]
    asked: Asked
    dialect: str | None

    @property
    def can_stream(self) -> bool:
        """A ranking needs every candidate first."""
        return self.body.get("best_of") is None


def completion_requests(
    prompt: str | Sequence[Any], models: str | Sequence[str], dialect: str | None, parameters: Mapping[str, Any]
) -> list[Request]:
    """Return one request, or as many as the prompts need at 256 each."""
    prompt, parameters = plain(prompt), plain(parameters)
    prompts = prompts_of(prompt)
    parts = [prompts[at : at + MAX_PROMPTS] for at in range(0, len(prompts), MAX_PROMPTS)] or [prompts]
    return [_completion(part, prompt if len(parts) == 1 else list(part), models, dialect, parameters) for part in parts]


def chat_request(
    messages: str | Sequence[Message], model: str, dialect: str | None, parameters: Mapping[str, Any]
) -> Request:
    """Return the request of a chat; a text is a user's only message."""
    chat = [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
    parameters = plain(parameters)
    asked = Asked(
        prompts=(shown_prompt(chat[-1]) if chat else "",),
        models=(model,),
        num_samples=int(parameters.get("n") or 1),
        is_chat=True,
    )
    return Request(route="chat", body={**parameters, "model": model, "messages": chat}, asked=asked, dialect=dialect)


def is_chat(prompt: object) -> bool:
    """Return whether the prompt is a list of messages."""
    return isinstance(prompt, Sequence) and any(isinstance(each, Mapping) and "role" in each for each in prompt)


def _completion(
    prompts: tuple[Any, ...],
    sent: object,
    models: str | Sequence[str],
    dialect: str | None,
    parameters: Mapping[str, Any],
) -> Request:
    asked = Asked(
        prompts=tuple(shown_prompt(each) for each in prompts),
        models=(models,) if isinstance(models, str) else tuple(models),
        num_samples=int(parameters.get("n") or 1),
    )
    model = models if isinstance(models, str) else list(models)
    body = {**parameters, "model": model, "prompt": sent}
    return Request(route="completions", body=body, asked=asked, dialect=dialect)
