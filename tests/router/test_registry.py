"""The registry knows what a replica has, and says of each request once that it was lost."""

from __future__ import annotations

from dataclasses import replace

from serve_app.core.delta import Delta, Finish, FinishReason
from serve_app.core.errors import ReplicaLost
from serve_app.core.names import ModelRef
from serve_app.core.prompt import Prompt
from serve_app.core.request import GenerationRequest
from serve_app.router.link import Guess, Habits, Registry

FINISH = Finish(reason=FinishReason.STOP, matched_stop=None, num_tokens=1)


def make_request(request_id: str, n: int = 1) -> GenerationRequest:
    return GenerationRequest(request_id=request_id, model=ModelRef(base="tiny"), prompt=Prompt(parts=("Hello",)), n=n)


def test_sequences_leave_one_by_one_and_what_follows_the_last_is_dropped() -> None:
    registry, inbox = Registry(), list[Delta]()
    registry.add([make_request("a", n=2)], inbox.append)
    for sample in (0, 1, 1):
        registry.dispatch(Delta(request_id="a", sample=sample, finish=FINISH))
    assert [delta.sample for delta in inbox] == [0, 1]
    assert registry.num_outstanding == 0


def test_what_is_forgotten_counts_no_more_and_hears_no_more() -> None:
    registry, inbox = Registry(), list[Delta]()
    registry.add([make_request("a", n=3), make_request("b")], inbox.append)
    registry.forget(["a", "unknown"])
    registry.dispatch(Delta(request_id="a", sample=0, text="late"))
    assert (registry.num_outstanding, inbox) == (1, [])


def test_an_inbox_that_gives_a_lost_request_anew_finds_the_registry_without_it() -> None:
    registry = Registry()
    lost: list[str] = []

    def again(delta: Delta) -> None:
        lost.append(delta.request_id)
        registry.add([make_request(delta.request_id)], lost.append)

    registry.add([make_request("a"), make_request("b")], again)
    registry.lose(lambda: ReplicaLost("gone"))
    assert lost == ["a", "b"]
    assert registry.num_outstanding == 2


def test_a_prompt_counts_as_computed_with_its_first_delta_also_where_it_is_not_reported_again() -> None:
    registry = Registry()
    registry.add([replace(make_request("a"), is_reported=True)], lambda _: None, [Guess(Habits(), num_missing=2000.0)])
    assert registry.num_prompt_tokens == 2000
    registry.dispatch(Delta(request_id="a", sample=0, text="on"))
    assert (registry.num_prompt_tokens, registry.num_outstanding) == (0, 1)
