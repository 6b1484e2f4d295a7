"""Every query of the rules and boards names series and labels that GET /metrics has, and no panel is forgotten."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from dataclasses import replace

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from serve_app.core.cards import Residency, Scale
from serve_app.core.delta import Load
from serve_app.core.errors import EngineFailed
from serve_app.core.ledger import FlowUsage, UsageReport
from serve_app.http.app import build_app
from serve_app.router.fleet import Fleet
from serve_app.router.router import Router
from tests.fakes import FakeBackend, model_card, replica_card
from tests.observe.queries import (
    BOARDS,
    REPOSITORY,
    Query,
    Selected,
    every_query,
    grouped,
    of_board,
    rules,
    selected,
    variables_of,
)

Labels = Mapping[str, frozenset[str]]
RESIDENCY = Residency(load_s=0.5, num_bytes=7, max_bytes=8)
"""Of an engine that knows all of it."""


async def scraped() -> str:
    """What a router that has served a completion with a shadow tells; both went on once where their replica failed."""
    fleet = Fleet("router-0", aliases={"prod": {"to": "demo", "shadow": {"demo": 100}}})
    usage = UsageReport(elapsed_ns=2, idle_ns=1, flows=(FlowUsage(flow="acme", engine_ns=1),))
    model = replace(model_card("demo"), max_num_sequences=4, max_waiting=4)
    card = replace(replica_card("r0", model), load=Load(num_blocks=4), usage=usage, residency=RESIDENCY)
    backend = FakeBackend(card, is_stepped=True)
    fleet.put(card, backend)
    fleet.expect(["demo"], (), {"demo": Scale(wanted=1, starting=0, draining=0)})
    transport = httpx.ASGITransport(build_app(Router(fleet)))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        body = {"model": "prod", "prompt": "one two", "max_tokens": 4}
        asking = asyncio.create_task(client.post("/v1/completions", json=body))
        fails_in = 2
        while not asking.done():
            await asyncio.sleep(0)
            fails_in -= backend.num_live > 0
            backend.fail(EngineFailed("failed")) if fails_in == 0 else backend.step()
        assert (await asking).status_code == 200
        text = (await client.get("/metrics")).text
    await fleet.close()
    return text


@pytest.fixture(scope="module")
def known() -> Labels:
    """The labels of every series, those that rules record included."""
    samples = [
        sample
        for family in text_string_to_metric_families(asyncio.run(scraped()))
        for sample in family.samples
    ]  # fmt: skip
    found = {name: frozenset[str]() for name in {sample.name for sample in samples}}
    for sample in samples:
        found[sample.name] |= frozenset(sample.labels)
    recorded = {rule["record"]: grouped(rule["expr"]) - {"le"} for rule in rules() if "record" in rule}
    return found | recorded


def faults(query: Query, known: Labels) -> list[str]:
    """What of a query no scrape would answer."""
    series = list(selected(query.expr))
    unknown = [each.name for each in series if each.name not in known]
    there = frozenset[str]().union(*(known.get(each.name, ()) for each in series))
    found = [f"no series {name}" for name in unknown]
    found += [f"{each.name} has no {label}" for each in series for label in each.labels - known.get(each.name, there)]
    found += [f"nothing has {label}" for label in grouped(query.expr) - there]
    shown = grouped(query.expr) or there
    return found + [f"nothing that is left has {label}" for label in query.told if label not in shown | {"value"}]


@pytest.mark.parametrize("query", every_query(), ids=lambda query: query.place)
def test_a_query_names_only_what_is_there(query: Query, known: Labels) -> None:
    assert list(selected(query.expr))
    assert faults(query, known) == []


@pytest.mark.parametrize("file", BOARDS, ids=lambda file: file.stem)
def test_the_choices_of_a_board_are_of_series_that_are_there(file, known: Labels) -> None:
    for name, (series, label) in variables_of(file).items():
        assert label in known[series], name


def test_every_series_but_a_few_is_in_a_rule_or_on_a_board(known: Labels) -> None:
    """What nobody looks at is no use."""
    asked = {each.name for query in every_query() for each in selected(query.expr)}
    ours = {name for name in known if name.startswith("serve_app_") and not name.endswith(("_created", "_sum"))}
    assert ours - asked - {f"{name.removesuffix('_bucket')}_count" for name in asked} == set()


@pytest.mark.parametrize("file", BOARDS, ids=lambda file: file.stem)
def test_a_board_has_an_address_of_its_own_and_no_panel_upon_another(file) -> None:
    board = json.loads(file.read_text(encoding="utf-8"))
    assert board["uid"] == f"serve-app-{file.stem}"
    taken = [
        (panel["gridPos"]["x"] + x, panel["gridPos"]["y"] + y)
        for panel in board["panels"]
        for x in range(panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["h"])
    ]
    assert len(taken) == len(set(taken))
    assert max(x for x, _ in taken) < 24
    assert list(of_board(file))


@pytest.mark.parametrize(
    ("expr", "fault"),
    [
        ("sum(rate(serve_app_request_total[5m]))", "no series serve_app_request_total"),
        ('serve_app_requests_total{code="200"}', "serve_app_requests_total has no code"),
        ("sum by (tenant) (rate(serve_app_requests_total[5m]))", "nothing has tenant"),
    ],
)
def test_a_query_of_what_is_not_there_is_found(expr: str, fault: str, known: Labels) -> None:
    assert faults(Query(place="here", expr=expr), known) == [fault]
    legend = Query(place="here", expr="sum by (route) (serve_app_requests_total)", told=("status",))
    assert faults(legend, known) == ["nothing that is left has status"]


def test_the_guide_has_a_row_for_every_alert() -> None:
    guide = (REPOSITORY / "docs" / "guides" / "watch-a-service.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `(ServeApp\w+)` \|", guide, re.MULTILINE) == [
        rule["alert"] for rule in rules() if "alert" in rule
    ]


def test_series_are_told_from_functions_clauses_and_windows() -> None:
    expr = 'sum by (le, model) (rate(a_bucket{x=~"$y",z!="1"}[5m])) > 2 and absent(b) unless on (q) c or vector(0)'
    found = [
        Selected(name="a_bucket", labels=frozenset({"x", "z"})),
        Selected(name="b", labels=frozenset()),
        Selected(name="c", labels=frozenset()),
    ]
    assert list(selected(expr)) == found
    assert grouped(expr) == {"le", "model", "q"}
