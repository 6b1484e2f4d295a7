"""Executes notebooks top to bottom and keeps what came out: `python -m tests.notebooks.execute [--fast] [01 02 …]`.

`--fast` leaves out cells that are tagged slow. Each notebook has a kernel of its own, and a service of its own unless
`SERVE_APP_URL` names one for all.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from PIL import Image

from serve_app.lab.local import find_or_start_with_keys

REPOSITORY = Path(__file__).parents[2]
FOLDER = REPOSITORY / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
CELL_TIMEOUT_S = 600
STARTUP_TIMEOUT_S = 300
SLOW = "slow"
FAST = "--fast"
PNG = "image/png"
NUM_COLOURS = 128
STAMP = "executed_sources"
"""In a notebook's metadata: the digest of the sources that its outputs were made by."""


def execute(notebook: nbformat.NotebookNode, *, left_out: str = "") -> nbformat.NotebookNode:
    """Run the cells, but those with that tag, in a new kernel in the folder of the notebooks.

    Raises CellExecutionError.
    """
    runner: Any = NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT_S,
        startup_timeout=STARTUP_TIMEOUT_S,
        skip_cells_with_tag=left_out,
        resources={"metadata": {"path": str(FOLDER)}},
        record_timing=False,
    )
    return runner.execute()


def is_slow(cell: nbformat.NotebookNode) -> bool:
    """Whether a cell takes longer than a few seconds, by its tags."""
    return SLOW in cell.metadata.get("tags", ())


def wants_keys(notebook: nbformat.NotebookNode) -> bool:
    """Whether it asks for a service with keys, and for an administrator's."""
    return any(f"{find_or_start_with_keys.__name__}(" in cell.source for cell in notebook.cells)


def sources_digest(notebook: nbformat.NotebookNode) -> str:
    """Of what outputs are made by: the sources of all cells of code, in order."""
    sources = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    return hashlib.sha256(json.dumps(sources).encode()).hexdigest()


def lessen_pictures(notebook: nbformat.NotebookNode) -> None:
    """Encode what was drawn with palettes: figures have few colours, and take a third of the bytes so."""
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            if PNG in output.get("data", {}):
                output.data[PNG] = _lessened(output.data[PNG])


def _lessened(encoded: str) -> str:
    picture = Image.open(io.BytesIO(base64.b64decode(encoded))).convert("RGB")
    written = io.BytesIO()
    picture.quantize(NUM_COLOURS, dither=Image.Dither.NONE).save(written, "PNG", optimize=True)
    return base64.b64encode(written.getvalue()).decode()


def read(file: Path) -> nbformat.NotebookNode:
    return nbformat.read(file, as_version=4)


def refresh(file: Path, *, left_out: str = "") -> None:
    """Execute a notebook and write it with its outputs, stamped."""
    notebook = execute(read(file), left_out=left_out)
    lessen_pictures(notebook)
    notebook.metadata[STAMP] = sources_digest(notebook)
    notebook.metadata.language_info = {"name": "python"}  # of which Python it was is no difference
    nbformat.write(notebook, file)


def main(words: list[str]) -> None:
    left_out = SLOW if FAST in words else ""
    names = [word for word in words if word != FAST]
    os.environ.setdefault("PYTHONPATH", str(REPOSITORY))
    for file in NOTEBOOKS:
        if not names or file.name.startswith(tuple(names)):
            started = time.monotonic()
            refresh(file, left_out=left_out)
            print(f"{file.name}: {time.monotonic() - started:.0f} s, {file.stat().st_size // 1024} KiB", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
