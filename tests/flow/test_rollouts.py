"""Canaries on real engines: a worse one is rolled back by itself, an equal one gets all requests."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from serve_app.catalog.aliases import share_of
from serve_app.core.tenants import LOCAL
from serve_app.http.app import build_app
from serve_app.router.publishing import Publisher, Publishing
from serve_app.router.rollout import RolloutSettings
from serve_app.router.rollouts import FLOW, Rollouts
from serve_app.router.router import Router
from tests.engine.adapter_files import save_adapter
from tests.engine.conftest import DEMO
from tests.flow.stack import Stack, running_stack

pytestmark = pytest.mark.slow

OPERATOR = Publisher()
NAME = "demo:tale"
NUM_REQUESTS = 20
UNTIMED = 1e6
"""A canary may be so many times as slow: what machine this is decides nothing."""
SHARED = "Once upon a time there was a king who had three sons, and the youngest of them "
ENDINGS = ("went away", "was a fool", "saw a fox", "slept", "had a ring", "asked why")


@dataclass(frozen=True, slots=True, kw_only=True)
class House:
    """Real replicas behind an application that publishes, with the folders of adapters."""

    stack: Stack
    publishing: Publishing
    rollouts: Rollouts
    client: httpx.AsyncClient
    folders: Path

    async def publish(self, folder: str, **more: Any) -> str:
        path = str(self.folders / folder)
        found = await self.publishing.publish(NAME, path, OPERATOR, **more)
        return found.version if found.canary is None else found.canary.version

    async def idle(self) -> None:
        """Wait until nothing is scored or decided."""
        while self.rollouts.is_busy:  # noqa: ASYNC110
            await asyncio.sleep(0.005)

    async def entry(self) -> dict[str, Any]:
        listed = (await self.client.get("/admin/adapters")).json()["data"]
        return next(each for each in listed if each["id"] == NAME)

    async def text(self, prompt: str, model: str = NAME, **more: Any) -> str:
        body = {"model": model, "prompt": prompt, "max_tokens": 8, "temperature": 0, **more}
        answer = await self.client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    async def ask_until_it_ends(self, *, most: int, **more: Any) -> int:
        """Ask until the canary has ended; return how many requests that took."""
        for number in range(most):
            await self.text(f"{SHARED}{ENDINGS[number % len(ENDINGS)]}", user=f"user-{number}", **more)
            await self.idle()
            if (await self.entry())["canary"] is None:
                return number + 1
        pytest.fail(f"it has not ended after {most} requests: {(await self.entry())['canary']}")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter; an equal one with other bytes; one whose tensors are scaled by 8; one that says other things."""
    out = tmp_path_factory.mktemp("canaries")
    model = AutoModelForCausalLM.from_pretrained(DEMO, local_files_only=True, dtype="float32")
    good = save_adapter(out / "good", model, rank=4, seed=1, targets=("q_proj", "v_proj"))
    equal = Path(shutil.copytree(good, out / "equal"))
    fields = json.loads((equal / "adapter_config.json").read_text())
    (equal / "adapter_config.json").write_text(json.dumps({**fields, "lora_dropout": 0.1}))
    scaled = Path(shutil.copytree(good, out / "scaled"))
    weights = scaled / "adapter_model.safetensors"
    save_file({name: 8 * tensor for name, tensor in load_file(weights).items()}, weights)
    save_adapter(out / "other", model, rank=8, seed=2)
    return out


@asynccontextmanager
async def housed(folders: Path, *, num_replicas: int = 1, **settings: Any) -> AsyncIterator[House]:
    async with running_stack(num_replicas=num_replicas, adapters=None) as stack:
        publishing = Publishing(stack.fleet, roots=[str(folders)])
        for service in stack.services:
            publishing.put(await service.hello("router-0"), service)
        chosen = {"requests": NUM_REQUESTS, "max_slowdown": UNTIMED, **settings}
        rollouts = Rollouts(publishing, stack.fleet, RolloutSettings(**chosen))
        app = build_app(Router(stack.fleet, rollouts=rollouts), publishing=publishing)
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://canary", timeout=120) as client:
            yield House(stack=stack, publishing=publishing, rollouts=rollouts, client=client, folders=folders)


