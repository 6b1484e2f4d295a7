"""What is committed of a notebook was made by its own cells, and tells nothing of the machine that made it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest

from tests.house.test_order import MACHINE_PATH
from tests.notebooks.execute import NOTEBOOKS, STAMP, is_slow, read, sources_digest

MAX_BYTES = 300_000
HOST = re.compile(r"https?://(?P<host>[\w.\-\[\]:]+?)(?=[/:\s\"'<\\]|$)")
OURS = {"127.0.0.1"}

each_notebook = pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)


def outputs_of(notebook: nbformat.NotebookNode) -> Iterator[nbformat.NotebookNode]:
    for cell in notebook.cells:
        yield from cell.get("outputs", ())


def shown_text(notebook: nbformat.NotebookNode) -> str:
    """Everything that outputs say, pictures left out."""
    texts = []
    for output in outputs_of(notebook):
        data = {kind: value for kind, value in output.get("data", {}).items() if not kind.startswith("image/")}
        texts.append(json.dumps([data, output.get("text", ""), output.get("traceback", [])]))
    return "\n".join(texts)


def foreign_hosts(text: str) -> set[str]:
    return {found["host"] for found in HOST.finditer(text)} - OURS


def test_there_are_the_seven_notebooks_in_their_order() -> None:
    assert [file.name[:2] for file in NOTEBOOKS] == [f"0{number}" for number in range(1, 8)]


@each_notebook
def test_outputs_are_of_the_committed_sources(file: Path) -> None:
    """A notebook that was not executed has neither outputs nor a stamp."""
    notebook = read(file)
    expected = sources_digest(notebook) if list(outputs_of(notebook)) else None
    assert notebook.metadata.get(STAMP) == expected, "execute it again: make notebooks"


@each_notebook
def test_every_cell_that_is_not_slow_was_executed_in_order_or_none_was(file: Path) -> None:
    cells = [cell for cell in read(file).cells if cell.cell_type == "code" and not is_slow(cell)]
    counts = [cell.execution_count for cell in cells]
    assert counts == sorted(counts) if None not in counts else set(counts) == {None}


@each_notebook
def test_no_output_is_an_error_or_a_warning(file: Path) -> None:
    notebook = read(file)
    assert [output.evalue for output in outputs_of(notebook) if output.output_type == "error"] == []
    assert [output.text for output in outputs_of(notebook) if output.get("name") == "stderr"] == []


@each_notebook
def test_no_output_names_a_path_or_another_host(file: Path) -> None:
    text = shown_text(read(file))
    assert MACHINE_PATH.findall(text) == []
    assert foreign_hosts(text) == set()


@each_notebook
def test_a_notebook_is_small(file: Path) -> None:
    assert file.stat().st_size < MAX_BYTES


@each_notebook
def test_links_between_notebooks_lead_somewhere(file: Path) -> None:
    text = "\n".join(cell.source for cell in read(file).cells if cell.cell_type == "markdown")
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (file.parent / target).exists(), target


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("at http://127.0.0.1:8000/v1", set()),
        ("at https://example.org/x", {"example.org"}),
        ('"http://10.0.0.7:9"', {"10.0.0.7"}),
    ],
)
def test_a_foreign_host_is_told_from_ours(text: str, hosts: set[str]) -> None:
    assert foreign_hosts(text) == hosts


def test_a_changed_source_changes_the_digest() -> None:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1 + 1")])
    before = sources_digest(notebook)
    notebook.cells[0].outputs = [nbformat.v4.new_output("stream", text="2")]
    assert sources_digest(notebook) == before
    notebook.cells[0].source = "1 + 2"
    assert sources_digest(notebook) != before
