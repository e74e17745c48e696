"""Adapters that plain PEFT made in other ways than ours: equal logits here, trained on, and given back."""

import json

import numpy as np
import peft
import pytest
import safetensors.torch
import torch
import transformers

from twinkle.checkpoint_engine.peft import CONFIG_FILE, WEIGHTS_FILE, export_adapter, import_adapter
from twinkle.checkpoint_engine.snapshot import restore, snapshot
from twinkle.core.errors import InvalidInput
from twinkle.model.fused.training import AdamParams, TrainJob
from twinkle.module.lora import Segment
from twinkle.module.packed_attention import CausalSpans

TOKENS = torch.arange(20) * 7 % 300
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
PLAIN = {
    "two kinds of projections": {"target_modules": ["q_proj", "v_proj"]},
    "one layer": {"target_modules": ["q_proj", "down_proj"], "layers_to_transform": [1]},
    "the head alone": {"target_modules": ["lm_head"]},
    "rank-stabilized": {"target_modules": ["q_proj", "up_proj", "lm_head"], "use_rslora": True},
    "all Linears, rank-stabilized": {"target_modules": "all-linear", "use_rslora": True},
    "ranks and alphas by layer": {
        "target_modules": ["q_proj", "k_proj", "o_proj"],
        "rank_pattern": {"k_proj": 2, "layers.1.self_attn.q_proj": 6, r"model\.layers\.0\.self_attn\.o_proj": 3},
        "alpha_pattern": {"o_proj": 5.0, r".*\.1\.self_attn.q_proj": 3},
    },
}
MIXED = {
    "both weights of the experts": {"target_modules": ["q_proj"], "target_parameters": EXPERTS},
    "first weight of the experts": {"target_modules": ["q_proj"], "target_parameters": EXPERTS[:1]},
    "last weight of the experts": {"target_modules": ["v_proj", "lm_head"], "target_parameters": EXPERTS[1:]},
    "experts of one layer, rank-stabilized": {
        "target_modules": ["q_proj"],
        "target_parameters": [f"model.layers.1.{name}" for name in EXPERTS],
        "use_rslora": True,
    },
    "ranks by weight": {
        "target_modules": ["q_proj"],
        "target_parameters": EXPERTS,
        "rank_pattern": {"mlp.experts.down_proj": 2, "q_proj": 5},
        "alpha_pattern": {r".*\.gate_up_proj": 7},
    },
}
SHARED = {
    "a shared expert by its weights": {
        "target_modules": ["q_proj"],
        "target_parameters": ["shared_expert.up_proj.weight", *EXPERTS],
        "alpha_pattern": {"shared_expert.up_proj.weight": 3},
    },
}
CASES = {
    **{f"qwen3, {name}": ("qwen3", settings) for name, settings in PLAIN.items()},
    **{f"qwen3-moe, {name}": ("qwen3-moe", settings) for name, settings in MIXED.items()},
    **{f"qwen2-moe, {name}": ("qwen2-moe", settings) for name, settings in SHARED.items()},
}


def made_by_peft(family, settings, base_dirs, folder):
    """The files of an adapter of random weights, and its logits."""
    base = transformers.AutoModelForCausalLM.from_pretrained(base_dirs(family), dtype=torch.float32)
    torch.manual_seed(3)
    config = peft.LoraConfig(r=4, lora_alpha=9, init_lora_weights=False, **settings)
    adapted = peft.get_peft_model(base, config)
    for name, parameter in adapted.named_parameters():
        if ".lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    adapted.save_pretrained(folder)
    files = {name: (folder / name).read_bytes() for name in (CONFIG_FILE, WEIGHTS_FILE)}
    return files, adapted(input_ids=TOKENS[None]).logits[0]


def our_logits(model, adapter):
    segments = [Segment(adapter, 0, 20)]
    hidden = model.run_packed(TOKENS, torch.arange(20), segments, CausalSpans([(0, 20)]))
    return model.logits(hidden, segments)


def assert_same_logits(ours, theirs):
    torch.testing.assert_close(ours, theirs, atol=1e-5 * theirs.abs().max().item(), rtol=1e-5)


def lora_keys(files):
    return {key for key in safetensors.torch.load(files[WEIGHTS_FILE]) if ".lora_" in key}


