"""The requests that a replica has taken in: room, owners, samples that have not ended."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from serve_app.core.delta import Delta, Finish, FinishReason
from serve_app.core.errors import EngineFailed, Overloaded
from serve_app.core.request import GenerationRequest
from serve_app.replica.requests import OpenRequests
from tests.engine.harness import request

DONE = Finish(reason=FinishReason.STOP, matched_stop=None, num_tokens=1)


def asked(name: str, n: int = 1) -> GenerationRequest:
    return replace(request(name), n=n)


def opened(num_places: int = 100, now: list[float] | None = None) -> OpenRequests:
    time = now or [0.0]
    return OpenRequests(num_places, lambda: time[0])


@pytest.mark.law("One ending")
def test_a_sequence_told_to_have_ended_twice_counts_once() -> None:
    requests = opened()
    requests.add("router", [asked("a", n=2)])
    requests.sort([Delta(request_id="a", sample=0, finish=DONE)] * 2)
    assert requests.samples_of(["a"]) == {("a", 1)}
    requests.sort([Delta(request_id="a", sample=1, error=EngineFailed("lost"))])
    assert "a" not in requests
    assert requests.num_sequences == 0


def test_deltas_are_sorted_by_router_in_their_order_without_those_of_nobody() -> None:
    requests = opened()
    requests.add("first", [asked("a", n=2), asked("b")])
    requests.add("second", [asked("c")])
    told = [("a", "1"), ("c", "1"), ("gone", "1"), ("b", "1"), ("a", "2")]
    found = requests.sort([Delta(request_id=name, sample=0, text=text) for name, text in told])
    assert {router: [(d.request_id, d.text) for d in own] for router, own in found.items()} == {
        "first": [("a", "1"), ("b", "1"), ("a", "2")],
        "second": [("c", "1")],
    }


def test_a_router_owns_its_own_requests_and_no_others() -> None:
    requests = opened()
    requests.add("first", [asked("a"), asked("b")])
    requests.add("second", [asked("c")])
    assert requests.owned_by("first") == {"a", "b"}
    assert requests.among(["a", "c", "unknown"], "first") == {"a"}
    requests.drop(["a", "unknown"])
    assert requests.owned_by("first") == {"b"}


def test_what_was_paused_is_known_until_it_is_resumed() -> None:
    requests = opened()
    requests.add("router", [asked("a"), asked("b")])
    requests.pause(["a", "b"])
    requests.resume(["b"])
    assert requests.paused_of(["a", "b"]) == {"a"}


def test_a_full_queue_says_when_it_will_have_room() -> None:
    now = [0.0]
    requests = opened(4, now)
    requests.add("router", [asked(str(number)) for number in range(5)])
    for number in range(5):
        requests.sort([Delta(request_id=str(number), sample=0, finish=DONE)])
        now[0] += 4
    now[0] -= 4
    requests.add("router", [asked("a", n=4)])
    with pytest.raises(Overloaded, match="3 more completions do not fit the queue of 4") as refusal:
        requests.check_room([asked("b", n=3)])
    assert refusal.value.retry_after_s == 12
    requests.drop(["a"])
    requests.check_room([asked("b", n=4)])


def test_random_use_counts_every_sequence_until_it_ends_once() -> None:
    draw = random.Random(0)
    requests = opened()
    open_samples: dict[str, set[int]] = {}
    for number in range(2000):
        name = f"r{draw.randrange(number + 1)}"
        match draw.choice(("add", "end", "end", "drop")):
            case "add":
                n = draw.randint(1, 4)
                requests.add(draw.choice(("first", "second")), [asked(f"r{number}", n=n)])
                open_samples[f"r{number}"] = set(range(n))
            case "end":
                sample = draw.randrange(4)
                requests.sort([Delta(request_id=name, sample=sample, finish=DONE)])
                open_samples.get(name, set()).discard(sample)
            case "drop":
                requests.drop([name])
                open_samples.pop(name, None)
        open_samples = {name: samples for name, samples in open_samples.items() if samples}
        assert requests.num_sequences == sum(map(len, open_samples.values()))
        assert requests.owned_by("first") | requests.owned_by("second") == set(open_samples)


def test_the_wait_is_that_of_the_oldest_request_without_a_token_or_of_the_queue_at_the_pace_of_endings() -> None:
    now = [10.0]
    requests = opened(now=now)
    assert requests.wait_s(4) == 0
    requests.add("router", [asked("a")])
    now[0] = 13.0
    requests.add("router", [asked("b", n=2)])
    assert requests.wait_s(4) == 3
    requests.sort([Delta(request_id="a", sample=0, text="once")])
    assert requests.wait_s(4) == 0
    now[0] = 15.0
    requests.sort([Delta(request_id="b", sample=0, finish=DONE)])
    now[0] = 20.0
    requests.sort([Delta(request_id="b", sample=1, finish=DONE)])
    requests.add("router", [asked("c", n=6)])
    assert requests.wait_s(4) == 15  # three are queued, and one ended in five seconds


def test_what_is_paused_does_not_wait_and_waits_from_when_it_goes_on() -> None:
    now = [0.0]
    requests = opened(now=now)
    requests.add("router", [asked("moved while its reader was slow"), asked("b")])
    requests.pause(["moved while its reader was slow"])
    requests.sort([Delta(request_id="b", sample=0, text="1")])
    now[0] = 30.0
    assert requests.wait_s(4) == 0
    requests.resume(["moved while its reader was slow"])
    now[0] = 31.0
    assert requests.wait_s(4) == 1
