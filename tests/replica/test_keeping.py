"""Streams that a replica keeps: within its bytes, each tenant in its share, and for one request at a time."""

from __future__ import annotations

from dataclasses import dataclass

from serve_app.core.cards import KeptCard
from serve_app.core.delta import Delta, Finish, FinishReason
from serve_app.core.names import ModelRef
from serve_app.core.prompt import Prompt
from serve_app.core.request import GenerationRequest, Kept
from serve_app.core.shares import Share
from serve_app.replica.keeping import CLAIM_S, Keeping

MODEL = ModelRef(base="tiny")


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def asked(name: str, *, flow: str = "acme", num_bytes: int = 1000, run: str = "") -> GenerationRequest:
    """A stream of one prompt, whose record takes a little more than so many bytes."""
    kept = Kept(
        id=name,
        response_id=name,
        created=0,
        owner=flow,
        path="/v1/completions",
        dialect="union",
        body=b"x" * num_bytes,
        seed=1,
        models=(MODEL,),
        seconds=60.0,
    )
    prompt = Prompt(parts=("",))
    return GenerationRequest(
        request_id=f"{run or name}/0", model=MODEL, prompt=prompt, kept=kept, share=Share(flow=flow)
    )


def taken(keeping: Keeping, *requests: GenerationRequest) -> bool:
    keeping.begin(requests)
    return keeping.make_room(requests)


def left(keeping: Keeping, *requests: GenerationRequest) -> None:
    """Streams that were taken and lost their clients."""
    for request in requests:
        assert taken(keeping, request)
        keeping.leave([request.request_id])


def told(request: GenerationRequest, text: str) -> Delta:
    return Delta(request_id=request.request_id, sample=0, text=text, token_ids=(5,))


def names(keeping: Keeping, *wanted: str, flow: str = "acme") -> list[str]:
    """Which of these streams are kept."""
    return [name for name in wanted if keeping.find(name, flow, "claim")]


def test_what_does_not_fit_is_not_kept_and_nothing_gives_way_to_it() -> None:
    keeping = Keeping(5000, Clock())
    left(keeping, asked("old"), asked("his", flow="beta"))
    before = keeping.card
    for num_bytes in (4500, 5001):
        large = asked("large", flow="beta", num_bytes=num_bytes)
        assert not taken(keeping, asked("running", flow="beta"), large)
        keeping.note([told(large, "text")])
        assert names(keeping, "large", flow="beta") == []
        keeping.forget(["running/0"])
        assert keeping.card == before
    assert not taken(Keeping(0, Clock()), asked("a"))


def test_what_runs_takes_room_and_what_outgrows_it_is_forgotten() -> None:
    keeping = Keeping(5000, Clock())
    first, second = asked("first"), asked("second")
    assert taken(keeping, first, second)
    assert not taken(keeping, asked("third", num_bytes=3000)), "two that run have most of it"
    keeping.note([told(first, "x" * 4000)])
    assert names(keeping, "first", "second") == ["second"]
    keeping.note([told(first, "more")])
    end = Finish(reason=FinishReason.LENGTH, matched_stop=None, num_tokens=1)
    keeping.note([Delta(request_id=second.request_id, sample=0, finish=end)])
    card = keeping.card
    assert (card.num_streams, card.num_forgotten) == (1, 1)
    assert 1000 < card.num_bytes < 2000


def test_nothing_gives_way_to_a_request_that_is_refused() -> None:
    keeping = Keeping(5000, Clock())
    left(keeping, asked("old"))
    before, request = keeping.card, asked("new", num_bytes=4500)
    keeping.begin([request])
    keeping.forget([request.request_id])
    assert keeping.card == before
    left(keeping, request)
    assert names(keeping, "old", "new") == ["new"]


def test_nothing_gives_way_to_a_request_that_may_still_be_refused() -> None:
    """Neither what was left nor what runs, whatever comes of those that run meanwhile."""
    keeping = Keeping(5000, Clock())
    left(keeping, asked("old"))
    running, early = asked("running", flow="beta"), asked("early", flow="greedy", num_bytes=4500)
    assert taken(keeping, running)
    before = keeping.card.num_bytes
    keeping.begin([early])
    keeping.note([told(running, "text")])
    assert (names(keeping, "old"), names(keeping, "running", flow="beta")) == (["old"], ["running"])
    keeping.leave([early.request_id])
    assert keeping.card.num_bytes > before + 4500, "what was left before it was taken counts"


def test_a_flow_that_has_most_gives_way_and_takes_nothing_of_others() -> None:
    keeping = Keeping(10_000, Clock())
    left(keeping, *(asked(f"mine {at}", flow="greedy") for at in range(6)))
    left(keeping, *(asked(f"his {at}", flow="frugal") for at in range(4)))
    assert names(keeping, *(f"mine {at}" for at in range(6)), flow="greedy") == ["mine 2", "mine 3", "mine 4", "mine 5"]
    running = [asked(f"now {at}", flow="greedy") for at in range(9)]
    assert [taken(keeping, each) for each in running] == [True] * 4 + [False] * 5
    assert len(names(keeping, *(f"his {at}" for at in range(4)), flow="frugal")) == 4


def test_a_stream_that_is_fetched_again_and_again_takes_its_room_once() -> None:
    keeping = Keeping(10_000, Clock())
    left(keeping, *(asked("again", run=f"again~{at}") for at in range(5)))
    card = keeping.card
    assert (card.num_streams, card.num_forgotten) == (1, 0)
    assert card.num_bytes < 2000


def test_of_two_that_fetch_at_once_the_second_is_told_until_the_first_had_time_to_go_on() -> None:
    clock = Clock()
    keeping = Keeping(10_000, clock)
    left(keeping, asked("a"))

    def is_taken(claim: str) -> bool:
        [past] = keeping.find("a", "acme", claim)
        return past.is_taken

    assert [is_taken("first"), is_taken("second"), is_taken("first")] == [False, True, False]
    clock.now += CLAIM_S
    assert [is_taken("second"), is_taken("first")] == [False, True]


def test_what_expires_leaves_its_room() -> None:
    clock = Clock()
    keeping = Keeping(10_000, clock)
    left(keeping, asked("a"), asked("b", flow="beta"))
    clock.now = 61.0
    assert names(keeping, "a") == []
    assert keeping.card == KeptCard()
