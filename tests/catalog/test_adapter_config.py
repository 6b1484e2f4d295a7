"""The meaning of an adapter's configuration, against PEFT's own."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peft.utils.other import get_pattern_key

from serve_app.catalog.adapter_config import parse_adapter_config
from serve_app.catalog.errors import CatalogError
from serve_app.core.adapters import AdapterConfig
from tests.catalog.zoo import SOUND_CONFIG

MODULES = [
    f"model.layers.{layer}.{part}" for layer in (0, 1, 10) for part in ("self_attn.q_proj", "mlp.up_proj", "q_proj")
]
KEYS = [
    "q_proj",
    "self_attn.q_proj",
    r"layers\.1\..*",
    "^model.layers.0.q_proj",
    "up_proj",
    ".*q_proj",
    "proj",
    "(q|k)_proj",
]


def parse(**fields: Any) -> AdapterConfig:
    return parse_adapter_config({**SOUND_CONFIG, **fields})


@settings(max_examples=150, deadline=None)
@given(keys=st.lists(st.sampled_from(KEYS), unique=True), module=st.sampled_from(MODULES))
def test_patterns_choose_the_rank_that_peft_would_choose(keys: list[str], module: str) -> None:
    pattern = {key: rank for rank, key in enumerate(keys, start=1)}
    expected = pattern.get(get_pattern_key(list(pattern), module), 4)
    assert parse(rank_pattern=pattern).rank_of(module) == expected
    alpha = pattern.get(get_pattern_key(list(pattern), module), 8)
    assert parse(alpha_pattern=pattern).scale_of(module) == alpha / 4


@pytest.mark.parametrize(("use_rslora", "scale"), [(False, 8 / 4), (True, 8 / 2)])
def test_the_scale_is_alpha_over_the_rank_or_over_its_root(use_rslora: bool, scale: float) -> None:
    assert parse(use_rslora=use_rslora).scale_of("model.layers.0.q_proj") == scale


def test_patterns_change_the_scale_of_their_modules_only() -> None:
    config = parse(rank_pattern={"q_proj": 2}, alpha_pattern={"q_proj": 3})
    assert config.scale_of("model.layers.0.q_proj") == 1.5
    assert config.scale_of("model.layers.0.v_proj") == 2.0


@pytest.mark.parametrize("key", ["(a*)*", "a{9}", "(?i)q", r"(a)\1", "[[a]", "a*b*c*d*", "x" * 300, "(", "*"])
def test_expressions_that_could_take_long_are_refused(key: str) -> None:
    with pytest.raises(CatalogError, match="rank_pattern has the key"):
        parse(rank_pattern={key: 4})
