"""What a router believes of replicas' caches follows what it sent, and ends with the replica."""

from __future__ import annotations

from serve_app.core.cards import ReplicaCard, Residency
from serve_app.core.prefixes import ENDS, prefixes_of
from serve_app.router.placement import LOAD_S, MAX_GONE, Warmth
from tests.fakes import model_card
from tests.router.virtual_fleet import asking, documents

TEXT, OTHER = documents(2)
NAMES = prefixes_of(asking(TEXT)).names


def told(*versions: str, num_slots: int = 2, load_s: float = 0.0) -> ReplicaCard:
    residency = Residency(versions=versions, num_slots=num_slots, load_s=load_s)
    return ReplicaCard(replica_id="a", model=model_card(), residency=residency)


def test_each_replica_holds_as_far_as_it_was_sent() -> None:
    warmth = Warmth()
    warmth.hold("a", NAMES)
    warmth.hold("b", NAMES[:3])
    assert warmth.depths(NAMES, ["a", "b", "c"]) == [ENDS[len(NAMES) - 1], ENDS[2], 0]
    assert warmth.depths(prefixes_of(asking(OTHER)).names, ["a"]) == [0]


def test_a_replica_that_leaves_takes_its_entries_along_and_no_others() -> None:
    warmth = Warmth()
    warmth.hold("a", NAMES, ["v1"])
    warmth.hold("b", NAMES[:3])
    warmth.forget("a")
    assert warmth.depths(NAMES, ["a", "b"]) == [0, ENDS[2]]
    assert warmth.load_s("a", ["v1"]) == LOAD_S
    warmth.hold("a", ())  # one that comes again begins with nothing
    assert warmth.depths(NAMES, ["a", "b"]) == [0, ENDS[2]]


def test_replicas_that_come_and_go_leave_nothing_behind() -> None:
    warmth = Warmth()
    warmth.hold("stays", NAMES[:3])
    for number in range(10 * MAX_GONE):
        warmth.hold(f"a{number}", NAMES)
        warmth.forget(f"a{number}")
    assert len(warmth._holders) == 3
    warmth.hold("new", NAMES[:5])
    assert warmth.depths(NAMES, ["stays", "new", "a0"]) == [ENDS[2], ENDS[4], 0]


def test_memory_is_bounded_and_what_was_used_last_stays() -> None:
    warmth = Warmth(max_names=3 * len(NAMES))
    for text in documents(20, seed=1):
        warmth.hold("a", NAMES)
        warmth.hold("a", prefixes_of(asking(text)).names)
        assert len(warmth._holders) <= 3 * len(NAMES)
    assert warmth.depths(NAMES, ["a"]) == [ENDS[len(NAMES) - 1]]


def test_a_prompt_that_is_half_forgotten_keeps_its_beginning() -> None:
    warmth = Warmth(max_names=len(NAMES))
    warmth.hold("a", NAMES)
    warmth.hold("a", prefixes_of(asking(OTHER[:1024])).names)
    [depth] = warmth.depths(NAMES, ["a"])
    assert depth == ENDS[len(NAMES) - 5]


def test_an_adapter_is_believed_to_be_where_it_was_sent_until_two_cards_do_not_show_it() -> None:
    warmth = Warmth()
    warmth.hold("a", (), ["v1"])
    warmth.hear(told())
    assert warmth.load_s("a", ["v1"]) == 0
    warmth.hear(told())
    assert warmth.load_s("a", ["v1"]) == LOAD_S
    warmth.hear(told("v1"))
    assert warmth.load_s("a", ["v1"]) == 0


def test_a_load_that_evicts_another_adapter_counts_twice() -> None:
    warmth = Warmth()
    warmth.hear(told("v1", load_s=0.5))
    assert warmth.load_s("a", ["v1", "v2"]) == 0.5
    warmth.hear(told("v1", "v3", load_s=0.5))
    assert warmth.load_s("a", ["v1", "v2"]) == 1.0
