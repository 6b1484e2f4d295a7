"""The boards are such as Grafana reads: its JSON model, its units and panels, one data source that is chosen.

Grafana itself is run by no test. Where its SDK is installed (`pip install grafana-foundation-sdk`), that reads every
board, too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.observe.queries import BOARDS

SCHEMA_VERSION = 39
"""Of Grafana 10 and 11; later ones read it and bring it up to theirs."""
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
UNITS = frozenset({"bytes", "percentunit", "reqps", "s", "short"})
"""Ids of Grafana's value formats (packages/grafana-data, valueFormats/categories.ts)."""
MEMBERS = {
    "row": {"type", "title", "id", "gridPos", "collapsed", "panels"},
    "stat": {"type", "title", "description", "id", "gridPos", "datasource", "fieldConfig", "targets", "options"},
    "timeseries": {"type", "title", "description", "id", "gridPos", "datasource", "fieldConfig", "targets", "options"},
}
"""Of a panel, by its type; all three are part of Grafana, none a plugin to install."""
OF_BOARD = frozenset(
    {
        "uid", "title", "description", "tags", "schemaVersion", "version", "editable", "graphTooltip", "refresh",
        "time", "timezone", "links", "templating", "panels",
    }
)  # fmt: skip
BUILT_IN = frozenset({"__rate_interval", "datasource"})
VARIABLE = re.compile(r"\$\{?(\w+)\}?")
every_board = pytest.mark.parametrize("file", BOARDS, ids=lambda file: file.stem)


def read(file: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return content


def units_of(panel: dict[str, Any]) -> Iterator[str]:
    """Of all its fields, and of those that differ."""
    config = panel.get("fieldConfig", {"defaults": {}, "overrides": []})
    if "unit" in config["defaults"]:
        yield config["defaults"]["unit"]
    yield from (each["value"] for one in config["overrides"] for each in one["properties"] if each["id"] == "unit")


@every_board
def test_a_board_and_its_panels_have_what_the_model_knows_and_nothing_else(file: Path) -> None:
    board = read(file)
    assert set(board) <= OF_BOARD
    assert board["schemaVersion"] == SCHEMA_VERSION
    assert "id" not in board, "which is one installation's own"
    for panel in board["panels"]:
        assert set(panel) <= MEMBERS[panel["type"]], panel["title"]
        assert set(panel["gridPos"]) == {"x", "y", "w", "h"}
        assert set(units_of(panel)) <= UNITS, panel["title"]
        targets = panel.get("targets", ())
        assert panel["type"] == "row" or targets, panel["title"]
        assert len({each["refId"] for each in targets}) == len(targets), panel["title"]
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)


@every_board
def test_every_query_goes_to_the_prometheus_that_is_chosen(file: Path) -> None:
    board = read(file)
    chosen, *others = board["templating"]["list"]
    assert (chosen["name"], chosen["type"], chosen["query"]) == ("datasource", "datasource", "prometheus")
    panels = [panel for panel in board["panels"] if panel["type"] != "row"]
    asking = [*others, *panels, *(target for panel in panels for target in panel["targets"])]
    assert [each for each in asking if each["datasource"] != SOURCE] == []
    assert [each["definition"] for each in others] == [each["query"]["query"] for each in others]


@every_board
def test_every_variable_that_is_used_is_there_and_the_other_way_round(file: Path) -> None:
    board = read(file)
    there = {each["name"] for each in board["templating"]["list"]}
    used = set(VARIABLE.findall(json.dumps(board["panels"]))) | {"datasource"}
    assert used - BUILT_IN == there - BUILT_IN


@every_board
def test_the_sdk_of_grafana_reads_a_board_and_loses_nothing(file: Path) -> None:
    models = pytest.importorskip("grafana_foundation_sdk.models", reason="needs grafana-foundation-sdk")
    encoder = pytest.importorskip("grafana_foundation_sdk.cog.encoder")
    plugins = pytest.importorskip("grafana_foundation_sdk.cog.plugins")
    from importlib import import_module

    plugins.register_default_plugins()
    dashboard = import_module(f"{models.__name__}.dashboard")
    board = read(file)
    for variable in board["templating"]["list"]:
        variable.pop("definition", None)  # what Grafana shows of a query in its list of variables, and no SDK writes
    again = json.loads(encoder.JSONEncoder().encode(dashboard.Dashboard.from_json(board)))
    assert list(lost(board, again)) == []


def lost(one: Any, other: Any, place: str = "") -> Iterator[str]:
    """Where the second has not what the first has."""
    if isinstance(one, dict) and isinstance(other, dict):
        for name, value in one.items():
            yield from lost(value, other.get(name), f"{place}.{name}")
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for number, (value, found) in enumerate(zip(one, other, strict=True)):
            yield from lost(value, found, f"{place}[{number}]")
    elif one != other:
        yield f"{place}: {one!r} became {other!r}"
