"""Canaries: strings that nobody else sends, in keys, prompts, headers and names. No sink has one afterwards."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from serve_app.core.errors import EngineFailed, InvalidRequest
from serve_app.deployments.logs import ACCESS_LOGGER, SERVES_LOGGER
from serve_app.http.app import build_app
from serve_app.http.guard import Door
from serve_app.observe.lines import GuardedFormatter
from serve_app.router.accounting import Accounting
from serve_app.router.fleet import Fleet
from serve_app.router.idempotency import Replays
from serve_app.router.ledger_writer import LedgerWriter
from serve_app.router.quotas import Quotas
from serve_app.router.router import Router, RouterConfig
from serve_app.router.run import RunSettings
from serve_app.tenants.admin_service import AdminService
from serve_app.tenants.lending import Lending
from serve_app.tenants.opening import open_store
from serve_app.tenants.store import Author
from tests.fakes import FakeBackend, adapter_card, model_card, replica_card
from tests.flow.bookkeeping import FakeAccounts

PEPPER = "p" * 32
CANARY = "kanarienvogel"
"""In every secret of a request; what follows says which one got out."""
BY = Author(name="test", at=0.0)


class House:
    """A service with keys, limits and a ledger, of two tenants on one replica, and all of its sinks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store, pepper = open_store(f"sqlite:///{folder}/kept.db", pepper_file=folder / "none", environment=PEPPER)
        self.admin_service = AdminService(self.store, pepper)
        self.keys = {"admin": str(self.admin_service.answer("create_admin_key", {}, BY)["key"])}
        for name in ("acme", "beta"):
            limits = {"tokens_per_minute": 1_000_000}
            self.admin_service.answer("add_tenant", {"name": name, "limits": limits}, BY)
            scopes = ["infer", "metrics"]
            self.keys[name] = str(
                self.admin_service.answer("create_key", {"tenant": name, "scopes": scopes}, BY)["key"]
            )
        self.directory = self.store.directory(pepper)
        lending = Lending(lambda name: self.directory.tenants[name].limits, clock=lambda: 0.0, wall=lambda: 0.0)
        self.fleet = Fleet("router-0")
        self.accounting = Accounting(
            Quotas("router-0", accounts := FakeAccounts(self.admin_service.ledger, lending)),
            LedgerWriter(accounts, self.fleet.counts),
        )
        self.backend = self.another("r0")
        door = Door(identify=lambda key: self.directory.identify(key, time.time()), administer=self.administer)
        config = RouterConfig(run=RunSettings(max_pause_s=0.0))  # a second replica never comes
        self.app = build_app(Router(self.fleet, config, accounting=self.accounting), door=door, replays=Replays())

    def another(self, replica_id: str) -> FakeBackend:
        backend = FakeBackend(replica_card(replica_id, model_card("tiny", adapter_card("sql"))), is_stepped=True)
        self.fleet.put(backend.card, backend)
        return backend

    async def administer(self, service: str, arguments: Mapping[str, object], actor: str) -> Mapping[str, object]:
        return self.admin_service.answer(service, arguments, Author(name=actor, at=time.time()))

    def bearing(self, name: str) -> dict[str, str]:
        return {"authorization": f"Bearer {self.keys[name]}"}


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    made = House(tmp_path)
    yield made
    await made.fleet.close()
    made.store.close()


@pytest.fixture
async def client(house: House) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=house.app), base_url="http://door") as client:
        yield client


LOGGERS = ("serve_app", "starlette", "uvicorn", "asyncio", SERVES_LOGGER)
"""Of what runs in a router; Serve's own is the last."""


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """What a replica writes, of every level."""
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(GuardedFormatter("%(levelname)s %(name)s: %(message)s"))
    loggers = [logging.getLogger(name) for name in LOGGERS]
    access = logging.getLogger(ACCESS_LOGGER)
    levels = [(each, each.level) for each in (*loggers, access)]
    was_apart, access.propagate = not access.propagate, True  # whatever a test before has set up
    for each, _ in levels:
        each.setLevel(logging.DEBUG)
    for each in loggers:
        each.addHandler(handler)
    yield written
    for each, level in levels:
        each.removeHandler(handler)
        each.setLevel(level)
    access.propagate = not was_apart


