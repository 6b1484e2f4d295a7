"""What the name of a model means to the catalog."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.catalog.errors import CatalogError
from serve_app.catalog.resolve import Catalog
from serve_app.core.cards import AdapterCard, ModelCard
from serve_app.core.errors import AdapterNotFound, AdapterUnusable, Forbidden, InvalidRequest, ModelNotFound, ServeError
from serve_app.core.names import ModelRef


def model(name: str, *adapters: str, broken: tuple[str, ...] = ()) -> ModelCard:
    cards = [
        AdapterCard(name=adapter, version=f"{name}/{adapter}", rank=4, root=f"/srv/{name}/{adapter}")
        for adapter in adapters
    ]
    cards += [
        AdapterCard(name=adapter, version="", reason="rank 999", root=f"/srv/{name}/{adapter}") for adapter in broken
    ]
    return ModelCard(name=name, root="/", created=0, max_model_len=8, vocab_size=9, adapters=tuple(cards))


def ref(base: str, adapter: str | None = None) -> ModelRef:
    return ModelRef(base=base, adapter=adapter, version=f"{base}/{adapter}" if adapter else "")


CATALOG = Catalog(
    [
        model("demo", "pirate", "json", "v2", broken=("huge",)),
        model("demo:v2", "x"),
        model("org/other", "json", "solo"),
        model("plain"),
        model("with#sign"),
    ],
    {"prod": "demo:pirate", "best": "prod", "later": "demo:unborn", "base": "demo", "plain": "demo"},
)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("demo", ref("demo")),
        (" demo ", ref("demo")),
        ("demo:", ref("demo")),
        ("demo: ", ref("demo")),
        ("demo::", ref("demo")),
        ("demo#", ref("demo")),
        ("with#sign", ref("with#sign")),  # an id as it stands comes first
        ("demo:pirate", ref("demo", "pirate")),
        ("demo: pirate ", ref("demo", "pirate")),
        ("demo:pirate#", ref("demo", "pirate")),
        ("demo::pirate", ref("demo", "pirate")),
        ("demo:v2", ref("demo:v2")),  # the base, not the adapter of the same address
        ("demo::v2", ref("demo", "v2")),  # which still has an address
        ("demo:v2:x", ref("demo:v2", "x")),  # the longest base
        ("org/other:json", ref("org/other", "json")),
        ("solo", ref("org/other", "solo")),
        ("pirate", ref("demo", "pirate")),
        ("prod", ref("demo", "pirate")),
        ("best", ref("demo", "pirate")),
        ("plain", ref("plain")),  # an alias never hides a model
    ],
)
def test_a_name_means_the_first_thing_that_fits(name: str, expected: ModelRef) -> None:
    assert CATALOG.resolve(name) == expected


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("gpt-5", ModelNotFound, 'served [(]demo, demo:v2, org/other, plain, .*or an adapter of it; found "gpt-5"'),
        ("", ModelNotFound, 'found ""'),
        ("gpt-5:pirate", ModelNotFound, 'found "gpt-5:pirate"'),
        ("demo#eu-west", ModelNotFound, 'name no deployment.* but be "demo"; found "demo#eu-west"'),
        ("demo:nope", AdapterNotFound, 'an adapter of "demo", which has json, pirate, v2; found "nope"'),
        ("demo::nope", AdapterNotFound, 'found "nope"'),
        ("demo:a:b", AdapterNotFound, 'found "a:b"'),
        ("demo:PIRATE", AdapterNotFound, 'found "PIRATE"'),
        ("later", AdapterNotFound, 'found "unborn"'),
        ("plain:pirate", InvalidRequest, 'name no adapter of "plain", for which LoRA is not enabled'),
        ("demo:huge", AdapterUnusable, 'that can be used; found "huge": rank 999'),
        ("huge", AdapterUnusable, 'that can be used; found "huge": rank 999'),
        ("json", InvalidRequest, "one of demo:json, org/other:json, as adapters of several"),
    ],
)
def test_a_name_that_fits_nothing_is_refused_with_what_there_is(
    name: str, error: type[ServeError], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        CATALOG.resolve(name)
    assert type(caught.value) is error
    assert caught.value.param == "model"


@pytest.mark.parametrize(
    ("name", "lora_path", "expected"),
    [
        ("demo", "pirate", ref("demo", "pirate")),
        ("base", "pirate", ref("demo", "pirate")),
        ("demo", None, ref("demo")),
        ("demo", "", ref("demo")),
        ("demo", " ", ref("demo")),
        ("demo:json", "pirate", ref("demo", "json")),  # the model's own choice wins
        ("demo:json", "../../etc/passwd", ref("demo", "json")),
        ("prod", "json", ref("demo", "pirate")),
    ],
)
def test_lora_path_chooses_the_adapter_where_the_model_does_not(
    name: str, lora_path: str | None, expected: ModelRef
) -> None:
    assert CATALOG.resolve(name, lora_path=lora_path) == expected


@pytest.mark.parametrize(
    ("path", "error"),
    [(path, Forbidden) for path in ("/etc/passwd", "../x", "org/name", "~/x", "c:\\x", "/srv/demo/../../etc/passwd")]
    + [(path, AdapterNotFound) for path in ("a\0b", "x" * 97, "demo:pirate")],
)
def test_a_lora_path_that_is_no_listed_one_is_never_looked_up(path: str, error: type[ServeError]) -> None:
    with pytest.raises(error, match="name or the listed path") as caught:
        CATALOG.resolve("demo", lora_path=path)
    assert type(caught.value) is error
    assert caught.value.param == "lora_path"


@pytest.mark.parametrize("path", ["/srv/demo/json", "/srv/demo//json/", "/srv/other/../demo/json"])
def test_an_adapter_may_be_named_by_its_listed_path(path: str) -> None:
    assert CATALOG.resolve("demo", lora_path=path) == ref("demo", "json")


def test_a_path_beside_the_listed_ones_is_an_adapter_that_is_not_there() -> None:
    with pytest.raises(AdapterNotFound, match='found "unborn"'):
        CATALOG.resolve("demo", lora_path="/srv/demo/unborn")
    with pytest.raises(AdapterUnusable):
        CATALOG.resolve("demo", lora_path="/srv/demo/huge")
    with pytest.raises(Forbidden):
        CATALOG.resolve("demo", lora_path="/srv/org/other/solo")  # of another base


def test_a_lora_path_of_an_unknown_adapter_names_lora_path() -> None:
    with pytest.raises(AdapterNotFound, match='found "nope"') as caught:
        CATALOG.resolve("demo", lora_path="nope")
    assert caught.value.param == "lora_path"


def test_names_lists_bases_usable_adapters_and_aliases() -> None:
    assert CATALOG.names() == (
        "demo", "demo:pirate", "demo:json", "demo:v2", "demo:v2:x",
        "org/other", "org/other:json", "org/other:solo", "plain", "with#sign", "base", "best", "later", "prod",
    )  # fmt: skip
    assert CATALOG.hidden_aliases == ("plain",)


@settings(max_examples=200, deadline=None)
@given(name=st.text(max_size=20) | st.lists(st.sampled_from(["demo", ":", "#", "v2", "json", " ", "%3A"])).map("".join))
def test_every_name_resolves_to_something_served_or_is_refused(name: str) -> None:
    with suppress(InvalidRequest, ModelNotFound, AdapterNotFound):
        found = CATALOG.resolve(name)
        card = CATALOG.model(found.base)
        assert card is not None
        assert found.adapter is None or card.adapter(found.adapter) is not None


@pytest.mark.parametrize("aliases", [{"a": "a"}, {"a": "b", "b": "a"}, {"x": "a", "a": "b", "b": "c", "c": "a"}])
def test_aliases_in_a_circle_are_refused(aliases: dict[str, str]) -> None:
    with pytest.raises(CatalogError, match="circle"):
        Catalog([model("demo")], aliases)


@pytest.mark.parametrize("alias", ["", " ", " a", "a "])
def test_aliases_that_nobody_could_ask_for_are_refused(alias: str) -> None:
    with pytest.raises(CatalogError, match="alias"):
        Catalog([model("demo")], {alias: "demo"})


def test_a_base_given_twice_is_refused() -> None:
    with pytest.raises(CatalogError, match="'demo' is there twice"):
        Catalog([model("demo"), model("demo")])


def test_escapes_of_qualified_names_are_read() -> None:
    with pytest.raises(AdapterNotFound, match='found "a:b#c%"'):
        CATALOG.resolve("demo::a%3Ab%23c%25")


def test_a_broken_adapter_does_not_make_a_bare_name_ambiguous() -> None:
    catalog = Catalog([model("a", "x"), model("b", broken=("x",))])
    assert catalog.resolve("x") == ref("a", "x")
