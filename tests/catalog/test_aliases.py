"""Aliases as a cluster file has them: what is accepted, what each error names, in which order targets come."""

from __future__ import annotations

import pytest

from serve_app.catalog.aliases import Alias, addresses_of, read_alias, read_aliases
from serve_app.catalog.files import CatalogError
from serve_app.catalog.resolve import Catalog
from serve_app.core.cards import ModelCard
from serve_app.core.errors import AdapterNotFound
from serve_app.core.names import ModelRef
from serve_app.core.tenants import Rights
from tests.fakes import adapter_card, model_card

SPLIT = {"demo:a": 1, "demo:b": 3, "demo:c": 0}


def models() -> list[ModelCard]:
    return [model_card("demo", adapter_card("a"), adapter_card("b"), adapter_card("c")), model_card("other")]


@pytest.mark.parametrize(
    ("said", "must"),
    [
        (7, "must be an address, or weights by address"),
        ({}, "must have 1 to 16 targets, found 0"),
        ({f"demo:{number}": 1 for number in range(17)}, "found 17"),
        ({"demo:a": -1}, "the weight of 'demo:a' must be a number from 0 to 1e[+]09, found -1"),
        ({"demo:a": float("nan")}, "'demo:a' must be a number from 0 to 1e[+]09, found nan"),
        ({"demo:a": float("inf")}, "found inf"),
        ({"demo:a": True}, "found True"),
        ({"demo:a": "95"}, "found '95'"),
        ({"demo:a": 0, "demo:b": 0}, "at least one weight must be above 0"),
        ({" demo": 1}, "a target must be an address such as demo:sql, found ' demo'"),
        ({"to": "demo", "shade": {}}, 'takes "shadow" beside "to", found shade'),
        ({"to": "demo", "shadow": "demo:a"}, "\"shadow\" must be percentages by address as .*, found 'demo:a'"),
        (
            {"to": "demo", "shadow": {"demo:a": 101}},
            "the percentage of 'demo:a' must be a number from 0 to 100, found 101",
        ),
        ({"to": {"demo": 0}, "shadow": {"demo:a": 1}}, "at least one weight must be above 0"),
        ({7: 1}, "a target must be an address such as demo:sql, found 7"),
    ],
)
def test_what_is_no_alias_is_refused_by_its_place(said: object, must: str) -> None:
    with pytest.raises(CatalogError, match=f"alias 'prod': .*{must}"):
        read_aliases({"prod": said})


def test_targets_come_as_they_are_drawn_and_by_themselves_the_heaviest_first() -> None:
    assert read_alias(SPLIT).targets == ("demo:b", "demo:a")
    aliases = read_aliases({"prod": SPLIT, "one": "prod", "far": {"one": 1, "other": 5}})
    assert list(addresses_of("far", aliases)) == ["other", "demo:b", "demo:a"]
    assert list(addresses_of("far", aliases, lambda _, weights: sorted(weights))) == [
        "demo:a",
        "demo:b",
        "demo:c",
        "other",
    ]
    assert list(addresses_of("demo", aliases)) == ["demo"]


def test_a_shadow_stands_beside_what_answers() -> None:
    alias = read_alias({"to": SPLIT, "shadow": {"demo:c": 10, "demo": 0}})
    assert (alias.weights, alias.shadow) == (SPLIT, {"demo:c": 10})
    assert alias.told().endswith("; demo:c computes 10% of them, too, unseen")
    assert read_alias({"to": "demo"}) == read_alias("demo")
    assert read_alias({"to": 5, "demo": 1}).targets == ("to", "demo"), "a model may have that name"


def test_an_alias_is_told_in_one_sentence() -> None:
    assert read_alias(SPLIT).told().startswith("of its requests answers demo:b 75%, demo:a 25%; ")
    assert [
        alias.is_weighted for alias in (read_alias(SPLIT), read_alias("demo"), Alias(weights={"a": 1, "b": 0}))
    ] == [
        True,
        False,
        False,
    ]


def test_a_circle_through_one_of_several_targets_is_refused() -> None:
    with pytest.raises(CatalogError, match="circle: a → b → a"):
        read_aliases({"a": {"demo": 99, "b": 1}, "b": {"demo": 0, "a": 0.5}})


def test_the_first_target_that_can_be_used_answers() -> None:
    catalog = Catalog(
        models(), {"prod": {"demo:gone": 9, "nobody": 5, "demo:b": 2, "demo:a": 1}, "dead": {"demo:gone": 1, "x": 1}}
    )
    assert catalog.resolve("prod") == ModelRef(base="demo", adapter="b", version="v1")
    assert catalog.resolve("prod", order=lambda _, weights: [*reversed(weights)]).adapter == "a"
    with pytest.raises(AdapterNotFound, match='found "gone"'):
        catalog.resolve("dead")


def test_adapters_behind_an_alias_are_those_of_the_first_target_that_has_them() -> None:
    catalog = Catalog(models(), {"base": {"other": 9, "demo": 1}})
    assert catalog.resolve("base") == ModelRef(base="other")
    assert catalog.resolve("base:a") == ModelRef(base="demo", adapter="a", version="v1")


def test_a_tenant_gets_the_targets_that_it_may_use_and_sees_no_alias_without_any() -> None:
    aliases = {"prod": {"demo:a": 99, "demo:b": 1}, "base": {"other": 1, "demo": 1}}
    catalog = Catalog(models(), aliases, rights=Rights(("demo:b",)))
    assert catalog.resolve("prod").adapter == "b"
    assert list(catalog.aliases) == ["prod"]
