"""A family that is not served is refused when it is loaded, and told why."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from safetensors.torch import save_file

from serve_app.engine.decoder.loading import load_model, rehearse
from serve_app.engine.decoder.text_part import ModelNotSupported
from tests.engine.harness import config
from tests.families.families import OFF, REFUSED, Family, Refusal
from tests.families.making import save_config

pytestmark = pytest.mark.slow

BY_NUMBERS = {"blt"}
"""Refused where they have computed, as what is off in their logits is."""


@pytest.mark.parametrize("refusal", REFUSED, ids=lambda refusal: refusal.family.label)
def test_what_is_not_served_is_refused_with_its_reason(
    refusal: Refusal, model_folder: Callable[[Family], Path], tmp_path: Path
) -> None:
    family = refusal.family
    if refusal.needs is not None and find_spec(refusal.needs) is not None:
        pytest.skip(f"{refusal.needs} is installed")
    if refusal.by_config:
        folder = tmp_path / family.label
        save_config(family.name, family.settings, folder)
        save_file({}, folder / "model.safetensors", metadata={"format": "pt"})
    else:
        folder = model_folder(family)
    with pytest.raises(ModelNotSupported, match=f"^{re.escape(f'{family.name}: {refusal.reason}')}") as refused:
        load_model(config(folder))
    if refusal.reason != OFF and family.name not in BY_NUMBERS:
        with pytest.raises(ModelNotSupported, match=f"^{re.escape(str(refused.value))}$"):
            rehearse(config(folder))
