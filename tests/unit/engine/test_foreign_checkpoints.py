"""Checkpoints of other code's names, in other numbers, or with holes: what is computed of them, or why not."""

import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.nn import functional

from harness.families import FAMILIES, SIZES, stir
from harness.pictures import save_picture_model
from twinkle.core.errors import ConfigError
from twinkle.core.settings import Settings
from twinkle.hub.image_processor import PROCESSOR_FILE
from twinkle.model.fused.model import FusedLoraModel
from twinkle.module.packed_attention import CausalSpans
from twinkle.workers.engines.transformers_engine import TransformersEngine

TOKENS = torch.randint(0, SIZES["vocab_size"], (23,), generator=torch.Generator().manual_seed(3))
HEADS, GROUPS, HEAD_SIZE = SIZES["num_attention_heads"], SIZES["num_key_value_heads"], 16


def logits_of(path, dtype=torch.float32):
    model = FusedLoraModel.from_pretrained(str(path), dtype=dtype)
    hidden = model.run_packed(TOKENS, torch.arange(len(TOKENS)), [], CausalSpans([(0, len(TOKENS))]))
    return model, model.logits(hidden, [])


def write(path, config, tensors):
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")


def made(family):
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(FAMILIES[family]()).eval()
    stir(model)
    return model


def test_the_old_names_of_glm_4_are_read_into_glm(tmp_path):
    plain = made("glm")
    state = plain.state_dict()
    old = {}
    for name, tensor in state.items():
        name = name.replace("model.layers.", "transformer.encoder.layers.")
        name = name.replace(".self_attn.o_proj.", ".self_attention.dense.")
        name = name.replace(".mlp.gate_up_proj.", ".mlp.dense_h_to_4h.").replace(
            ".mlp.down_proj.", ".mlp.dense_4h_to_h."
        )
        name = name.replace("model.embed_tokens.", "transformer.embedding.word_embeddings.")
        name = name.replace("model.norm.", "transformer.encoder.final_layernorm.")
        name = name.replace("lm_head.", "transformer.output_layer.")
        if ".q_proj." in name:
            parts = [
                state[f"model.layers.{name.split('.')[3]}.self_attn.{p}_proj.{name.rsplit('.')[-1]}"] for p in "qkv"
            ]
            old[name.replace("self_attn.q_proj", "self_attention.query_key_value")] = torch.cat(parts)
        elif ".k_proj." not in name and ".v_proj." not in name:
            old[name] = tensor
    old["transformer.rotary_pos_emb.inv_freq"] = torch.ones(4)
    config = {
        "model_type": "chatglm",
        "architectures": ["ChatGLMModel"],
        "auto_map": {"AutoModelForCausalLM": "modeling_chatglm.ChatGLMForConditionalGeneration"},
        "add_bias_linear": False,
        "add_qkv_bias": True,
        "ffn_hidden_size": SIZES["intermediate_size"],
        "hidden_size": SIZES["hidden_size"],
        "kv_channels": HEAD_SIZE,
        "layernorm_epsilon": plain.config.rms_norm_eps,
        "multi_query_attention": True,
        "multi_query_group_num": GROUPS,
        "num_attention_heads": HEADS,
        "num_layers": SIZES["num_hidden_layers"],
        "padded_vocab_size": SIZES["vocab_size"],
        "rope_ratio": 1,
        "seq_length": SIZES["max_position_embeddings"],
        "eos_token_id": [2, 3],
        "pad_token_id": 0,
        "tie_word_embeddings": False,
    }
    write(tmp_path, config, old)

    model, ours = logits_of(tmp_path)

    theirs = plain(input_ids=TOKENS[None]).logits[0]
    torch.testing.assert_close(ours, theirs, atol=1e-5 * theirs.abs().max().item(), rtol=1e-4)
    assert model.info.architecture == "GlmForCausalLM"
    assert model.info.eos_token_ids == (2, 3)


