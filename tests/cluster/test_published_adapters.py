"""Adapters that are published, tried, rolled back and withdrawn under streams, and what is left after kill -9.

A team that publishes with a key of its own is in `test_exact`.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save_file

from serve_app.catalog.aliases import in_order
from serve_app.cli.processes import send
from serve_app.core.tenants import LOCAL
from tests.cluster.house import NUM_ASKED, House
from tests.cluster.kills import REPLICA, ROUTER
from tests.cluster.started import REPOSITORY, TIMEOUT_S, Started

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(sys.platform != "linux", reason="what a process belongs to is told by /proc"),
]

NUM_STREAMS = 30
NAME = "demo:live"
PROMPTS = ("Once upon a time", "The captain said", "A list of names")
BODY = {"model": NAME, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
FIRST, SECOND = "pirate", "shout"
"""Folders that become two versions of one name."""
ONE, TWO = "demo:one", "demo:two"
WEIGHTS = {ONE: 3, TWO: 1}
ALIASES = {"split": WEIGHTS, "watched": {"to": ONE, "shadow": {TWO: 100}}}
ROLLOUT = {"requests": 12, "max_slowdown": 1e6}
"""Without times: what machine this is decides nothing."""


def with_two_of_each(content: dict[str, Any], *, root: Path) -> None:
    settings = content["applications"][0]["deployments"][0]["user_config"]
    settings |= {"max_open_requests": 512, "adapter_roots": [str(root)], "aliases": ALIASES, "rollout": ROLLOUT}
    for application in content["applications"]:
        for deployment in application["deployments"]:
            deployment["num_replicas"] = 2


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("root") / "adapters"
    shutil.copytree(REPOSITORY / "adapters" / "demo", folder)
    return folder


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, root: Path) -> Iterator[House]:
    """One service for all tests that publish without keys."""
    made = House(tmp_path_factory.mktemp("house"), partial(with_two_of_each, root=root))
    made.run.until_ready()
    until_two_are_ready(made.run.url)
    yield made
    made.run.end()


@pytest.fixture
def house(running: House) -> Iterator[House]:
    yield running
    for each in listed(running.run.url):
        running.command("adapters", "withdraw", each["id"], "--url", running.run.url)


def until_two_are_ready(url: str) -> None:
    """Every router sees two replicas; of two routers each request asks another."""
    until(lambda: {each["ready_replicas"] for each in listed(url)} <= {2} and _num_replicas(url) == {2})


def _num_replicas(url: str) -> set[int]:
    return {len(httpx.get(f"{url}/live", timeout=TIMEOUT_S).json()["replicas"]) for _ in range(8)}


def listed(url: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = httpx.get(f"{url}/admin/adapters", timeout=TIMEOUT_S).json()["data"]
    return found


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        with suppress(httpx.HTTPError, KeyError, json.JSONDecodeError):
            if holds():
                return
        assert time.monotonic() < deadline
        time.sleep(0.2)


def publish(house: House, folder: Path, *options: str, name: str = NAME) -> str:
    """The version that the name means now, which every replica serves."""
    answer = house.command("adapters", "publish", name, str(folder), *options, "--url", house.run.url)
    assert (answer["replicas"], answer["ready_replicas"]) == (2, 2)
    return str(answer["version"])


def ask(url: str, model: str, prompt: str = PROMPTS[0], **more: object) -> httpx.Response:
    body = {**BODY, "model": model, "prompt": prompt, **more}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=TIMEOUT_S)
    assert answer.status_code == 200, answer.text
    return answer


def text_in(answer: httpx.Response) -> str:
    return str(answer.json()["choices"][0]["text"])


def texts_of(url: str, model: str = NAME) -> tuple[str, ...]:
    """Of every prompt; asked again and again, as every router and replica has to say the same."""
    found = set()
    for _ in range(NUM_ASKED // len(PROMPTS)):
        found.add(tuple(text_in(ask(url, model, each)) for each in PROMPTS))
    (only,) = found
    return only


@dataclass(slots=True)
class Crowd:
    """Streams without a pause. Each must be, as a whole, what the name meant between its begin and its first byte.

    meanings: texts of every prompt by version;  allowed: versions that the name may mean now; without one it may be
    missing
    """

    url: str
    meanings: dict[str, tuple[str, ...]]
    allowed: set[str]
    may_be_missing: bool = False
    num_right: int = 0
    num_missing: int = 0
    wrong: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    is_over: bool = False

    async def run(self, number: int) -> None:
        async with httpx.AsyncClient(timeout=120) as client:
            while not self.is_over:
                await self._ask(client, number)
                number += 1

    async def _ask(self, client: httpx.AsyncClient, number: int) -> None:
        at = number % len(PROMPTS)
        versions = set(self.allowed)
        body = {**BODY, "prompt": PROMPTS[at], "stream": True}
        async with client.stream("POST", f"{self.url}/v1/completions", json=body) as response:
            versions |= self.allowed
            if response.status_code == 404 and self.may_be_missing:
                self.num_missing += 1
                await response.aread()
                await asyncio.sleep(0.2)
                return
            if response.status_code != 200:
                self.failed.append(f"{response.status_code} {(await response.aread())[:300]!r}")
                return
            text, is_whole = "", False
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    is_whole = True
                elif line.startswith("data: "):
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        self.failed.append(line)
                        return
                    text += "".join(each["text"] for each in event["choices"])
        if not is_whole:
            self.failed.append(f"cut: {text}")
        elif text in {self.meanings[version][at] for version in versions}:
            self.num_right += 1
        else:
            self.wrong.append(text)


async def test_thirty_streams_see_whole_versions_and_nothing_fails(house: House, root: Path) -> None:
    other = ("adapters", "publish", "demo:other", str(root / "json"), "--url", house.run.url)
    await asyncio.to_thread(house.command, *other)
    first = await asyncio.to_thread(publish, house, root / FIRST)
    meanings = {first: await asyncio.to_thread(texts_of, house.run.url)}
    second = await asyncio.to_thread(publish, house, root / SECOND, "--in-place")
    meanings[second] = await asyncio.to_thread(texts_of, house.run.url)
    assert all(one != other for one, other in zip(*meanings.values(), strict=True)), "prompts tell versions apart"
    await asyncio.to_thread(house.command, "adapters", "rollback", NAME, "--url", house.run.url)
    crowd = Crowd(house.run.url, meanings, {first})
    streams = [asyncio.create_task(crowd.run(number)) for number in range(NUM_STREAMS)]
    await _some_more(crowd)
    for words, meant in (
        (("publish", NAME, str(root / SECOND), "--in-place"), second),
        (("rollback", NAME), first),
        (("rollback", NAME), second),
        (("publish", NAME, str(root / FIRST), "--in-place"), first),
    ):
        crowd.allowed = {*crowd.allowed, meant}
        await asyncio.to_thread(house.command, "adapters", *words, "--url", house.run.url)
        crowd.allowed = {meant}
        await _some_more(crowd)
    crowd.may_be_missing = True
    await asyncio.to_thread(house.command, "adapters", "withdraw", NAME, "--url", house.run.url)
    crowd.allowed = set()
    await _until(lambda: crowd.num_missing >= NUM_STREAMS or bool(crowd.failed or crowd.wrong))
    crowd.allowed = {first}
    await asyncio.to_thread(publish, house, root / FIRST)
    crowd.may_be_missing = False
    await _some_more(crowd)
    crowd.is_over = True
    await asyncio.gather(*streams)
    assert (crowd.failed, crowd.wrong) == ([], [])


async def _some_more(crowd: Crowd) -> None:
    """Twice as many streams as there are at once have ended since."""
    before = crowd.num_right
    await _until(lambda: crowd.num_right >= before + 2 * NUM_STREAMS or bool(crowd.failed or crowd.wrong))


async def _until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.05)


def test_weights_hold_for_each_user_at_every_router_and_a_header_says_who_answered(house: House, root: Path) -> None:
    """Of two routers each request asks another."""
    url = house.run.url
    versions = {name: publish(house, root / folder, name=name) for name, folder in ((ONE, FIRST), (TWO, SECOND))}
    texts = {name: text_in(ask(url, name)) for name in versions}
    assert texts[ONE] != texts[TWO], "a prompt tells them apart"
    drawn = {user: in_order(WEIGHTS, "split", LOCAL.tenant.own, "user", user)[0] for user in map(str, range(12))}
    assert set(drawn.values()) == {ONE, TWO}
    for user, name in drawn.items():
        answers = [ask(url, "split", user=user) for _ in range(4)]
        assert {each.headers["x-served-model"] for each in answers} == {f"{name}@{versions[name]}"}
        assert {text_in(each) for each in answers} == {texts[name]}


def test_a_shadow_computes_what_another_version_answers(house: House, root: Path) -> None:
    url = house.run.url
    version = publish(house, root / FIRST, name=ONE)
    publish(house, root / SECOND, name=TWO)
    expected = text_in(ask(url, ONE))

    def is_shadowed() -> bool:
        answer = ask(url, "watched")
        assert (text_in(answer), answer.headers["x-served-model"]) == (expected, f"{ONE}@{version}")
        lines = [line for _ in range(4) for line in httpx.get(f"{url}/metrics", timeout=TIMEOUT_S).text.splitlines()]
        done = [
            line for line in lines if line.startswith("serve_app_shadow_requests_total") and 'outcome="done"' in line
        ]
        return any(TWO in line and float(line.split()[-1]) > 0 for line in done)

    until(is_shadowed)


def test_a_scaled_canary_is_rolled_back_by_itself_and_an_equal_one_gets_all_requests(house: House, root: Path) -> None:
    url = house.run.url
    first = publish(house, root / FIRST)
    canaries = {name: Path(shutil.copytree(root / FIRST, root / name)) for name in ("scaled", "equal")}
    for name, factor in (("scaled", 8), ("equal", 1)):
        weights = canaries[name] / "adapter_model.safetensors"
        save_file({key: factor * tensor for key, tensor in load_file(weights).items()}, weights, {"made": "again"})

    def after_canary(name: str) -> tuple[str, str]:
        """Return what it is, and what the name means when it has ended."""
        options = ("adapters", "publish", NAME, str(canaries[name]), "--canary", "50%", "--url", url)
        canary = house.command(*options)["canary"]["version"]

        def has_ended() -> bool:
            for prompt in PROMPTS:
                ask(url, NAME, prompt, user="\0".join((prompt, str(time.monotonic()))))
            return meant()["canary"] is None

        until(has_ended)
        return canary, meant()["version"]

    def meant() -> dict[str, Any]:
        [entry] = (each for each in listed(url) if each["id"] == NAME)
        return entry

    scaled, version = after_canary("scaled")
    assert scaled != version == first
    equal, version = after_canary("equal")
    assert equal == version != first


def test_after_kill_9_exactly_the_published_set_is_served(house: House, root: Path) -> None:
    url = house.run.url
    first = publish(house, root / FIRST)
    of_first = texts_of(url)
    other = house.command("adapters", "publish", "demo:other", str(root / "json"), "--url", url)["version"]
    kill_one(house, REPLICA)
    second = publish_again(house, root / SECOND)
    until_two_are_ready(url)
    of_second = texts_of(url)
    assert of_second != of_first
    assert texts_of(url, f"{NAME}@{second[:8]}") == of_second
    kill_one(house, ROUTER)
    until_two_are_ready(url)
    assert texts_of(url) == of_second
    with suppress(AssertionError):  # the router that is asked may be the one that dies
        with_kill = asyncio.run(_rolled_back_while_a_router_dies(house))
        assert with_kill["version"] == first
    until_two_are_ready(url)
    meant = {each["id"]: each["version"] for each in listed(url)}
    assert meant == {NAME: meant[NAME], "demo:other": other}
    assert meant[NAME] in (first, second)
    assert texts_of(url) == (of_first if meant[NAME] == first else of_second)
    for each in house.run.processes():
        send(each, signal.SIGKILL)
    house.run.until(lambda: not house.run.processes())
    house.run.process.kill()
    house.run.process.wait(TIMEOUT_S)
    house.run = Started(house.folder, partial(with_two_of_each, root=root))
    house.run.until_ready()
    until_two_are_ready(house.run.url)
    assert {each["id"]: each["version"] for each in listed(house.run.url)} == meant
    assert texts_of(house.run.url) == (of_first if meant[NAME] == first else of_second)


async def _rolled_back_while_a_router_dies(house: House) -> dict[str, Any]:
    rollback = asyncio.create_task(
        asyncio.to_thread(house.command, "adapters", "rollback", NAME, "--url", house.run.url)
    )
    await asyncio.sleep(0.3)
    await asyncio.to_thread(kill_one, house, ROUTER)
    return await rollback


def kill_one(house: House, kind: str) -> None:
    victim = next(each for each in house.run.processes() if kind in each.command)
    assert send(victim, signal.SIGKILL)


def publish_again(house: House, folder: Path) -> str:
    """While a replica is gone; those that are ready serve it, the other one when it is there again."""
    answer = house.command("adapters", "publish", NAME, str(folder), "--in-place", "--url", house.run.url)
    assert answer["replicas"] == answer["ready_replicas"]
    return str(answer["version"])
