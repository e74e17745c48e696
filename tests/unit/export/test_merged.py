"""Merged models: what transformers reads of the written folder is base and adapter as PEFT computes them."""

import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from harness.exports import fill, make_adapter, request_for, split_in_two, write
from harness.families import FAMILIES, RELEASED, SIZES
from twinkle.checkpoint_engine.peft import export_adapter
from twinkle.core.errors import ConfigError, InvalidInput, StorageUnavailable
from twinkle.model.fused.model import FusedLoraModel
from twinkle.module.adapter import TrainedModule
from twinkle.module.lora import LoraConfig
from twinkle.workers.jobs.export.build import outline_of, take_step, verify_form
from twinkle.workers.jobs.export.skeleton import open_skeleton

QUICK = (
    "qwen3",
    "qwen3-tied",
    "qwen3-moe",
    "mixtral",
    "gpt-oss",
    "qwen3_5-moe",
    "nemotron-h",
    "deepseek-v3",
    "phi3",
    "released:gemma3",
    "released:llama4",
)
"""One of each way in which files hold weights; the others in soak."""


def export(request):
    for step in outline_of(request).steps:
        take_step(request, step)
    return {form: verify_form(request, form) for form in request.forms}


@pytest.mark.parametrize("family", QUICK)
def test_transformers_reads_a_merged_folder_as_base_and_adapter(family, family_base, tmp_path):
    base = family_base(family)
    adapter = make_adapter(tmp_path / "adapter", base)

    figures = export(request_for(tmp_path / "out", base, adapter, ["peft", "merged"]))

    assert figures["merged"]["logits_difference"] < 1e-5
    assert figures["merged"]["merging_difference"] < 5e-5
    assert figures["merged"]["effect"] > 0.1
    assert figures["peft"]["tensors"] == len(load_file(adapter / "adapter_model.safetensors"))


@pytest.mark.soak
@pytest.mark.parametrize("family", [*FAMILIES, *(f"released:{name}" for name in RELEASED)])
@pytest.mark.parametrize("unembed", [True, False])
def test_every_family_that_is_served_is_merged_from_what_the_engine_saves(family, unembed, family_base, tmp_path):
    base = family_base(family)
    engine = FusedLoraModel.from_pretrained(str(base))
    adapter = engine.create_adapter(LoraConfig(rank=4, seed=3, train_unembed=unembed))
    fill(adapter)
    folder = write(tmp_path / "adapter", export_adapter(adapter, str(base)))

    figures = export(request_for(tmp_path / "out", base, folder, ["peft", "merged"]))["merged"]

    assert figures["logits_difference"] < 1e-5
    assert figures["merging_difference"] < 5e-5
    assert figures["effect"] > 0.1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_keep_the_numbers_of_the_base_and_what_is_not_trained_keeps_its_bits(dtype, family_base, tmp_path):
    base = family_base("qwen3-moe", dtype)
    adapter = make_adapter(tmp_path / "adapter", base, train_attn=False, train_unembed=False)

    figures = export(request_for(tmp_path / "out", base, adapter, ["merged"]))["merged"]

    before, after = (load_file(path / "model.safetensors") for path in (base, tmp_path / "out" / "merged"))
    assert before.keys() == after.keys() and {tensor.dtype for tensor in after.values()} == {dtype}
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if ".mlp.experts." in name}
    assert figures["logits_difference"] < 1e-5 < figures["rounding_difference"] < 0.05


def test_a_trained_head_of_a_tied_model_becomes_its_own_and_leaves_the_embedding(family_base, tmp_path):
    base = family_base("qwen3-tied")
    adapter = make_adapter(tmp_path / "adapter", base)

    export(request_for(tmp_path / "out", base, adapter, ["merged"]))

    before, after = (load_file(path / "model.safetensors") for path in (base, tmp_path / "out" / "merged"))
    assert torch.equal(before["model.embed_tokens.weight"], after["model.embed_tokens.weight"])
    assert after.keys() - before.keys() == {"lm_head.weight"}
    assert json.loads((tmp_path / "out/merged/config.json").read_text())["tie_word_embeddings"] is False


def test_a_tied_model_whose_head_is_not_trained_stays_tied(family_base, tmp_path):
    base = family_base("qwen3-tied")
    adapter = make_adapter(tmp_path / "adapter", base, train_unembed=False)

    export(request_for(tmp_path / "out", base, adapter, ["merged"]))

    assert json.loads((tmp_path / "out/merged/config.json").read_text())["tie_word_embeddings"] is True
    assert "lm_head.weight" not in load_file(tmp_path / "out/merged/model.safetensors")


def test_modules_with_ranks_and_alphas_of_their_own_are_merged_by_these(family_base, tmp_path):
    base = family_base("qwen3-moe")
    paths = [target.path for target in open_skeleton(base).targets]
    modules = tuple(TrainedModule(path, 2 + number % 3, 5.0 + number) for number, path in enumerate(paths))
    adapter = make_adapter(tmp_path / "adapter", base, modules=modules, use_rslora=True)

    figures = export(request_for(tmp_path / "out", base, adapter, ["merged"]))["merged"]

    assert figures["merging_difference"] < 5e-5 and figures["effect"] > 0.1


