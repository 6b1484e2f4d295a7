"""Law: prompts with images are completed as transformers' `generate` completes them, whatever shares their batches."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoTokenizer

from serve_app.core.names import ModelRef
from serve_app.core.prompt import MARKER, Image, Prompt
from serve_app.core.request import GenerationRequest, StopParams
from serve_app.engine.decoder.config_check import check_config, held_bytes, weight_bytes
from serve_app.engine.decoder.loading import load_model
from serve_app.engine.driver import ReplicaEngine
from serve_app.engine.engine import Engine
from serve_app.engine.lora.matching import AdapterRefused
from serve_app.engine.scheduler.sequence import Sequence
from serve_app.engine.vision.images import ImageEmbeddings
from serve_app.replica.preparation import Preparation
from tests.engine.adapter_files import load_adapter, save_adapter
from tests.engine.harness import GREEDY, Outcome, config, drain, make_engine
from tests.families.sighted import LLAVA, QWEN2_VL, SIGHTED, Sighted, whole_model
from tests.pictures import file_of, picture

MAX_TOKENS = 6
MIN_GAP = 1e-4
LONG = "Once upon a time there was a picture of a fox, and everybody who saw it said at once: "
# (text, seeds of its pictures, sizes of them), by the order in which they are asked
ASKED = (
    ("What is <image> here?", (1,)),
    ("What is <image> here?", (2,)),  # another picture, the same tokens
    (LONG + "<image> is not <image>, or is it?", (1, 3)),
    (LONG + "<image> is not <image>, or is it?", (1, 4)),  # the same until the second picture
    ("<image>", (5,)),
    ("No picture at all, but a text that is longer than what one step computes.", ()),
)
NUM_SAMPLES = {0: 2, 2: 2}


KINDS = pytest.mark.parametrize("kind", SIGHTED, ids=lambda kind: kind.label)


@pytest.mark.law("Images")
@KINDS
def test_greedy_equals_generate_with_images_in_chunks_hits_and_forks(
    kind: Sighted, sighted_folder: Callable[[Sighted], Path]
) -> None:
    folder = sighted_folder(kind)
    own = whole_model(folder)
    expected = [generate(kind, folder, own, text, seeds) for text, seeds in ASKED]
    assert len({tuple(tokens) for tokens in expected}) == len(ASKED), "the model says the same whatever it is shown"
    engine = make_engine(config(folder))
    for attempt in ("cold", "with prefix hits"):
        for number, (text, seeds) in enumerate(ASKED):
            engine.add(sequences(engine, f"{attempt}-{number}", text, seeds, n=NUM_SAMPLES.get(number, 1)))
        outcomes = drain(engine)
        for number, tokens in enumerate(expected):
            for sample in range(NUM_SAMPLES.get(number, 1)):
                got = outcomes[f"{attempt}-{number}", sample]
                assert got.token_ids == tokens, f"{attempt}: {ASKED[number]}, sample {sample}"
    assert all(num_cached(outcomes["with prefix hits-" + str(at), 0]) > 0 for at in (2, 3))


@pytest.mark.law("Images")
@KINDS
def test_what_is_computed_of_one_image_is_never_used_for_another(
    kind: Sighted, sighted_folder: Callable[[Sighted], Path]
) -> None:
    engine = make_engine(config(sighted_folder(kind)))
    hits = []
    for number, seeds in enumerate(((1, 3), (1, 3), (1, 4), (2, 3))):
        engine.add(sequences(engine, str(number), LONG + "<image> is not <image>, or is it?", seeds))
        hits.append(num_cached(drain(engine)[str(number), 0]))
    before = len(LONG) // 16 * 16
    assert hits[0] == 0
    assert hits[1] > hits[2] >= hits[3] == before, "a hit ends with the block before the first image that differs"


@KINDS
def test_nothing_that_sees_is_left_in_the_model_and_all_of_its_weights_were_foreseen(
    kind: Sighted, sighted_folder: Callable[[Sighted], Path]
) -> None:
    folder = sighted_folder(kind)
    model = make_engine(config(folder)).model
    assert model.tower is not None
    assert weight_bytes(check_config(folder), torch.float32) == held_bytes(model.module) + held_bytes(
        model.tower.module
    )
    blind = make_engine(config(folder, images=False)).model
    assert held_bytes(blind.module) <= held_bytes(model.module) + held_bytes(model.tower.module)
    assert (blind.tower, blind.why_no_images) == (None, "its operator has switched images off")


@pytest.mark.parametrize("kind", [LLAVA, QWEN2_VL], ids=lambda kind: kind.label)
def test_an_adapter_of_the_text_applies_behind_images_and_one_of_the_tower_is_refused(
    kind: Sighted, sighted_folder: Callable[[Sighted], Path], tmp_path: Path
) -> None:
    folder, (text, seeds) = sighted_folder(kind), ASKED[2]
    settings = config(folder)
    named = save_adapter(tmp_path / "named", load_model(settings).module, targets=("q_proj", "v_proj", "down_proj"))
    (named / "adapter_config.json").write_text(
        json.dumps(
            {
                "peft_type": "LORA",
                "r": 4,
                "lora_alpha": 4,
                "target_modules": r".*language_model.*\.(q_proj|v_proj|down_proj)",
            }
        )
    )
    engine = make_engine(settings, {"named": named})
    engine.add(sequences(engine, "plain", text, seeds))
    engine.add(sequences(engine, "named", text, seeds, adapter="named"))
    outcomes = drain(engine)
    own = whole_model(folder)
    assert outcomes["plain", 0].token_ids == generate(kind, folder, own, text, seeds)
    with_adapter = PeftModel.from_pretrained(own, named)
    assert outcomes["named", 0].token_ids == generate(kind, folder, with_adapter, text, seeds)
    assert outcomes["named", 0].token_ids != outcomes["plain", 0].token_ids
    whole = tmp_path / "whole"
    every = LoraConfig(r=4, target_modules=r".*\.(q_proj|v_proj|qkv)", init_lora_weights=False)
    get_peft_model(whole_model(folder), every).save_pretrained(whole)
    with pytest.raises(AdapterRefused, match=r"model\.(vis|multi_modal)"):
        load_adapter(whole, version="whole", model=load_model(settings).module, sees=True)


def test_without_an_image_processor_the_text_is_served_and_the_card_says_why(
    sighted_folder: Callable[[Sighted], Path], tmp_path: Path
) -> None:
    for file in sighted_folder(SIGHTED[0]).iterdir():
        if file.name != "preprocessor_config.json":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    model = make_engine(config(tmp_path)).model
    assert model.tower is None
    assert model.why_no_images is not None
    assert model.why_no_images.startswith("its folder has no image processor")


def sequences(
    engine: Engine, name: str, text: str, seeds: tuple[int, ...], *, n: int = 1, adapter: str | None = None
) -> list[Sequence]:
    """A prompt as a replica prepares it."""
    tower = engine.model.tower
    assert tower is not None
    images = [Image(data=file_of(picture(seed)), name=f"images[{at}]") for at, seed in enumerate(seeds)]
    prompt = Prompt(parts=(text,)).with_images(images, MARKER) if images else Prompt(parts=(text,))
    asked = GenerationRequest(
        request_id=name,
        model=ModelRef(base="toy", adapter=adapter, version=adapter or ""),
        prompt=prompt,
        n=n,
        sampling=GREEDY,
        stop=StopParams(max_tokens=MAX_TOKENS),
    )
    seen: list[ImageEmbeddings] = [tower.encode(tower.decode(image)) for image in images]
    tokenizer = engine.tokenizer  # type: ignore[attr-defined]
    length = engine.model.max_model_len
    preparation = Preparation(tokenizer, model_name="toy", max_model_len=length, marks=tower)
    return ReplicaEngine(engine).sequences(preparation.prepare(asked, images=seen))


def num_cached(outcome: Outcome) -> int:
    report = outcome.deltas[0].prompt
    assert report is not None
    return report.num_cached_tokens


@torch.inference_mode()
def generate(kind: Sighted, folder: Path, own: Any, text: str, seeds: tuple[int, ...]) -> list[int]:
    """transformers' greedy continuation, by its own processor."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if seeds:
        inputs = kind.inputs(tokenizer, kind.processor(), text, [picture(seed) for seed in seeds])
    else:
        inputs = tokenizer(text, return_tensors="pt", add_special_tokens=False)
    wanted = {
        "input_ids",
        "attention_mask",
        "mm_token_type_ids",
        "pixel_values",
        "pixel_attention_mask",
        "image_grid_thw",
    }
    out = own.generate(
        **{name: value for name, value in inputs.items() if name in wanted},
        max_new_tokens=MAX_TOKENS,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    for logits in out.logits:
        first, second = torch.topk(logits[0], 2).values.tolist()
        assert first - second > MIN_GAP, "the model's own choice is a matter of rounding; give it another seed"
    return [int(token) for token in out.sequences[0, inputs["input_ids"].shape[1] :]]
