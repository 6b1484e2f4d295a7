"""What the name of a model means to the catalog."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.catalog.files import CatalogError
from serve_app.catalog.resolve import Catalog, Wanted
from serve_app.core.cards import AdapterCard, ModelCard
from serve_app.core.errors import (
    AdapterNotFound,
    AdapterUnusable,
    Forbidden,
    InvalidRequest,
    ModelNotFound,
    NotFound,
    ServeError,
)
from serve_app.core.names import ModelRef, Part, mixed
from serve_app.core.tenants import Rights


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
    {"prod": "demo:pirate", "best": "prod", "later": "demo:unborn", "base": "demo", "first": "base", "plain": "demo"},
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
        ("base:json", ref("demo", "json")),  # an adapter of what an alias leads to
        ("base::v2", ref("demo", "v2")),
        ("first:json", ref("demo", "json")),
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


def test_a_model_whose_adapters_were_all_withdrawn_has_none_of_that_name() -> None:
    catalog = Catalog([replace(model("bare"), adapters_revision=3)])
    with pytest.raises(AdapterNotFound, match='an adapter of "bare", which has none; found "sql"'):
        catalog.resolve("bare:sql")


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
    assert CATALOG.resolve(Wanted(model=name, adapter=lora_path)) == expected


@pytest.mark.parametrize(
    ("path", "error"),
    [(path, Forbidden) for path in ("/etc/passwd", "../x", "org/name", "~/x", "c:\\x", "/srv/demo/../../etc/passwd")]
    + [(path, AdapterNotFound) for path in ("a\0b", "x" * 97, "demo:pirate")],
)
def test_a_lora_path_that_is_no_listed_one_is_never_looked_up(path: str, error: type[ServeError]) -> None:
    with pytest.raises(error, match="name or the listed path") as caught:
        CATALOG.resolve(Wanted(model="demo", adapter=path))
    assert type(caught.value) is error
    assert caught.value.param == "lora_path"


@pytest.mark.parametrize("path", ["/srv/demo/json", "/srv/demo//json/", "/srv/other/../demo/json"])
def test_an_adapter_may_be_named_by_its_listed_path(path: str) -> None:
    assert CATALOG.resolve(Wanted(model="demo", adapter=path)) == ref("demo", "json")


def test_a_path_beside_the_listed_ones_is_an_adapter_that_is_not_there() -> None:
    with pytest.raises(AdapterNotFound, match='found "unborn"'):
        CATALOG.resolve(Wanted(model="demo", adapter="/srv/demo/unborn"))
    with pytest.raises(AdapterUnusable):
        CATALOG.resolve(Wanted(model="demo", adapter="/srv/demo/huge"))
    with pytest.raises(Forbidden):
        CATALOG.resolve(Wanted(model="demo", adapter="/srv/org/other/solo"))  # of another base


def test_a_lora_path_of_an_unknown_adapter_names_lora_path() -> None:
    with pytest.raises(AdapterNotFound, match='found "nope"') as caught:
        CATALOG.resolve(Wanted(model="demo", adapter="nope"))
    assert caught.value.param == "lora_path"


def test_names_lists_bases_usable_adapters_and_aliases() -> None:
    assert CATALOG.names() == (
        "demo", "demo:pirate", "demo:json", "demo:v2", "demo:v2:x",
        "org/other", "org/other:json", "org/other:solo", "plain", "with#sign", "base", "best", "first", "later", "prod",
    )  # fmt: skip
    assert CATALOG.hidden_aliases == ("plain",)


def mix(base: str, **scales: float) -> ModelRef:
    return mixed(base, [Part(adapter=name, version=f"{base}/{name}", scale=scale) for name, scale in scales.items()])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("demo:pirate*0.7+json*0.3", mix("demo", pirate=0.7, json=0.3)),
        ("demo: json*.3 + pirate*0.70 ", mix("demo", pirate=0.7, json=0.3)),
        ("demo::pirate*0.7+json*0.3", mix("demo", pirate=0.7, json=0.3)),
        ("demo:pirate+json", mix("demo", pirate=1.0, json=1.0)),
        ("demo:pirate*-1.5e-3", mix("demo", pirate=-0.0015)),
        ("demo:pirate*0.5+pirate*0.5", ref("demo", "pirate")),
        ("demo:pirate*1+json*0", ref("demo", "pirate")),
        ("demo:pirate*0", ref("demo")),
        ("demo:pirate+pirate*-1", ref("demo")),
        ("demo:v2:x*0.5", mix("demo:v2", x=0.5)),
        ("solo*0.5", mix("org/other", solo=0.5)),
        ("solo*0.5+json*0.5", mix("org/other", solo=0.5, json=0.5)),  # the only base that has both
        ("half", mix("demo", pirate=0.5)),
    ],
)
def test_a_mix_means_its_adapters_with_their_scales(name: str, expected: ModelRef) -> None:
    catalog = Catalog(CATALOG._models.values(), {"half": "demo:pirate*0.5"})
    assert catalog.resolve(name) == expected
    assert catalog.resolve(expected.name) == expected, "its own name is an address"


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("demo:pirate*", InvalidRequest, r"mix adapters as name\*scale\+name\*scale with scales from -100 to 100"),
        ("demo:pirate*0.7*2", InvalidRequest, "mix adapters as"),
        ("demo:+pirate", InvalidRequest, "mix adapters as"),
        ("demo:0.7*pirate", InvalidRequest, "mix adapters as"),
        ("demo:pirate*1e5", InvalidRequest, "mix adapters as"),
        ("demo:pirate*101", InvalidRequest, "mix adapters as"),
        ("demo:pirate*nan", InvalidRequest, "mix adapters as"),
        ("demo:pirate*inf", InvalidRequest, "mix adapters as"),
        ("demo:pirate*٣", InvalidRequest, "mix adapters as"),
        ("demo:pirate*0.5+nope*0.5", AdapterNotFound, 'which has json, pirate, v2; found "nope"'),
        ("demo:pirate*0.5+huge*0.5", AdapterUnusable, 'found "huge": rank 999'),
        ("plain:a*0.5", InvalidRequest, "for which LoRA is not enabled"),
        ("json*0.5", InvalidRequest, "as adapters of several models have that name"),
        ("nobody*0.5", ModelNotFound, 'found "nobody[*]0.5"'),
    ],
)
def test_what_is_no_mix_or_of_no_adapters_is_refused(name: str, error: type[ServeError], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        CATALOG.resolve(Wanted(model=name, param="model[3]"))
    assert (type(caught.value), caught.value.param) == (error, "model[3]")


def test_a_mix_has_no_more_adapters_than_fit_at_once() -> None:
    card = replace(model("m", *"abcd"), max_mixed_adapters=3)
    assert len(Catalog([card]).resolve("m:a+b+c+a").mix) == 3
    with pytest.raises(InvalidRequest, match='at most 3 adapters of "m"; found 4'):
        Catalog([card]).resolve("m:a+b+c+d")
    assert card.has(ModelRef(base="m", adapter="a", version="m/a"))
    assert not card.has(mix("m", a=1, b=1, c=1, d=1))
    assert not card.has(mix("m", a=1, e=1))


def test_a_mix_may_be_named_beside_the_model_and_is_never_taken_for_a_path() -> None:
    assert CATALOG.resolve(Wanted(model="demo", adapter="pirate*0.5+json")) == mix("demo", pirate=0.5, json=1)
    for path in ("../a*0.5", "/srv/demo/json*0.5"):
        with pytest.raises(Forbidden) as caught:
            CATALOG.resolve(Wanted(model="demo", adapter=path, adapter_param="adapter"))
        assert caught.value.param == "adapter"


@settings(max_examples=200, deadline=None)
@given(
    name=st.text(max_size=20)
    | st.lists(st.sampled_from(["demo", ":", "#", "v2", "json", " ", "%3A", "*0.5", "+"])).map("".join)
)
def test_every_name_resolves_to_something_served_or_is_refused(name: str) -> None:
    with suppress(InvalidRequest, ModelNotFound, AdapterNotFound):
        found = CATALOG.resolve(name)
        card = CATALOG.models.get(found.base)
        assert card is not None
        assert all(card.adapter(part.adapter) is not None for part in found.parts)


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


def adapter_of(name: str, version: str) -> AdapterCard:
    return AdapterCard(name=name, version=version, rank=4, root=f"/srv/{version}")


OLD, NEW, OTHER = "a1b2c3d4" * 4, "a1b2c3d5" * 4, "f" * 32
TALES = replace(
    model("demo", "sql", "art"),
    adapters=(adapter_of("sql", NEW), adapter_of("art", OTHER)),
    staged=(adapter_of("sql", OLD),),
)


@pytest.mark.parametrize(
    ("name", "version"),
    [
        ("demo:sql", NEW),
        (f"demo:sql@{OLD}", OLD),
        (f"demo:sql@{NEW}", NEW),
        ("demo:sql@a1b2c3d4a", OLD),
        ("demo::sql@a1b2c3d5", NEW),
        ("sql@a1b2c3d4", OLD),
    ],
)
def test_a_version_is_pinned_by_its_digest_or_by_what_only_it_begins_with(name: str, version: str) -> None:
    assert Catalog([TALES]).resolve(name) == ModelRef(base="demo", adapter="sql", version=version)
    assert Catalog([TALES]).resolve(Wanted(model="demo", adapter=name.rpartition(":")[2])).version == version


TRIED = replace(TALES, adapters=(replace(adapter_of("sql", NEW), canary=(OLD, 0.25)), adapter_of("art", OTHER)))


@pytest.mark.parametrize(
    ("name", "version"),
    [
        ("demo:sql", OLD),
        ("sql", OLD),
        ("prod", OLD),
        ("pinned", NEW),
        (f"demo:sql@{NEW}", NEW),
        (f"demo:sql@{OLD}", OLD),
        ("demo:art", OTHER),
    ],
)
def test_a_name_without_a_version_means_the_canary_if_it_is_drawn(name: str, version: str) -> None:
    catalog = Catalog([TRIED], {"prod": "demo:sql", "pinned": f"demo:sql@{NEW}"})
    drawn: list[str] = []

    def draw(address: str) -> float:
        drawn.append(address)
        return 0.2

    assert catalog.resolve(name, draw=draw).version == version
    assert set(drawn) <= {"demo:sql"}
    assert catalog.resolve(name, draw=lambda address: 0.25) == catalog.resolve(name)


def test_a_canary_that_is_not_at_hand_is_not_drawn() -> None:
    assert Catalog([replace(TRIED, staged=())]).resolve("demo:sql", draw=lambda address: 0.0).version == NEW


def test_a_mix_means_no_canary() -> None:
    mixture = "demo:sql*0.5+art*0.5"
    assert Catalog([TRIED]).resolve(mixture, draw=lambda address: 0.0) == Catalog([TALES]).resolve(mixture)


@pytest.mark.parametrize("version", ["a1b2c3d", "a1b2", "ffffffff", "0" * 32, ""])
def test_a_version_that_is_not_at_hand_or_not_told_apart_is_refused_with_those_that_are(version: str) -> None:
    with pytest.raises((AdapterNotFound, InvalidRequest)) as refused:
        Catalog([TALES]).resolve(f"demo:sql@{version}")
    if version:
        assert OLD in str(refused.value)
        assert NEW in str(refused.value)


def test_versions_of_one_adapter_may_be_mixed() -> None:
    found = Catalog([TALES]).resolve(f"demo:sql@{OLD}*0.5+sql*0.5")
    assert {part.version: part.scale for part in found.parts} == {OLD: 0.5, NEW: 0.5}


def test_a_pinned_version_of_an_adapter_that_a_tenant_may_not_use_is_not_there() -> None:
    catalog = Catalog([TALES], rights=Rights(patterns=("demo:art",)))
    assert catalog.resolve("demo:art").version == OTHER
    with pytest.raises(NotFound) as refused:
        catalog.resolve(f"demo:sql@{OLD}")
    assert OLD not in str(refused.value).replace(f"sql@{OLD}", "")
