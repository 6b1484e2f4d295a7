"""What is offered of the models that are chosen, and what is said of what they cannot do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
from playwright.sync_api import Page, expect

from serve_app.core.cards import Capabilities, ModelCard, RecordCard
from serve_app.core.request import HeadForm
from serve_app.router.fleet import Fleet
from tests.console.conftest import NewPage
from tests.console.served import Served, reciting
from tests.fakes import FakeBackend, adapter_card, model_card, replica_card

pytestmark = pytest.mark.slow
OWN = replace(model_card("own"), chat_template="{{ messages }}", records=RecordCard(returns_hidden_states=True))
OTHER = replace(
    model_card("other"), engine="vllm", capabilities=Capabilities(adapters=frozenset({"plain"}), recordings=frozenset())
)
RANKER = replace(model_card("ranker"), records=RecordCard(head=HeadForm(labels=("x",), activation="sigmoid")))


def serving(*cards: ModelCard) -> Served:
    return Served(reciting(*(FakeBackend(replica_card(card.name, card)) for card in cards)))


@pytest.fixture
def mixed() -> Iterator[Served]:
    made = serving(OWN, OTHER, RANKER)
    yield made
    made.close()


def choose(page: Page, *names: str) -> None:
    expect(page.locator("#chips input").first).to_be_visible()
    for box in page.locator("#chips input").all():
        box.set_checked(box.get_attribute("value") in names)


def test_parameters_that_a_chosen_model_refuses_are_not_offered_and_it_is_said_who_does(
    mixed: Served, new_page: NewPage
) -> None:
    page = new_page(mixed.url)
    assert page.get_by_role("checkbox", name="ranker").count() == 0, "it writes no text"
    option = page.locator("#more option[value=return_hidden_states]")
    choose(page, "own")
    expect(option).to_be_enabled()
    page.get_by_label("Add a parameter").select_option("return_hidden_states")
    choose(page, "own", "other")
    expect(page.locator("[data-parameter=return_hidden_states] .range")).to_have_text("refused by other")
    page.get_by_role("button", name="Remove return_hidden_states").click()
    expect(option).to_be_disabled()
    expect(option).to_have_text("return_hidden_states, refused by other")
    choose(page, "own")
    expect(option).to_be_enabled()


def test_what_the_engine_of_a_chosen_model_lacks_is_said_and_what_it_takes_none_of(
    mixed: Served, new_page: NewPage
) -> None:
    page = new_page(mixed.url)
    told = page.locator("#chosen-lack")
    choose(page, "own")
    expect(told).to_be_empty()
    page.get_by_text("Chat", exact=True).click()
    choose(page, "own", "other")
    expect(told).to_contain_text("other takes no chats.")
    expect(told).to_contain_text("Models that vllm computes lack: embeddings, hidden_states, mixed adapters")
    choose(page, "own")
    page.locator("#address").fill("other:one*0.6+two*0.4")
    expect(told).to_contain_text("mixed adapters")


def test_mixes_are_proposed_only_where_a_model_takes_them(mixed: Served, new_page: NewPage) -> None:
    page = new_page(mixed.url)
    expect(page.locator("#address")).to_have_attribute("placeholder", "or a mix: base:one*0.6+two*0.4")
    alone = serving(OTHER)
    page = new_page(alone.url)
    expect(page.locator("#address")).to_have_attribute("placeholder", "or a version: base:adapter@version")
    alone.close()


def test_one_of_many_is_found_by_a_part_of_its_name(new_page: NewPage) -> None:
    served = serving(*(model_card(f"team-{number:02}", *map(adapter_card, "abcd")) for number in range(20)))
    page = new_page(served.url)
    expect(page.locator("#chips input")).to_have_count(100)
    expect(page.locator("#chips label:visible")).to_have_count(40)
    expect(page.get_by_label("Find a model")).to_have_attribute("placeholder", "find one of 100, 40 are shown")
    page.get_by_label("Find a model").fill("-13:")
    expect(page.locator("#chips label:visible")).to_have_count(5)
    page.get_by_role("checkbox", name="team-13:c").check()
    page.get_by_label("Find a model").fill("-07")
    expect(page.get_by_role("checkbox", name="team-13:c")).to_be_checked()
    expect(page.locator("#chips label:visible")).to_have_count(7)
    served.close()


def test_a_search_that_is_no_longer_shown_hides_no_model(new_page: NewPage) -> None:
    fleet = Fleet("router-0")
    backends = [FakeBackend(replica_card(name, model_card(name))) for name in (f"m-{at:02}" for at in range(13))]
    served = Served(reciting(*backends, given=fleet))
    page = new_page(served.url)
    page.get_by_label("Find a model").fill("m-03")
    expect(page.locator("#chips label:visible")).to_have_count(2)  # and the one that is ticked
    served.call(partial(fleet.remove, "m-12"))
    page.get_by_role("link", name="Models", exact=True).click()
    page.get_by_role("link", name="Playground", exact=True).click()
    expect(page.locator("#chips label:visible")).to_have_count(12)
    served.close()


def test_a_model_that_is_gone_is_not_replaced_by_another_and_is_ticked_when_it_is_back(new_page: NewPage) -> None:
    fleet = Fleet("router-0")
    backends = [FakeBackend(replica_card(name, model_card(name))) for name in ("first", "second")]
    served = Served(reciting(*backends, given=fleet))
    page = new_page(served.url)
    choose(page, "second")
    come, go = partial(fleet.put, backends[1].card, backends[1]), partial(fleet.remove, "second")
    for act, told, ticked in ((go, "Not served now: second.", []), (come, "", ["second"])):
        served.call(act)
        page.get_by_role("link", name="Models", exact=True).click()
        page.get_by_role("link", name="Playground", exact=True).click()
        expect(page.locator("#chosen-lack")).to_have_text(told)
        assert [box.get_attribute("value") for box in page.locator("#chips input:checked").all()] == ticked
    served.close()
