"""Compiling beside everything else: bounded, shared, remembered, and tried where it may be ended."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from serve_app.constraints.compilation import build_matcher, compile_source
from serve_app.constraints.compiler import Compiler, Trials
from serve_app.constraints.limits import ConstraintLimits, Refusal
from serve_app.core.errors import EngineFailed, InvalidRequest, Overloaded
from serve_app.core.names import ModelRef
from serve_app.core.prompt import Prompt
from serve_app.core.request import Constraint, GenerationRequest
from serve_app.core.shares import Share
from serve_app.sandbox.fork_server import ForkServer
from tests.constraints.vocabularies import BYTES, tokenizer
from tests.sandbox.shouting import give_up

pytestmark = pytest.mark.slow

ENDLESS = "(ab|c)*" * 30_000
"""Takes many times what any trial may."""


def regex(source: str, name: str = "regex") -> Constraint:
    return Constraint(kind="regex", source=source, name=name)


def request(name: str) -> GenerationRequest:
    return GenerationRequest(request_id=name, model=ModelRef(base="m"), prompt=Prompt(parts=("",)))


@asynccontextmanager
async def compiler(**limits: float) -> AsyncIterator[Compiler]:
    made = Compiler(lambda: BYTES, limits=ConstraintLimits(**limits))  # type: ignore[arg-type]
    try:
        yield made
    finally:
        made.close()


async def test_equal_constraints_are_compiled_once_and_each_text_begins_anew() -> None:
    async with compiler() as shared:
        first, second = await asyncio.gather(shared.compile(regex("ab")), shared.compile(regex("ab", "grammar")))
        assert first is second
        assert await shared.compile(regex("ab")) is first
        assert shared.num_compiled == 1
        one, other = first.matcher(), first.matcher()
        one.advance(ord("a"))
        one.advance(ord("b"))
        assert (one.is_complete, one.may_end, one.failure) == (True, True, None)
        assert (other.is_complete, other.may_end) == (False, False)
        other.advance(ord("x"))
        assert other.failure is not None
        assert not other.is_complete


async def test_a_refusal_names_the_parameter_of_each_and_is_remembered() -> None:
    async with compiler() as shared:
        for name in ("regex", "grammar"):
            with pytest.raises(InvalidRequest) as caught:
                await shared.compile(regex("(", name))
            assert caught.value.param == name
            assert caught.value.message.startswith(
                f'"{name}" must hold a regular expression that can be followed; found this: '
            )
        assert shared.num_compiled == 1


async def test_what_is_kept_is_bounded_and_what_was_asked_for_last_stays() -> None:
    """Grammars were kept without a bound: vLLM, GHSA-hf3c-wxg2-49q9."""
    async with compiler(max_cached=3, max_cached_chars=50) as shared:
        for source in ("a", "b", "c", "a", "d"):
            await shared.compile(regex(source))
        assert shared.num_compiled == 4
        await shared.compile(regex("a"))
        assert shared.num_compiled == 4
        await shared.compile(regex("b"))
        assert shared.num_compiled == 5
        await shared.compile(regex("x" * 49))
        await shared.compile(regex("a"))
        assert shared.num_compiled == 7


@pytest.mark.law("Caches are apart")
async def test_requests_of_different_salts_have_no_constraint_in_common() -> None:
    """Whose schema is answered at once would have learned that another tenant has sent it."""
    async with compiler() as shared:
        first = await shared.compile(regex("ab"), salt="tenant a", flow="a")
        assert await shared.compile(regex("ab"), salt="tenant b", flow="b") is not first
        assert await shared.compile(regex("ab"), salt="tenant a", flow="of the same group") is first
        assert shared.num_compiled == 2
        asked = [
            replace(request(str(at)), constraint=regex("cd"), cache_salt=f"tenant {tenant}", share=Share(flow=tenant))
            for at, tenant in enumerate("aabb")
        ]
        found = await shared.compile_all([*asked, request("free")])
        assert (found["0"], found["2"], found.keys()) == (found["1"], found["3"], set("0123"))
        assert shared.num_compiled == 4


@pytest.mark.law("Caches are apart")
@pytest.mark.parametrize("limits", [{"max_cached": 8}, {"max_cached_chars": 1_000, "max_cached": 500}])
async def test_a_flood_of_one_flow_drives_out_its_own_and_nobody_elses(limits: dict[str, float]) -> None:
    """However many salts its sender makes up, and though all of it is asked for at once."""
    async with compiler(**limits) as shared:
        kept = await shared.compile(regex("a" * 90), salt="a", flow="a")
        flood = [shared.compile(regex("b" * number), salt=f"b{number}", flow="b") for number in range(80, 110)]
        await asyncio.gather(*flood)
        assert await shared.compile(regex("a" * 90), salt="a", flow="a") is kept
        assert len(shared._kept) <= limits["max_cached"]
        assert shared._num_chars <= shared._limits.max_cached_chars


async def test_more_than_may_wait_are_told_to_come_again() -> None:
    async with compiler(max_waiting=2) as shared:
        asked = [asyncio.ensure_future(shared.compile(regex("a" * count))) for count in range(1, 4)]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        assert [type(answer).__name__ for answer in answers] == ["Compiled", "Compiled", "Overloaded"]
        assert isinstance(answers[2], Overloaded)
        await shared.compile(regex("aaa"))


def endless(number: int) -> Constraint:
    return regex(ENDLESS + "x" * number)


async def test_what_takes_long_takes_no_place_from_what_does_not() -> None:
    """Three endless ones: two take the slow places, the third is ended and told to come again; all others pass by."""
    limits = {"max_cpu_s": 3, "max_wall_s": 600, "quick_s": 0.5, "max_trials": 1, "max_slow": 2, "max_wait_s": 60}
    async with compiler(**limits) as shared:
        await shared.warm()
        ended: list[str] = []

        async def asked(name: str, constraint: Constraint) -> object:
            try:
                return await shared.compile(constraint)
            except (InvalidRequest, Overloaded) as error:
                return error
            finally:
                ended.append(name)

        slow = [asyncio.create_task(asked(f"slow {at}", endless(at))) for at in range(3)]
        quick = [asyncio.create_task(asked(f"quick {at}", regex("a" * at))) for at in range(1, 9)]
        answers = await asyncio.gather(*slow, *quick)
        assert [type(answer).__name__ for answer in answers] == [
            "InvalidRequest", "InvalidRequest", "Overloaded", *["Compiled"] * 8,
        ]  # fmt: skip
        assert ended.index("quick 8") < ended.index("slow 0")
        assert ended.index("slow 2") < ended.index("slow 0")
        assert answers[2].facts["retry_after_s"] > 0  # type: ignore[attr-defined]
        assert shared._slots.num_slow == 0
        num_before = shared.num_compiled
        assert isinstance(await asked("again", endless(2)), InvalidRequest)  # it was not remembered as refused
        assert shared.num_compiled == num_before + 1


async def test_who_waits_too_long_for_a_place_is_told_to_come_again() -> None:
    limits = {"max_cpu_s": 2, "max_wall_s": 600, "quick_s": 1, "max_trials": 1, "max_slow": 1, "max_wait_s": 0.2}
    async with compiler(**limits) as shared:
        await shared.warm()
        first = asyncio.create_task(shared.compile(endless(0)))
        while not shared._slots._free.locked():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        with pytest.raises(Overloaded):
            await shared.compile(regex("a"))
        assert not first.done()
        with pytest.raises(InvalidRequest):
            await first
        await shared.compile(regex("a"))


async def test_a_client_is_not_to_blame_for_a_machine_that_is_busy() -> None:
    """The clock ends the trial long before its processor time is spent."""
    async with compiler(max_cpu_s=60, max_wall_s=1, quick_s=0.2) as shared:
        with pytest.raises(Overloaded) as caught:
            await shared.compile(endless(0))
        assert caught.value.facts["retry_after_s"] > 0
        await shared.compile(regex("a"))


async def test_what_was_warmed_waits_for_no_process() -> None:
    async with compiler() as shared:
        await shared.warm()
        process = shared._trials.server._process
        assert process is not None
        assert process.poll() is None
        await shared.compile(regex("a"))
        assert shared._trials.server._process is process


async def test_a_client_that_leaves_takes_nothing_from_who_asked_for_the_same() -> None:
    async with compiler() as shared:
        leaving = asyncio.ensure_future(shared.compile(regex("[a-f]+")))
        staying = asyncio.ensure_future(shared.compile(regex("[a-f]+")))
        await asyncio.sleep(0)
        leaving.cancel()
        assert (await staying).matcher().failure is None


def ended(trials: Trials, source: str) -> Refusal:
    with pytest.raises(Refusal) as caught:
        trials.run(regex(source))
    return caught.value


def test_a_trial_that_takes_too_long_is_ended_and_the_next_one_is_not() -> None:
    """Expressions blew up while they were compiled: vLLM, CVE-2026-55574, PYSEC-2026-3933."""
    trials = Trials(BYTES, ConstraintLimits(max_cpu_s=0.2, max_wall_s=60))
    try:
        assert "takes too" in ended(trials, ENDLESS).message
        assert trials.run(regex("a+")).text
    finally:
        trials.close()


def test_a_trial_that_takes_too_much_memory_is_ended() -> None:
    """Without any bound on time it would go on: what ends it is the memory that it asks for."""
    trials = Trials(BYTES, ConstraintLimits(max_cpu_s=60, max_wall_s=60, max_trial_bytes=8 << 20))
    schema = json.dumps({"enum": [f"{number:x}" * 9 for number in range(20_000)]})
    try:
        with pytest.raises(Refusal, match="time or memory"):
            trials.run(Constraint(kind="json_schema", source=schema, name="json_schema"))
        assert trials.run(regex("a+")).text
    finally:
        trials.close()


def test_a_process_that_ends_before_it_looked_at_a_constraint_refuses_none() -> None:
    trials = Trials(BYTES, ConstraintLimits())
    trials.server = ForkServer(give_up, None, doing="is not there")
    with pytest.raises(EngineFailed):
        trials.run(regex("a"))
    trials.close()


def test_a_process_that_was_lost_is_begun_again() -> None:
    trials = Trials(BYTES, ConstraintLimits())
    try:
        trials.run(regex("a"))
        process = trials.server._process
        assert process is not None
        process.kill()
        process.wait()
        assert trials.run(regex("b")).text
        assert trials.server._process is not process
    finally:
        trials.close()
    assert trials.server._process is None


def test_building_leaves_python_to_other_threads() -> None:
    """Of turns that another thread takes while a large schema is built: with Python's lock held it would have none."""
    schema = {
        "type": "object",
        "properties": {f"p{at}": {"enum": [f"{at}-{n}" for n in range(60)]} for at in range(60)},
    }
    text = compile_source("json_schema", json.dumps(schema), tokenizer()).text
    assert num_turns_beside(lambda: build_matcher(text, tokenizer())) > 3


def num_turns_beside(work: Callable[[], object]) -> int:
    """How often a thread that sleeps a fraction of a millisecond gets its turn while the work is done."""
    has_ended, turns = threading.Event(), 0

    def count() -> None:
        nonlocal turns
        while not has_ended.is_set():
            time.sleep(0.0002)
            turns += 1

    counting = threading.Thread(target=count)
    counting.start()
    before = turns
    for _ in range(5):
        work()
    found = turns - before
    has_ended.set()
    counting.join()
    return found
