"""Adapter slots: pinned versions stay, idle ones give way, nothing is lost; loading happens beside the steps."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from serve_app.core.cards import Residency
from serve_app.core.names import ModelRef, Part, mixed
from serve_app.engine.lora.matching import AdapterRefused
from serve_app.engine.lora.plan import Mix
from serve_app.engine.lora.slots import Slots
from tests.engine.adapter_files import save_adapter, version_in
from tests.engine.test_pool import WIDTH, make_bank, make_model, run

BASE = ModelRef(base="m")


def adapter(version: str) -> ModelRef:
    """An adapter; of several letters a mix, half of each."""
    parts = [Part(adapter=letter, version=letter, scale=0.5) for letter in version]
    return mixed("m", parts if len(parts) > 1 else [replace(parts[0], scale=1.0)])


def slot_of(slots: Slots, version: str) -> int:
    """Pin an adapter that is used at its own strength."""
    [(slot, factor)] = slots.acquire(adapter(version))
    assert factor == 1
    return slot


class Later(Executor):
    """Runs what was submitted when the test says so, in order."""

    def __init__(self) -> None:
        self.jobs: list[Callable[[], None]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def job() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            except Exception as error:
                future.set_exception(error)

        self.jobs.append(job)
        return future

    def run_next(self) -> None:
        self.jobs.pop(0)()


class Holds:
    """A bank that only notes what is where: staged first, computed with after the swap."""

    def __init__(self, broken: frozenset[str] = frozenset()) -> None:
        self.broken = broken
        self.in_slot: dict[int, str] = {}

    def stage(self, slot: int, version: str) -> Callable[[], None]:
        assert slot not in self.in_slot, "a slot was not vacated"
        if version in self.broken:
            raise AdapterRefused(f"{version} has changed on disk")
        return lambda: self.in_slot.__setitem__(slot, version)

    def vacate(self, slot: int) -> None:
        self.in_slot.pop(slot, None)


def test_a_base_needs_no_slot() -> None:
    slots = Slots(0, lambda slot, version: None)
    assert slots.can_acquire(BASE)
    assert slots.acquire(BASE) == ()
    assert slots.is_ready(BASE)
    assert slots.failed(BASE) is None


def test_a_pinned_version_is_not_evicted_and_an_idle_one_is() -> None:
    loads: list[tuple[int, str]] = []
    slots = Slots(2, lambda slot, version: loads.append((slot, version)))
    first, second = slot_of(slots, "a"), slot_of(slots, "b")
    assert not slots.can_acquire(adapter("c"))
    slots.release(adapter("b"))
    assert slots.can_acquire(adapter("c"))
    assert slot_of(slots, "c") == second
    assert slot_of(slots, "a") == first
    assert loads == [(first, "a"), (second, "b"), (second, "c")]


def test_a_version_is_ready_once_it_is_staged_and_polled() -> None:
    bank, later, calls = Holds(), Later(), []
    slots = Slots(1, bank.stage, vacate=bank.vacate, executor=later, on_staged=lambda: calls.append("staged"))
    slot = slot_of(slots, "a")
    assert not slots.poll()
    assert (slots.is_ready(adapter("a")), calls, bank.in_slot) == (False, [], {})
    later.run_next()
    assert (slots.is_ready(adapter("a")), calls, bank.in_slot) == (False, ["staged"], {})
    assert slots.poll()
    assert (slots.is_ready(adapter("a")), bank.in_slot) == (True, {slot: "a"})
    assert slot_of(slots, "a") == slot
    assert (slots.num_loads, later.jobs) == (1, []), "a version that is there is not sent for again"


def test_what_is_resident_is_told_with_the_seconds_that_loads_took() -> None:
    later = Later()
    slots = Slots(1, lambda slot, version: None, executor=later)
    assert slots.residency == Residency(num_slots=1)
    slots.acquire(adapter("a"))
    assert slots.residency == Residency(versions=("a",), num_slots=1)
    later.run_next()
    slots.poll()
    slots.release(adapter("a"))
    slots.acquire(adapter("b"))
    assert slots.residency.versions == ("b",)
    assert slots.residency.load_s > 0


def test_a_slot_that_is_being_written_is_nobody_elses_even_without_users() -> None:
    bank, later = Holds(), Later()
    slots = Slots(1, bank.stage, vacate=bank.vacate, executor=later)
    slots.acquire(adapter("a"))
    slots.release(adapter("a"))
    assert not slots.can_acquire(adapter("b"))
    assert slots.can_acquire(adapter("a"))
    later.run_next()
    slots.poll()
    assert slots.can_acquire(adapter("b"))


def test_a_version_that_cannot_be_staged_fails_with_its_reason_and_frees_its_slot() -> None:
    bank, later = Holds(broken=frozenset({"a"})), Later()
    slots = Slots(1, bank.stage, vacate=bank.vacate, executor=later)
    slots.acquire(adapter("a"))
    assert slots.failed(adapter("a")) is None
    later.run_next()
    slots.poll()
    assert slots.failed(adapter("a")) == "a has changed on disk"
    assert not slots.is_ready(adapter("a"))
    slots.check_integrity([adapter("a")])
    slots.release(adapter("a"))
    assert slots.failed(adapter("a")) is None
    slots.check_integrity([])
    bank.broken = frozenset()  # the file is put back
    slots.acquire(adapter("a"))
    later.run_next()
    slots.poll()
    assert slots.is_ready(adapter("a"))


def test_without_an_executor_a_failure_is_known_at_once() -> None:
    bank = Holds(broken=frozenset({"a"}))
    slots = Slots(1, bank.stage, vacate=bank.vacate)
    slots.acquire(adapter("a"))
    assert slots.failed(adapter("a")) == "a has changed on disk"


def test_a_mix_is_pinned_whole_or_not_at_all() -> None:
    loads: list[tuple[int, str]] = []
    slots = Slots(3, lambda slot, version: loads.append((slot, version)))
    first = slot_of(slots, "a")
    second = slot_of(slots, "b")
    slots.release(adapter("b"))
    assert slots.can_acquire(adapter("bcd")) is False, "two are to come and one may go, besides the free one"
    assert slots.can_acquire(adapter("abc"))
    mix = slots.acquire(adapter("abc"))
    assert [slot for slot, _ in mix][:2] == [first, second], "what is there is used, and makes no room for the rest"
    assert [factor for _, factor in mix] == [0.5, 0.5, 0.5]
    assert not slots.can_acquire(adapter("d"))
    slots.release(adapter("abc"))
    slots.check_integrity([adapter("a")])
    assert slots.can_acquire(adapter("acd"))
    assert not slots.can_acquire(adapter("bcde")), "more than there are slots"
    assert [version for _, version in loads] == ["a", "b", "c"]


def test_a_mix_fails_with_the_adapter_that_cannot_be_had() -> None:
    bank, later = Holds(broken=frozenset("x")), Later()
    slots = Slots(2, bank.stage, vacate=bank.vacate, executor=later)
    slots.acquire(adapter("ax"))
    for _ in range(2):
        assert not slots.is_ready(adapter("ax"))
        later.run_next()
        slots.poll()
    assert slots.failed(adapter("ax")) == "x: x has changed on disk"
    assert slots.failed(adapter("a")) is None
    slots.release(adapter("ax"))
    slots.check_integrity([])
    assert slots.is_ready(adapter("a")), "the sound one stays"


def test_the_engines_thread_reads_and_copies_nothing(tmp_path: Path) -> None:
    model = make_model()
    bank = make_bank(model, {name: save_adapter(tmp_path / name, model, seed=i) for i, name in enumerate("abc")})
    staged_in: set[str] = set()
    staged = threading.Event()

    def stage(slot: int, version: str) -> Callable[[], None]:
        staged_in.add(threading.current_thread().name)
        return bank.stage(slot, version)

    with ThreadPoolExecutor(1, thread_name_prefix="adapters") as executor:
        slots = Slots(2, stage, vacate=bank.vacate, executor=executor, on_staged=staged.set)
        for name in "abcab":
            slot = slot_of(slots, name)
            while not slots.is_ready(adapter(name)):
                assert await_staged(slots)
                with torch.utils.flop_counter.FlopCounterMode(display=False), _NoTensorWork():
                    slots.poll()
            assert version_in(bank, slot) == name
            slots.release(adapter(name))
    assert staged_in == {"adapters_0"}
    assert staged.is_set()
    assert slots.num_loads == 5


def await_staged(slots: Slots) -> bool:
    """Wait until something can be polled; False if nothing is being staged."""
    return bool(slots._staging) and bool(wait(slots._staging.values(), 30, return_when="FIRST_COMPLETED").done)


class _NoTensorWork(torch.utils._python_dispatch.TorchDispatchMode):
    """Fails on every tensor operation of this thread."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} was called")