HEADERS = {
    "user-agent": f"{CANARY}-agent",
    "cookie": f"session={CANARY}-cookie",
    "referer": f"https://{CANARY}-referer.example/",
    "x-secret": f"{CANARY}-header",
    f"x-{CANARY}": "1",
    "x-forwarded-for": f"{CANARY}-forwarded",
    "traceparent": f"00-{CANARY}",
    "idempotency-key": f"{CANARY}-idempotency",
    "x-request-id": f"{CANARY} is not well formed",
}
TOOL = {"type": "function", "function": {"name": f"{CANARY}_tool", "parameters": {"type": "object"}}}
MESSAGES = [{"role": "user", "content": f"{CANARY}-chat"}]
USER = f"{CANARY}-user"
COMPLETION = {"model": "tiny", "prompt": f"{CANARY}-prompt and more", "max_tokens": 3, "stop": [f"{CANARY}-stop"]}
SENT: list[tuple[str, str, Any]] = [
    ("POST", "/v1/completions", COMPLETION | {"user": USER, "suffix": None}),
    ("POST", "/v1/completions", COMPLETION | {"stream": True, "cache_salt": f"{CANARY}-salt"}),
    ("POST", "/v1/completions", COMPLETION | {"model": f"{CANARY}-model"}),
    ("POST", "/v1/completions", COMPLETION | {"model": f"tiny:{CANARY}-adapter"}),
    ("POST", "/v1/completions", COMPLETION | {"model": ["tiny", f"{CANARY}-other"]}),
    ("POST", "/v1/completions", COMPLETION | {f"{CANARY}_parameter": 1}),
    ("POST", "/v1/completions", COMPLETION | {"temperature": f"{CANARY}-temperature"}),
    ("POST", "/v1/completions", COMPLETION | {"logit_bias": {f"{CANARY}-token": 1}}),
    ("POST", "/v1/completions", COMPLETION | {"max_tokens": 10**9}),
    ("POST", "/v1/completions", COMPLETION | {"regex": f"({CANARY}"}),
    ("POST", "/v1/completions", f'{{"model": "tiny", "prompt": "{CANARY}-broken'),
    ("POST", "/v1/chat/completions", {"model": "tiny", "messages": MESSAGES, "max_tokens": 3, "tools": [TOOL]}),
    (
        "POST",
        "/v1/chat/completions",
        {"model": "tiny", "messages": MESSAGES, "tools": [TOOL], "tool_choice": f"{CANARY}-choice"},
    ),
    ("POST", "/v1/embeddings", {"model": "tiny", "input": f"{CANARY}-input"}),
    ("POST", "/v1/rerank", {"model": "tiny", "query": f"{CANARY}-query", "documents": [f"{CANARY}-document"]}),
    ("POST", "/completion", {"model": "tiny", "prompt": f"{CANARY}-native", "n_predict": 2}),
    ("POST", "/tokenize", {"model": "tiny", "content": f"{CANARY}-content"}),
    ("POST", "/apply-template", {"model": "tiny", "messages": MESSAGES}),
    ("GET", f"/v1/models/{CANARY}-path", None),
    ("GET", f"/{CANARY}/route?secret={CANARY}-query", None),
    ("DELETE", f"/v1/completions?{CANARY}", None),
]


async def send(house: House, client: httpx.AsyncClient, sent: tuple[str, str, Any], headers: Mapping[str, str]) -> str:
    """One request, with a replica that recites while it runs; its answer."""
    method, path, body = sent
    content = body if isinstance(body, str | None) else json.dumps(body)
    plain = {"content-type": "application/json", **headers}
    asking = asyncio.ensure_future(client.request(method, path, content=content, headers=plain))
    while not asking.done():
        house.backend.step()
        await asyncio.sleep(0)
    return asking.result().text


async def sinks(house: House, client: httpx.AsyncClient, log: io.StringIO) -> dict[str, str]:
    """All that is kept of requests, or told to somebody else, by where that is."""
    await house.accounting.ledger_writer.flush()
    paths = (
        "/metrics",
        "/admin/events",
        "/admin/keys",
        "/admin/tenants",
        "/admin/usage?by=tenant,model,adapter,key_id",
    )
    found = {path: (await client.get(path, headers=house.bearing("admin"))).text for path in paths}
    found["the log"] = log.getvalue().replace(f'"user":"{USER}"', "")  # which names the end user there
    for file in house.folder.iterdir():
        found[file.name] = file.read_bytes().decode("latin-1")
    return found


@pytest.mark.law("Canaries")
async def test_no_canary_is_in_any_sink(house: House, client: httpx.AsyncClient, log: io.StringIO) -> None:
    """Keys and prompts were in logs: vLLM, PR 52523; LiteLLM #20240."""
    strange = {"authorization": f"Bearer sa-{CANARY}{'x' * (43 - len(CANARY))}"}
    for number, sent in enumerate(SENT):
        headers = HEADERS | {"idempotency-key": f"{CANARY}-{number}"}
        for key in (house.bearing("acme"), strange, {"x-api-key": f"{CANARY}-key"}, {}):
            await send(house, client, sent, headers | key)
    for sink, text in (await sinks(house, client, log)).items():
        assert CANARY not in text, (sink, text[max(0, text.index(CANARY) - 300) :][:600])
        for secret in house.keys.values():
            assert secret[3:] not in text, sink
    assert "acme,tiny" in (await client.get("/admin/usage?format=csv", headers=house.bearing("admin"))).text


