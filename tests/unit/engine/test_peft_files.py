"""Adapters as PEFT files: plain PEFT reads them, damaged or foreign ones are refused."""

import json

import numpy as np
import peft
import pytest
import safetensors.torch
import torch
import transformers

from twinkle.checkpoint_engine.peft import export_adapter, import_adapter, read_config
from twinkle.core.errors import InvalidInput
from twinkle.model.fused.training import AdamParams, TrainJob
from twinkle.module.lora import LoraConfig, Segment
from twinkle.module.packed_attention import CausalSpans

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
OPTIMIZER = "optimizer.safetensors"


def trained_adapter(model, make_datum, config, steps=2):
    rng = np.random.default_rng(0)
    adapter = model.create_adapter(config)
    for _ in range(steps):
        [outcome] = model.forward_backward([TrainJob(adapter, (make_datum(rng, 12),), "cross_entropy")])
        assert not isinstance(outcome, Exception)
        model.optim_step(adapter, AdamParams(learning_rate=1e-2))
    return adapter


@pytest.mark.parametrize(
    "family",
    ["qwen3", "qwen3-tied", "llama-tied", "qwen3-moe", "qwen3-moe-mixed", "qwen2-moe", "mixtral", "olmoe"],
)
@pytest.mark.parametrize("unembed", [True, False])
def test_plain_peft_loads_an_export_and_computes_the_same_logits(
    family, unembed, base_dirs, load_model, make_datum, tmp_path
):
    model = load_model(family)
    adapter = trained_adapter(model, make_datum, LoraConfig(rank=4, seed=3, train_unembed=unembed))
    for name, content in export_adapter(adapter, str(base_dirs(family))).items():
        (tmp_path / name).write_bytes(content)
    base = transformers.AutoModelForCausalLM.from_pretrained(base_dirs(family), dtype=torch.float32)
    token_ids = torch.arange(20) * 7 % 300

    theirs = peft.PeftModel.from_pretrained(base, tmp_path)(input_ids=token_ids[None]).logits[0]

    segments = [Segment(adapter, 0, 20)]
    hidden = model.run_packed(token_ids, torch.arange(20), segments, CausalSpans([(0, 20)]))
    ours = model.logits(hidden, segments)
    bare = model.logits(model.run_packed(token_ids, torch.arange(20), [], CausalSpans([(0, 20)])), [])
    torch.testing.assert_close(ours, theirs, atol=1e-5 * theirs.abs().max().item(), rtol=1e-5)
    assert not torch.allclose(ours, bare, atol=1e-2)


def test_what_plain_peft_saves_can_be_imported(base_dirs, load_model, make_datum, tmp_path):
    model = load_model("qwen3")
    adapter = trained_adapter(model, make_datum, LoraConfig(rank=4, seed=3, train_mlp=False))
    (tmp_path / "ours").mkdir()
    for name, content in export_adapter(adapter, str(base_dirs("qwen3"))).items():
        (tmp_path / "ours" / name).write_bytes(content)
    base = transformers.AutoModelForCausalLM.from_pretrained(base_dirs("qwen3"), dtype=torch.float32)
    peft.PeftModel.from_pretrained(base, tmp_path / "ours").save_pretrained(tmp_path / "theirs")
    files = {name: (tmp_path / "theirs" / name).read_bytes() for name in (CONFIG, WEIGHTS)}

    imported = import_adapter(model.pool, files, with_optimizer=False, trainable=False)

    assert torch.equal(imported.params, adapter.params)
    assert (imported.config.train_attn, imported.config.train_mlp, imported.config.train_unembed) == (True, False, True)


def test_export_and_import_with_the_optimizer_is_lossless_and_repeatable(load_model, make_datum):
    model = load_model()
    adapter = trained_adapter(model, make_datum, LoraConfig(rank=4, alpha=7.5, seed=3, train_attn=False))
    files = export_adapter(adapter, "base", with_optimizer=True)

    imported = import_adapter(model.pool, files, with_optimizer=True)

    assert imported.config == adapter.config == read_config(files, model.pool.targets)
    assert imported.step == 2
    for name in ("params", "exp_avg", "exp_avg_sq"):
        assert torch.equal(imported.__dict__[name], adapter.__dict__[name])
    assert export_adapter(imported, "base", with_optimizer=True) == files
    assert import_adapter(model.pool, files, with_optimizer=False).step == 0


def edited(files, name, edit):
    tensors = safetensors.torch.load(files[name])
    edit(tensors)
    return {**files, name: safetensors.torch.save(tensors)}


def test_files_that_do_not_fit_are_refused_with_the_reason(load_model, make_datum):
    model = load_model()
    adapter = trained_adapter(model, make_datum, LoraConfig(rank=4))
    files = export_adapter(adapter, "base", with_optimizer=True)
    key = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"

    def wrong_shape(tensors):
        tensors[key] = torch.zeros(5, 64)

    def not_finite(tensors):
        tensors[key][0, 0] = float("nan")

    def missing(tensors):
        del tensors[key]

    def unknown(tensors):
        tensors["base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight"] = torch.zeros(4, 64)

    def setting(**settings):
        return {**files, CONFIG: json.dumps({**json.loads(files[CONFIG]), **settings}).encode()}

    cases = [
        (edited(files, WEIGHTS, wrong_shape), "shape"),
        (edited(files, WEIGHTS, not_finite), "not finite"),
        (edited(files, WEIGHTS, missing), "lacks"),
        (edited(files, WEIGHTS, unknown), "unknown tensor"),
        ({**files, WEIGHTS: files[WEIGHTS][:100]}, "not a safetensors file"),
        ({**files, WEIGHTS: b""}, "not a safetensors file"),
        ({CONFIG: files[CONFIG]}, "missing"),
        ({**files, CONFIG: b"{"}, "not JSON"),
        (setting(r=5), "r does not match"),
        (setting(r="4"), "integer"),
        (setting(use_dora=True), "use_dora"),
        (setting(rank_pattern={"q_proj": 2}), "rank_pattern"),
        ({name: content for name, content in files.items() if name != OPTIMIZER}, "missing"),
        (edited(files, OPTIMIZER, lambda tensors: tensors[f"exp_avg_sq.{key}"].neg_()), "negative"),
    ]
    for broken, reason in cases:
        with pytest.raises(InvalidInput, match=reason):
            import_adapter(model.pool, broken, with_optimizer=True)
