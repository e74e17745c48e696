"""Base models from their checkpoints, frozen weights in one plain dtype, whatever code and numbers they came in.

A checkpoint may be made for code that transformers does not have (``FOREIGN``): its config is read into a class that
computes the same, and its weights under that class's names. Weights in 8 and 4 bits are read into plain ones.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import snapshot_download
from safetensors.torch import load_file
from transformers.utils.quantization_config import Mxfp4Config

from twinkle.core.errors import ConfigError
from twinkle.hub.support import (
    CONFIG_FILE,
    QUANTISATION,
    TOWER_LEFT_OUT,
    WITH_PICTURES,
    check_config,
    quantisation_of,
)
from twinkle.hub.trust import naming_code
from twinkle.model.parallel.spread import class_of
from twinkle.model.quantised_weights import IN_BLOCKS, IN_GROUPS, NamedTensors, plain_tensors
from twinkle.module.adapter import AS_LOADED, StoredPaths

Spread = Callable[..., tuple[Any, dict[str, Any]]]
DEFAULT_KV_CHANNELS = 128
ROPE_BASE = 10000.0
A_LEVEL_DEEPER = StoredPaths(loaded="model.", published="model.language_model.")
"""Where the decoder lies in a class for pictures too."""
WHOLE_BELOW = {"llama4": StoredPaths(published="language_model.")}
"""By their types the classes for pictures that hold a language model with its head."""


@dataclass(frozen=True)
class ForeignModel:
    """A model that exists as remote code only, and the class of transformers that computes the same.

    Args:
        config: The class's config from the checkpoint's.
        tensors: The class's tensors from one of the checkpoint's; None where the names are the class's own.
    """

    config: Callable[[Mapping[str, Any]], transformers.PretrainedConfig]
    tensors: Callable[[str, torch.Tensor, Any], NamedTensors] | None = None


def takes_pictures(path: str) -> bool:
    """Whether the model of a folder or of an id of a hub is of a type whose pictures are taken."""
    return _written_config(path).get("model_type") in WITH_PICTURES


def load_base_model(
    path: str, *, name: str, dtype: torch.dtype, with_tower: bool = True, spread: Spread | None = None
) -> Any:
    """The causal language model of a folder or of an id of a hub, on the CPU.

    Args:
        path: The folder or the id.
        name: What the model is called.
        dtype: Of its weights.
        with_tower: Keep what makes embeddings of pictures, where these are taken; some types cannot do without.
        spread: Loads a class from a folder with arguments of ``from_pretrained`` so that layers are spread over ranks;
            used where weights are read as they are published, else every rank loads all of them.

    Raises:
        ConfigError: It cannot be served, or its weights do not fit its config.
    """
    is_local = os.path.exists(path)
    written = _written_config(path)
    check_config(name, written)
    foreign = FOREIGN.get(str(written.get("model_type")))
    if foreign is None:
        with naming_code(name):
            config = transformers.AutoConfig.from_pretrained(path, local_files_only=is_local, trust_remote_code=False)
        check_config(name, config.to_dict())  # what the file leaves out has a default that may be refused
    else:
        config = foreign.config(written)
    loader: Any = transformers.AutoModelForCausalLM
    if config.model_type in WITH_PICTURES | TOWER_LEFT_OUT:
        loader = transformers.AutoModelForImageTextToText
    options: dict[str, Any] = {"config": config, "dtype": dtype, "output_loading_info": True}
    quantisation = quantisation_of(written) or {}
    is_unpacked = quantisation.get("quant_method") in (IN_BLOCKS, IN_GROUPS)
    if is_unpacked or (foreign is not None and foreign.tensors is not None):
        tensors = _read(path)
        if is_unpacked:
            for part in (config, config.get_text_config()):
                if hasattr(part, QUANTISATION):
                    delattr(part, QUANTISATION)
            tensors = plain_tensors(tensors, quantisation, dtype)
        if foreign is not None and foreign.tensors is not None:
            convert = foreign.tensors
            tensors = (pair for name, tensor in tensors for pair in convert(name, tensor, config))
        with torch.device("meta"):
            model_class: Any = type(loader.from_config(config, trust_remote_code=False))
        model, info = model_class.from_pretrained(None, state_dict=dict(tensors), **options)
    else:
        if quantisation.get("quant_method") == "mxfp4":
            options["quantization_config"] = Mxfp4Config(dequantize=True)
        elif spread is not None and is_local and not quantisation:
            del options["output_loading_info"]
            model, info = spread(class_of(loader, path, config, trust_remote_code=False), path, **options)
            _check_whole(name, model, info["missing_keys"])
            return _as_served(model, with_tower=with_tower)
        with naming_code(name):
            model, info = loader.from_pretrained(path, local_files_only=is_local, trust_remote_code=False, **options)
    _check_whole(name, model, info["missing_keys"])
    return _as_served(model, with_tower=with_tower)


def _as_served(model: Any, *, with_tower: bool) -> Any:
    model_type = model.config.model_type
    is_whole = with_tower and model_type in WITH_PICTURES
    return _language_model(model) if model_type in TOWER_LEFT_OUT and not is_whole else model


def _language_model(model: Any) -> Any:
    """The language model out of a class for pictures too, whose tower is let go.

    The whole is read first: transformers knows under which names each class's weights were published.
    """
    if model.config.model_type in WHOLE_BELOW:
        return model.language_model
    with torch.device("meta"):
        alone: Any = transformers.AutoModelForCausalLM.from_config(
            model.config.get_text_config(), trust_remote_code=False
        )
    alone.model = model.base_model.language_model
    alone.set_output_embeddings(model.get_output_embeddings())
    alone.generation_config = model.generation_config
    return alone


def stored_paths(path: str) -> StoredPaths:
    """What the modules of the model that ``load_base_model`` makes are called in the files of adapters."""
    model_type = str(_written_config(path).get("model_type"))
    return WHOLE_BELOW.get(model_type, A_LEVEL_DEEPER) if model_type in TOWER_LEFT_OUT else AS_LOADED


def _written_config(path: str) -> dict[str, Any]:
    folder = Path(path if os.path.exists(path) else snapshot_download(path, allow_patterns=[CONFIG_FILE]))
    written: dict[str, Any] = json.loads((folder / CONFIG_FILE).read_text())
    return written


def _check_whole(name: str, model: Any, missing_keys: Collection[str]) -> None:
    if missing_keys:
        first, others = sorted(missing_keys)[:3], len(missing_keys) - 3
        raise ConfigError(
            f"{name} lacks weights that {type(model).__name__} has: {', '.join(first)}"
            f"{f' and {others} more' if others > 0 else ''}; the checkpoint does not fit its config"
        )


def decoder_of(model: Any) -> Any:
    """The stack of layers below a model's output head, without the tower of one that takes pictures."""
    if model.config.model_type in WITH_PICTURES:
        return model.base_model.language_model
    # Llama 4's text model calls itself by its place in the one with pictures, and so finds itself.
    return model.model if model.base_model is model else model.base_model


