"""A replica tells each router what the others sent, once, and keeps no more than its bound."""

from __future__ import annotations

from serve_app.core.prefixes import prefixes_of
from serve_app.replica.told import Told
from tests.router.virtual_fleet import asking, documents

ONE, TWO = (asking(text) for text in documents(2))


def test_a_router_hears_once_what_others_sent_and_not_what_it_sent_itself() -> None:
    told = Told()
    assert told.take("a") == told.take("b") == ()
    told.note("a", [ONE])
    told.note("b", [TWO])
    assert told.take("a") == prefixes_of(TWO).names
    assert told.take("b") == prefixes_of(ONE).names
    assert told.take("a") == ()


def test_what_is_sent_again_is_told_once() -> None:
    told = Told()
    told.take("b")
    told.note("a", [ONE, ONE])
    assert told.take("b") == prefixes_of(ONE).names


def test_a_router_that_does_not_ask_costs_no_more_than_the_bound() -> None:
    told = Told(max_untold=30)
    told.take("b")
    told.note("a", [ONE, TWO])
    assert len(told.take("b")) == 30


def test_a_router_that_is_gone_costs_nothing() -> None:
    told = Told()
    told.take("b")
    told.forget("b")
    told.note("a", [ONE])
    assert told.take("b") == ()
