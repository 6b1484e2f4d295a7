"""What the page of performance says was measured is what the history of measurements has."""

from __future__ import annotations

import json
import re

from tests.docs.contract import bodies
from tests.docs.dialects import PAGES_OF
from tests.docs.sections import REPOSITORY

README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
PERFORMANCE = (REPOSITORY / "docs" / "performance.md").read_text(encoding="utf-8")


def test_figures_of_the_page_are_those_of_the_line_it_names() -> None:
    date = re.search(r"the line of (\S+) in `benchmarks/history.jsonl`", PERFORMANCE)
    assert date is not None
    lines = (REPOSITORY / "benchmarks" / "history.jsonl").read_text(encoding="utf-8").splitlines()
    (figures,) = [json.loads(line)["figures"] for line in lines if json.loads(line)["date"].startswith(date[1])][-1:]
    one, many, eight, adapted = (
        figures[f"decode {case}, ms"] for case in ("1 x 256", "32 x 256", "8 x 256", "8 x 256, 8 of 8 adapters")
    )
    said = re.search(
        r"steps of\s+(\d+) ms for one sequence, (\d+) ms for 32, (\d+) ms for eight, (\d+) ms for", PERFORMANCE
    )
    assert said is not None
    assert list(said.groups()) == [f"{value:.0f}" for value in (one, many, eight, adapted)]
    assert f"{32 * one / many:.1f} times the tokens per second of one" in PERFORMANCE
    assert f"takes {adapted / eight:.1f} times one without" in PERFORMANCE


def test_the_readme_counts_dialects_and_parameters_as_they_are() -> None:
    assert f"{('Seven', 'Eight', 'Nine', 'Ten')[len(PAGES_OF) - 7]} dialects" in README
    least = re.search(r"Over (\d+) parameters", README)
    assert least is not None
    assert int(least[1]) < len(bodies()["union"]["parameters"]) < int(least[1]) + 50
