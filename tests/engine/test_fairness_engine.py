"""Flows on the real engine: real text of the demo model, the same bounds, and texts that no neighbour changes."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import replace

import pytest

from serve_app.api.listings import replica_state
from serve_app.core.prompt import Prompt
from serve_app.core.shares import Share
from serve_app.engine.engine import Engine
from serve_app.engine.scheduler.planner import Pace
from tests.engine.conftest import DEMO, DEMO_ADAPTERS
from tests.engine.harness import Outcome, collect, complete, config, make_engine, request, sequences
from tests.fakes import replica_card

pytestmark = pytest.mark.slow

BLOCK_BYTES = 6 * 2 * (32 + 32) * 4 * 16
NUM_BLOCKS = 24
TEXT = "Once upon a time there was a little fox who lived near the river. One day the fox met a bear. "


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    made = make_engine(
        config(DEMO, max_num_sequences=4, max_batch_tokens=64, kv_cache_bytes=NUM_BLOCKS * BLOCK_BYTES, max_adapters=1),
        {name: DEMO_ADAPTERS / name for name in ("pirate", "shout")},
    )
    yield made
    made.close()


@pytest.fixture
def roomy() -> Iterator[Engine]:
    """Blocks for everybody, and three places, none of them spare."""
    made = make_engine(config(DEMO, max_num_sequences=3, max_batch_tokens=64, kv_cache_bytes=96 * BLOCK_BYTES))
    yield made
    made.close()


def prompt_of(engine: Engine, text: str) -> list[int]:
    ids: list[int] = engine.tokenizer.encode(Prompt(parts=(text,)))  # type: ignore[attr-defined]
    return ids


class Backlog:
    """Keeps so many requests of one flow and shape waiting."""

    def __init__(self, engine: Engine, share: Share, text: str, *, max_tokens: int, adapters: tuple[str | None, ...]):
        self._engine = engine
        self._share = share
        self._prompt = prompt_of(engine, text)
        self._max_tokens = max_tokens
        self._adapters = adapters
        self._number = 0

    def fill(self) -> None:
        waiting = self._engine._scheduler.waiting
        while sum(each.request.share == self._share for each in waiting) < 3:
            adapter = self._adapters[self._number % len(self._adapters)]
            name = f"{self._share.flow}{self._number}"
            asked = replace(request(name, max_tokens=self._max_tokens, adapter=adapter), share=self._share)
            self._engine.add(sequences(self._engine, asked, [30 + self._number % 900, *self._prompt]))
            self._number += 1

    @property
    def served(self) -> float:
        """Without swaps."""
        usage = {each.flow: each for each in self._engine.usage.flows}.get(self._share.flow)
        swap_weight = self._engine.config.swap_weight
        return 0.0 if usage is None else usage.service - swap_weight * usage.num_swaps


def drop_all(engine: Engine) -> None:
    engine.reset()
    engine.check_integrity()


@pytest.mark.law("Shares")
def test_flows_of_different_shapes_are_served_alike_at_every_step_of_real_text(engine: Engine) -> None:
    short = Backlog(engine, Share(flow="short"), "Tell me", max_tokens=60, adapters=(None,))
    long = Backlog(engine, Share(flow="long"), TEXT * 3, max_tokens=3, adapters=(None,))
    longest = len(prompt_of(engine, TEXT * 3)) + 1
    bound = 2 * max(1.0 * longest, 2.0 * NUM_BLOCKS * 16)
    for _ in range(300):
        short.fill()
        long.fill()
        engine.step()
        assert abs(short.served - long.served) <= bound
    assert min(short.served, long.served) > bound
    drop_all(engine)


def test_who_hops_between_real_adapters_leaves_the_other_its_share(engine: Engine) -> None:
    stays = Backlog(engine, Share(flow="stays"), "Tell me", max_tokens=12, adapters=(None,))
    hops = Backlog(engine, Share(flow="hops"), "Tell me", max_tokens=12, adapters=("pirate", "shout"))
    bound = 2 * 2.0 * NUM_BLOCKS * 16
    for _ in range(160):
        stays.fill()
        hops.fill()
        engine.step()
        assert hops.served - stays.served <= bound
    usage = {each.flow: each for each in engine.usage.flows}
    assert usage["hops"].num_swaps > 3
    assert usage["stays"].num_swaps == 0
    assert stays.served > hops.served
    drop_all(engine)


@pytest.mark.law("Accounts")
def test_no_flow_changes_a_text_and_accounts_add_up(engine: Engine) -> None:
    """Three flows of three classes beside each other, too many for the blocks; then each request alone."""
    before = engine.usage
    shares = [
        Share(flow="one", priority="interactive"),
        Share(flow="two", weight=3.0),
        Share(flow="three", priority="batch"),
    ]
    asked = [
        (replace(request(f"r{number}", max_tokens=30), share=shares[number % 3]), prompt_of(engine, TEXT[number * 4 :]))
        for number in range(12)
    ]
    outcomes: dict[tuple[str, int], Outcome] = {}
    for one, prompt_ids in asked:
        engine.add(sequences(engine, one, prompt_ids))
    num_rows = 0
    while engine.has_work:
        collect(outcomes, engine.step())
        engine.check_integrity()
    for one, prompt_ids in asked:
        alone = complete(engine, [(replace(one, share=Share()), prompt_ids)])[one.request_id, 0]
        assert outcomes[one.request_id, 0].token_ids == alone.token_ids
    report = engine.usage
    assert report.idle_ns + sum(usage.engine_ns for usage in report.flows) == report.elapsed_ns
    assert report.idle_ns >= before.idle_ns
    for number, share in enumerate(shares):
        usage = next(each for each in report.flows if each.flow == share.flow)
        told = [outcomes[one.request_id, 0] for one, _ in asked[number::3]]
        assert usage.num_generated == sum(len(outcome.token_ids) for outcome in told)
        reports = [delta.prompt for outcome in told for delta in outcome.deltas if delta.prompt is not None]
        assert usage.num_cached == sum(each.num_cached_tokens for each in reports)
        num_rows += usage.num_rows
        assert usage.num_rows >= sum(each.num_tokens - each.num_cached_tokens for each in reports)
        assert usage.engine_ns > 0
    assert report.gap == 0


class NoneBeyond(Pace):
    """Lets no row beyond others' into a step, and all prompts."""

    def allowance(self, num_decoding: int, budget: int, *, behind: Items[int] = (), is_shared: bool = False) -> int:
        return budget

    def rows(self, num_level: int, num_beyond: int, *, is_shared: bool = False) -> int:
        return 0


