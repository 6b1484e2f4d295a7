"""Draws that are begun on a device and looked at once: the tokens are those of draws that are looked at as they go."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from concurrent.futures import Future
from typing import Literal

import pytest
import torch
from torch import Tensor

from serve_app.core.request import TEMPERATURE_FIRST, TEMPERATURE_LAST, LogprobParams, SamplingParams, StopParams
from serve_app.engine.decoder.memory import HostCopy
from serve_app.engine.sampling.masks import StepMasks
from serve_app.engine.sampling.sampler import SampledSpan, Sampler, Scored, can_launch_ahead
from serve_app.engine.sampling.stages import STAGES, Parameters, order_of, stages_of
from serve_app.engine.scheduler.sequence import Batch, Sequence, Span
from tests.engine.sampling_reference import row
from tests.engine.test_sampling import mixed_rows
from tests.engine.unseen import DEVICE, Looked, NoLooking

VOCAB = 2000
EOS = frozenset([7])


def usual_params(draw: random.Random) -> SamplingParams:
    return SamplingParams(
        seed=draw.randrange(1 << 40),
        temperature=draw.choice([0.0, 0.3, 1.0, 1.0, 1.7]),
        top_k=draw.choice([0, 0, 1, 20, 600]),
        top_p=draw.choice([1.0, 1.0, 0.5, 0.95]),
        min_p=draw.choice([0.0, 0.0, 0.05, 0.3]),
        min_keep=draw.choice([0, 0, 3]),
        samplers=draw.choice([TEMPERATURE_FIRST, TEMPERATURE_LAST, ("top_p", "top_k"), ("penalties", "min_p")]),
        repetition_penalty=draw.choice([1.0, 1.3]),
        presence_penalty=draw.choice([0.0, 0.5]),
        frequency_penalty=draw.choice([0.0, 0.4]),
        logit_bias=draw.choice([(), ((11, -math.inf), (12, 4.0), (VOCAB + 5, 1.0))]),
        allowed_token_ids=draw.choice([(), (), (), (5, 6, 9, 1999)]),
    )


def usual_rows(count: int) -> list[Sequence]:
    """The same ones at every call."""
    draw = random.Random(4)
    wanted = [None, None, LogprobParams(top=0), LogprobParams(top=3), LogprobParams(top=None)]
    rows = []
    for place in range(count):
        output = [draw.randrange(40) for _ in range(place % 9)]
        stop, logprobs = StopParams(min_tokens=draw.choice([0, 20])), draw.choice(wanted)
        rows.append(row(usual_params(draw), output=output, sample=place, stop=stop, logprobs=logprobs))
    return rows


def logits_of(count: int, *, spread: float = 3.0, vocab: int = VOCAB) -> Tensor:
    logits = torch.randn(count, vocab, generator=torch.Generator().manual_seed(3)) * spread
    logits[2, :] = math.nan
    logits[3, 9] = math.nan
    logits[4, :] = -math.inf
    logits[5, 10:] = -math.inf
    return logits


def batch_of(rows: list[Sequence]) -> Batch:
    return Batch(tuple(Span(each, each.num_tokens - 1, 1, samples=True) for each in rows))


def masks_of(rows: list[Sequence], vocab: int = VOCAB) -> StepMasks:
    """Every third row may draw every fifth token alone; one of them none at all."""
    bound = rows[::3]
    is_allowed = torch.zeros(len(bound), -(-vocab // 32) * 32, dtype=torch.bool)
    is_allowed[:, ::5] = True
    is_allowed[-1] = False
    words = (is_allowed.view(len(bound), -1, 32).long() << torch.arange(32)).sum(-1)
    work: Future[None] = Future()
    work.set_result(None)
    return StepMasks(words.to(torch.int32), {id(each): place for place, each in enumerate(bound)}, work)


class CountingCopy(HostCopy):
    num_landed = 0

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(tensor)
        CountingCopy.num_landed += 1


def sampled(rows: list[Sequence], logits: Tensor, *, is_launched: bool, is_masked: bool = False) -> list[SampledSpan]:
    sampler = Sampler(EOS, land=CountingCopy if is_launched else None)
    return sampler.sample(logits, batch_of(rows), masks_of(rows, logits.shape[-1]) if is_masked else None)


def assert_same(found: list[SampledSpan], expected: list[SampledSpan]) -> None:
    for place, (one, other) in enumerate(zip(found, expected, strict=True)):
        facts = [(each.token_id, each.is_finite, each.is_exhausted) for each in (one, other)]
        assert facts[0] == facts[1], place
        assert_scored_alike(one.scored, other.scored)


def assert_scored_alike(one: Scored | None, other: Scored | None) -> None:
    """But for the order in which a vocabulary is added up, in float32."""
    assert (one is None) is (other is None)
    if one is None or other is None:
        return
    assert (one.token_id, one.rank) == (other.token_id, other.rank)
    assert one.logprob == pytest.approx(other.logprob, abs=1e-6, nan_ok=True)
    assert [token_id for token_id, _ in one.top] == [token_id for token_id, _ in other.top]
    pairs = zip(one.top, other.top, strict=True)
    assert all(own == pytest.approx(theirs, abs=1e-6, nan_ok=True) for (_, own), (_, theirs) in pairs)


@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize("spread", [0.05, 3.0])
def test_tokens_and_scores_are_those_of_draws_that_are_looked_at(spread: float, is_masked: bool) -> None:
    logits = logits_of(240, spread=spread)
    expected = sampled(usual_rows(240), logits, is_launched=False, is_masked=is_masked)
    before = CountingCopy.num_landed
    found = sampled(usual_rows(240), logits, is_launched=True, is_masked=is_masked)
    assert CountingCopy.num_landed == before + 1, "one copy for all rows"
    assert_same(found, expected)
    assert len({each.token_id for each in found}) > 30
    assert {each.is_finite for each in found} == {False, True}
    assert any(each.is_exhausted for each in found) is is_masked


@pytest.mark.parametrize("vocab", [40, 256, 300, 16500])
def test_small_and_large_vocabularies(vocab: int) -> None:
    logits = logits_of(60, vocab=vocab)
    rows = [[each for each in usual_rows(60) if not each.request.sampling.allowed_token_ids] for _ in range(2)]
    logits = logits[: len(rows[0])]
    assert_same(sampled(rows[0], logits, is_launched=True), sampled(rows[1], logits, is_launched=False))


def test_unusual_rows_beside_usual_ones_are_drawn_as_ever() -> None:
    logits = logits_of(120)
    rows = [[*usual_rows(60), *mixed_rows(60)] for _ in range(2)]
    assert 60 < sum(can_launch_ahead(each) for each in rows[0]) < 115
    assert_same(sampled(rows[0], logits, is_launched=True), sampled(rows[1], logits, is_launched=False))


def test_what_a_device_draws_leaves_out_no_stage() -> None:
    """Every stage is computed there, but for one that is steered by what was drawn, and XTC."""
    usual = [each for each in [*usual_rows(200), *mixed_rows(200)] if can_launch_ahead(each)]
    drawn = [each for each in usual if not each.request.sampling.is_greedy]
    assert len(drawn) > 100
    computed = [stage for name in STAGES if name in TEMPERATURE_FIRST and name != "xtc" for stage in STAGES[name]]
    for each in drawn:
        parameters = Parameters.of_sequences([each], torch.device("cpu"))
        for stage in stages_of(order_of(each.request.sampling)):
            assert stage in computed or not stage.is_active(parameters).any()


def test_a_text_has_the_same_tokens_in_company_and_alone() -> None:
    logits = logits_of(60)
    together = sampled(usual_rows(60), logits, is_launched=True)
    for place, each in enumerate(usual_rows(60)):
        assert_same(sampled([each], logits[place : place + 1], is_launched=True), [together[place]])


class Nowhere(HostCopy):
    """Where a device's numbers go that nobody looks at."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


