"""GGUF: what its readers find in the files is what was meant; what llama.cpp computes otherwise is refused by name."""

import json
import shutil

import gguf
import pytest
import torch
import transformers

from harness.exports import add_tokenizer, make_adapter, make_base, request_for
from harness.families import FAMILIES
from twinkle.core.errors import ConfigError, StorageUnavailable
from twinkle.workers.jobs.export.build import outline_of, take_step, verify_form


def export(request):
    written = [file for step in outline_of(request).steps for file in take_step(request, step)]
    return written, {form: verify_form(request, form) for form in request.forms}


@pytest.mark.parametrize("kind", ["llama", "llama-tied", "llama3-rope", "qwen2", "qwen3", "qwen3-tied", "qwen3-moe"])
def test_transformers_reads_a_model_in_gguf_bit_for_bit_as_it_was_merged(kind, gguf_base, tmp_path):
    base = gguf_base(kind)
    adapter = make_adapter(tmp_path / "adapter", base)

    _, figures = export(request_for(tmp_path / "out", base, adapter, ["gguf"]))

    assert figures["gguf"]["merging_difference"] < 5e-5
    assert figures["gguf"]["tensors"] > 20


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "qwen3-moe"])
def test_an_adapter_in_gguf_multiplies_out_to_its_updates(kind, gguf_base, tmp_path):
    base = gguf_base(kind)
    adapter = make_adapter(tmp_path / "adapter", base)

    _, figures = export(request_for(tmp_path / "out", base, adapter, ["gguf-adapter"]))

    assert figures["gguf-adapter"]["update_difference"] < 1e-5


def test_numbers_in_sixteen_bits_stay_so_and_norms_and_routers_become_float32(gguf_base, tmp_path):
    base = gguf_base("qwen3-moe", torch.bfloat16)
    adapter = make_adapter(tmp_path / "adapter", base)

    export(request_for(tmp_path / "out", base, adapter, ["gguf"]))

    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "out/gguf/model.gguf").tensors}
    plain = {name for name, tensor in tensors.items() if tensor.tensor_type == gguf.GGMLQuantizationType.F32}
    assert plain == {name for name in tensors if "norm" in name or "ffn_gate_inp" in name}
    assert tensors["blk.0.ffn_gate_exps.weight"].tensor_type == gguf.GGMLQuantizationType.BF16


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3-tied", "qwen3-moe"])
def test_eight_bits_are_what_the_merged_weights_come_to_in_blocks(kind, gguf_base, tmp_path):
    base = gguf_base(kind, torch.bfloat16)
    adapter = make_adapter(tmp_path / "adapter", base)

    written, figures = export(request_for(tmp_path / "out", base, adapter, ["gguf-q8_0"]))

    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "out/gguf-q8_0/model.gguf").tensors}
    kinds = {name: tensor.tensor_type for name, tensor in tensors.items()}
    assert kinds["token_embd.weight"] == kinds["blk.0.attn_q.weight"] == gguf.GGMLQuantizationType.Q8_0
    assert kinds["output_norm.weight"] == gguf.GGMLQuantizationType.F32
    assert all(kinds[name] == gguf.GGMLQuantizationType.F32 for name in kinds if "ffn_gate_inp" in name)
    assert 0 < figures["gguf-q8_0"]["quantization_difference"] < 0.05
    assert [file.path for file in written] == ["gguf-q8_0/model.gguf"]


def test_the_file_says_what_llama_cpp_needs_of_the_tokenizer(gguf_base, tmp_path):
    base = gguf_base("qwen3")
    adapter = make_adapter(tmp_path / "adapter", base)

    written, _ = export(request_for(tmp_path / "out", base, adapter, ["ollama"]))

    fields = gguf.GGUFReader(tmp_path / "out/gguf/model.gguf").fields
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    tokens = fields["tokenizer.ggml.tokens"].contents()
    assert fields["tokenizer.ggml.pre"].contents() == "qwen2"
    assert len(tokens) == 307
    assert tokens[: len(tokenizer)] == tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    assert fields["tokenizer.ggml.eos_token_id"].contents() == tokenizer.eos_token_id
    assert fields["tokenizer.chat_template"].contents() == tokenizer.chat_template
    modelfile = (tmp_path / "out/gguf/Modelfile").read_text()
    assert modelfile.startswith("FROM ./model.gguf\n") and 'PARAMETER stop "<|im_end|>"' in modelfile
    assert [file.path for file in written] == ["gguf/model.gguf", "gguf/Modelfile"]


