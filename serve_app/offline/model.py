"""One model in this process, asked as a service is asked: the same routes and answers, without Ray or a socket."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Mapping
from concurrent.futures import ThreadPoolExecutor
from threading import Thread
from typing import Any, TypeVar

from serve_app.core.batches import Answered
from serve_app.core.tenants import LOCAL
from serve_app.deployments.arguments import ModelArgs
from serve_app.deployments.loading import load_service
from serve_app.deployments.logs import ACCESS_LOGGER
from serve_app.http.batch_lines import line_answers
from serve_app.http.settings import HttpSettings
from serve_app.offline.files import Question
from serve_app.router.admission import Admission, AdmissionSettings
from serve_app.router.fleet import Fleet
from serve_app.router.router import Router, RouterConfig
from serve_app.router.run import RunSettings

Result = TypeVar("Result")

ROUTER, REPLICA = "offline", "offline-0"
DAY_S = 86_400.0
"""For so long a request may wait, and run."""
GREETING_S = 1.0
"""Between two greetings of the replica, which computes for nobody who is silent."""


class LocalModel:
    """Loads a model with its adapters; raises as `load_service`. Any number of threads may call `ask`."""

    def __init__(self, args: Mapping[str, Any]) -> None:
        """args: of the model, as in a cluster file"""
        settings = ModelArgs.model_validate(args)
        with ThreadPoolExecutor(1) as threads:  # a thread that has computed keeps its OpenMP team: this one ends
            self._service = threads.submit(load_service, settings, REPLICA).result()
        access = logging.getLogger(ACCESS_LOGGER)
        self._access_level = access.level
        access.setLevel(logging.WARNING)  # no line for each request
        self._answer = line_answers(HttpSettings())
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, name="local-model", daemon=True)
        self._thread.start()
        self._fleet = Fleet(ROUTER)
        self._wait(self._open())
        self._greeting = asyncio.run_coroutine_threadsafe(self._greet(), self._loop)
        admission = Admission(lambda: self._fleet.rooms)
        admission.settings = AdmissionSettings(max_wait_s=DAY_S)
        self._router = Router(self._fleet, RouterConfig(run=RunSettings(timeout_s=DAY_S)), admission=admission)

    def ask(self, question: Question, request_id: str) -> Answered:
        """Return what the route answers, refusals included; blocks. Raises EngineFailed if the engine cannot go on."""
        self._service.check()
        body = json.dumps(question.body).encode()
        return self._wait(self._answer(self._router, LOCAL, question.path, body, request_id))

    def close(self) -> None:
        """End the engine; requests that still run are lost."""
        self._greeting.cancel()
        self._wait(self._fleet.close())
        self._wait(self._service.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        logging.getLogger(ACCESS_LOGGER).setLevel(self._access_level)

    async def _open(self) -> None:
        self._service.start()
        await self._service.warm()
        self._fleet.put(await self._service.hello(ROUTER), self._service)

    async def _greet(self) -> None:
        while True:
            await asyncio.sleep(GREETING_S)
            self._fleet.put(await self._service.hello(ROUTER), self._service)

    def _wait(self, work: Awaitable[Result]) -> Result:
        async def done() -> Result:
            return await work

        return asyncio.run_coroutine_threadsafe(done(), self._loop).result()
