"""Law: an adapter of any kind that PEFT writes is computed as PEFT computes it, or refused with the way out.

What is refused and what is told of it are the same for a check, which has no weights, and for a replica.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM

from serve_app.catalog.adapters import read_records
from serve_app.check.folders import check_adapters
from serve_app.engine.decoder.loading import load_model
from serve_app.engine.decoder.record import expert_layers
from serve_app.engine.lora.matching import Matcher
from serve_app.engine.lora.modules import BankedModule
from serve_app.engine.lora.registration import bind_adapters
from tests.engine.harness import complete, config, make_engine, reference_greedy, request
from tests.families import families
from tests.families.making import save_model
from tests.families.sighted import LLAVA, save_sighted

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::UserWarning"),  # PEFT has opinions on some of these
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

PROMPT = [7, 30, 200, 31, 5, 90, 14, 66]
FAMILIES: Mapping[str, dict[str, Any]] = {
    "llama": {"vocab_size": 259, "tie_word_embeddings": True},
    "mixtral": {},
    "qwen3_moe": {},
    "gpt_oss": {},
    "minimax_m2": {},
    "llava": {},
    "qwen2_vl": next(each.settings for each in families.SERVED if each.label == "qwen2_vl"),
}
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
Edit = Callable[[Path], object]


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("bases")
    for name, settings in FAMILIES.items():
        save_model(name, settings, out / name)
    return out


def load(base: Path) -> Any:
    kind = AutoModelForMultimodalLM if base.name in {"llava", "qwen2_vl"} else AutoModelForCausalLM
    return kind.from_pretrained(base, local_files_only=True, dtype=torch.float32).eval()


def write(base: Path, out: Path, settings: Mapping[str, Any], edit: Edit = lambda folder: None) -> Path:
    """What PEFT saves of an adapter whose every weight is random, and what is made of it."""
    torch.manual_seed(3)
    settings = {"target_modules": ["q_proj"], "r": 4, **settings}
    has_embeddings = settings.pop("save_embedding_layers", "auto")
    adapted = get_peft_model(load(base), LoraConfig(task_type="CAUSAL_LM", lora_alpha=16, **settings))
    for name, parameter in adapted.named_parameters():
        if "lora_" in name or "trainable_tokens" in name:
            torch.nn.init.normal_(parameter, std=0.15)
    adapted.save_pretrained(out, save_embedding_layers=has_embeddings)
    edit(out)
    return out


def fields(**changed: Any) -> Edit:
    """With other fields in its configuration."""

    def edit(folder: Path) -> None:
        path = folder / "adapter_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))

    return edit


def tensors(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Edit:
    """With other tensors."""

    def edit(folder: Path) -> None:
        path = folder / "adapter_model.safetensors"
        save_file({name: each.contiguous() for name, each in change(load_file(path)).items()}, path)

    return edit


def renamed(old: str, new: str) -> Edit:
    return tensors(lambda found: {name.replace(old, new): each for name, each in found.items()})


def by_expert(first: str, second: str, down: str, container: str) -> Edit:
    """LoRA of each expert's linears, as they were before transformers put them together."""

    def edit(folder: Path) -> None:
        found, draw = {}, torch.Generator().manual_seed(4)
        sizes = {first: (32, WIDTHS[container]), second: (32, WIDTHS[container]), down: (WIDTHS[container], 32)}
        for layer in range(2):
            for expert in range(4):
                for name, (inputs, outputs) in sizes.items():
                    key = f"base_model.model.model.layers.{layer}.{container}.experts.{expert}.{name}"
                    found[f"{key}.lora_A.weight"] = torch.randn(4, inputs, generator=draw) * 0.2
                    found[f"{key}.lora_B.weight"] = torch.randn(outputs, 4, generator=draw) * 0.2
        save_file(found, folder / "adapter_model.safetensors")
        fields(target_modules=[first, second, down])(folder)

    return edit


WIDTHS = {"block_sparse_moe": 48, "mlp": 32}
"""Of one expert, by what is around the experts."""

