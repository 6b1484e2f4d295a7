"""The client of a notebook: completions, chats, comparisons and streams as things to look at; tables of the rest.

Plain calls work wherever they stand, in a cell too, where Jupyter's own loop runs; `acomplete` and `achat` are for
`await`.
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import numpy
import pandas

from serve_app.cli.screen import DEFAULT_URL, KEY_VARIABLES, URL_VARIABLE
from serve_app.lab import evaluation, markup
from serve_app.lab.completion import Comparison, Completion, Completions, Reading, joined, plain, table_of
from serve_app.lab.errors import ServiceError
from serve_app.lab.grid import (
    NOT_PARAMETERS,
    Cell,
    Kept,
    Price,
    Row,
    cells_of,
    failed_row,
    frame_of,
    most_of,
    row_of,
    side_by_side,
    summary_of,
)
from serve_app.lab.live import live, replicas, series
from serve_app.lab.wire import MAX_PROMPTS, Message, Request, Wire, chat_request, completion_requests, is_chat

NO_KEY = "none"
PROGRESS_FROM = 8
"""Choices of one call from which on a bar is shown."""
AT_ONCE = 16
"""Requests of a grid that are sent side by side."""
ANY = "a"
"""A prompt that no model refuses."""
COLUMNS = ("route", "model", "choices", "prompt_tokens", "cached_tokens", "completion_tokens", "seconds")


class Client:
    """Asks one service. Parameters are the service's own, all of them; failures are a ServiceError.

    url, key:    None is what `SERVE_APP_URL` and `SERVE_APP_KEY` say, else the service on this machine and no key
    http_client: of httpx, for proxies and certificates of one's own
    background:  where requests run; None makes a thread for them
    """

    def __init__(
        self,
        url: str | None = None,
        key: str | None = None,
        *,
        http_client: Any = None,
        background: Background | None = None,
    ) -> None:
        self.url = (url or os.environ.get(URL_VARIABLE) or DEFAULT_URL).rstrip("/").removesuffix("/v1")
        self._wire = Wire(self.url, key or key_of_environment(), http_client)
        self._background = background if background is not None else Background()
        self._spent: list[dict[str, Any]] = []
        self._first_model: str | None = None

    def __repr__(self) -> str:
        return f"Client({self.url!r})"

    def complete(
        self,
        prompt: str | Sequence[Any],
        model: str | Sequence[str] | None = None,
        *,
        dialect: str | None = None,
        **parameters: Any,
    ) -> Completions:
        """Complete a prompt or a list of them, many with a bar; `model` left out is the first that is served."""
        requests = completion_requests(prompt, model or self._default_model(), dialect, parameters)
        return self._all(requests)

    def acomplete(
        self, prompt: str | Sequence[Any], model: str | Sequence[str], *, dialect: str | None = None, **parameters: Any
    ) -> Awaitable[Completions]:
        """The same to be awaited, in any loop; several at once with `asyncio.gather`."""
        return self._background.awaitable(self._answers(completion_requests(prompt, model, dialect, parameters)))

    def chat(
        self,
        messages: str | Sequence[Message],
        model: str | None = None,
        *,
        dialect: str | None = None,
        **parameters: Any,
    ) -> Completions:
        """Answer a message, or a chat of several, through the model's chat template."""
        return self._all([chat_request(messages, model or self._default_model(), dialect, parameters)])

    def achat(
        self, messages: str | Sequence[Message], model: str, *, dialect: str | None = None, **parameters: Any
    ) -> Awaitable[Completions]:
        """The same to be awaited."""
        return self._background.awaitable(self._answer(chat_request(messages, model, dialect, parameters)))

    def compare(
        self,
        prompts: str | Sequence[str],
        models: str | Sequence[str],
        *,
        dialect: str | None = None,
        **parameters: Any,
    ) -> Comparison:
        """Complete the same prompts by several models, up to 256 prompts in one request."""
        every = [prompts] if isinstance(prompts, str) else list(prompts)
        names = [models] if isinstance(models, str) else list(models)
        requests = completion_requests(every, names, dialect, parameters)
        return Comparison(prompts=tuple(every), models=tuple(names), completions=self._all(requests))

    def stream(
        self,
        prompt: str | Sequence[Message],
        model: str | None = None,
        *,
        dialect: str | None = None,
        **parameters: Any,
    ) -> Completion:
        """Complete a prompt, or answer a list of messages, in view; an interrupt stops the service, too."""
        name = model or self._default_model()
        if is_chat(prompt):
            request = chat_request(prompt, name, dialect, parameters)
        else:
            (request,) = completion_requests(prompt, name, dialect, parameters)
        display, text = live(), ""
        reading, started = Reading(asked=request.asked), time.monotonic()
        for chunk in self._background.iterate(self._wire.chunks(request.route, request.body, dialect)):
            text += reading.add(chunk)
            display.text(request.asked.prompts[0], text)
        first = self._noted(request, reading, time.monotonic() - started)[0]
        display.end(first._repr_html_(), first.text)
        return first

    def grid(
        self,
        prompts: str | Iterable[str],
        models: str | Iterable[str],
        params: Mapping[str, Any] | Iterable[Mapping[str, Any]] = (),
        path: str | Path | None = None,
        *,
        at_once: int = AT_ONCE,
    ) -> pandas.DataFrame:
        """Complete every prompt by every model with every set of parameters: a row for each.

        params: one set or several; one without a seed gets the same seed for all models, another one for each prompt
        path:   keeps the rows as they come. The same call goes on from there: JSON lines, or Parquet if so named
        If one request fails, its row has the `error`. Raises ServiceError where all would fail, as without a service.
        """
        every, names, sets = _listed(prompts, "prompts"), _listed(models, "models"), _sets(params)
        cells = cells_of(every, names, sets)
        with closing(Kept(path)) as kept:
            missing = [cell for cell in cells if cell.id not in kept.rows]
            prices = self._prices(names, sets) if missing else {}
            display, done = live(), len(cells) - len(missing)
            rows = side_by_side(missing, partial(self._row, prices), at_once)
            for at, row in enumerate(self._background.iterate(rows), done + 1):
                kept.add(row)
                display.progress(at, len(cells), "completions")
            frame = frame_of(cells, kept.rows)
            kept.finish(frame)
        said = summary_of(frame, num_kept=done)
        display.end(markup.quiet(said), said)
        return frame

    def grid_cost(
        self,
        prompts: str | Iterable[str],
        models: str | Iterable[str],
        params: Mapping[str, Any] | Iterable[Mapping[str, Any]] = (),
    ) -> pandas.DataFrame:
        """Say what a grid would take at most, by the service's prices: a row for each model and set of parameters."""
        every, sets = list(dict.fromkeys(_listed(prompts, "prompts"))), _sets(params)
        parts = [every[at : at + MAX_PROMPTS] for at in range(0, len(every), MAX_PROMPTS)]
        rows = []
        for model in _listed(models, "models"):
            for each in sets:
                told = [one for part in parts for one in self._explained(part, model, each)]
                rows.append({"model": model, **each, **most_of(told)})
        return table_of(rows)

    def evaluate(
        self,
        dataset: pandas.DataFrame | Iterable[Mapping[str, Any]],
        metric: evaluation.Metric,
        models: str | Iterable[str],
        params: Mapping[str, Any] | Iterable[Mapping[str, Any]] = (),
        path: str | Path | None = None,
        *,
        at_once: int = AT_ONCE,
    ) -> evaluation.Evaluation:
        """Compute a grid of a dataset's prompts, and of each row a number that says how good it is.

        dataset: with a `prompt` each, and what the metric wants to know
        metric:  of a row's mapping, `row["text"]` among it; its name is the column's
        """
        sets = _sets(params)
        reserved = {*NOT_PARAMETERS, "seed", *chain.from_iterable(sets)}
        examples = evaluation.examples_of(dataset, metric, reserved)
        frame = self.grid(examples["prompt"], models, sets, path, at_once=at_once)
        return evaluation.evaluated(frame, examples, metric)

    def score(
        self, prompts: str | Sequence[str], continuations: str | Sequence[str], model: str | None = None
    ) -> pandas.DataFrame:
        """Sum the log-probabilities of each continuation behind its prompt, or behind the one prompt: a row each."""
        continuations = _listed(continuations, "continuations")
        before = [prompts] * len(continuations) if isinstance(prompts, str) else _listed(prompts, "prompts")
        if len(before) != len(continuations):
            raise ValueError(
                f'"prompts" must be one text, or {len(continuations)} as "continuations" are; found {len(before)}.'
            )
        texts = [prompt + continuation for prompt, continuation in zip(before, continuations, strict=True)]
        return evaluation.scores(before, continuations, self.complete(texts, model, **evaluation.ECHOED))

    def perplexity(self, texts: str | Sequence[str], model: str | None = None) -> pandas.DataFrame:
        """Say how well a model predicts each text: a row each."""
        return evaluation.perplexities(self.score("", _listed(texts, "texts"), model))

    def embed(self, texts: str | Sequence[str], model: str | None = None) -> numpy.ndarray:
        """Return [texts, dimensions] float32."""
        every, name = _listed(texts, "texts"), model or self._default_model()
        rows: list[list[float]] = []
        for at in range(0, len(every), MAX_PROMPTS):
            body = {"model": name, "input": every[at : at + MAX_PROMPTS]}
            found = self._background.run(self._wire.ask("/v1/embeddings", body))["data"]
            rows += [each["embedding"] for each in found]
        return numpy.array(rows, dtype=numpy.float32)

    def hidden_states(self, text: str, model: str | None = None) -> numpy.ndarray:
        """Return [tokens, hidden size] float32: the last layer's output at each token, if the model may return it."""
        if not isinstance(text, str):
            raise ValueError(f'"text" must be one text; found {text!r}.')
        name = model or self._default_model()
        body = {"model": name, "prompt": text, "return_hidden_states": True, **evaluation.ECHOED}
        answer = self._background.run(self._wire.answer("completions", body))
        return numpy.array(answer.body["choices"][0]["hidden_states"], dtype=numpy.float32)

    def models(self) -> pandas.DataFrame:
        """A row per name that can be sent: its base, its context, where its weights came from."""
        frame = table_of(self._background.run(self._wire.models())).set_index("id")
        frame["created"] = pandas.to_datetime(frame["created"], unit="s", utc=True)
        return frame.drop(columns=["object", "owned_by"])

    def usage(self) -> pandas.DataFrame:
        """What this client has asked for so far, as the service counted it: a row per request.

        What a whole team asked for the service tells at `GET /v1/usage`, where it asks for keys.
        The ledger, of everybody and with prices, is `Administrator.ledger`.
        """
        return pandas.DataFrame(self._spent, columns=pandas.Index(COLUMNS))

    def tokens(self, text: str, model: str | None = None) -> pandas.DataFrame:
        """A row per token of a text: its id and its piece. A piece that is only a part of a character is its bytes."""
        body = {"content": text, "model": model or self._default_model(), "with_pieces": True}
        found = self._background.run(self._wire.ask("/tokenize", body))["tokens"]
        return pandas.DataFrame([{"id": each["id"], "piece": _text_of(each["piece"])} for each in found])

    def replicas(self) -> pandas.DataFrame:
        """A row per replica: what it has in work now, and what it has done."""
        return replicas(self._background.run(self._wire.text("/metrics")))

    def metrics(self) -> pandas.DataFrame:
        """Every series that the service publishes."""
        return series(self._background.run(self._wire.text("/metrics")))

    def close(self) -> None:
        """Close connections and end the thread."""
        self._background.run(self._wire.close())
        self._background.close()

    def _default_model(self) -> str:
        if self._first_model is None:
            listed = self._background.run(self._wire.models())
            if not listed:
                raise ServiceError(f"No model is served to this key at {self.url}.")
            can = (each for each in listed if "completion" in each.get("capabilities", "completion"))
            self._first_model = str(next(can, listed[0])["id"])
        return self._first_model

    def _explained(self, prompts: Sequence[str], model: str, params: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        body = {**params, "model": model, "prompt": list(prompts)}
        parts: list[Mapping[str, Any]] = self._background.run(self._wire.ask("/v1/explain", body))["parts"]
        return parts

    def _prices(self, models: Sequence[str], sets: Sequence[Mapping[str, Any]]) -> dict[str, Price]:
        """Return the price of each model. Raises ServiceError for a set of parameters that no request may have."""
        return {model: self._explained([ANY], model, each)[0]["price"] for model in models for each in sets}

    async def _row(self, prices: Mapping[str, Price], cell: Cell) -> Row:
        (request,) = completion_requests(cell.prompt, cell.model, None, cell.params)
        try:
            return row_of(cell, await self._answer(request, is_patient=True), prices[cell.model])
        except ServiceError as error:
            return failed_row(cell, error)

    def _all(self, requests: Sequence[Request]) -> Completions:
        total = sum(request.asked.num_choices for request in requests)
        if total >= PROGRESS_FROM and all(request.can_stream for request in requests):
            return _merged(self._watched(requests, total), num_models=len(requests[0].asked.models))
        return self._background.run(self._answers(requests))

    async def _answers(self, requests: Sequence[Request]) -> Completions:
        """Send one request after the other, as each may have 256 prompts."""
        return _merged([await self._answer(each) for each in requests], num_models=len(requests[0].asked.models))

    def _watched(self, requests: Sequence[Request], total: int) -> list[Completions]:
        """Take choices as they end, in any order, while a bar says how many have."""
        display, parts, done, num_tokens = live(), [], 0, 0
        for request in requests:
            reading, started = Reading(asked=request.asked), time.monotonic()
            for chunk in self._background.iterate(self._wire.chunks(request.route, request.body, request.dialect)):
                reading.add(chunk)
                display.progress(done + reading.num_finished, total, "completions")
            parts.append(self._noted(request, reading, time.monotonic() - started))
            done += reading.num_finished
            num_tokens += reading.usage.get("completion_tokens", 0)
        seconds = sum(part.seconds for part in parts)
        said = f"{done} completions · {num_tokens} tokens · {seconds:.1f} s"
        display.end(markup.quiet(said), said)
        return parts

    async def _answer(self, request: Request, *, is_patient: bool = False) -> Completions:
        started = time.monotonic()
        answer = await self._wire.answer(request.route, request.body, request.dialect, is_patient=is_patient)
        reading = Reading(asked=request.asked)
        reading.add(answer.body)
        return self._noted(request, reading, time.monotonic() - started, dict(answer.told))

    def _noted(
        self, request: Request, reading: Reading, seconds: float, told: dict[str, str] | None = None
    ) -> Completions:
        choices = reading.choices()
        row = {"route": request.route, "model": ",".join(request.asked.models), "choices": len(choices)}
        self._spent.append({**row, **reading.usage, "seconds": seconds})
        return Completions(choices=choices, usage=reading.usage, seconds=seconds, told=told or {})


def key_of_environment() -> str:
    """Return the key that was set; NO_KEY where none was."""
    return next(filter(None, map(os.environ.get, KEY_VARIABLES)), NO_KEY)


def _listed(texts: str | Iterable[str], name: str) -> list[str]:
    """Raises ValueError for what is no text, as where a table has no value."""
    listed = [texts] if isinstance(texts, str) else list(texts)
    for at, each in enumerate(listed):
        try:
            each.encode()
        except (AttributeError, UnicodeEncodeError):
            raise ValueError(f'"{name}[{at}]" must be a text that UTF-8 can hold; found {each!r}.') from None
    return listed


def _sets(params: Mapping[str, Any] | Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    sets: list[Mapping[str, Any]] = plain([params] if isinstance(params, Mapping) else list(params) or [{}])
    return sets


def _text_of(piece: str | list[int]) -> str:
    return piece if isinstance(piece, str) else bytes(piece).decode(errors="backslashreplace")


def _merged(parts: Sequence[Completions], *, num_models: int) -> Completions:
    """Join the answers of several requests in the order of one: by model, then by prompt."""
    if len(parts) == 1:
        return parts[0]
    names = {name for part in parts for name in part.usage}
    shares = [len(part) // num_models for part in parts]
    return Completions(
        choices=joined(
            part.choices[model * share : (model + 1) * share]
            for model in range(num_models)
            for part, share in zip(parts, shares, strict=True)
        ),
        usage={name: sum(part.usage.get(name, 0) for part in parts) for name in sorted(names)},
        seconds=sum(part.seconds for part in parts),
    )


T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The end of an iteration, and what it failed with."""

    error: BaseException | None = None


class Background:
    """Runs coroutines for threads and for other loops; what they are given up for is cancelled."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="serve_app.lab", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for it in this thread; an interrupt cancels it."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def awaitable(self, work: Coroutine[Any, Any, T]) -> Awaitable[T]:
        """Wait for it in the loop that runs here."""
        return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def iterate(self, source: AsyncIterator[T]) -> Iterator[T]:
        """Yield what the source yields, in this thread; closing the iteration, or an interrupt, closes the source."""
        arrived: queue.SimpleQueue[T | Ended] = queue.SimpleQueue()
        future = asyncio.run_coroutine_threadsafe(_pour(source, arrived), self._loop)
        try:
            while not isinstance(item := arrived.get(), Ended):
                yield item
            if item.error is not None:
                raise item.error
        finally:
            future.cancel()

    def close(self) -> None:
        """End the thread; what still runs is left where it is."""
        if self._loop.is_running():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        if not self._loop.is_closed():
            self._loop.close()


async def _pour(source: AsyncIterator[T], into: queue.SimpleQueue[T | Ended]) -> None:
    error: BaseException | None = None
    try:
        async for item in source:
            into.put(item)
    except Exception as failure:
        error = failure
    finally:
        into.put(Ended(error=error))
