"""Small files of real models load and give what transformers gives, for a share of the folders that there are."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.families.real import COLUMNS, LAYERS, SHARED, TABLE, UNKNOWN, loads, make, names, read_config

pytestmark = pytest.mark.slow

SHARE = (
    "chatglm3-6b", "deepseek-r1", "gemma-3-4b-it", "gpt-oss-20b", "granite-docling", "kimi-k2", "llama-3.2-vision",
    "minicpm3-4b", "olmo-2-7b", "phi-2", "phi-3-mini-128k", "qwen2.5-vl", "qwen3.5",
)  # fmt: skip
"""One of each kind: `python -m tests.families.real FOLDERS` tries all of them."""


@pytest.mark.parametrize("name", SHARE)
def test_a_real_folder_is_served_as_transformers_serves_it_or_refused_for_its_architecture(
    name: str, tmp_path: Path
) -> None:
    if not (SHARED / name).is_dir():
        pytest.skip(f"{name} is not here")
    case = make(SHARED / name, tmp_path / name)
    family = loads(case)
    if family.startswith("refused"):
        assert family in (f"refused, {LAYERS}", f"refused, {UNKNOWN}")
        assert (family == f"refused, {UNKNOWN}") == (read_config(case.path) is None)
    else:
        assert {column: tried(case) for column, tried in COLUMNS.items()} == dict.fromkeys(COLUMNS, "equal")


def test_the_table_of_the_page_has_every_folder_and_no_difference() -> None:
    rows = TABLE.read_text(encoding="utf-8").splitlines()[2:]
    assert rows
    assert "DIFFERENT" not in "".join(rows)
    if SHARED.is_dir():
        assert [row.split(" | ")[0].removeprefix("| ") for row in rows] == names()