FAULTS = {
    "a mistake of ours": RuntimeError(f"cannot do with {CANARY}-prompt"),
    "a library's": ValueError(f"{CANARY}\nERROR serve_app: forged"),
    "a key": KeyError(f"{CANARY}-prompt"),
    "the engine's": EngineFailed("The engine failed."),
    "a refusal": InvalidRequest.refusing("prompt", must="be shorter", found=f"{CANARY}-prompt"),
}


@pytest.mark.law("Canaries")
@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
async def test_no_canary_is_in_any_sink_or_anybody_elses_answer_where_something_fails(
    house: House, client: httpx.AsyncClient, log: io.StringIO, fault: str, is_streamed: bool
) -> None:
    error = FAULTS[fault]
    beside = {"model": "tiny", "prompt": "plain", "max_tokens": 30, "stream": is_streamed}
    secret = COMPLETION | {"max_tokens": 30, "stream": is_streamed}
    asked = [
        asyncio.ensure_future(client.post("/v1/completions", json=body, headers=house.bearing(name)))
        for name, body in (("beta", beside), ("acme", secret))
    ]
    while house.backend.num_live < 2:  # noqa: ASYNC110
        await asyncio.sleep(0)
    house.backend.step()
    house.backend.refusal = error
    refused = await client.post("/v1/completions", json=COMPLETION, headers=house.bearing("acme"))
    assert refused.status_code >= 400
    house.backend.die(error)
    answers = await asyncio.gather(*asked)
    assert CANARY not in answers[0].text, answers[0].text
    for sink, text in (await sinks(house, client, log)).items():
        assert CANARY not in text, (sink, text[max(0, text.index(CANARY) - 300) :][:600])
    assert_unforged(log)


def assert_unforged(log: io.StringIO) -> None:
    for line in log.getvalue().splitlines():
        assert line.startswith(("  | ", "DEBUG ", "INFO ", "WARNING ", "ERROR ")), line
        assert "forged" not in line.split(": ")[0]
    assert not [each for each in log.getvalue() if each != "\n" and not each.isprintable()]


FORGERIES = [
    'x\n{"event":"completion","tenant":"beta","status":200}',
    "x\r\nERROR serve_app: forged",
    "\x1b[2J\x1b[31mforged",
    "\x9b2Jforged",
    "x\u2028ERROR forged",
    "\x00forged\x85ERROR forged",
]


@pytest.mark.law("Canaries")
@pytest.mark.parametrize("forgery", FORGERIES)
async def test_no_line_of_the_log_is_forged_by_a_name_or_a_header(
    house: House, client: httpx.AsyncClient, log: io.StringIO, forgery: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVE_APP_LOG_MESSAGES", "1")  # not even where messages are shown
    headers = {"x-request-id": forgery.encode(), "user-agent": forgery.encode(), **house.bearing("acme")}
    for model in (forgery, f"tiny:{forgery}", "tiny"):
        content = json.dumps(COMPLETION | {"model": model, "user": forgery})
        asking = asyncio.ensure_future(client.post("/v1/completions", content=content, headers=headers))  # type: ignore[arg-type]
        while not asking.done():
            house.backend.step()
            await asyncio.sleep(0)
    house.backend.refusal = RuntimeError(forgery)
    await client.post("/v1/completions", json=COMPLETION, headers=house.bearing("acme"))
    assert_unforged(log)
    lines = [line for line in log.getvalue().splitlines() if line.startswith("INFO serve_app.http.completions: {")]
    assert len(lines) == 4, lines
    assert [json.loads(line.partition(": ")[2])["tenant"] for line in lines] == ["acme"] * 4


@pytest.mark.parametrize("name", [*LOGGERS, ACCESS_LOGGER])
def test_a_canary_in_any_of_the_loggers_would_be_seen(log: io.StringIO, name: str) -> None:
    logging.getLogger(f"{name}.below").debug(CANARY)
    assert CANARY in log.getvalue()


def test_messages_of_the_machine_are_told_and_others_withheld(log: io.StringIO) -> None:
    logger = logging.getLogger("serve_app.test")
    for error in (OSError(28, "No space left on device"), ValueError(CANARY), InvalidRequest(CANARY)):
        try:
            raise error
        except (OSError, ValueError, InvalidRequest):
            logger.exception("it failed")
        logger.warning("it failed: %r", error)
    told = log.getvalue()
    assert told.count("OSError: [Errno 28] No space left on device") == 2
    assert told.count("message withheld") == 4
    assert 'File "' in told
    assert CANARY not in told


def test_of_an_error_that_led_to_another_both_are_told(log: io.StringIO) -> None:
    try:
        try:
            raise OSError("first")
        except OSError as error:
            raise MemoryError("second") from error
    except MemoryError:
        logging.getLogger("serve_app.test").exception("it failed")
    told = log.getvalue()
    assert told.index("OSError: first") < told.index("MemoryError: second")
