"""Executes notebooks top to bottom and keeps what came out: `python -m tests.notebooks.execute [01 02 …]`.

Each has a kernel of its own and a service of its own, unless `SERVE_APP_URL` names one for all.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

REPOSITORY = Path(__file__).parents[2]
FOLDER = REPOSITORY / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
CELL_TIMEOUT_S = 600
SLOW = "slow"
STAMP = "executed_sources"
"""In a notebook's metadata: the digest of the sources that its outputs were made by."""


def execute(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Run every cell in a new kernel, in the folder of the notebooks. Raises CellExecutionError."""
    runner: Any = NotebookClient(
        notebook, timeout=CELL_TIMEOUT_S, resources={"metadata": {"path": str(FOLDER)}}, record_timing=False
    )
    return runner.execute()


def without_slow(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """The same without the cells that are tagged so."""
    kept = [cell for cell in notebook.cells if SLOW not in cell.metadata.get("tags", ())]
    return nbformat.from_dict({**notebook, "cells": kept})


def sources_digest(notebook: nbformat.NotebookNode) -> str:
    """Of what a person wrote: kinds and sources of all cells, in order."""
    written = [[cell.cell_type, cell.source] for cell in notebook.cells]
    return hashlib.sha256(json.dumps(written).encode()).hexdigest()


def read(file: Path) -> nbformat.NotebookNode:
    return nbformat.read(file, as_version=4)


def refresh(file: Path) -> None:
    """Execute a notebook and write it with its outputs, stamped."""
    notebook = execute(read(file))
    notebook.metadata[STAMP] = sources_digest(notebook)
    notebook.metadata.language_info = {"name": "python"}  # of which Python it was is no difference
    nbformat.write(notebook, file)


def main(names: list[str]) -> None:
    os.environ.setdefault("PYTHONPATH", str(REPOSITORY))
    for file in NOTEBOOKS:
        if not names or file.name.startswith(tuple(names)):
            started = time.monotonic()
            refresh(file)
            print(f"{file.name}: {time.monotonic() - started:.0f} s, {file.stat().st_size // 1024} KiB", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