def _read(path: str) -> NamedTensors:
    folder = Path(path) if os.path.exists(path) else Path(snapshot_download(path))
    safe = sorted(folder.glob("*.safetensors"))
    files = safe or sorted(folder.glob("pytorch_model*.bin"))
    if not files:
        raise ConfigError(f"{path} holds no weights: neither *.safetensors nor pytorch_model*.bin")
    for file in files:
        stored = load_file(file) if safe else torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        yield from stored.items()


def _glm_config(written: Mapping[str, Any]) -> transformers.PretrainedConfig:
    return transformers.GlmConfig(
        architectures=["GlmForCausalLM"],
        vocab_size=written["padded_vocab_size"],
        hidden_size=written["hidden_size"],
        intermediate_size=written["ffn_hidden_size"],
        num_hidden_layers=written["num_layers"],
        num_attention_heads=written["num_attention_heads"],
        num_key_value_heads=written["multi_query_group_num"]
        if written.get("multi_query_attention")
        else written["num_attention_heads"],
        head_dim=written.get("kv_channels", DEFAULT_KV_CHANNELS),
        max_position_embeddings=written["seq_length"],
        rms_norm_eps=written["layernorm_epsilon"],
        attention_bias=bool(written.get("add_qkv_bias") or written.get("add_bias_linear")),
        rope_parameters={
            "rope_type": "default",
            "rope_theta": ROPE_BASE * written.get("rope_ratio", 1),
            "partial_rotary_factor": 0.5,
        },
        tie_word_embeddings=bool(written.get("tie_word_embeddings")),
        eos_token_id=written.get("eos_token_id"),
        pad_token_id=written.get("pad_token_id"),
    )