@pytest.mark.parametrize("case", CASES)
def test_what_peft_made_gives_the_same_logits_here_and_back_there_after_training(
    case, base_dirs, load_model, make_datum, tmp_path
):
    family, settings = CASES[case]
    model = load_model(family)
    files, expected = made_by_peft(family, settings, base_dirs, tmp_path)

    adapter = import_adapter(model.pool, files, with_optimizer=False)

    assert_same_logits(our_logits(model, adapter), expected)
    assert not torch.allclose(our_logits(model, None), expected, atol=1e-2)
    job = TrainJob(adapter, (make_datum(np.random.default_rng(0), 12),), "cross_entropy")
    assert not isinstance(model.forward_backward([job])[0], Exception)
    restored = restore(model.pool, snapshot(adapter, model.determinism), model.determinism)
    for each in (adapter, restored):
        model.optim_step(each, AdamParams(learning_rate=1e-2))
    assert torch.equal(restored.params, adapter.params)
    assert not torch.allclose(our_logits(model, restored), expected, atol=1e-2)

    exported = export_adapter(restored, str(base_dirs(family)), with_optimizer=True)

    assert lora_keys(exported) == lora_keys(files)
    again = import_adapter(model.pool, exported, with_optimizer=True)
    assert again.config == adapter.config
    assert torch.equal(again.params, adapter.params)
    assert torch.equal(again.exp_avg, adapter.exp_avg)
    assert export_adapter(again, str(base_dirs(family)), with_optimizer=True) == exported
    (tmp_path / "back").mkdir()
    for name, content in exported.items():
        (tmp_path / "back" / name).write_bytes(content)
    base = transformers.AutoModelForCausalLM.from_pretrained(base_dirs(family), dtype=torch.float32)
    back = peft.PeftModel.from_pretrained(base, tmp_path / "back")
    assert {name.replace(".default", "") for name, _ in back.named_parameters() if ".lora_" in name} == lora_keys(files)
    assert_same_logits(our_logits(model, adapter), back(input_ids=TOKENS[None]).logits[0])


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"use_dora": True}, "use_dora is True"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"lora_bias": True}, "lora_bias"),
        ({"modules_to_save": ["embed_tokens"]}, "modules_to_save"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"rank_pattern": {"(a+)+b": 2}}, "rank_pattern holds the regular expression"),
        ({"rank_pattern": {"q_proj": "2"}}, "rank_pattern must map"),
        ({"alpha_pattern": {"q_proj": 0}}, "alpha"),
        ({"alpha_pattern": [1]}, "alpha_pattern must map"),
        ({"rank_pattern": {"q_proj": 5}}, "shape"),
        ({"rank_pattern": {"q_proj": 5000}}, "rank"),
        ({"target_parameters": "experts"}, "target_parameters"),
        ({"r": True}, "r must be an integer"),
    ],
)
def test_what_would_compute_something_else_is_refused_by_its_name(settings, reason, base_dirs, load_model, tmp_path):
    files, _ = made_by_peft("qwen3", {"target_modules": ["q_proj"]}, base_dirs, tmp_path)
    changed = {**files, CONFIG_FILE: json.dumps({**json.loads(files[CONFIG_FILE]), **settings}).encode()}
    with pytest.raises(InvalidInput, match=reason.replace("(", r"\(")):
        import_adapter(load_model("qwen3").pool, changed, with_optimizer=False)


def test_experts_of_another_number_or_unnamed_ones_are_refused(base_dirs, load_model, tmp_path):
    files, _ = made_by_peft("qwen3-moe", MIXED["both weights of the experts"], base_dirs, tmp_path)

    with pytest.raises(InvalidInput, match="shape"):
        import_adapter(load_model("olmoe").pool, files, with_optimizer=False)
    with pytest.raises(InvalidInput, match="unknown tensor"):
        import_adapter(load_model("qwen3").pool, files, with_optimizer=False)
    unnamed = {**json.loads(files[CONFIG_FILE]), "target_parameters": None}
    with pytest.raises(InvalidInput, match="unknown tensor"):
        import_adapter(
            load_model("qwen3-moe").pool, {**files, CONFIG_FILE: json.dumps(unnamed).encode()}, with_optimizer=False
        )