@pytest.mark.law("Shares")
def test_who_sits_out_for_others_says_the_same_later(roomy: Engine) -> None:
    job = [replace(request(f"j{number}", max_tokens=20), share=Share(flow="job")) for number in range(2)]
    asked = [*job, replace(request("q", max_tokens=20), share=Share(flow="question"))]
    prompts = [prompt_of(roomy, TEXT[4 * number :]) for number in range(3)]
    alone = [complete(roomy, [each])[each[0].request_id, 0].token_ids for each in zip(asked, prompts, strict=True)]
    roomy._scheduler.pace = NoneBeyond(2.0)
    for one, prompt_ids in zip(asked, prompts, strict=True):
        roomy.add(sequences(roomy, one, prompt_ids))
    outcomes: dict[tuple[str, int], Outcome] = {}
    ended: list[str] = []
    while roomy.has_work:
        deltas = roomy.step()
        collect(outcomes, deltas)
        ended += [delta.request_id for delta in deltas if delta.finish is not None]
        roomy.check_integrity()
    assert [outcomes[one.request_id, 0].token_ids for one in asked] == alone
    assert ended[0] == "q", "the job's two took turns beside it"


@pytest.mark.law("Places")
def test_a_question_does_not_wait_for_a_job_that_has_every_place_and_changes_none_of_its_texts(roomy: Engine) -> None:
    """Three texts of one flow on three places; somebody else asks."""
    engine = roomy
    texts = [prompt_of(engine, TEXT[number * 5 :][:60]) for number in range(3)]
    asked = replace(request("job", max_tokens=80), share=Share(flow="job"))
    asked = replace(asked, stop=replace(asked.stop, ignore_eos=True))
    job = [(replace(asked, request_id=f"job{number}"), ids) for number, ids in enumerate(texts)]
    question = (replace(request("question", max_tokens=5), share=Share(flow="asks")), prompt_of(engine, "Who is it?"))
    outcomes: dict[tuple[str, int], Outcome] = {}
    for one, prompt_ids in job:
        engine.add(sequences(engine, one, prompt_ids))
    for _ in range(12):
        collect(outcomes, engine.step())
    num_before, num_steps = engine.num_preemptions, 0
    engine.add(sequences(engine, question[0], question[1]))
    while ("question", 0) not in outcomes:
        collect(outcomes, engine.step())
        num_steps += 1
    assert num_steps <= engine.config.turn_quantum / (2 * 3) + 6, "a quantum, and not the sixty that are left"
    assert engine.num_preemptions > num_before
    while engine.has_work:
        collect(outcomes, engine.step())
        engine.check_integrity()
    for one, prompt_ids in (*job, question):
        alone = complete(engine, [(replace(one, share=Share()), prompt_ids)])[one.request_id, 0]
        assert outcomes[one.request_id, 0].token_ids == alone.token_ids


