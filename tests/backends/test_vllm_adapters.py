"""Adapters come, change and go under requests where vLLM computes them; every text is that of our own engine."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any, cast

import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM

pytest.importorskip("vllm")

from vllm.config.lora import LoRAConfig
from vllm.lora.request import LoRARequest

from serve_app.backends.vllm.adapters import VllmAdapters
from serve_app.catalog.adapters import read_published
from serve_app.core.adapters import AdapterSet, PublishedAdapter
from serve_app.core.errors import AdapterUnusable
from tests.engine.adapter_files import save_adapter
from tests.engine.conftest import DEMO
from tests.flow import test_published_adapters as flow
from tests.flow.stack import Stack, running_stack
from tests.flow.test_published_adapters import NAME, PROMPT, published, text_of, version_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

folders, texts = flow.folders, flow.texts
OPTIONS = {"max_lora_rank": 32}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack() -> AsyncIterator[Stack]:
    """One replica that began without adapters: two of vLLM in one process disturb each other."""
    async with running_stack(num_replicas=1, adapters=None, engine="vllm", max_adapters=2, vllm=OPTIONS) as made:
        yield made


async def test_texts_are_of_one_version_while_an_adapter_is_published_replaced_rolled_back_and_withdrawn(
    stack: Stack, folders: Path, texts: dict[str | None, str]
) -> None:
    await flow.test_texts_are_of_one_version_while_versions_change_under_them(stack, folders, texts)


async def test_metrics_tell_what_is_loaded_and_found_and_nothing_that_is_not_known(
    stack: Stack, tmp_path: Path
) -> None:
    [service] = stack.services
    before = service.engine.residency
    model = AutoModelForCausalLM.from_pretrained(DEMO, local_files_only=True, dtype="float32")
    folder = save_adapter(tmp_path / "new", model, rank=8, seed=3)
    await publish(stack, 11, PublishedAdapter(base="demo", name="new", version=version_of(folder), path=str(folder)))
    for name in ("demo:new", "demo", "demo:new"):
        await text_of(stack, name)
    await stack.greet()
    now = service.engine.residency
    assert (now.num_loads - before.num_loads, now.num_hits - before.num_hits) == (1, 2)
    text = (await stack.get("/metrics")).text
    series = {line.partition("{")[0].removeprefix("serve_app_replica_") for line in text.splitlines() if "{" in line}
    assert {"adapters_resident", "adapter_slots", "adapter_loads_total", "adapter_hits_total"} <= series
    assert not {"adapter_bytes", "adapter_budget_bytes", "adapter_load_seconds"} & series
    assert 'state="used"' in text
    assert 'state="cached"' not in text
    [replica] = (await stack.get("/live")).json()["replicas"]
    assert replica["blocks_cached"] is None


async def test_vllm_is_asked_what_it_holds_behind_steps_with_adapters_alone(
    stack: Stack, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await publish(stack, 12, published(folders, "v1"))
    vllm, asked = stack.services[0].engine.core.core, list[None]()
    list_loras = vllm.list_loras
    monkeypatch.setattr(vllm, "list_loras", lambda: (asked.append(None), list_loras())[1])
    await text_of(stack, "demo")
    assert not asked
    await text_of(stack, NAME)
    assert asked


class Vllm:
    """What its engine core tells and does of adapters, with one place."""

    def __init__(self) -> None:
        lora = LoRAConfig(max_lora_rank=32, max_loras=1, lora_dtype=torch.float32)
        self.vllm_config, self.held, self.is_full = SimpleNamespace(lora_config=lora), set[int](), False

    def list_loras(self) -> set[int]:
        return self.held

    def add_lora(self, request: LoRARequest) -> None:
        self.held = set()
        if self.is_full:
            raise RuntimeError("out of memory")
        self.held = {request.lora_int_id}


async def test_an_adapter_is_judged_beside_the_steps_and_a_load_that_fails_is_looked_at(
    folders: Path, tmp_path: Path
) -> None:
    vllm, calls = Vllm(), Queue[Any]()
    adapters = VllmAdapters(cast(Any, vllm), max_loras=1)
    adapters.post = calls.put
    record = read_published(shutil.copytree(folders / "v1", tmp_path / "v1"), "tale")
    assert record.weights is not None
    staged = adapters.stage(record)
    between = calls.get(timeout=60)
    record.weights.write_bytes(b"")  # whoever reads it now finds nothing
    between()
    assert staged.result(0) == record.card()
    assert adapters.residency.versions == (record.version,)

    vllm.is_full = True
    staged = adapters.stage(read_published(folders / "v2", "tale"))
    calls.get(timeout=60)()
    with pytest.raises(AdapterUnusable, match="out of memory"):
        staged.result(0)
    assert adapters.residency.versions == ()
    adapters.close()


async def publish(stack: Stack, revision: int, *adapters: PublishedAdapter) -> None:
    [service] = stack.services
    for adapter in adapters:
        await service.stage_adapter(adapter.name, adapter.path, adapter.version)
    await service.apply_adapters(AdapterSet(revision=revision, adapters=adapters))
    await stack.greet()


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"use_dora": True}, "it is trained with DoRA, which vLLM does not compute; `engine: own` in the model's args"),
        ({"modules_to_save": ["lm_head"]}, "it replaces whole modules, which vLLM does not compute"),
        ({"r": 64}, "its rank 64 is above 32; `vllm: {max_lora_rank: 64}` in the model's args allows it"),
    ],
)
async def test_an_adapter_that_vllm_does_not_compute_is_refused_with_the_way_out(
    stack: Stack, folders: Path, tmp_path: Path, fields: dict[str, object], reason: str
) -> None:
    folder = shutil.copytree(folders / "v1", tmp_path / "odd")
    config = folder / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | fields))
    with pytest.raises(AdapterUnusable) as refused:
        await stack.services[0].stage_adapter("odd", str(folder), version_of(folder))
    assert f'Adapter "odd" cannot be served: {reason}' in refused.value.message


@pytest.mark.parametrize(
    ("value", "reason"),
    [(1e19, "its values are too large: with it, the model's outputs are not finite in float32"),
     (float("nan"), "lora_A.weight holds values that are not finite in float32")],
)  # fmt: skip
async def test_an_adapter_whose_values_are_too_large_is_refused_as_by_our_engine(
    stack: Stack, texts: dict[str | None, str], tmp_path: Path, value: float, reason: str
) -> None:
    model = AutoModelForCausalLM.from_pretrained(DEMO, local_files_only=True, dtype="float32")
    folder = save_adapter(tmp_path / "bad", model, down=value, up=1e19, targets=("q_proj",))
    before = stack.services[0].engine.residency
    with pytest.raises(AdapterUnusable, match=re.escape(reason)):
        await stack.services[0].stage_adapter("bad", str(folder), version_of(folder))
    assert stack.services[0].engine.residency == before
    assert await text_of(stack, "demo") == texts[None]


async def test_an_adapter_may_be_overwritten_and_one_that_was_changed_unasked_ends_its_requests_alone(
    folders: Path, texts: dict[str | None, str], tmp_path: Path
) -> None:
    folder = shutil.copytree(folders / "v1", tmp_path / "tale")
    async with running_stack(num_replicas=1, adapters=None, engine="vllm", max_adapters=1, vllm=OPTIONS) as stack:
        await publish(stack, 1, replace(published(folders, "v1"), path=str(folder)))
        assert await text_of(stack, NAME) == texts["v1"]
        shutil.copytree(folders / "v2", folder, dirs_exist_ok=True)
        assert await text_of(stack, NAME) == texts["v1"], "nobody published what lies there now"
        adapter = replace(published(folders, "v2"), path=str(folder))
        await publish(stack, 2, adapter)
        assert await text_of(stack, NAME) == texts["v2"]

        other = PublishedAdapter(
            base="demo", name="other", version=version_of(folders / "v1"), path=str(folders / "v1")
        )
        await publish(stack, 3, adapter, other)  # the slot is this one's now
        shutil.copytree(folders / "v1", folder, dirs_exist_ok=True)
        base, failed, more = await asyncio.gather(
            text_of(stack, "demo"),
            stack.post({"model": NAME, "prompt": PROMPT, "max_tokens": 24}),
            text_of(stack, "demo:other"),
        )
        assert (base, more) == (texts[None], texts["v1"])
        error = failed.json()["error"]
        assert (failed.status_code, error["param"]) == (400, "model")
        assert "has changed on disk since the adapter was registered" in error["message"]
        shutil.copytree(folders / "v2", folder, dirs_exist_ok=True)
        assert await text_of(stack, NAME) == texts["v2"], "the files are those of the version again"
        await stack.settled()


async def test_an_adapter_in_the_models_folder_is_judged_at_start(folders: Path) -> None:
    async with running_stack(num_replicas=1, adapters=str(folders), engine="vllm", max_adapters=1) as stack:
        reasons = {each.name: each.reason or "" for each in stack.services[0].card.model.adapters}
        assert "its values are too large" in reasons.pop("bad")
        assert set(reasons.values()) == {""}
        await text_of(stack, "demo:v2")
