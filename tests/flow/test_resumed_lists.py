"""Streams of which a part was lost, and those that are fetched by two at once: nothing is counted or computed twice."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest
from sqlalchemy import text

from serve_app.core.cards import Scale
from serve_app.core.tenants import Meter
from serve_app.router.places import signed
from tests.fakes import FakeBackend, settle
from tests.flow.bookkeeping import TENANTS, FakeAccounts, House, backend, house
from tests.flow.test_ledger import accounts, sums  # noqa: F401
from tests.flow.test_resuming import ACME, ASKED, app_of, kept_of, shown

KEY = {"x-api-key": "acme"}


async def left_behind(house: House, *replicas: FakeBackend, num_steps: int = 5, **asked: object) -> str:
    """The id of a stream that has come so far when its client leaves."""
    house.ask("acme", stream=True, **asked)
    while not all(each.num_live for each in replicas):  # noqa: ASYNC110
        await asyncio.sleep(0)
    for _ in range(num_steps):
        for each in replicas:
            each.step()
        await settle(100)
    house.tasks[0].cancel()
    await asyncio.gather(*house.tasks, return_exceptions=True)
    await settle(100)
    return kept_of(replicas[0]).id


async def stepped(replica: FakeBackend, *asking: asyncio.Task[httpx.Response]) -> list[httpx.Response]:
    while not all(each.done() for each in asking):
        replica.step()
        await asyncio.sleep(0)
    return [each.result() for each in asking]


def by_choice(response: httpx.Response) -> dict[int, str]:
    texts: dict[int, str] = {}
    for line in response.text.splitlines():
        for choice in json.loads(line[6:])["choices"] if line.startswith("data: {") else ():
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return texts


@pytest.mark.law("Exactly once")
@pytest.mark.law("Resumed streams")
@pytest.mark.parametrize("seen", [0, 3, 5])
async def test_a_prompt_of_a_list_that_was_lost_is_computed_anew_and_counts_once(
    accounts: FakeAccounts,  # noqa: F811
    seen: int,
) -> None:
    """The router and a replica die. What the client has seen of the lost prompt by then it does not pay again."""
    one, lost = backend(0, is_stepped=True), backend(1, is_stepped=True)
    first, second = house(accounts, [one, lost], "router-0"), house(accounts, [one, lost], "router-1")
    named = await left_behind(first, one, lost, num_steps=seen, prompt=["a b c", "d e"])
    lost.die(ConnectionError("gone"))
    second.fleet.remove("r1")
    of_lost = one.submissions[0][0].prompt_index == 0
    place = ",".join([f"{7 * seen}.{seen}"] * 2)
    headers = KEY | ({"last-event-id": signed(place, kept_of(one).secret).decode()} if seen else {})
    get = second.client.get(f"/v1/completions/{named}", headers=headers)
    [answer] = await stepped(one, asyncio.create_task(get))
    rest = [f" p{part}s0w{{}}" for part in range(2)]
    assert by_choice(answer) == {part: "".join(rest[part].format(at) for at in range(seen, 12)) for part in range(2)}, (
        answer.text
    )
    again = one.submissions[-1]
    assert {each.part for each in again} == {0, 1}
    assert [len(each.past) > 0 for each in sorted(again, key=lambda each: each.part)] == [
        of_lost and bool(seen),
        not of_lost and bool(seen),
    ]
    for each in (first, second):
        await each.accounting.ledger_writer.flush()
    with accounts.store.engine.connect() as connection:
        rows = connection.execute(text("SELECT status, prompt_tokens, completion_tokens, choices FROM ledger")).all()
    assert [tuple(row) for row in rows] == [(200, 5, 24, 2)]
    found = sums(accounts, tenant="acme")
    assert (found["requests"], found["prompt_tokens"], found["completion_tokens"]) == (1, 5, 24)
    used = [each.accounting.quotas._account(TENANTS["acme"]).statement().used for each in (first, second)]
    if seen:  # else nobody told what was reserved for
        assert sum(each[Meter.TOKENS] for each in used) == 5 + 24
    await first.kill()
    await second.kill()


async def test_of_two_that_fetch_a_stream_at_once_one_gets_it_and_nothing_is_computed_twice(
    accounts: FakeAccounts,  # noqa: F811
) -> None:
    one = backend(0, is_stepped=True)
    one.keeping._clock = lambda: 0.0
    houses = [house(accounts, [one], f"router-{number}") for number in range(3)]
    named = await left_behind(houses[0], one)
    path = f"/v1/completions/{named}"
    asking = [asyncio.create_task(each.client.get(path, headers=KEY)) for each in houses[1:]]
    answers = sorted(await stepped(one, *asking), key=lambda each: each.status_code)
    assert [each.status_code for each in answers] == [200, 503]
    assert (answers[1].headers["retry-after"], answers[1].json()["error"]["error_code"]) == ("1", "unavailable")
    again = await houses[2].client.get(path, headers=KEY)
    assert shown(again) == shown(answers[0]) == "".join(f" p0s0w{at}" for at in range(12))
    assert (len(one.submissions), one.spent["acme"].completion_tokens) == (2, 12)
    for each in houses:
        await each.kill()


async def test_a_part_that_a_replica_may_have_which_was_not_met_yet_is_not_computed_anew(
    accounts: FakeAccounts,  # noqa: F811
) -> None:
    one, other = backend(0, is_stepped=True), backend(1, is_stepped=True)
    first, second = house(accounts, [one, other], "router-0"), house(accounts, [one], "router-1")
    named = await left_behind(first, one, other, prompt=["a", "b"])
    second.fleet.expect(["tiny"], scales={"tiny": Scale(wanted=2, starting=0, draining=0)})
    for name in (named, "cmpl-none"):
        early = await second.client.get(f"/v1/completions/{name}", headers=KEY)
        assert (early.status_code, early.headers["retry-after"]) == (503, "1")
    second.fleet.expect(["tiny"], scales={"tiny": Scale(wanted=2, starting=1, draining=0)})
    assert (await second.client.get("/v1/completions/cmpl-none", headers=KEY)).status_code == 404
    await first.kill()
    await second.kill()


async def test_a_stream_tells_whether_it_can_be_fetched_anew() -> None:
    client, fleet, replica = app_of()
    first = await client.post("/v1/completions", json=ASKED)
    again = await client.get(f"/v1/completions/{kept_of(replica).id}")
    whole = await client.post("/v1/completions", json={**ASKED, "stream": False})
    told = [each.headers.get("x-resumable") for each in (first, again, whole)]
    assert told == ["true", "true", None]
    replica.keeping._max_bytes = 100
    full = await client.post("/v1/completions", json=ASKED)
    assert (full.headers["x-resumable"], shown(full)) == ("false", shown(first))
    assert (await client.get(f"/v1/completions/{kept_of(replica).id}")).status_code == 404
    await fleet.close()
    client, fleet, _ = app_of(ACME, 0.0)
    assert (await client.post("/v1/completions", json=ASKED)).headers["x-resumable"] == "false"
    await fleet.close()


async def test_only_streams_that_were_fetched_count_as_fetched() -> None:
    client, fleet, replica = app_of()
    await client.post("/v1/completions", json=ASKED)
    await client.get("/v1/completions/cmpl-none")

    async def counted() -> dict[str, float]:
        lines = (await client.get("/metrics")).text.splitlines()
        wanted = ("serve_app_resumed_streams_total{", "serve_app_move_pause_seconds_count{")
        return {name: sum(float(each.split()[-1]) for each in lines if each.startswith(name)) for name in wanted}

    assert list((await counted()).values()) == [0.0, 0.0]
    await client.get(f"/v1/completions/{kept_of(replica).id}")
    assert list((await counted()).values()) == [1.0, 0.0]
    await fleet.close()