@pytest.mark.parametrize("damage", ["truncated", "replaced", "removed"])
def test_a_file_that_changes_before_it_is_staged_fails_its_own_version_only(damage: str, tmp_path: Path) -> None:
    model = make_model()
    folders = {name: save_adapter(tmp_path / name, model, seed=i) for i, name in enumerate("ab")}
    bank = make_bank(model, folders)
    weights = folders["a"] / "adapter_model.safetensors"
    match damage:
        case "truncated":
            weights.write_bytes(weights.read_bytes()[:200])
        case "replaced":
            (save_adapter(tmp_path / "new", model, seed=9) / "adapter_model.safetensors").replace(weights)
        case "removed":
            weights.unlink()
    with ThreadPoolExecutor(1) as executor:
        slots = Slots(2, bank.stage, vacate=bank.vacate, executor=executor)
        slots.acquire(adapter("a"))
        good = slot_of(slots, "b")
        while await_staged(slots):
            slots.poll()
    assert "adapter_model.safetensors" in str(slots.failed(adapter("a")))
    assert slots.is_ready(adapter("b"))
    assert run(model, bank, torch.ones(1, WIDTH), [good]).isfinite().all()


@pytest.mark.law("Conservation")
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["a", "b", "c", "d", "x", "ab", "bc", "ax", "abcd"]),
            st.sampled_from(["come", "leave", "load", "poll"]),
        ),
        max_size=80,
    ),
    st.integers(1, 3),
    st.booleans(),
)
def test_random_use_keeps_one_owner_per_slot_and_one_pin_per_user(
    actions: list[tuple[str, str]], num_slots: int, is_inline: bool
) -> None:
    bank, later = Holds(broken=frozenset("x")), Later()
    slots = Slots(num_slots, bank.stage, vacate=bank.vacate, executor=None if is_inline else later)
    users: list[tuple[ModelRef, Mix]] = []
    for name, action in actions:
        match action:
            case "leave" if users:
                slots.release(users.pop(0)[0])
            case "load" if later.jobs:
                later.run_next()
            case "poll":
                slots.poll()
            case "come" if slots.can_acquire(adapter(name)):
                users.append((adapter(name), slots.acquire(adapter(name))))
        slots.check_integrity([model for model, _ in users])
        for model, mix in users:
            held = [(bank.in_slot.get(slot), factor) for slot, factor in mix]
            assert slots.is_ready(model) == (held == [(part.version, part.scale) for part in model.parts])
            assert slots.failed(model) is None or "x" in model.name


