"""Adapter slots: pinned versions stay, idle ones give way, nothing is lost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from serve_app.core.names import ModelRef
from serve_app.engine.lora.slots import Slots


def adapter(version: str) -> ModelRef:
    return ModelRef(base="m", adapter=version, version=version)


def test_a_base_needs_no_slot() -> None:
    slots = Slots(0, lambda slot, version: None)
    assert slots.can_acquire(ModelRef(base="m"))
    assert slots.acquire(ModelRef(base="m")) == -1


def test_a_pinned_version_is_not_evicted_and_an_idle_one_is() -> None:
    loads: list[tuple[int, str]] = []
    slots = Slots(2, lambda slot, version: loads.append((slot, version)))
    first, second = slots.acquire(adapter("a")), slots.acquire(adapter("b"))
    assert not slots.can_acquire(adapter("c"))
    slots.release(adapter("b"))
    assert slots.can_acquire(adapter("c"))
    assert slots.acquire(adapter("c")) == second
    assert slots.acquire(adapter("a")) == first
    assert loads == [(first, "a"), (second, "b"), (second, "c")]


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.booleans()), max_size=60), st.integers(1, 3))
def test_random_use_keeps_one_owner_per_slot_and_one_pin_per_user(
    actions: list[tuple[str, bool]], num_slots: int
) -> None:
    holds: dict[int, str] = {}
    slots = Slots(num_slots, holds.__setitem__)
    users: list[ModelRef] = []
    for name, leaves in actions:
        if leaves and users:
            slots.release(users.pop(0))
        elif slots.can_acquire(adapter(name)):
            slot = slots.acquire(adapter(name))
            assert holds[slot] == name
            users.append(adapter(name))
        slots.check_integrity(users)
