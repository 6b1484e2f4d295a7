"""The tables leave no family out and say nothing twice."""

from __future__ import annotations

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.families.families import NOT_ALONE, REFUSED, SERVED
from tests.families.page import PAGE, render

LISTED = [*SERVED, *(each.family for each in REFUSED)]


def test_every_family_that_transformers_decodes_with_is_in_a_table() -> None:
    assert sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - {each.name for each in LISTED} - set(NOT_ALONE)) == []


def test_no_case_is_listed_twice() -> None:
    labels = [each.label for each in LISTED]
    assert sorted(label for label in set(labels) if labels.count(label) > 1) == []


def test_the_page_of_models_is_written_from_the_tables() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(), "write it again: python -m tests.families.page"