def test_a_question_takes_a_spare_place_beside_a_job_that_has_all_others() -> None:
    engine = make_engine(config(DEMO, max_num_sequences=4, max_batch_tokens=64, kv_cache_bytes=96 * BLOCK_BYTES))
    texts = [prompt_of(engine, TEXT[number * 5 :][:60]) for number in range(6)]  # on four places
    asked = replace(request("job", max_tokens=90), share=Share(flow="job"))
    asked = replace(asked, stop=replace(asked.stop, ignore_eos=True))
    job = [(replace(asked, request_id=f"job{number}"), ids) for number, ids in enumerate(texts)]
    question = (replace(request("question", max_tokens=5), share=Share(flow="asks")), prompt_of(engine, "Who is it?"))
    outcomes: dict[tuple[str, int], Outcome] = {}
    for one, prompt_ids in job:
        engine.add(sequences(engine, one, prompt_ids))
    for _ in range(int(engine.config.turn_quantum / (2 * 4)) + 2):
        collect(outcomes, engine.step())
    assert engine.load.num_running == 4
    engine.add(sequences(engine, *question))
    for _ in range(2):
        collect(outcomes, engine.step())
    assert engine.load.num_running == 5
    for _ in range(5):
        collect(outcomes, engine.step())
    assert ("question", 0) in outcomes, "not after the steps that the job's first ones still take"
    while engine.has_work:
        collect(outcomes, engine.step())
        engine.check_integrity()
    assert engine.num_preemptions == 0
    for one, prompt_ids in (*job, question):
        alone = complete(engine, [(replace(one, share=Share()), prompt_ids)])[one.request_id, 0]
        assert outcomes[one.request_id, 0].token_ids == alone.token_ids
    engine.close()


def test_what_is_told_of_completion_tokens_only_grows_whoever_has_them(roomy: Engine) -> None:
    told = [0]
    for number, length in enumerate((12, 3, 6)):
        asked = replace(request(f"r{number}", max_tokens=length), share=Share(flow="ab"[number % 2]))
        roomy.add(sequences(roomy, asked, [30, *prompt_of(roomy, "Tell me")]))
        while roomy.has_work:
            roomy.step()
            told.append(_told_of(roomy))
    assert told == sorted(told)
    assert told[-1] == 12 + 3 + 6


def _told_of(engine: Engine) -> int:
    return replica_state(replica_card("r0"), engine.load).completion_tokens
