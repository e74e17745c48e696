"""Checkpoints of the class that is published: the language model out of it, and adapters under the names it wants."""

import json

import numpy as np
import peft
import pytest
import safetensors.torch
import torch
import transformers

from harness.families import RELEASED, stir
from twinkle.checkpoint_engine.peft import export_adapter, import_adapter
from twinkle.model.fused.model import FusedLoraModel
from twinkle.model.fused.training import AdamParams, TrainJob
from twinkle.module.lora import LoraConfig, Segment, TrainedModule
from twinkle.module.packed_attention import CausalSpans

WEIGHTS = "adapter_model.safetensors"
TOKENS = torch.arange(70) * 7 % 300
TOWERS = ("visual", "vision", "audio", "projector", "mtp")


@pytest.fixture(scope="module", params=RELEASED)
def released(request, tmp_path_factory):
    """The published class, and the engine on a checkpoint of it that holds layers for guessing ahead too."""
    folder = tmp_path_factory.mktemp("released")
    torch.manual_seed(5)
    model = transformers.AutoModelForImageTextToText.from_config(RELEASED[request.param]()).eval()
    stir(model)
    model.save_pretrained(folder)
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    safetensors.torch.save_file(
        {**weights, "mtp.fc.weight": torch.zeros(4, 4)}, folder / "model.safetensors", metadata={"format": "pt"}
    )
    return folder, model, FusedLoraModel.from_pretrained(str(folder))


def logits_of(model, adapter):
    segments = [] if adapter is None else [Segment(adapter, 0, len(TOKENS))]
    spans = CausalSpans([(0, len(TOKENS))])
    return model.logits(model.run_packed(TOKENS, torch.arange(len(TOKENS)), segments, spans), segments)


def trained(model, make_datum, config):
    adapter = model.create_adapter(config)
    for seed in range(2):
        data = (make_datum(np.random.default_rng(seed), 12),)
        [outcome] = model.forward_backward([TrainJob(adapter, data, "cross_entropy")])
        assert not isinstance(outcome, Exception)
        model.optim_step(adapter, AdamParams(learning_rate=1e-2))
    return adapter


def test_the_language_model_is_served_out_of_the_class_with_a_tower(released):
    _, model, ours = released

    with torch.no_grad():
        theirs = model(input_ids=TOKENS[None]).logits[0]

    torch.testing.assert_close(logits_of(ours, None), theirs, atol=1e-5 * theirs.abs().max().item(), rtol=1e-4)
    assert not any(tower in name for name, _ in ours._model.named_parameters() for tower in TOWERS)


@pytest.mark.parametrize("unembed", [True, False])
def test_peft_on_the_released_class_computes_with_an_export_what_the_engine_does_and_not_the_bare_model(
    unembed, released, make_datum, tmp_path
):
    folder, model, ours = released
    adapter = trained(ours, make_datum, LoraConfig(rank=4, seed=3, train_unembed=unembed))
    for name, content in export_adapter(adapter, str(folder)).items():
        (tmp_path / name).write_bytes(content)
    base = type(model).from_pretrained(folder, dtype=torch.float32)

    with torch.no_grad():
        theirs = peft.PeftModel.from_pretrained(base, tmp_path)(input_ids=TOKENS[None]).logits[0]

    torch.testing.assert_close(logits_of(ours, adapter), theirs, atol=1e-5 * theirs.abs().max().item(), rtol=1e-4)
    assert not torch.allclose(theirs, logits_of(ours, None), atol=1e-2)


def test_exports_return_and_so_do_files_named_after_the_language_model_alone(released, make_datum):
    _, _, ours = released
    paths = [target.path for target in ours.pool.targets if target.kind == "attn"]
    modules = (TrainedModule(paths[-1], 3, 5.0), TrainedModule(paths[0], 2, 7.0))
    for config in (LoraConfig(rank=4), LoraConfig(rank=2, modules=modules)):
        adapter = trained(ours, make_datum, config)
        files = export_adapter(adapter, "base", with_optimizer=True)
        tensors = safetensors.torch.load(files[WEIGHTS])
        assert all(".language_model." in name or "lm_head" in name for name in tensors)
        alone = {name.replace(".language_model.", "."): tensor for name, tensor in tensors.items()}
        by_peft = {**files, WEIGHTS: safetensors.torch.save(tensors)}
        of_the_text_class = {**files, WEIGHTS: safetensors.torch.save(alone)}

        for given in (files, by_peft, of_the_text_class):
            imported = import_adapter(ours.pool, given, with_optimizer=True)
            assert torch.equal(imported.params, adapter.params)
            assert torch.equal(imported.exp_avg_sq, adapter.exp_avg_sq)
            assert imported.scales == adapter.scales
        settings = json.loads(files["adapter_config.json"])
        assert config.modules is None or ours.pool.paths.stored(paths[-1]) in settings["target_modules"]