async def test_a_canary_whose_tensors_are_scaled_is_rolled_back_by_itself(folders: Path) -> None:
    async with housed(folders) as house:
        version = await house.publish("good")
        await house.publish("scaled", canary=0.25)
        num_asked = await house.ask_until_it_ends(most=4 * NUM_REQUESTS)
        assert num_asked <= NUM_REQUESTS, "eight scored requests of both versions are enough"
        assert (await house.entry())["version"] == version
        assert house.rollouts.decisions == Counter({"roll back": 1})
        assert {await house.text(SHARED, user=f"user-{n}") for n in range(20)} == {
            await house.text(SHARED, model=f"{NAME}@{version}")
        }


async def test_an_equal_canary_gets_all_requests_step_by_step(folders: Path) -> None:
    async with housed(folders, requests=8, steps=(0.3, 0.6)) as house:
        before = await house.publish("good")
        after = await house.publish("equal", canary=0.3)
        assert before != after
        await house.ask_until_it_ends(most=200)
        entry = await house.entry()
        assert (entry["version"], entry["previous"]["version"]) == (after, before)
        assert house.rollouts.decisions == Counter({"widen": 2})


async def test_what_is_scored_is_no_tenants_and_what_cannot_be_scored_is_compared_all_the_same(folders: Path) -> None:
    async with housed(folders, max_divergence=UNTIMED) as house:
        await house.publish("good")
        await house.publish("other", canary=0.5)
        for number in range(4):
            await house.text(SHARED, user=f"user-{number}", n=2, ignore_eos=True)
        entry = await house.entry()
        assert (entry["canary"]["scored"], entry["canary"]["divergence"]) == (0, None)
        assert entry["canary"]["counted"]["requests"] + entry["canary"]["beside"]["requests"] == 4
        for number in range(6):
            chat = {
                "model": NAME,
                "messages": [{"role": "user", "content": SHARED}],
                "max_tokens": 4,
                "ignore_eos": True,
            }
            sent = {**chat, "user": f"user-{number}", "stream": number % 2 == 0, "ignore_eos": True}
            answer = await house.client.post("/v1/chat/completions", json=sent)
            assert (answer.status_code, "prompt_token_ids" in answer.text) == (200, False)
            await house.idle()
        entry = await house.entry()
        assert entry["canary"]["scored"] == 6
        assert entry["canary"]["divergence"] > 0.1
        await house.stack.settled()
        [service] = house.stack.services
        generated = {each.flow: each.num_generated for each in service.usage.flows}
        assert generated["local"] == 4 * 2 * 8 + 6 * 4
        assert generated[FLOW.flow] == 0


@pytest.mark.law("Adapters")
async def test_no_version_finds_a_prefix_that_the_other_has_computed(folders: Path) -> None:
    prompts = [f"{SHARED}{ending}" for ending in ENDINGS]
    alone = {}
    for folder in ("good", "other"):
        async with housed(folders) as house:
            version = await house.publish(folder)
            alone[version] = [await house.text(prompt) for prompt in prompts]
    [good, other] = alone
    assert all(map(str.__ne__, alone[good], alone[other])), "some say the same"
    async with housed(folders, max_divergence=UNTIMED, requests=10_000) as house:
        await house.publish("good")
        await house.publish("other", canary=0.5)
        users = {
            share_of("canary", NAME, LOCAL.tenant.own, "user", user, "") < 0.5: user for user in map(str, range(20))
        }
        for at, prompt in enumerate(prompts):
            for is_canary in (True, False):
                said = await house.text(prompt, user=users[is_canary])
                assert said == alone[other if is_canary else good][at]
        [service] = house.stack.services
        assert service.engine.load.num_prefix_hit_tokens > 0, "each finds its own"
        await house.publishing.roll_back(NAME, OPERATOR)
        assert [await house.text(prompt, user=users[True]) for prompt in prompts] == alone[good]
