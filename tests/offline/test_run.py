"""Questions are asked again where that may help, their answers are kept, and an error ends the others."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from serve_app.core.batches import Answered
from serve_app.core.errors import InvalidRequest, Unavailable
from serve_app.offline.files import Form, Question
from serve_app.offline.run import FAULT_RESTS_S, PATIENCE_S, Journal, answer, ask_all, in_threads

FORM = Form(default="demo")
GOOD = Answered(status=200, body=b'{"choices": []}')


def question(number: int = 1, prompt: str = "a") -> Question:
    return FORM.question(number, {"prompt": prompt})


def answered(status: int, retry_s: float = 2.0) -> Answered:
    return Answered(status=status, body=json.dumps({"error": {"message": str(status)}}).encode(), retry_s=retry_s)


def asked(*answers: Answered | Unavailable) -> tuple[int | str, list[float]]:
    """The status that comes of these answers, one behind the other, and the rests between them."""
    left, rests = list(answers), list[float]()

    def ask(question: Question, request_id: str) -> Answered:
        found = left.pop(0)
        if isinstance(found, Unavailable):
            raise found
        return found

    try:
        status: int | str = answer(question(), ask, "id", sleep=rests.append).status
    except Unavailable as error:
        status = str(error)
    assert left == []
    return status, rests


def test_what_is_put_off_comes_again_when_the_service_says() -> None:
    assert asked(answered(429, 7.0), answered(503, 30.0), answered(429, 0.0), GOOD) == (200, [7.0, 30.0, 1.0])


def test_what_is_put_off_for_too_long_ends_the_run() -> None:
    told, rests = asked(answered(429, PATIENCE_S), answered(429, 1.0))
    assert (told, rests) == ("The service has put a request off for 600 s.", [PATIENCE_S])


def test_a_refusal_is_an_answer() -> None:
    assert asked(answered(400)) == (400, [])


def test_a_fault_is_an_answer_when_it_stays() -> None:
    rests = [*FAULT_RESTS_S]
    assert asked(*[answered(500)] * (len(rests) + 1)) == (500, rests)
    assert asked(answered(502), Unavailable("gone"), GOOD) == (200, rests[:2])


def test_a_service_that_stays_away_ends_the_run() -> None:
    rests = [*FAULT_RESTS_S]
    assert asked(*[Unavailable("gone")] * (len(rests) + 1)) == ("gone", rests)


def test_a_good_answer_is_kept_to_the_same_request_and_no_other(tmp_path: Path) -> None:
    file = tmp_path / "out.part"
    journal = Journal(file)
    journal.add(question(1), GOOD, "id-1")
    journal.add(question(2), answered(400), "id-2")
    journal.close(is_done=False)
    journal = Journal(file)
    assert [question(1) in journal, question(2) in journal, question(3) in journal] == [True, False, False]
    assert question(1, "another prompt") not in journal
    assert journal.line(question(1))["id"] == "id-1"
    renamed = FORM.question(1, {"prompt": "a", "custom_id": "new"})
    assert renamed in journal
    assert journal.line(renamed)["custom_id"] == "new"
    assert journal.line(question(2))["response"]["status_code"] == 400
    journal.add(question(2), GOOD, "id-3")
    assert question(2) in journal
    journal.close(is_done=True)
    assert list(tmp_path.iterdir()) == []


def test_a_journal_has_one_run_and_is_no_other_file(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "out.part")
    with pytest.raises(InvalidRequest, match="another run has it"):
        Journal(tmp_path / "out.part")
    journal.close(is_done=False)
    (tmp_path / "notes.part").write_text("somebody's notes, which are longer than any header of a store")
    with pytest.raises(InvalidRequest, match="no run has written it"):
        Journal(tmp_path / "notes.part")
    assert (tmp_path / "notes.part").read_text().startswith("somebody's notes")


def test_the_first_error_ends_a_run_and_what_was_answered_is_kept(tmp_path: Path) -> None:
    journal, begun = Journal(tmp_path / "out.part"), list[int]()

    def ask(question: Question, request_id: str) -> Answered:
        begun.append(question.number)
        if question.number == 3:
            raise InvalidRequest("no more")
        return GOOD

    told: list[None] = []
    with pytest.raises(InvalidRequest, match="no more"):
        ask_all(map(question, range(1, 9)), ask, journal, num_threads=1, told=lambda: told.append(None))
    assert begun == [1, 2, 3]
    assert [number for number in range(1, 9) if question(number) in journal] == [1, 2]
    begun.clear()
    ask_all(map(question, (1, 2, 4)), ask, journal, num_threads=4, told=lambda: told.append(None))
    assert begun == [4]
    assert len(told) == 2 + 3
    journal.close(is_done=False)


def test_what_had_begun_before_an_error_is_kept(tmp_path: Path) -> None:
    journal, has_failed = Journal(tmp_path / "out.part"), threading.Event()

    def ask(question: Question, request_id: str) -> Answered:
        if question.number == 2:
            has_failed.set()
            raise InvalidRequest("no more")
        assert has_failed.wait(60)
        return GOOD

    with pytest.raises(InvalidRequest, match="no more"):
        ask_all(map(question, (1, 2)), ask, journal, num_threads=2, told=lambda: None)
    assert question(1) in journal
    journal.close(is_done=False)


def test_items_are_taken_as_they_are_worked_on_each_once() -> None:
    taken, done = list[int](), list[int]()

    def items() -> Iterator[int]:
        for number in range(100):
            taken.append(number)
            yield number

    def work(number: int) -> None:
        assert len(taken) <= len(done) + 4
        done.append(number)

    in_threads(items(), work, num_threads=4)
    assert sorted(done) == [*range(100)]