def test_writing_again_gives_the_same_bytes(gguf_base, tmp_path):
    base = gguf_base("llama")
    adapter = make_adapter(tmp_path / "adapter", base)

    first, _ = export(request_for(tmp_path / "first", base, adapter, ["gguf", "gguf-adapter"]))
    again, _ = export(request_for(tmp_path / "again", base, adapter, ["gguf", "gguf-adapter"]))

    assert first == again


def test_a_file_whose_rows_lie_in_another_order_is_found_when_it_is_read_back(gguf_base, tmp_path):
    base = gguf_base("llama")
    adapter = make_adapter(tmp_path / "adapter", base)
    request = request_for(tmp_path / "out", base, adapter, ["gguf"])
    for step in outline_of(request).steps:
        take_step(request, step)
    path = tmp_path / "out/gguf/model.gguf"
    tensor = next(tensor for tensor in gguf.GGUFReader(path, "r+").tensors if tensor.name == "blk.1.attn_k.weight")
    tensor.data[[0, 1]] = tensor.data[[1, 0]]
    tensor.data.flush()

    with pytest.raises(StorageUnavailable, match=r"layers\.1\.self_attn\.k_proj"):
        verify_form(request, "gguf")


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        ("llama", {"attention_bias": True}, "attention_bias"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act"),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}}, "'yarn'"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 4}, "use_sliding_window"),
        ("qwen3-moe", {"norm_topk_prob": False}, "norm_topk_prob"),
        ("qwen3-moe", {"mlp_only_layers": [0]}, "mlp_only_layers"),
    ],
)
def test_what_llama_cpp_would_compute_otherwise_is_refused(kind, changes, said, gguf_base, tmp_path):
    config = transformers.AutoConfig.from_pretrained(gguf_base(kind))
    for name, value in changes.items():
        setattr(config, name, value)
    base = make_base(tmp_path / "base", config)
    add_tokenizer(base)
    adapter = make_adapter(tmp_path / "adapter", base)

    with pytest.raises(ConfigError, match=said):
        outline_of(request_for(tmp_path / "out", base, adapter, ["gguf"]))


@pytest.mark.parametrize("form", ["gguf", "gguf-adapter", "ollama"])
@pytest.mark.parametrize("family", ["gemma3", "mistral", "deepseek-v3", "qwen3_5"])
def test_a_family_that_is_not_converted_is_refused_by_name(family, form, family_base, tmp_path):
    base = family_base(family)
    adapter = make_adapter(tmp_path / "adapter", base)

    with pytest.raises(ConfigError, match=FAMILIES[family]().model_type):
        outline_of(request_for(tmp_path / "out", base, adapter, [form]))


def test_a_tokenizer_that_llama_cpp_would_take_for_another_is_refused(gguf_base, tmp_path):
    base = shutil.copytree(gguf_base("qwen3"), tmp_path / "base")
    adapter = make_adapter(tmp_path / "adapter", base)
    written = json.loads((base / "tokenizer.json").read_text())
    written["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = r"\w+|\s+"
    (base / "tokenizer.json").write_text(json.dumps(written))

    with pytest.raises(ConfigError, match="tokenizer"):
        outline_of(request_for(tmp_path / "out", base, adapter, ["gguf"]))


def test_a_trained_head_of_a_tied_model_is_refused_as_an_adapter_and_taken_as_a_model(gguf_base, tmp_path):
    base = gguf_base("qwen3-tied")
    adapter = make_adapter(tmp_path / "adapter", base)

    with pytest.raises(ConfigError, match="one matrix"):
        outline_of(request_for(tmp_path / "out", base, adapter, ["gguf-adapter"]))
    _, figures = export(request_for(tmp_path / "out", base, adapter, ["gguf"]))

    names = {tensor.name for tensor in gguf.GGUFReader(tmp_path / "out/gguf/model.gguf").tensors}
    assert {"output.weight", "token_embd.weight"} <= names
    assert figures["gguf"]["merging_difference"] < 5e-5
