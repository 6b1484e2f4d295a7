"""Law: every error pickles with all its facts and has a status."""

from __future__ import annotations

import pickle
from collections.abc import Iterator

import pytest

from serve_app.core.errors import ServeError

pytestmark = pytest.mark.law("Nothing in silence")


def every_class(root: type[ServeError] = ServeError) -> Iterator[type[ServeError]]:
    yield root
    for child in root.__subclasses__():
        yield from every_class(child)


@pytest.mark.parametrize("error_class", sorted(set(every_class()), key=lambda cls: cls.__name__))
def test_every_error_survives_pickling_with_its_facts(error_class: type[ServeError]) -> None:
    error = error_class("a message", "stop", {"retry_after_s": 2, "n_ctx": 512})
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is error_class
    assert (copy.message, copy.param, copy.facts) == ("a message", "stop", {"retry_after_s": 2, "n_ctx": 512})
    assert copy.retry_after_s == 2.0
    assert 400 <= copy.status < 600
    assert copy.code != ServeError.code or error_class is ServeError
