"""Reads what rules and boards ask Prometheus for: which series, by which labels."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

REPOSITORY = Path(__file__).parents[2]
OBSERVE = REPOSITORY / "serve_app" / "observe"
BOARDS = sorted((OBSERVE / "boards").glob("*.json"))
RULES = OBSERVE / "rules.yaml"

SELECTOR = re.compile(r"(?P<name>[a-zA-Z_:][\w:]*)\s*(?:\{(?P<matchers>[^}]*)\})?(?P<call>\s*\()?")
CLAUSE = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\((?P<labels>[^)]*)\)")
MATCHER = re.compile(r'(?P<label>\w+)\s*(?:=~|!~|!=|=)\s*"[^"]*"')
VALUES = re.compile(r"label_values\((?P<name>\w+), (?P<label>\w+)\)")
WINDOW = re.compile(r"\[[^\]]*\]")
WORDS = frozenset({"and", "or", "unless", "bool", "offset"})
TOLD = re.compile(r"\{\{\s*(?:\$labels\.)?(\w+)\s*\}\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """One expression.

    place: where it stands
    told:  labels that a legend or an annotation shows
    """

    place: str
    expr: str
    told: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Selected:
    """A series that a query names, and the labels that it is chosen by."""

    name: str
    labels: frozenset[str]


def selected(expr: str) -> Iterator[Selected]:
    """Every series of an expression; functions, aggregations and the labels of clauses are none."""
    bare = WINDOW.sub("", CLAUSE.sub(" ", expr))
    for found in SELECTOR.finditer(bare):
        if not found["call"] and found["name"] not in WORDS:
            labels = frozenset(each["label"] for each in MATCHER.finditer(found["matchers"] or ""))
            yield Selected(name=found["name"], labels=labels)


def grouped(expr: str) -> frozenset[str]:
    """Every label of its clauses."""
    return frozenset(
        label.strip() for found in CLAUSE.finditer(expr) for label in found["labels"].split(",") if label.strip()
    )


def of_board(file: Path) -> Iterator[Query]:
    """What the panels of a board show."""
    for panel in json.loads(file.read_text(encoding="utf-8"))["panels"]:
        for target in panel.get("targets", ()):
            told = tuple(TOLD.findall(target["legendFormat"]))
            yield Query(place=f"{file.stem}: {panel['title']}", expr=target["expr"], told=told)


def variables_of(file: Path) -> Mapping[str, tuple[str, str]]:
    """The variables of a board that Prometheus is asked for: series and label, by name."""
    listed = json.loads(file.read_text(encoding="utf-8"))["templating"]["list"]
    found = {each["name"]: VALUES.fullmatch(each["definition"]) for each in listed if each["type"] == "query"}
    assert all(found.values())
    return {name: (each["name"], each["label"]) for name, each in found.items() if each is not None}


def rules() -> list[dict[str, Any]]:
    """Every rule, recording and alerting."""
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def of_rules() -> Iterator[Query]:
    for rule in rules():
        told = tuple(TOLD.findall(" ".join(rule.get("annotations", {}).values())))
        yield Query(place=f"rules: {rule.get('record') or rule['alert']}", expr=rule["expr"], told=told)


def every_query() -> list[Query]:
    return [*of_rules(), *(query for file in BOARDS for query in of_board(file))]


def filled_in(expr: str) -> str:
    """What Grafana makes of it where everything is chosen."""
    return re.sub(r"\$\w+(?=\")", ".*", expr.replace("$__rate_interval", "5m"))
