"""The notebooks run top to bottom on a real cluster, in kernels of their own; their slow cells by `make notebooks`.

Those about tenants run where there are keys, in `test_exact.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from serve_app.cli.screen import URL_VARIABLE
from tests.notebooks.execute import NOTEBOOKS, REPOSITORY, SLOW, execute, is_slow, read, wants_keys

pytestmark = pytest.mark.cluster


WITHOUT_KEYS = [file for file in NOTEBOOKS if not wants_keys(read(file))]


@pytest.mark.parametrize("file", WITHOUT_KEYS, ids=lambda file: file.stem)
def test_a_notebook_runs(file: Path, base_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(URL_VARIABLE, base_url)
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    check_that_it_runs(file)


def check_that_it_runs(file: Path) -> None:
    """All of it but its slow cells, against the service that the environment names."""
    notebook = execute(read(file), left_out=SLOW)
    executed = [cell for cell in notebook.cells if cell.cell_type == "code" and not is_slow(cell)]
    assert len(executed) >= 4
    assert all(cell.execution_count for cell in executed)