GLM_NAMES = (
    ("transformer.embedding.word_embeddings.", "model.embed_tokens."),
    ("transformer.encoder.final_layernorm.", "model.norm."),
    ("transformer.output_layer.", "lm_head."),
    ("transformer.encoder.layers.", "model.layers."),
    (".self_attention.dense.", ".self_attn.o_proj."),
    (".mlp.dense_h_to_4h.", ".mlp.gate_up_proj."),
    (".mlp.dense_4h_to_h.", ".mlp.down_proj."),
)
"""Old names and those of ``glm``; the gate and what it gates lie in one matrix in both."""


def _glm_tensors(name: str, tensor: torch.Tensor, config: Any) -> NamedTensors:
    if name.endswith(".inv_freq"):
        return
    for old, new in GLM_NAMES:
        name = name.replace(old, new)
    packed = ".self_attention.query_key_value."
    if packed not in name:
        yield name, tensor
        return
    keys = config.num_key_value_heads * config.head_dim
    rows = (config.num_attention_heads * config.head_dim, keys, keys)
    for projection, part in zip(("q_proj", "k_proj", "v_proj"), tensor.split(rows), strict=True):
        yield name.replace(packed, f".self_attn.{projection}."), part.contiguous()


def _internlm2_config(written: Mapping[str, Any]) -> transformers.PretrainedConfig:
    scaling = written.get("rope_scaling") or {}
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": written.get("rope_theta", ROPE_BASE)}
    # Its dynamic scaling begins beyond the context that it was trained for, and none longer is served.
    if scaling.get("type", "dynamic") != "dynamic":
        rope |= {"rope_type": scaling["type"], "factor": scaling["factor"]}
    return transformers.LlamaConfig(
        architectures=["LlamaForCausalLM"],
        **{name: written[name] for name in INTERNLM2_SAME if name in written},
        rope_parameters=rope,
        attention_bias=bool(written.get("bias")),
    )


INTERNLM2_SAME = """
    bos_token_id eos_token_id hidden_act hidden_size intermediate_size max_position_embeddings num_attention_heads
    num_hidden_layers num_key_value_heads pad_token_id rms_norm_eps tie_word_embeddings vocab_size
""".split()  # noqa: SIM905 - a line for each would take half a screen
INTERNLM2_NAMES = (
    ("model.tok_embeddings.", "model.embed_tokens."),
    (".attention.wo.", ".self_attn.o_proj."),
    (".feed_forward.w1.", ".mlp.gate_proj."),
    (".feed_forward.w3.", ".mlp.up_proj."),
    (".feed_forward.w2.", ".mlp.down_proj."),
    (".attention_norm.", ".input_layernorm."),
    (".ffn_norm.", ".post_attention_layernorm."),
)


def _internlm2_tensors(name: str, tensor: torch.Tensor, config: Any) -> NamedTensors:
    for old, new in INTERNLM2_NAMES:
        name = name.replace(old, new)
    name = f"lm_head.{name.removeprefix('output.')}" if name.startswith("output.") else name
    packed = ".attention.wqkv."
    if packed not in name:
        yield name, tensor
        return
    # By key-value head: its queries, then its key, then its value (arXiv 2403.17297, section 2.2).
    groups = config.num_key_value_heads
    queries = config.num_attention_heads // groups
    heads = tensor.unflatten(0, (groups, queries + 2, -1))
    for projection, part in zip(("q_proj", "k_proj", "v_proj"), heads.split((queries, 1, 1), dim=1), strict=True):
        yield name.replace(packed, f".self_attn.{projection}."), part.flatten(0, 2).contiguous()


def _deepseek_v3_config(written: Mapping[str, Any]) -> transformers.PretrainedConfig:
    own = {key: value for key, value in written.items() if key not in ("model_type", "auto_map", "architectures")}
    config: transformers.PretrainedConfig = transformers.DeepseekV3Config.from_dict(
        {**own, "architectures": ["DeepseekV3ForCausalLM"]}
    )
    return config


FOREIGN: Mapping[str, ForeignModel] = {
    "chatglm": ForeignModel(_glm_config, _glm_tensors),
    "internlm2": ForeignModel(_internlm2_config, _internlm2_tensors),
    "kimi_k2": ForeignModel(_deepseek_v3_config),
}
"""By the ``model_type`` of their configs."""