def internlm2_tensors(generator):
    hidden, inner, vocabulary = (SIZES[name] for name in ("hidden_size", "intermediate_size", "vocab_size"))
    shapes = {"model.tok_embeddings": (vocabulary, hidden), "output": (vocabulary, hidden), "model.norm": (hidden,)}
    for layer in range(SIZES["num_hidden_layers"]):
        shapes |= {
            f"model.layers.{layer}.attention.wqkv": ((HEADS + 2 * GROUPS) * HEAD_SIZE, hidden),
            f"model.layers.{layer}.attention.wo": (hidden, HEADS * HEAD_SIZE),
            f"model.layers.{layer}.feed_forward.w1": (inner, hidden),
            f"model.layers.{layer}.feed_forward.w3": (inner, hidden),
            f"model.layers.{layer}.feed_forward.w2": (hidden, inner),
            f"model.layers.{layer}.attention_norm": (hidden,),
            f"model.layers.{layer}.ffn_norm": (hidden,),
        }
    return {f"{name}.weight": 0.2 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def internlm2_logits(weights, *, theta, epsilon):
    """InternLM2 as its report writes it (arXiv 2403.17297): a Llama whose queries, keys and values lie by group."""

    def norm(x_TH, name):
        return x_TH * (x_TH.pow(2).mean(-1, keepdim=True) + epsilon).rsqrt() * weights[f"{name}.weight"]

    def turned(x_TD, position_T1):
        angles = position_T1 / theta ** (torch.arange(0, HEAD_SIZE, 2) / HEAD_SIZE)
        first, second = x_TD.chunk(2, dim=-1)
        return torch.cat(
            (first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()), -1
        )

    x_TH = weights["model.tok_embeddings.weight"][TOKENS]
    position_T1 = torch.arange(len(TOKENS))[:, None].float()
    ahead_TT = torch.ones(len(TOKENS), len(TOKENS), dtype=torch.bool).triu(1)
    for layer in range(SIZES["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        packed = norm(x_TH, f"{at}.attention_norm") @ weights[f"{at}.attention.wqkv.weight"].T
        heads = []
        for group in packed.split((HEADS // GROUPS + 2) * HEAD_SIZE, dim=-1):
            *queries, key, value = group.split(HEAD_SIZE, dim=-1)
            for query in queries:
                scores = turned(query, position_T1) @ turned(key, position_T1).T / HEAD_SIZE**0.5
                heads.append(scores.masked_fill(ahead_TT, -torch.inf).softmax(-1) @ value)
        x_TH = x_TH + torch.cat(heads, -1) @ weights[f"{at}.attention.wo.weight"].T
        normed = norm(x_TH, f"{at}.ffn_norm")
        w1, w2, w3 = (weights[f"{at}.feed_forward.w{number}.weight"] for number in (1, 2, 3))
        x_TH = x_TH + (functional.silu(normed @ w1.T) * (normed @ w3.T)) @ w2.T
    return norm(x_TH, "model.norm") @ weights["output.weight"].T


INTERNLM2 = {
    **SIZES,
    "model_type": "internlm2",
    "architectures": ["InternLM2ForCausalLM"],
    "auto_map": {"AutoModelForCausalLM": "modeling_internlm2.InternLM2ForCausalLM"},
    "bias": False,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "rope_scaling": {"type": "dynamic", "factor": 2.0},
    "tie_word_embeddings": False,
}


def test_internlm2_is_read_into_llama_and_computes_its_equations(tmp_path):
    weights = internlm2_tensors(torch.Generator().manual_seed(4))
    write(tmp_path, INTERNLM2, weights)

    _, ours = logits_of(tmp_path)

    expected = internlm2_logits(weights, theta=1e6, epsilon=1e-5)
    torch.testing.assert_close(ours, expected, atol=1e-5 * expected.abs().max().item(), rtol=1e-4)


def test_a_worker_serves_a_model_whose_tokenizer_is_code_without_running_it(tmp_path):
    write(tmp_path, INTERNLM2, internlm2_tensors(torch.Generator().manual_seed(4)))
    code = {"auto_map": {"AutoTokenizer": ["tokenization_internlm2.InternLM2Tokenizer", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(code | {"tokenizer_class": "InternLM2Tokenizer"}))
    (tmp_path / "tokenization_internlm2.py").write_text("raise SystemExit('run')")

    engine = TransformersEngine.from_settings(Settings(model=str(tmp_path), threads=1))

    assert engine.capabilities.tokenizer_path is None


def test_kimi_k2_is_read_as_the_architecture_that_it_is(tmp_path):
    plain = made("deepseek-v3")
    plain.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"model_type": "kimi_k2", "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}}
    (tmp_path / "config.json").write_text(json.dumps(config))

    model, ours = logits_of(tmp_path)

    theirs = plain(input_ids=TOKENS[None]).logits[0]
    torch.testing.assert_close(ours, theirs, atol=1e-5 * theirs.abs().max().item(), rtol=1e-4)
    assert model.info.architecture == "DeepseekV3ForCausalLM"


def test_weights_in_eight_bits_are_read_into_plain_ones(tmp_path):
    plain = made("qwen3")
    block = 32
    stored = {}
    for name, tensor in list(plain.state_dict().items()):
        if not name.endswith("_proj.weight"):
            stored[name] = tensor
            continue
        rows, columns = (-(-size // block) for size in tensor.shape)
        scale = torch.rand(rows, columns, generator=torch.Generator().manual_seed(1)) * 0.01 + 0.001
        spread = scale.repeat_interleave(block, 0)[: tensor.shape[0]].repeat_interleave(block, 1)[:, : tensor.shape[1]]
        packed = (tensor / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
        stored[name], stored[f"{name}_scale_inv"] = packed, scale
        plain.get_parameter(name).data.copy_(packed.float() * spread)
    config = plain.config.to_dict() | {
        "architectures": ["Qwen3ForCausalLM"],
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [block, block],
        },
    }
    write(tmp_path, config, stored)

    model, ours = logits_of(tmp_path)

    theirs = plain(input_ids=TOKENS[None]).logits[0]
    assert model.dtype == torch.float32
    torch.testing.assert_close(ours, theirs, atol=0.02 * theirs.abs().max().item(), rtol=0.02)


FOUR_BITS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
"""What a number of 4 bits means (OCP microscaling formats, E2M1)."""


def in_four_bits(shape, generator):
    """Weights in blocks of 32 numbers with a power of two for each: blocks and scales as stored, and the weights."""
    *outer, width = shape
    numbers = torch.randint(0, 16, (*outer, width // 32, 32), generator=generator)
    scales = torch.randint(122, 126, (*outer, width // 32), generator=generator)
    plain = (FOUR_BITS[numbers] * 2.0 ** (scales[..., None] - 127)).flatten(-2)
    pairs = numbers.unflatten(-1, (16, 2))
    return (pairs[..., 0] | pairs[..., 1] << 4).to(torch.uint8), scales.to(torch.uint8), plain


def test_weights_in_four_bits_are_read_into_plain_ones(tmp_path):
    inner, experts = 96, 4
    shape = {
        **SIZES,
        "intermediate_size": inner,
        "head_dim": 16,
        "num_local_experts": experts,
        "num_experts_per_tok": 2,
    }
    torch.manual_seed(5)
    plain = transformers.GptOssForCausalLM(transformers.GptOssConfig(**shape, sliding_window=7)).eval()
    stir(plain)
    stored, generator = {}, torch.Generator().manual_seed(2)
    for name, tensor in plain.state_dict().items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored[name] = tensor
            continue
        # Stored with the outputs first, unlike the class's own weights.
        blocks, scales, weights = in_four_bits(tensor.transpose(1, 2).shape, generator)
        stored[f"{name}_blocks"], stored[f"{name}_scales"] = blocks, scales
        plain.get_parameter(name).data.copy_(weights.transpose(1, 2))
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    config = plain.config.to_dict() | {"architectures": ["GptOssForCausalLM"], "quantization_config": settings}
    write(tmp_path, config, stored)

    model, ours = logits_of(tmp_path)

    theirs = plain(input_ids=TOKENS[None]).logits[0]
    assert model.dtype == torch.float32
    torch.testing.assert_close(ours, theirs, atol=1e-5 * theirs.abs().max().item(), rtol=1e-4)


def in_groups(tensor, bits, group):
    """What compressed-tensors stores of a weight, and the weight it then is."""
    scales = tensor.unflatten(1, (-1, group)).abs().amax(-1) / (2 ** (bits - 1) - 1)
    spread = scales.repeat_interleave(group, 1)
    numbers = (tensor / spread).round().int()
    words = (numbers + 2 ** (bits - 1)).unflatten(1, (-1, 32 // bits))
    packed = torch.zeros(words.shape[:2], dtype=torch.int32)
    for place in range(32 // bits):
        packed |= words[..., place] << (bits * place)
    parts = {"weight_packed": packed, "weight_scale": scales, "weight_shape": torch.tensor(tensor.shape)}
    return parts, numbers * spread


@pytest.mark.parametrize("bits", [4, 8])
def test_a_kimi_in_few_bits_as_it_is_published_is_read_with_its_tower(tmp_path, bits):
    rounded = save_picture_model(tmp_path / "rounded", "kimi-k2.5")
    stored, weights = {}, {}
    for name, tensor in load_file(rounded / "model.safetensors").items():
        weights[name] = tensor
        if ".mlp." not in name or not name.endswith("_proj.weight"):
            stored[name] = tensor
            continue
        parts, weights[name] = in_groups(tensor, bits, group=16)
        stored |= {name.removesuffix("weight") + part: value for part, value in parts.items()}
    assert sum(name.endswith("weight_packed") for name in stored) > 20
    config = json.loads((rounded / "config.json").read_text())
    write(rounded, config, weights)
    few_bits = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group", "group_size": 16}
    config["text_config"]["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": few_bits, "input_activations": None}},
    }
    write(tmp_path / "packed", config, stored)
    shutil.copy(rounded / PROCESSOR_FILE, tmp_path / "packed")

    model, ours = logits_of(tmp_path / "packed")

    plain = transformers.AutoModelForImageTextToText.from_pretrained(rounded, dtype=torch.float32)
    theirs = plain(input_ids=TOKENS[None]).logits[0]
    torch.testing.assert_close(ours, theirs, atol=1e-5 * theirs.abs().max().item(), rtol=1e-4)
    assert model.picture_rules is not None


def test_a_checkpoint_with_holes_is_refused_by_the_names_it_lacks(tmp_path):
    plain = made("qwen3")
    plain.save_pretrained(tmp_path)
    stored = plain.state_dict()
    del stored["model.layers.1.mlp.up_proj.weight"]
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(ConfigError, match=r"lacks weights .*model\.layers\.1\.mlp\.up_proj\.weight"):
        FusedLoraModel.from_pretrained(str(tmp_path))