@pytest.mark.parametrize("which", ["greedy", "drawn", "constrained"])
def test_nothing_is_looked_at_before_the_end(which: Literal["greedy", "drawn", "constrained"]) -> None:
    rows = [each for each in usual_rows(80) if which != "greedy" or each.request.sampling.is_greedy]
    masks = masks_of(rows) if which == "constrained" else None
    logits = torch.empty(len(rows), VOCAB, device=DEVICE)
    with NoLooking() as watch:
        begun = Sampler(EOS, land=Nowhere).begin(logits, batch_of(rows), masks)
    assert begun.launched is not None
    assert not begun.others
    assert isinstance(begun.launched.landing, Nowhere)
    assert begun.launched.landing.tensor.shape[0] >= 5 * len(rows)
    assert watch.num_sent > 0


def test_whoever_looks_is_caught() -> None:
    rows = usual_rows(12)
    with pytest.raises(Looked, match="copy to the host"), NoLooking():
        Sampler(EOS).sample(torch.empty(12, VOCAB, device=DEVICE), batch_of(rows))
    device = torch.ones(3, device=DEVICE)
    looks = {
        "nonzero": lambda: torch.nonzero(device),
        "masked_select": lambda: torch.masked_select(device, device > 0),
        "scalar": lambda: bool(device[0] > 0),
        "boolean index": lambda: device[device > 0],
        "copy": lambda: torch.ones(3).to(DEVICE),
        "made there": lambda: torch.tensor([1, 2]).to(DEVICE, non_blocking=False),
        "filled": lambda: device.copy_(torch.ones(3)),
        "to the host": lambda: device.to("cpu", non_blocking=True),
    }
    assert [name for name, look in looks.items() if not is_caught(look)] == []


def is_caught(look: Callable[[], object]) -> bool:
    try:
        with NoLooking():
            look()
    except Looked:
        return True
    return False
