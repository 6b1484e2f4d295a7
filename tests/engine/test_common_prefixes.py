"""Of copies of a prefix one is read for all rows that have it, which get the same bits as from their own."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from serve_app.engine.kv.lanes import LaneStorage, RowsPlan, rows_of
from serve_app.engine.kv.storage import KeyValueShape, Reading
from serve_app.kernels.cpu.attention import STRETCH
from serve_app.kernels.forms import Scoring
from serve_app.kernels.openmp import libgomp
from tests.engine.conftest import DEMO
from tests.engine.harness import complete, config, make_engine, reference_greedy, request
from tests.families.making import save_model

pytestmark = pytest.mark.skipif(libgomp() is None, reason="needs torch's libgomp")

KV_HEADS, DIM, SIZE, LANE = 2, 32, 16, 4 * STRETCH
COMMON = 2 * STRETCH + 5 * SIZE


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def storage(block_size: int = SIZE) -> LaneStorage:
    """Whose lanes begin with the same keys and values, and go on with others."""
    shape = KeyValueShape.uniform(layers=1, heads=KV_HEADS, key_dim=DIM, value_dim=DIM)
    sizes = {"num_lanes": 4, "max_model_len": LANE, "num_blocks": 4, "block_size": block_size}
    made = LaneStorage(shape, dtype=torch.bfloat16, **sizes)
    for seed, part in enumerate(made.all_positions(0)):
        lanes = part.view(4, -1, KV_HEADS, DIM)
        lanes[:] = drawn(*lanes.shape, seed=seed)
        lanes[:, :COMMON] = lanes[:1, :COMMON].clone()
    return made


def names(count: int, *, of: str = "") -> list[bytes]:
    """Of blocks; those of the common ones and others behind, or of others from the first on."""
    common = COMMON // SIZE
    return [f"{of or ('' if at < common else 'own')}{at}".encode() for at in range(count)]


def reading(token: int, place: int, start: int, length: int, known: Sequence[bytes]) -> Reading:
    return Reading(first_token=token, place=place, blocks=(), start=start, length=length, names=known)


STEP = [
    reading(0, 1, COMMON + 40, 1, names(COMMON // SIZE)),
    reading(1, 0, COMMON + 300, 1, names(COMMON // SIZE + 7)),
    reading(2, 3, COMMON + 3, 6, names(COMMON // SIZE)),
]
OTHER = reading(8, 2, COMMON + 9, 1, names(COMMON // SIZE, of="other"))


def elsewhere(step: Sequence[Reading], *, window: int | None = None, block_size: int = SIZE) -> list[list[int]]:
    lanes = storage(block_size)
    rows = rows_of(lanes, step, window=window, chunk=None, stretch=STRETCH)
    return [[position // lanes.first_position(1) for position in row.elsewhere] for row in rows]


def test_the_first_ones_copy_is_read_for_all_that_have_the_names() -> None:
    assert elsewhere([*STEP, OTHER]) == [[1, 1]] * 8 + [[2, 2]]


def test_what_is_not_computed_yet_or_begins_later_is_ones_own() -> None:
    behind = reading(0, 3, STRETCH + 30, 1, names(COMMON // SIZE))
    assert elsewhere([*STEP[:1], behind]) == [[1, 1], [1]]
    assert elsewhere(STEP, window=700) == [[]] * 8
    assert elsewhere(STEP[:1]) == [[]]
    assert elsewhere(STEP, block_size=48) == [[]] * 8


@pytest.mark.parametrize("is_new", [False, True])
def test_rows_get_the_same_bits_and_other_copies_are_not_read(is_new: bool) -> None:
    step = STEP[:2] if is_new else STEP
    count = sum(each.length for each in step)
    query, key, value = (drawn(count, heads, DIM, seed=5) for heads in (14, KV_HEADS, KV_HEADS))
    found = []
    for has_names in (False, True):
        lanes = storage()
        asked = [each if has_names else reading(*_plain(each), ()) for each in step]
        places = [lanes.first_position(each.place) + each.start + at for each in step for at in range(each.length)]
        if has_names:
            for part in lanes.all_positions(0):
                part.view(4, -1, KV_HEADS, DIM)[[0, 2, 3], : 2 * STRETCH] = torch.nan
        plan = lanes.plan(asked, torch.tensor(places))
        assert isinstance(plan, RowsPlan)
        new = (key, value) if is_new else (None, None)
        found.append(plan.run(0, query, *new, scoring=Scoring(scale=0.2)))
    assert torch.equal(*found)


def _plain(each: Reading) -> tuple[int, int, int, int]:
    return each.first_token, each.place, each.start, each.length


def test_sequences_on_one_prefix_go_on_as_they_do_alone(tmp_path_factory: pytest.TempPathFactory) -> None:
    """One that ends before the others, whose copy was read, among them."""
    folder = tmp_path_factory.mktemp("model")
    save_model("qwen2", {"hidden_size": 64, "head_dim": 16, "max_position_embeddings": 2048}, folder)
    prefix = [(7 * at) % 250 for at in range(COMMON)]
    asked = [
        (request(f"r{number}", max_tokens=6 + 9 * number), [*prefix, number, 2 * number + 1, 5]) for number in range(4)
    ]
    settings = config(folder, dtype="bfloat16", max_num_sequences=4, max_model_len=2048, kv_cache_bytes=1 << 26)
    together = complete(make_engine(settings, eos_token_ids=frozenset()), asked)
    alone = {}
    for each in asked:
        alone |= complete(make_engine(settings, eos_token_ids=frozenset()), [each])
    assert {name: each.token_ids for name, each in together.items()} == {
        name: each.token_ids for name, each in alone.items()
    }


@pytest.mark.law("Company")
def test_completions_on_a_long_prefix_share_it_and_are_those_of_generate() -> None:
    prefix = [700 + (7 * i) % 50 for i in range(800)]  # longer than a stretch of the kernel; some texts end early
    prompts = [[*prefix, 701 + i, *range(720, 720 + i)] for i in range(14)]
    engine = make_engine(config(DEMO, max_num_sequences=14, max_batch_tokens=200))  # a copy for each is made in a step
    complete(engine, [(request("first", max_tokens=1), prefix)])
    outcomes = complete(engine, [(request(f"{i}", max_tokens=20), prompt) for i, prompt in enumerate(prompts)])
    assert engine.load.num_prefix_hit_tokens >= 14 * 784
    plain = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()
    for i, prompt in enumerate(prompts):
        assert outcomes[f"{i}", 0].token_ids == reference_greedy(plain, prompt, 20)
