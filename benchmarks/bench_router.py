"""CPU time that the router alone costs, per request and per streamed token: no Ray, no server, no engine.

    python -m benchmarks.bench_router --streams 32

The application is called as an ASGI server calls it; frames come as a replica's would, one per step with a token of
every stream, unpickled from what a replica sends. The next comes when every stream has sent what the last one gave.
What keys, limits and the ledger add is measured by bench_tenancy.py.
Prints JSON: microseconds of processor time per token and per request, and of a frame's way through pickle per token.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import pickle
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator

from ray import cloudpickle
from starlette.types import ASGIApp, Message, Scope

from serve_app.core.delta import Delta, Finish, FinishReason, Frame, Load, PromptReport
from serve_app.deployments.transport import pack, unpack
from serve_app.http.app import build_app
from serve_app.router.fleet import Fleet
from serve_app.router.router import Router
from tests.fakes import FakeBackend

ROUTER = "router-0"


class Client:
    """One stream. received: by all of them, messages that had bytes"""

    def __init__(self, body: bytes, received: Counter[str]) -> None:
        self.is_over = asyncio.Event()
        self._received = received
        self._body: bytes | None = body

    async def receive(self) -> Message:
        if self._body is None:
            await self.is_over.wait()
            return {"type": "http.disconnect"}
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.body":
            self._received["pieces"] += 1
            if not message.get("more_body", False):
                self.is_over.set()


def scope() -> Scope:
    return {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": "/v1/completions", "raw_path": b"/v1/completions", "query_string": b"", "root_path": "",
        "headers": [(b"host", b"x"), (b"content-type", b"application/json")],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 8000),
    }  # fmt: skip


def frames(request_ids: list[str], num_tokens: int) -> Iterator[Frame]:
    """What a replica sends of them, token by token."""
    for number in range(1, num_tokens + 1):
        is_last = number == num_tokens
        finish = Finish(reason=FinishReason.LENGTH, matched_stop=None, num_tokens=number) if is_last else None
        report = PromptReport(num_tokens=4, num_cached_tokens=0) if number == 1 else None
        yield Frame(
            deltas=tuple(
                Delta(request_id=id_, sample=0, text=" word", token_ids=(1000 + i,), prompt=report, finish=finish)
                for i, id_ in enumerate(request_ids)
            ),
            load=Load(num_running=len(request_ids), num_blocks=100, num_steps=number),
        )


async def wait_until(is_so: Callable[[], bool]) -> None:
    while not is_so():  # noqa: ASYNC110
        await asyncio.sleep(0)


async def measure(app: ASGIApp, backend: FakeBackend, num_streams: int, num_tokens: int) -> dict[str, float]:
    """Microseconds of this process: per request, per token, and per token for pickling and unpickling its frame."""
    asked = {"model": "tiny", "prompt": "Once", "max_tokens": num_tokens, "stream": True}
    received: Counter[str] = Counter()
    clients = [Client(json.dumps(asked).encode(), received) for _ in range(num_streams)]
    backend.submissions.clear()
    began = time.process_time()
    tasks = [asyncio.create_task(app(scope(), client.receive, client.send)) for client in clients]  # type: ignore[arg-type]  # an app is a coroutine function
    await wait_until(lambda: len(backend.submissions) == num_streams)
    requests_s = time.process_time() - began
    request_ids = [each.request_id for submission in backend.submissions for each in submission]
    tokens_s = pickling_s = unpickling_s = 0.0
    for number, frame in enumerate(frames(request_ids, num_tokens), 1):
        at = time.process_time()
        written = cloudpickle.dumps(pack(frame))  # as Ray does with what it carries
        pickling_s += time.process_time() - at
        at = time.process_time()
        read = unpack(pickle.loads(written))
        unpickling_s += time.process_time() - at
        at = time.process_time()
        backend.send(ROUTER, *read.deltas)
        if number < num_tokens:
            await wait_until(lambda: received["pieces"] >= number * num_streams)  # noqa: B023
            tokens_s += time.process_time() - at
    at = time.process_time()
    await asyncio.gather(*tasks)
    requests_s += time.process_time() - at
    num_paced = num_streams * (num_tokens - 1)
    return {
        "router_us_per_token": tokens_s * 1e6 / num_paced,
        "pickling_us_per_token": pickling_s * 1e6 / (num_streams * num_tokens),
        "unpickling_us_per_token": unpickling_s * 1e6 / (num_streams * num_tokens),
        "router_us_per_request": requests_s * 1e6 / num_streams,
    }


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    backend = FakeBackend(is_stepped=True)
    fleet = Fleet(ROUTER)
    fleet.put(await backend.hello(ROUTER), backend)
    app = build_app(Router(fleet))
    rounds = [await measure(app, backend, args.streams, args.max_tokens) for _ in range(args.rounds)]
    report = {
        name: {"median": round(statistics.median(each[name] for each in rounds), 2),
               "best": round(min(each[name] for each in rounds), 2)}
        for name in rounds[0]
    }  # fmt: skip
    print(json.dumps(report, indent=1))
    await fleet.close()


if __name__ == "__main__":
    asyncio.run(main())
