"""Prompts and completions are in the log where a tenant asked for that: of a sample of its own requests, and no key."""

from __future__ import annotations

import asyncio
import io
import json

import httpx
import pytest

from serve_app.router.stats import HIDDEN, MAX_CHARS, MAX_TEXTS, is_sampled
from serve_app.tenants.keys import new_key
from tests.flow.test_canaries import (
    BY,
    CANARY,
    COMPLETION,
    FORGERIES,
    HEADERS,
    MESSAGES,
    PEPPER,
    SENT,
    House,
    assert_unforged,
    client,
    house,
    log,
    send,
    sinks,
)

__all__ = ["client", "house", "log"]


def opt_in(house: House, name: str, share: float) -> None:
    house.admin_service.answer("set_tenant", {"name": name, "log_texts": share}, BY)
    house.directory = house.store.directory(PEPPER.encode())


def texts_in(log: io.StringIO) -> list[dict[str, object]]:
    """The lines that have texts."""
    lines = [line.partition(": ")[2] for line in log.getvalue().splitlines() if '"event":"texts"' in line]
    return [json.loads(line) for line in lines]


async def ask(house: House, client: httpx.AsyncClient, prompt: object, *, by: str = "acme", **body: object) -> str:
    path, asked = "/v1/completions", {"model": "tiny", "prompt": prompt, "max_tokens": 3, **body}
    return await send(house, client, ("POST", path, asked), house.bearing(by))


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_what_was_sent_and_answered_is_logged_of_who_asked_for_it(
    house: House, client: httpx.AsyncClient, log: io.StringIO, is_streamed: bool
) -> None:
    opt_in(house, "acme", 1.0)
    await ask(house, client, "Once upon", n=2, stream=is_streamed)
    [line] = texts_in(log)
    assert (line["tenant"], line["model"]) == ("acme", "tiny")
    assert f'"request_id":"{line["request_id"]}"' in log.getvalue().partition('"event":"texts"')[0]
    assert line["prompts"] == [{"text": "Once upon", "num_chars": 9}]
    told = [" p0s0w0 p0s0w1 p0s0w2", " p0s1w0 p0s1w1 p0s1w2"]
    assert line["completions"] == [{"index": at, "text": text, "num_chars": 21} for at, text in enumerate(told)]
    await send(
        house, client, ("POST", "/v1/chat/completions", {"model": "tiny", "messages": MESSAGES}), house.bearing("acme")
    )
    assert f"{CANARY}-chat" in str(texts_in(log)[-1]["prompts"])


async def test_of_another_tenant_nothing_is_logged_and_its_own_texts_are_nowhere_else(
    house: House, client: httpx.AsyncClient, log: io.StringIO
) -> None:
    """Everything that the canaries are sent in, by one who asked for it and one who did not."""
    opt_in(house, "acme", 1.0)
    for number, sent in enumerate(SENT):
        headers = HEADERS | {"idempotency-key": f"{CANARY}-{number}"}
        await send(house, client, sent, headers | house.bearing("beta"))
        own = json.loads(json.dumps(sent).replace(CANARY, "eigenes"))
        await send(house, client, (own[0], own[1], own[2]), house.bearing("acme"))
    assert len(texts_in(log)) >= 5
    assert {line["tenant"] for line in texts_in(log)} == {"acme"}
    found = await sinks(house, client, log)
    for sink, text in found.items():
        assert CANARY not in text, sink
        for secret in house.keys.values():
            assert secret[3:] not in text, sink
    lines = [line for line in found.pop("the log").splitlines() if "eigenes-prompt" in line]
    assert lines
    assert all('"event":"texts"' in line for line in lines)
    assert not [sink for sink, text in found.items() if "eigenes-" in text]


async def test_no_share_is_none_and_a_share_is_about_as_many_always_the_same() -> None:
    ids = [f"r{number}" for number in range(4000)]
    assert not any(is_sampled(each, tenant="acme", share=0.0) for each in ids)
    assert all(is_sampled(each, tenant="acme", share=1.0) for each in ids)
    few = {each for each in ids if is_sampled(each, tenant="acme", share=0.1)}
    assert 300 < len(few) < 500
    assert few == {each for each in ids if is_sampled(each, tenant="acme", share=0.1)}
    assert few < {each for each in ids if is_sampled(each, tenant="acme", share=0.3)}
    assert few != {each for each in ids if is_sampled(each, tenant="beta", share=0.1)}


async def test_once_it_is_turned_off_nothing_more_is_logged(
    house: House, client: httpx.AsyncClient, log: io.StringIO
) -> None:
    for share, wanted in ((0.0, 0), (1.0, 1), (0.0, 1)):
        opt_in(house, "acme", share)
        await ask(house, client, "Once")
        assert len(texts_in(log)) == wanted


async def test_keys_in_texts_are_hidden_wherever_a_text_is_cut(
    house: House, client: httpx.AsyncClient, log: io.StringIO
) -> None:
    opt_in(house, "acme", 1.0)
    secret = new_key()
    for before in (0, 7, *range(MAX_CHARS - 60, MAX_CHARS + 3, 4)):
        await ask(house, client, ("x" * before)[: MAX_CHARS * 2] + f"{secret} and {house.keys['beta']}", by="acme")
    told = log.getvalue()
    assert HIDDEN.encode("unicode_escape").decode() in told
    for key in (secret, house.keys["beta"]):
        assert key[:12] not in told


@pytest.mark.parametrize("forgery", FORGERIES)
async def test_a_text_forges_no_line(house: House, client: httpx.AsyncClient, log: io.StringIO, forgery: str) -> None:
    opt_in(house, "acme", 1.0)
    house.backend.script = lambda request, sample: [forgery, '"}\n{"event":"texts"', forgery]
    await ask(house, client, forgery)
    assert_unforged(log)
    [line] = texts_in(log)
    assert line["prompts"] == [{"text": forgery, "num_chars": len(forgery)}]


async def test_a_line_is_bounded_however_much_was_sent_and_answered(
    house: House, client: httpx.AsyncClient, log: io.StringIO
) -> None:
    opt_in(house, "acme", 1.0)
    house.backend.script = lambda request, sample: ["\U0001f980" * 300] * 30
    await ask(house, client, ["\U0001f980" * 400] * 6, n=2, max_tokens=20)
    [line] = texts_in(log)
    assert [len(line[name]) for name in ("prompts", "completions")] == [MAX_TEXTS, MAX_TEXTS]  # type: ignore[arg-type]
    assert {each["num_chars"] for each in line["completions"]} == {6000}  # type: ignore[attr-defined]
    assert len(json.dumps(line)) < 12 * MAX_CHARS * 2 * MAX_TEXTS + 1000


async def test_a_prompt_that_is_made_again_elsewhere_is_logged_once(
    house: House, client: httpx.AsyncClient, log: io.StringIO
) -> None:
    opt_in(house, "acme", 1.0)
    asking = asyncio.ensure_future(
        client.post("/v1/completions", json=COMPLETION | {"prompt": "Once"}, headers=house.bearing("acme"))
    )
    while not house.backend.num_live:  # noqa: ASYNC110
        await asyncio.sleep(0)
    house.backend.step()
    await asyncio.sleep(0)
    second = house.another("r1")
    house.backend.die(ConnectionError("the process is gone"))
    while not asking.done():
        second.step()
        await asyncio.sleep(0)
    assert asking.result().status_code == 200
    [line] = texts_in(log)
    assert line["completions"] == [{"index": 0, "text": " p0s0w0 p0s0w1 p0s0w2", "num_chars": 21}]
