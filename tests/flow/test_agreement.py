"""What is found wrong with a ledger: invented ones, each true but for one lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text

from serve_app.core.ledger import CLIENT_LEFT, Counted, Row, Spent
from serve_app.tenants.ledger import LedgerStore
from tests.agreement import Asked, Kept, disagreements, kept_in
from tests.tenants.conftest import postgresql, url  # noqa: F401

MOST = (5, 60)
WHOLE = Asked(name="whole", tenant="acme", most=MOST, usage=(5, 50))
AGAIN = replace(WHOLE, name="again", repeats="whole")
LEFT = Asked(name="left", tenant="acme", most=MOST)
REFUSED = replace(LEFT, name="refused", was_taken=False)
MOVED = replace(WHOLE, name="moved", num_lost=1)
LOST = replace(WHOLE, name="lost", may_lack_row=True)


def row(name: str, completion: int = 50, *, number: int = 0, status: int = 200, prompt: int = 5) -> Row:
    made = Row(id=f"{name}/{number}", tenant="acme", key_id="key-1", request_id=name, model="tiny", status=status)
    return replace(made, prompt_tokens=prompt, cached_tokens=1, completion_tokens=completion, engine_ns=7)


def store_in(folder: Path) -> str:
    return f"sqlite:///{folder / 'ledger.db'}"


def ledger(store: str, rows: Sequence[Row], *, prompt: int, completion: int, engine_ns: int | None = None) -> Kept:
    """As the real store keeps these rows, and that one replica counted so much."""
    num_prompts = prompt // 5
    spent = Spent(
        flow="acme",
        prompt_tokens=prompt,
        cached_tokens=num_prompts,
        completion_tokens=completion,
        engine_ns=7 * num_prompts if engine_ns is None else engine_ns,
    )
    engine = create_engine(store)
    LedgerStore(engine).record(rows, [Counted(replica_id="r0", model="tiny", spent=spent)], 0.0)
    engine.dispose()
    return kept_in(store)


def test_a_ledger_of_what_nobody_disturbed_agrees(url: str) -> None:  # noqa: F811
    kept = ledger(url, [row("whole")], prompt=5, completion=50)
    shown = {("r0", "acme"): {"completion_tokens": 50, "engine_ns": 7}}
    assert disagreements(kept, [WHOLE, AGAIN], shown) == []


def test_what_was_left_moved_or_lost_with_its_router_may_leave_something_unattributed(tmp_path: Path) -> None:
    rows = [row("whole"), row("left", 20, status=CLIENT_LEFT), row("moved")]
    explained = ledger(store_in(tmp_path), rows, prompt=25, completion=120 + 40 + 60 + 50)
    assert explained.unattributed["acme"]["completion_tokens"] == 150
    assert disagreements(explained, [WHOLE, LEFT, MOVED, LOST]) == []


@pytest.mark.parametrize(
    ("rows", "asked", "found"),
    [
        ([], [WHOLE], "whole was told of (5, 50) and whole has no row"),
        ([row("whole", 5)], [WHOLE], "whole was told of (5, 50) and the row of whole of (5, 5)"),
        ([row("whole", prompt=4)], [WHOLE], "whole was told of (5, 50) and the row of whole of (4, 50)"),
        ([row("left", 20), row("left", 20, number=1)], [LEFT], "left has 2 rows"),
        ([row("whole"), row("again")], [WHOLE, AGAIN], "again was given an answer again and has a row"),
        (
            [],
            [replace(WHOLE, may_lack_row=True), replace(AGAIN, usage=(5, 49))],
            "again was told of (5, 49) and whole of (5, 50)",
        ),
        ([], [LEFT, replace(AGAIN, repeats="left")], "again was told of (5, 50) and left has no row"),
        ([row("lost", 49)], [LOST], "lost was told of (5, 50) and the row of lost of (5, 49)"),
        ([row("left", 61)], [LEFT], "left has a row of more than it may come to: (5, 61) of (5, 60)"),
    ],
)
def test_a_row_that_is_missing_wrong_or_doubled_is_found(
    tmp_path: Path, rows: Sequence[Row], asked: Sequence[Asked], found: str
) -> None:
    """Whoever else left enough behind that no sum shows it."""
    many = [replace(LEFT, name=f"left-{number}") for number in range(9)]
    kept = ledger(store_in(tmp_path), rows, prompt=40, completion=200)
    assert [each for each in disagreements(kept, [*asked, *many]) if "unattributed" not in each] == [found]


@pytest.mark.parametrize(
    ("rows", "completion", "asked", "found"),
    [
        ([row("whole")], 51, [WHOLE], "acme: 1 completion_tokens are unattributed, and 0 to 0 may be"),
        ([row("left", 20)], 61, [LEFT], "acme: 41 completion_tokens are unattributed, and 0 to 40 may be"),
        ([row("whole")], 51, [WHOLE, REFUSED], "acme: 1 completion_tokens are unattributed, and 0 to 0 may be"),
        ([row("moved")], 111, [MOVED], "acme: 61 completion_tokens are unattributed, and 0 to 60 may be"),
        ([], 51, [LOST], "acme: 51 completion_tokens are unattributed, and 50 to 50 may be"),
        ([], 49, [LOST], "acme: 49 completion_tokens are unattributed, and 50 to 50 may be"),
        ([row("whole")], 49, [WHOLE], "acme: 50 completion_tokens are not the 49 that replicas counted"),
    ],
)
def test_more_or_less_than_what_requests_explain_is_found(
    tmp_path: Path, rows: Sequence[Row], completion: int, asked: Sequence[Asked], found: str
) -> None:
    kept = ledger(store_in(tmp_path), rows, prompt=5, completion=completion)
    assert found in disagreements(kept, asked)


def test_time_that_no_row_explains_is_found_where_every_request_has_its_row(tmp_path: Path) -> None:
    kept = ledger(store_in(tmp_path), [row("whole")], prompt=5, completion=50, engine_ns=8)
    [found] = disagreements(kept, [WHOLE])
    assert found.endswith("is unattributed, and every request has its row")


@pytest.mark.parametrize("amount", [{"completion_tokens": 51}, {"engine_ns": 8}])
def test_a_replica_that_shows_something_else_than_the_ledger_knows_is_found(
    tmp_path: Path, amount: dict[str, int]
) -> None:
    kept = ledger(store_in(tmp_path), [row("whole")], prompt=5, completion=50)
    [(name, number)] = amount.items()
    [found] = disagreements(kept, [WHOLE], {("r0", "acme"): amount})
    assert found == f"r0 shows {number} {name} for acme, and {number - 1} are known"


def test_sums_by_day_that_are_not_those_of_the_rows_are_found(tmp_path: Path) -> None:
    ledger(store_in(tmp_path), [row("whole")], prompt=5, completion=50)
    engine = create_engine(store_in(tmp_path))
    with engine.begin() as connection:
        connection.execute(text("update days set prompt_tokens = 4, requests = 2"))
    engine.dispose()
    assert disagreements(kept_in(store_in(tmp_path)), [WHOLE]) == [
        "acme: 1 requests of rows and 0 of none are not the 2 of days",
        "acme: 5 prompt_tokens of rows and 0 of none are not the 4 of days",
        "acme: 4 prompt_tokens are not the 5 that replicas counted",
    ]