def test_a_version_gets_a_slot_only_while_it_fits_beside_those_in_use() -> None:
    sizes = {"a": 2, "b": 2, "c": 3, "d": 1}
    bank = Holds()
    slots = Slots(4, bank.stage, vacate=bank.vacate, fits=lambda versions: sum(sizes[each] for each in versions) <= 5)
    slot_of(slots, "a")
    slot_of(slots, "b")
    assert not slots.can_acquire(adapter("c")), "there are slots, but no bytes"
    assert slots.can_acquire(adapter("d"))
    slots.release(adapter("a"))
    assert slots.can_acquire(adapter("c"))
    slot_of(slots, "c")
    assert sorted(bank.in_slot.values()) == ["b", "c"], "what gives way takes no memory any more"
    assert not slots.can_acquire(adapter("ad"))
    slots.check_integrity([adapter("b"), adapter("c")])


def test_hits_are_those_that_found_their_version_there() -> None:
    bank = Holds()
    slots = Slots(1, bank.stage, vacate=bank.vacate)
    for version in ("a", "a", "b", "a", "a"):
        slot_of(slots, version)
        slots.release(adapter(version))
    assert (slots.num_loads, slots.num_hits) == (3, 2)


def test_a_version_in_use_stays_when_it_is_to_be_evicted() -> None:
    bank = Holds()
    slots = Slots(2, bank.stage, vacate=bank.vacate)
    slot_of(slots, "a")
    assert not slots.evict("a")
    slots.release(adapter("a"))
    assert slots.evict("a")
    assert slots.evict("never there")
    assert (bank.in_slot, slots.residency.versions) == ({}, ())
    slots.check_integrity([])


def test_a_version_that_is_to_be_kept_gives_way_last() -> None:
    bank = Holds()
    slots = Slots(2, bank.stage, vacate=bank.vacate)
    slots.kept = frozenset({"a"})
    for version in ("a", "b", "c"):
        slot_of(slots, version)
        slots.release(adapter(version))
    assert sorted(bank.in_slot.values()) == ["a", "c"]
    slots.acquire(adapter("bc"))
    assert sorted(bank.in_slot.values()) == ["b", "c"], "it holds nobody up"


def test_what_is_larger_than_all_bytes_has_them_alone() -> None:
    sizes = {"a": 2, "b": 2, "c": 2}
    bank = Holds()
    slots = Slots(4, bank.stage, vacate=bank.vacate, fits=lambda versions: sum(sizes[each] for each in versions) <= 3)
    slot_of(slots, "c")
    assert not slots.can_acquire(adapter("ab"))
    slots.release(adapter("c"))
    assert slots.can_acquire(adapter("ab"))
    slots.acquire(adapter("ab"))
    assert sorted(bank.in_slot.values()) == ["a", "b"]
    assert not slots.can_acquire(adapter("c"))