SERVED: dict[str, dict[str, tuple[dict[str, Any], Edit | None, str]]] = {
    "llama": {
        "DoRA of all linears": ({"target_modules": "all-linear", "use_dora": True}, None, ""),
        "the head": ({"target_modules": ["lm_head", "v_proj"]}, None, "left out, as the base has the same weights"),
        "the head alone": ({"target_modules": ["lm_head"], "save_embedding_layers": False}, None, ""),
        "DoRA of the head": ({"target_modules": ["lm_head"], "use_dora": True}, None, "lm_head.base_layer.weight"),
        "embeddings beside": ({"save_embedding_layers": True}, None, "left out, as the base has the same weights"),
        "a head that was not trained": ({"modules_to_save": ["lm_head"]}, None, "base_model.model.lm_head.weight"),
        "no biases": ({"bias": "all"}, None, ""),
        "rank 512": ({"r": 512}, None, ""),
        "patterns": (
            {
                "r": 8,
                "target_modules": r".*\.(q|v)_proj",
                "rank_pattern": {r"layers\.(?:1|2)\.self_attn\.q_proj": 4, r"model\.layers\.\d{1,2}\..*v_proj": 2},
                "alpha_pattern": {"^model.layers.0": 3},
                "use_rslora": True,
            },
            None,
            "",
        ),
        "layers by number": ({"layers_to_transform": [1], "layers_pattern": "layers"}, None, ""),
        "all but some": (
            {"target_modules": "all-linear", "exclude_modules": r".*layers\.0\..*"},
            None,
            "",
        ),
        "tensors outside": (
            {"target_modules": ["q_proj", "v_proj"]},
            fields(target_modules=["q_proj"]),
            "left out, as target_modules does not name their modules",
        ),
        "modules without tensors": (
            {},
            fields(target_modules=["q_proj", "up_proj"]),
            "left as in the base, as no tensors are there for them: model.layers.0.mlp.up_proj",
        ),
        "DoRA's magnitudes without DoRA": ({"use_dora": True}, fields(use_dora=False), "lora_magnitude_vector"),
        "keys of another version": (
            {},
            fields(use_magic={"strength": 1}, peft_version="9.9", megatron_config={"a": 1}, loftq_config={"b": 2},
                   eva_config={"unknown": 1}, runtime_config={"x": 1}, corda_config={"y": 1}, lora_dropout=0.5),
            "adapter_config.json: use_magic is not read by PEFT's LoRA",
        ),
        "an initialisation that keeps the base": ({"init_lora_weights": "orthogonal"}, None, ""),
    },
    "mixtral": {
        "attention": ({"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}, None, ""),
        "all linears": ({"target_modules": "all-linear"}, None, ""),
        "experts": ({"target_modules": [], "target_parameters": EXPERTS}, None, ""),
        "each expert": ({}, by_expert("w1", "w3", "w2", "block_sparse_moe"), ""),
        "the router": ({"target_modules": [], "target_parameters": ["gate.weight"]}, None, ""),
    },
    "qwen3_moe": {
        "half of the experts": ({"target_parameters": EXPERTS[1:]}, None, ""),
        "each expert": ({"use_rslora": True}, by_expert("gate_proj", "up_proj", "down_proj", "mlp"), ""),
    },
    "gpt_oss": {"experts": ({"target_parameters": EXPERTS, "rank_pattern": {"experts.down_proj": 2}}, None, "")},
    "minimax_m2": {"all linears": ({"target_modules": "all-linear"}, None, "")},
    "llava": {
        "the tower as well": ({}, None, "base_model.model.model.vision_tower"),
        "older names": (
            {},
            renamed("model.model.language_model", "model.language_model.model"),
            "left out, as target_modules does not name their modules",
        ),
    },
}  # fmt: skip


@pytest.mark.parametrize("family", SERVED)
def test_what_is_computed_is_what_peft_computes_in_any_company(family: str, bases: Path, tmp_path: Path) -> None:
    base = bases / family
    folders = {
        name: write(base, tmp_path / name.replace(" ", "_").replace("'", ""), settings, edit or (lambda _: None))
        for name, (settings, edit, _) in SERVED[family].items()
    }
    for report, told in zip(
        check_adapters(str(tmp_path), str(base)), sorted(folders.items(), key=lambda _: _[1]), strict=True
    ):
        assert report.reason is None, told
        assert SERVED[family][told[0]][2] in "; ".join(report.notes), (told, report.notes)
    engine = make_engine(config(base, max_num_sequences=48, images=False), folders)
    outcomes = complete(engine, [(request(f"{name}", adapter=name), PROMPT) for name in [None, *folders]])
    plain = reference_greedy(load(base), PROMPT, 12)
    assert outcomes["None", 0].token_ids == plain
    for each in expert_layers(engine.model.module).values():  # whose choices are recorded for clients, of all rows
        assert isinstance(each, BankedModule)
    for name, folder in folders.items():
        fields(lora_dropout=0.0, megatron_config=None)(folder)  # which change nothing, and PEFT itself asks more for
        adapted = PeftModel.from_pretrained(load(base), folder).eval()
        expected = reference_greedy(adapted, PROMPT, 12)
        assert outcomes[name, 0].token_ids == expected, name
        assert expected != plain, name


def test_names_that_transformers_alone_knows_to_be_older_are_read_as_it_reads_a_checkpoint(
    bases: Path, tmp_path: Path
) -> None:
    base = bases / "qwen2_vl"
    new = write(base, tmp_path / "new", {"target_modules": ["v_proj"]})
    old = tmp_path / "old"
    shutil.copytree(new, old)
    renamed("model.model.language_model", "model.model")(old)
    engine = make_engine(config(base, images=False), {"new": new, "old": old})
    outcomes = complete(engine, [(request(name, adapter=name), PROMPT) for name in ("new", "old")])
    expected = reference_greedy(PeftModel.from_pretrained(load(base), new).eval(), PROMPT, 12)
    assert [outcomes[name, 0].token_ids for name in ("new", "old")] == [expected, expected]


def other(name: str, *, rows: int = 259) -> Edit:
    """With another weight of the base than the base has."""
    return tensors(lambda found: {**found, name: torch.ones(rows, 32)})


REFUSED: dict[str, tuple[str, dict[str, Any], Edit | None, tuple[str, ...]]] = {
    "another head": ("llama", {}, other("base_model.model.lm_head.weight"),
                     ("lm_head.weight' replaces a weight of the base", "save_embedding_layers=False", "merge")),
    "a longer embedding": (
        "llama", {}, other("base_model.model.model.embed_tokens.weight", rows=260),
        ("embed_tokens.weight' replaces a weight", "merge_and_unload"),
    ),
    "LoRA of the embedding": ("llama", {"target_modules": ["embed_tokens", "q_proj"]}, None,
                              ("model.embed_tokens: it is LoRA of an embedding", "merge_and_unload")),
    "tokens of its own": ("llama", {"trainable_token_indices": {"embed_tokens": [1, 2]}}, None,
                          ("trainable_token_indices: it replaces rows", "merge_and_unload")),
    "biases of lora_B": ("llama", {"lora_bias": True}, None, ("lora_bias: lora_B has biases", "merge_and_unload")),
    "repeated layers": ("llama", {}, fields(layer_replication=[[0, 2], [1, 2]]), ("layer_replication", "merge_and_")),
    "activated LoRA": ("llama", {}, fields(alora_invocation_tokens=[1, 2]), ("alora_invocation_tokens", "plain LoRA")),
    "routed LoRA": ("llama", {}, fields(arrow_config={"top_k": 2}), ("arrow_config: PEFT computes it", "merge_and_")),
    "QALoRA": ("llama", {}, fields(use_qalora=True), ("use_qalora", "merge_and_unload")),
    "PiSSA": ("llama", {"init_lora_weights": "pissa"}, None,
              ("init_lora_weights: 'pissa' changes the base", "path_initial_model_for_weight_conversion")),
    "an odd initialisation": ("llama", {}, fields(init_lora_weights=["pissa"]), ("init_lora_weights", "plain LoRA")),
    "rank 513": ("llama", {}, fields(r=513), ("r: it must be a whole number from 1 to 512, found '513'", "merge_and_")),
    "rank true": ("llama", {}, fields(r=True), ("r: it must be a whole number",)),
    "a rank of a pattern": ("llama", {}, fields(rank_pattern={"q_proj": 0}), ("rank_pattern['q_proj']: it must be",)),
    "patterns in a list": ("llama", {}, fields(rank_pattern=["q_proj"]), ("rank_pattern: it must be an object",)),
    "an endless alpha": ("llama", {}, fields(lora_alpha=1e300), ("lora_alpha: it must be a number of less than",)),
    "no expression": ("llama", {}, fields(rank_pattern={"q_proj(*": 4}), ("an expression that is none",)),
    "no module": ("llama", {}, fields(target_modules=["w_proj"]), ("PEFT refuses it", "not found in the base model")),
    "another rank": ("llama", {}, fields(r=8), ("rank 8 of adapter_config.json", "that it was trained on")),
    "half a pair": ("llama", {}, tensors(lambda found: {name: found[name] for name in found if "lora_A" in name}),
                    ("lora_B.weight' is missing", "save_pretrained")),
    "DoRA without magnitudes": ("llama", {}, fields(use_dora=True), ("lora_magnitude_vector.weight' is missing",)),
    "other names": ("llama", {}, renamed("self_attn", "attention"), ("none of its", "save_pretrained")),
    "nothing that was trained": ("llama", {}, tensors(lambda found: {name: each * 0 for name, each in found.items()}),
                                 ("inert: lora_A or lora_B is zero", "save it again after training")),
    "too large": ("llama", {}, tensors(lambda found: {name: each * torch.inf for name, each in found.items()}),
                  ("not finite in float32",)),
    "DoRA of experts": ("mixtral", {"target_parameters": EXPERTS}, fields(use_dora=True), ("PEFT refuses it: lora",)),
    "half of what is fused": ("mixtral", {}, fields(target_modules=["w1"]), ("PEFT refuses it", "also targeting w3")),
}  # fmt: skip


def test_what_is_not_computed_is_refused_with_the_way_out_by_the_replica_and_by_the_check(
    bases: Path, tmp_path: Path
) -> None:
    for family in ("llama", "mixtral"):
        kinds = {f"k{at}": each for at, each in enumerate(REFUSED.values()) if each[0] == family}
        folder = tmp_path / family
        for name, (_, settings, edit, _) in kinds.items():
            write(bases / family, folder / name, settings, edit or (lambda _: None))
        _, cards = bind_adapters(read_records(folder), load(bases / family))
        checked = {each.name: each.reason for each in check_adapters(str(folder), str(bases / family))}
        assert {card.name: card.reason for card in cards} == checked
        for name, (*_, words) in kinds.items():
            for word in words:
                assert word in str(checked[name]), (word, checked[name])


def test_an_expression_that_takes_for_ever_is_refused_in_time(
    bases: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serve_app.engine.lora.matching.MATCHING_S", 1.0)
    write(bases / "llama", tmp_path / "a", {}, fields(target_modules=r"(([a-z_.0-9]+)+)+!"))
    [report] = check_adapters(str(tmp_path), str(bases / "llama"))
    assert "takes more than 1 s" in str(report.reason)
    assert "repeats inside repeats" in str(report.reason)


def test_what_changes_the_vision_encoder_is_refused_where_images_are_served(tmp_path: Path) -> None:
    base, folder = tmp_path / "llava", tmp_path / "adapters"
    save_sighted(LLAVA, base)
    write(base, folder / "a", {})
    for sees, told in ((True, "set `images: false` to serve it for text"), (False, "None")):
        model = load_model(config(base, images=sees)).module
        [card] = bind_adapters(read_records(folder), model, matcher=Matcher.of(model, sees=sees))[1]
        assert told in str(card.reason)
    [report] = check_adapters(str(folder), str(base))
    assert "set `images: false`" in str(report.reason)


def test_weights_beside_lora_are_compared_with_the_files_that_belong_to_the_model(bases: Path, tmp_path: Path) -> None:
    base, folder = tmp_path / "llama", tmp_path / "adapters"
    shutil.copytree(bases / "llama", base)
    write(base, folder / "a", {"save_embedding_layers": True})
    others = {name: tensor + 1 for name, tensor in load_file(base / "model.safetensors").items()}
    save_file(others, base / "consolidated.safetensors")  # its name sorts before the model's own
    [report] = check_adapters(str(folder), str(base))
    assert report.reason is None
