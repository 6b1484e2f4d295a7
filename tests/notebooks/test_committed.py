"""What is committed of a notebook was made by its own cells, and tells nothing of the machine that made it."""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path

import matplotlib.pyplot as plt
import nbformat
import pytest
from PIL import Image

from tests.house.test_order import MACHINE_PATH
from tests.notebooks.execute import NOTEBOOKS, PNG, REPOSITORY, STAMP, lessen_pictures, read, sources_digest

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


def test_each_notebook_is_in_the_table_of_the_page_for_researchers() -> None:
    listed = re.findall(
        r"\(\.\./notebooks/([^)]+)\)", (REPOSITORY / "docs" / "researchers.md").read_text(encoding="utf-8")
    )
    assert listed == [file.name for file in NOTEBOOKS]
    assert len(listed) >= 5


@each_notebook
def test_outputs_are_of_the_committed_sources(file: Path) -> None:
    notebook = read(file)
    assert list(outputs_of(notebook)) != []
    assert notebook.metadata.get(STAMP) == sources_digest(notebook), "execute it again: make notebooks"


@each_notebook
def test_every_cell_was_executed_in_order(file: Path) -> None:
    """Slow ones, too: what is committed is of the whole notebook."""
    counts = [cell.execution_count for cell in read(file).cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))


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


def test_a_lessened_picture_keeps_its_size_and_takes_fewer_bytes() -> None:
    output = nbformat.v4.new_output("display_data", data={PNG: drawn()})
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("draw()", outputs=[output])])
    lessen_pictures(notebook)
    before, after = (base64.b64decode(each) for each in (drawn(), notebook.cells[0].outputs[0].data[PNG]))
    assert len(after) < 0.6 * len(before)
    assert Image.open(io.BytesIO(after)).size == Image.open(io.BytesIO(before)).size


def drawn() -> str:
    """A figure as a notebook holds it."""
    figure, axes = plt.subplots()
    axes.bar(range(5), range(5))
    written = io.BytesIO()
    figure.savefig(written, format="png")
    plt.close(figure)
    return base64.b64encode(written.getvalue()).decode()
