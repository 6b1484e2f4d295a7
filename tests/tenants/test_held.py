"""For how long a router goes by what it heard."""

from __future__ import annotations

import math

import pytest

from serve_app.core.errors import Unauthenticated, Unavailable
from serve_app.core.tenants import Scope, Tenant
from serve_app.tenants.keys import Directory, Key, KeyCache, digest_of, new_key

PEPPER = b"p" * 32
SECRET = new_key()


def directory(version: int, *, origins: tuple[str, ...] = ()) -> Directory:
    key = Key(
        id="k", tenant="a", digest=digest_of(SECRET, PEPPER), scopes=frozenset({Scope.INFER}), created_at=0.0
    )  # fmt: skip
    return Directory([Tenant(name="a", cors_origins=origins)], [key], pepper=PEPPER, version=version)


@pytest.mark.parametrize("grace_s", [10.0, math.inf])
def test_nobody_is_let_in_before_anything_was_heard(grace_s: float) -> None:
    held = KeyCache(grace_s=grace_s)
    assert (held.directory.version, held.directory.origins) == (-1, frozenset())
    with pytest.raises(Unavailable) as refusal:
        held.identify(SECRET, now=1.0, at=1.0)
    assert refusal.value.retry_after_s == 2


@pytest.mark.law("The door")
def test_what_was_heard_is_good_for_its_time_and_then_nobody_is_let_in() -> None:
    held = KeyCache(grace_s=10.0)
    held.hear(directory(4, origins=("https://a",)), 100.0)
    assert (held.directory.version, held.directory.origins) == (4, {"https://a"})
    assert held.identify(SECRET, now=1.0, at=110.0).tenant.name == "a"
    with pytest.raises(Unavailable):
        held.identify(SECRET, now=1.0, at=110.1)
    held.hear(None, 111.0)  # nothing changed meanwhile
    assert held.identify(SECRET, now=1.0, at=121.0).key_id == "k"


def test_a_wrong_key_is_refused_as_ever() -> None:
    held = KeyCache(grace_s=10.0)
    held.hear(directory(1), 0.0)
    with pytest.raises(Unauthenticated):
        held.identify(new_key(), now=1.0, at=1.0)


def test_an_answer_that_was_overtaken_does_not_bring_back_what_was_before() -> None:
    held = KeyCache(grace_s=10.0)
    held.hear(directory(5), 101.0)
    held.hear(directory(4, origins=("https://a",)), 100.0)
    assert (held.directory.version, held.directory.origins) == (5, frozenset())
