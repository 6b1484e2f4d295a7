"""Every how-to does what it says: its steps on a copy of the code, then the Python of `claims.md` that tries them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from runpy import run_path

import pytest
import torch

from tests.docs.sections import REPOSITORY
from tests.docs.steps import Edit, claims_of, copy_of, edits_of, run
from tests.families.families import Family
from tests.families.making import save_model
from tests.families.test_parity import test_greedy_equals_generate_with_chunks_hits_and_forks as check_parity

HOW_TO = REPOSITORY / "docs" / "how-to"
CLAIMS = (REPOSITORY / "tests" / "docs" / "claims.md").read_text(encoding="utf-8")
WITH_CLAIMS = (
    "add-a-parameter",
    "add-a-dialect",
    "add-a-sampler-stage",
    "add-a-route",
    "give-a-team-a-key",
    "bill-your-teams",
)


def page_of(name: str) -> str:
    return (HOW_TO / f"{name}.md").read_text(encoding="utf-8")


def test_every_how_to_is_tried() -> None:
    assert {file.stem for file in HOW_TO.glob("*.md")} == {*WITH_CLAIMS, "add-a-model-family"}


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_CLAIMS)
def test_what_a_how_to_says_holds_after_its_steps_and_not_before(name: str, tmp_path: Path) -> None:
    page = page_of(name)
    root = copy_of(REPOSITORY, tmp_path, "serve_app", "tests")
    (claims,) = claims_of(CLAIMS.partition(f"\n## {name}\n")[2].partition("\n## ")[0])
    with pytest.raises(Exception):  # noqa: B017, PT011 - each fails in a way of its own
        run(claims, root)
    for edit in edits_of(page):
        edit.apply(root)
    run(claims, root)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """So small a product is sooner computed than shared out."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
def test_a_family_of_the_how_to_says_what_generate_says(tmp_path: Path) -> None:
    root = copy_of(REPOSITORY, tmp_path, "tests/families")
    for edit in edits_of(page_of("add-a-model-family")):
        edit.apply(root)
    served = run_path(str(root / "tests" / "families" / "families.py"))["SERVED"]
    (added,) = [each for each in served if each.label == "llama-wide heads"]

    def model_folder(family: Family) -> Path:
        folder = tmp_path / "model"
        save_model(family.name, family.settings, folder, seed=family.seed)
        return folder

    check_parity(added, model_folder)


def test_what_is_said_to_be_refused_is_said_where_the_how_to_has_it() -> None:
    rows = re.findall(
        r"^\| ([^|]+) \| [^|]+ \| (?:`\w+` in )?`([\w/]+\.py)` \|$", page_of("add-a-model-family"), re.MULTILINE
    )
    assert len(rows) > 6
    for said, file in rows:
        code = (REPOSITORY / "serve_app" / file).read_text(encoding="utf-8")
        assert all(part in code for part in map(str.strip, said.split("…"))), f"{file} does not say {said!r}"


def test_lines_that_are_not_there_or_twice_cannot_be_changed(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\ny = 1\nx = 1\n")
    for old in ("x = 1\n", "z = 1\n"):
        with pytest.raises(AssertionError, match="has these lines"):
            Edit(file="a.py", old=old, new="").apply(tmp_path)
    Edit(file="a.py", old="y = 1\n", new="y = 2\n").apply(tmp_path)
    assert (tmp_path / "a.py").read_text() == "x = 1\ny = 2\nx = 1\n"


def test_a_diff_is_read_hunk_by_hunk() -> None:
    page = "```diff\n--- a/f.py\n+++ b/f.py\n@@\n a\n-b\n+c\n@@\n+d\n e\n--- /dev/null\n+++ b/g.py\n@@\n+new\n```\n"
    assert list(edits_of(page)) == [
        Edit(file="f.py", old="a\nb\n", new="a\nc\n"),
        Edit(file="f.py", old="e\n", new="d\ne\n"),
        Edit(file="g.py", old="", new="new\n"),
    ]
