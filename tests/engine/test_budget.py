"""The budget of keys and values: what was asked for, or a share of what is free; what cannot fit is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from serve_app.engine.decoder.loading import load_model
from serve_app.engine.decoder.text_part import ModelNotSupported
from serve_app.engine.kv.budget import CPU_SHARE, check_adapters_fit, context_within, free_bytes, kv_budget
from serve_app.engine.kv.reservation import Reservation
from tests.engine.harness import config, uniform
from tests.families.making import save_config

CPU = torch.device("cpu")
HALF_BILLION = uniform(layers=24, heads=2, key_dim=64, value_dim=64)


def asked(*, vocab_size: int = 1000, **changes: object) -> int:
    settings = config("nowhere", **changes)
    return kv_budget(settings, HALF_BILLION, own_limit=32768, vocab_size=vocab_size, dtype=torch.bfloat16, device=CPU)


def test_auto_is_a_share_of_what_is_free() -> None:
    found = asked(kv_cache_bytes="auto", max_num_sequences=64)
    assert found == pytest.approx(CPU_SHARE * free_bytes(CPU), rel=0.1)


def test_auto_is_no_more_than_all_sequences_could_fill() -> None:
    assert asked(kv_cache_bytes="auto", max_num_sequences=1, max_model_len=1024) == 1024 * 12288


def test_what_is_asked_for_is_given() -> None:
    assert asked(kv_cache_bytes=64 << 20) == 64 << 20


def test_more_than_is_free_is_refused_with_the_numbers() -> None:
    with pytest.raises(ModelNotSupported, match=r"kv_cache_bytes=\d+ \(\d+ MiB\) does not fit: \d+ MiB"):
        asked(kv_cache_bytes=1 << 50)


def test_what_leaves_no_room_for_steps_is_refused_with_what_they_take() -> None:
    half = free_bytes(CPU) // 2
    assert asked(kv_cache_bytes=half) == half
    rows = 8 + 2 + 64
    with pytest.raises(ModelNotSupported, match=r"\d+ MiB of memory are free .* of which steps take \d+ MiB, logits"):
        asked(kv_cache_bytes=half, vocab_size=half // (3 * rows))  # logits of two thirds of what is free


def test_what_leaves_no_room_for_resident_adapters_is_refused_with_what_they_take() -> None:
    free = free_bytes(CPU)

    def check(sizes: list[int], **changes: object) -> None:
        settings = config("nowhere", kv_cache_bytes=free // 2, **changes)
        check_adapters_fit(settings, sizes, budget=free // 2, vocab_size=1000, device=CPU)

    check([free // 3, 1000])
    check([free // 3] * 4, max_adapters=1)
    check([])
    with pytest.raises(ModelNotSupported, match=r"steps take \d+ MiB and 2 adapters \d+ MiB. Lower it or max_adapters"):
        check([free // 3] * 4, max_adapters=2)
    check_adapters_fit(config("x", kv_cache_bytes="auto"), [free], budget=free // 2, vocab_size=1000, device=CPU)


def test_address_space_that_is_not_promised_is_a_refusal_with_the_numbers() -> None:
    with pytest.raises(ModelNotSupported, match=r"want 1099511627776 MiB of address space .*vm.overcommit_memory is"):
        Reservation(1 << 60)


def test_less_than_a_block_is_refused() -> None:
    with pytest.raises(ModelNotSupported, match="one block of 16 tokens takes 196608"):
        asked(kv_cache_bytes=1000)


def test_a_context_that_was_asked_for_is_given_or_refused() -> None:
    held = {"own_limit": 32768, "bytes_per_token": 12288}
    assert context_within(config("x", max_model_len=4096), 64 << 20, **held) == 4096
    with pytest.raises(ModelNotSupported, match=r"max_model_len=16384 does not fit.*192 MiB.*64 MiB.*holds 5456"):
        context_within(config("x", max_model_len=16384), 64 << 20, **held)
    assert context_within(config("x"), 64 << 20, **held) == 5456


def test_weights_larger_than_the_memory_are_refused_before_they_are_read(tmp_path: Path) -> None:
    save_config("llama", {"vocab_size": 1 << 40, "tie_word_embeddings": True}, tmp_path)
    with pytest.raises(ModelNotSupported, match=r"the weights take 134217728 MiB, \d+ MiB of memory are free"):
        load_model(config(tmp_path))
