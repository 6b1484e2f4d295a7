"""Rows on one prefix: found by their names, attended to in one product, and what comes out is what each gets alone."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from serve_app.engine.decoder.attention import GroupedPlan, attend
from serve_app.engine.decoder.loading import LoadedModel
from serve_app.engine.decoder.runner import Runner
from serve_app.engine.kv.groups import Reading
from serve_app.engine.kv.lanes import LaneStorage
from serve_app.engine.kv.plan import AttentionPlan, Scoring
from serve_app.engine.kv.shape import KeyValueShape
from serve_app.engine.kv.storage import Holding, Storage
from serve_app.engine.kv.trunk_plan import TrunkPlan, attend_each, attend_together
from serve_app.engine.kv.trunks import LEAST_GAIN, Trunk, find_trunks
from serve_app.engine.lora.pool import AdapterBank
from tests.engine.conftest import DEMO
from tests.engine.harness import complete, config, make_engine, reference_greedy, request

SIZE = 16
HEADS, KV_HEADS, DIM = 6, 2, 8


def names(path: str) -> list[bytes]:
    """A letter is a block; a name covers all that is before it."""
    return [path[: end + 1].encode() for end in range(len(path))]


def reading(number: int, path: str, *, extra: int = 3, length: int = 1) -> Reading:
    start = len(path) * SIZE + extra
    return Reading(first_token=number, place=number, blocks=(), start=start, length=length, names=names(path))


def found(paths: Sequence[str]) -> list[tuple[list[int], int]]:
    trunks = find_trunks([reading(number, path) for number, path in enumerate(paths)], SIZE)
    return sorted(([each.first_token for each in trunk.readings], trunk.num_keys // SIZE) for trunk in trunks)


ENOUGH = "a" * (LEAST_GAIN // SIZE)


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        ([ENOUGH, ENOUGH], [([0, 1], len(ENOUGH))]),
        ([ENOUGH[:-1], ENOUGH], []),  # too short to pay
        ([ENOUGH[:-1]] * 3, [([0, 1, 2], len(ENOUGH) - 1)]),
        ([ENOUGH, "b" + ENOUGH[1:], ENOUGH], [([0, 2], len(ENOUGH))]),
        ([ENOUGH, "b" + ENOUGH], []),  # like names further on are of other tokens before
        ([ENOUGH + "b", ENOUGH + "c", ENOUGH], [([0, 1, 2], len(ENOUGH))]),
        (["x" + ENOUGH + "b"] * 2 + ["x" + ENOUGH + "c", "xy"], [([0, 1, 2], len(ENOUGH) + 1)]),
        (["x" + "b" * 800, "x" + "b" * 800, "x" + "c" * 800, "x" + "c" * 800], [([0, 1], 801), ([2, 3], 801)]),
        (["", ""], []),
    ],
)
def test_a_trunk_is_what_is_read_again_most_often(paths: list[str], expected: list[tuple[list[int], int]]) -> None:
    assert found(paths) == expected


def test_chunks_and_names_ahead_of_the_query_are_in_no_trunk() -> None:
    chunks = [reading(number, ENOUGH, length=2) for number in range(3)]
    ahead = [reading(number, ENOUGH, extra=-1) for number in range(3, 6)]
    assert find_trunks([*chunks, *ahead], SIZE) == []


def test_a_query_over_two_parts_of_its_keys_is_the_query_over_all() -> None:
    generator = torch.Generator().manual_seed(5)
    query = torch.randn(5, HEADS, DIM, generator=generator) * 3
    trunk, trunk_values = torch.randn(2, 40, KV_HEADS, DIM, generator=generator)
    own, own_values = torch.randn(2, 5, 7, KV_HEADS, DIM, generator=generator)
    keys = torch.cat((trunk.expand(5, -1, -1, -1), own), dim=1)
    values = torch.cat((trunk_values.expand(5, -1, -1, -1), own_values), dim=1)
    expected = attend(query[:, None], keys, values, mask=None, scale=0.4)[:, 0]
    first, first_total = attend_together(query, trunk, trunk_values, scale=0.4)
    second, second_total = attend_each(query[:, None], own, own_values, mask=None, scale=0.4)
    share = torch.sigmoid(first_total - second_total[:, 0])
    torch.testing.assert_close(torch.lerp(second[:, 0], first, share), expected, rtol=1e-5, atol=1e-6)


def make_storage() -> LaneStorage:
    shape = KeyValueShape.uniform(layers=1, heads=KV_HEADS, key_dim=DIM, value_dim=DIM)
    storage = LaneStorage(shape, num_lanes=12, max_model_len=256, num_blocks=200, block_size=SIZE, dtype=torch.float32)
    return storage


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("scoring", [Scoring(scale=0.4), Scoring(scale=0.4, window=9), Scoring(scale=0.4, softcap=2.0)])
def test_rows_of_trunks_chunks_and_others_get_what_they_get_apart(seed: int, scoring: Scoring) -> None:
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    storage = make_storage()
    lanes = torch.randn(2, 12, 200, KV_HEADS, DIM, generator=generator)
    trunks = {"a": 3 * SIZE, "b": 6 * SIZE}
    contents = {name: torch.randn(2, length, KV_HEADS, DIM, generator=generator) for name, length in trunks.items()}
    readings: list[Reading] = []
    rows: dict[str, list[Reading]] = {name: [] for name in trunks}
    first = 0
    for place in draw.sample(range(12), draw.choice([4, 9, 12])):
        kind = draw.choice(["a", "b", "own", "chunk"])
        start = draw.randrange(trunks.get(kind, 0), 190)
        length = draw.randrange(2, 9) if kind == "chunk" else 1
        each = Reading(first_token=first, place=place, blocks=(), start=start, length=length)
        if kind in trunks:
            lanes[:, place, : trunks[kind]] = contents[kind]
            rows[kind].append(each)
        readings.append(each)
        written = torch.tensor(storage.places(Holding(place), 0, start + length))
        storage.write(0, written, *lanes[:, place, : start + length])
        first += length
    written = torch.cat([torch.tensor(storage.places(Holding(r.place), r.start, r.num_keys)) for r in readings])
    query = torch.randn(first, HEADS, DIM, generator=generator)
    new = torch.randn(2, first, KV_HEADS, DIM, generator=generator)
    apart = GroupedPlan(storage, storage.groups(readings), written).run(0, query, *new, scoring=scoring)
    shared = [Trunk(readings=tuple(some), num_keys=trunks[name]) for name, some in rows.items() if some]
    together = TrunkPlan(storage, readings, shared, written).run(0, query, *new, scoring=scoring)
    torch.testing.assert_close(together, apart, rtol=1e-5, atol=1e-6)


class WatchedStorage:
    """A storage that notes what kind each plan is, on a machine that has no kernel of ours."""

    def __init__(self, storage: LaneStorage) -> None:
        self._storage = storage
        self.kinds: Counter[type] = Counter()

    def __getattr__(self, name: str) -> object:
        return getattr(self._storage, name)

    def plan(self, readings: Sequence[Reading], places: Tensor) -> AttentionPlan:
        plan = self._storage.plan_by_torch(readings, places)
        self.kinds[type(plan)] += 1
        return plan


class WatchedRunner(Runner):
    def __init__(self, model: LoadedModel, storage: Storage, bank: AdapterBank) -> None:
        assert isinstance(storage, LaneStorage)
        self.watched = WatchedStorage(storage)
        super().__init__(model, self.watched, bank)  # type: ignore[arg-type]


@pytest.mark.law("Company")
def test_completions_on_a_long_prefix_share_it_and_are_those_of_generate() -> None:
    prefix = [700 + (7 * i) % 50 for i in range(800)]  # so long that five rows save enough; some texts end early
    prompts = [[*prefix, 701 + i, *range(720, 720 + i)] for i in range(14)]
    settings = config(DEMO, max_num_sequences=14, max_batch_tokens=200)  # of which a copy for each is made in a step
    engine = make_engine(settings, runner=WatchedRunner)
    complete(engine, [(request("first", max_tokens=1), prefix)])
    kinds = engine._runner.watched.kinds  # type: ignore[attr-defined]
    assert not kinds[TrunkPlan]
    texts = [(request(f"{i}", max_tokens=20), prompt) for i, prompt in enumerate(prompts)]
    outcomes = complete(engine, texts)
    assert engine.load.num_prefix_hit_tokens >= 14 * 784
    assert kinds[TrunkPlan] >= 5
    by_kernel = complete(make_engine(config(DEMO, max_num_sequences=14)), texts)
    plain = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()
    for i, prompt in enumerate(prompts):
        expected = reference_greedy(plain, prompt, 20)
        assert outcomes[f"{i}", 0].token_ids == by_kernel[f"{i}", 0].token_ids == expected