def test_shards_index_and_all_that_is_no_weights_go_along(family_base, tmp_path):
    base = shutil.copytree(family_base("qwen3"), tmp_path / "base")
    split_in_two(base)
    for name in ("LICENSE", "tokenizer_config.json", "README.md", "pytorch_model.bin", ".gitattributes"):
        (base / name).write_text("{}")
    adapter = make_adapter(tmp_path / "adapter", base)

    export(request_for(tmp_path / "out", base, adapter, ["merged"]))

    assert sorted(path.name for path in (tmp_path / "out/merged").iterdir()) == [
        "LICENSE",
        "config.json",
        "generation_config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer_config.json",
    ]
    index = json.loads((tmp_path / "out/merged/model.safetensors.index.json").read_text())
    assert index["weight_map"] == json.loads((base / "model.safetensors.index.json").read_text())["weight_map"]
    assert index["metadata"]["total_size"] > 0


def test_an_export_that_was_broken_off_writes_only_what_is_not_there_whole(family_base, tmp_path):
    base = shutil.copytree(family_base("qwen3"), tmp_path / "base")
    split_in_two(base)
    adapter = make_adapter(tmp_path / "adapter", base)
    request = request_for(tmp_path / "out", base, adapter, ["merged"])
    steps = outline_of(request).steps
    first = [take_step(request, step) for step in steps]
    merged = tmp_path / "out" / "merged"
    shards = sorted(merged.glob("*.safetensors"))
    intact, damaged = (path.stat().st_ino for path in shards)
    shards[1].write_bytes(shards[1].read_bytes()[:-1] + b"x")

    again = [take_step(request, step) for step in steps]

    assert again == first
    assert shards[0].stat().st_ino == intact and shards[1].stat().st_ino != damaged


def test_a_damaged_file_is_found_when_it_is_read_back(family_base, tmp_path):
    base = family_base("qwen3")
    adapter = make_adapter(tmp_path / "adapter", base)
    request = request_for(tmp_path / "out", base, adapter, ["merged"])
    for step in outline_of(request).steps:
        take_step(request, step)
    path = tmp_path / "out" / "merged" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] += 0.01
    save_file(tensors, path, metadata={"format": "pt"})

    with pytest.raises(StorageUnavailable, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        verify_form(request, "merged")


def test_what_cannot_be_merged_is_refused_by_name_before_any_work(family_base, tmp_path):
    base = shutil.copytree(family_base("qwen3"), tmp_path / "base")
    adapter = make_adapter(tmp_path / "adapter", base)
    config = json.loads((base / "config.json").read_text())

    def refused(number, *, written=None, files=None, of=adapter, **settings):
        folder = shutil.copytree(base, tmp_path / f"base-{number}")
        (folder / "config.json").write_text(json.dumps({**config, **(written or {})}))
        for name, content in (files or {}).items():
            (folder / name).unlink() if content is None else save_file(content, folder / name)
        with pytest.raises((ConfigError, InvalidInput)) as raised:
            outline_of(request_for(tmp_path / "out", folder, of, ["merged"], **settings))
        return raised.value.message

    assert "fp8" in refused(1, written={"quantization_config": {"quant_method": "fp8"}})
    assert "chatglm" in refused(2, written={"model_type": "chatglm", "architectures": ["ChatGLMModel"]})
    assert "model.safetensors" in refused(3, files={"model.safetensors": None})
    assert "TWINKLE_EXPORT_MEMORY_BYTES" in refused(4, memory_bytes=1000)
    other = make_adapter(tmp_path / "other", family_base("qwen3-moe"))
    assert "adapter_model.safetensors" in refused(5, of=other)
    assert not (tmp_path / "out").exists()


def test_an_adapter_alone_is_exported_also_of_a_base_that_cannot_be_merged(family_base, tmp_path):
    base = shutil.copytree(family_base("qwen3"), tmp_path / "base")
    adapter = make_adapter(tmp_path / "adapter", base)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))

    figures = export(request_for(tmp_path / "out", base, adapter, ["peft"], memory_bytes=1))

    assert figures == {"peft": {"files": 2.0}}
    assert (tmp_path / "out/peft/adapter_config.json").read_bytes() == (adapter / "adapter_config.json").read_bytes()


def test_a_tensor_that_peft_has_no_place_for_is_found(family_base, tmp_path):
    base = family_base("qwen3")
    adapter = make_adapter(tmp_path / "adapter", base)
    request = request_for(tmp_path / "out", base, adapter, ["peft"])
    for step in outline_of(request).steps:
        take_step(request, step)
    settings = json.loads((tmp_path / "out/peft/adapter_config.json").read_text())
    settings["target_modules"].remove("q_proj")
    (tmp_path / "out/peft/adapter_config.json").write_text(json.dumps(settings))

    with pytest.raises(StorageUnavailable, match="q_proj"):
        verify_form(request, "peft")


def test_a_base_whose_experts_lie_in_one_tensor_is_merged_as_well(tmp_path, family_base):
    base = shutil.copytree(family_base("qwen3-moe"), tmp_path / "base")
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    assert any(name.endswith("experts.gate_up_proj") for name in state)
    save_file(state, base / "model.safetensors", metadata={"format": "pt"})
    adapter = make_adapter(tmp_path / "adapter", base)

    figures = export(request_for(tmp_path / "out", base, adapter, ["merged"]))["merged"]

    assert figures["merging_difference"] < 5e-5
    assert load_file(tmp_path / "out/merged/model.safetensors").keys() == state.keys()
    assert SIZES["num_hidden_layers"] * 2 == sum("experts" in name for name in state)
