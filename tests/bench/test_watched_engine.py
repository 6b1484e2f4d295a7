"""An engine that is watched computes what another does, and says of each step what it was made of."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.watched_engine import WatchedEngine
from serve_app.engine.decoder.loading import load_model
from serve_app.text.tokenizer import TextTokenizer
from tests.engine.conftest import DEMO
from tests.engine.harness import complete, config, make_engine, request

pytestmark = pytest.mark.slow


def test_a_watched_engine_computes_the_same_and_names_where_its_time_went() -> None:
    settings = config(DEMO)
    model = load_model(settings)
    tokenizer = TextTokenizer.load(Path(settings.path), vocab_size=model.vocab_size)
    texts = []
    for engine in (make_engine(settings), WatchedEngine(settings, model, tokenizer, ())):
        engine.tokenizer = tokenizer  # type: ignore[attr-defined]
        texts.append(complete(engine, [(request("a", max_tokens=5), [30, 31, 32])])["a", 0].token_ids)
        engine.close()
    assert isinstance(engine, WatchedEngine)
    engine.collections.close()
    assert texts[0] == texts[1]
    assert [(each.num_prompt_tokens, each.num_decoding) for each in engine.steps] == [(3, 0)] + [(0, 1)] * 4
    for each in engine.steps:
        assert each.parts.keys() == {"schedule", "forward", "draw", "settle"}
        assert each.wall == pytest.approx(sum(each.parts.values()))
