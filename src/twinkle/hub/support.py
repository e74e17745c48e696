"""Which base models are refused, and why: one table, for the command line before anything starts and for the engine.

``config.json`` alone is read, without torch. What it cannot tell, the engine's own checks at start find out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twinkle.core.errors import ConfigError
from twinkle.core.process.events import event_log
from twinkle.hub.model_path import locate_file
from twinkle.hub.remote import Unanswered

CONFIG_FILE = "config.json"
SERVED_LAYERS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
DELTA_NETS = frozenset({"qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"})
"""Types whose layers of linear attention are gated delta nets, which are served."""
COMPRESSED = frozenset({"deepseek_v4"})
"""Types whose attention sees entries that stand for many tokens, and picks them by an index, which is served."""
MAMBA = frozenset({"nemotron_h"})
"""Types whose layers of linear attention are Mamba-2, which is served, and which count MLPs and experts as layers."""
TOWER_LEFT_OUT = frozenset(
    {
        "deepseek_vl",
        "deepseek_vl_hybrid",
        "gemma3",
        "gemma4",
        "kimi_k25",
        "llama4",
        "mistral3",
        "qwen3_5",
        "qwen3_5_moe",
    }
)
"""Types for pictures too (or sound), whose language model is served without the tower, unless pictures are taken."""
MOVING_ROPES = frozenset({"dynamic", "longrope", "su"})
"""Kinds of rotary embedding whose angles depend on more than the position: on how long the longest sequence is."""
READ_AS_ANOTHER = frozenset({"chatglm", "internlm2", "kimi_k2"})
"""Types of code that transformers does not have, which are read into a class that computes the same."""
SCALED_BEYOND_CONTEXT = frozenset({"internlm2"})
"""Types that are read into another class without such a scaling: it begins where their context ends."""
OTHER_INPUTS = {"vision_config": "images", "audio_config": "sound", "speech_config": "sound", "thinker_config": "sound"}
PECULIAR = {
    "gemma3n_text": "its layers keep several streams that guess at one another (AltUp)",
    "qwen4_exp_text": "it keeps several residual streams and looks runs of tokens up in tables (n-grams)",
}
"""What there is in a type that nothing else has, and that is not computed here."""
CHATGLM_VOCABULARY = 65024
"""Of ChatGLM 2 and 3; GLM-4, whose config has the same type, is read into the class ``glm``."""
OWN_SCALES = ("lm_head_multiplier",)
QUANTISATION = "quantization_config"
DEQUANTISED = frozenset({"fp8", "mxfp4"})
"""Kinds of quantised weights that are read into plain ones; of ``compressed-tensors`` one form is."""
PACKED_INTEGERS = "pack-quantized"
WITH_PICTURES = frozenset({"kimi_k25", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"})
"""Types whose pictures are taken: a vision tower that takes patches and their grids, before a language model that is
served as well."""
WRITES_ON = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
STATEFUL = """
    bamba falcon_h1 falcon_mamba granitemoehybrid jamba kimi_linear lfm2 lfm2_moe mamba mamba2 minimax
    recurrent_gemma rwkv xlstm zamba zamba2
""".split()  # noqa: SIM905 - a line for each would take a screen
"""Types that carry a state along the sequence; a config of theirs need not list its layers."""
OLDER = """
    biogpt bloom codegen ctrl falcon gpt2 gpt_bigcode gpt_neo gptj mpt nemotron openai-gpt opt phi stablelm xglm xlm
    xlnet
""".split()  # noqa: SIM905 - as above
"""Types whose attention cannot be replaced by ours, or whose projections are no Linears without more."""

_log = event_log()

Config = Mapping[str, Any]


@dataclass(frozen=True)
class Refusal:
    """A trait of models that are not served; ``found`` says what in a config shows it, or nothing.

    ``reason`` completes "it cannot be served:", with what was found in the place of the braces.
    """

    reason: str
    found: Callable[[Config], str | None]


def check_config(name: str, config: Config) -> None:
    """Refuse a model by its config: the whole ``config.json``, or its part for text.

    Raises:
        ConfigError: It cannot be served; all reasons in one line.
    """
    reasons = list(_reasons(config))
    if reasons:
        raise ConfigError(
            f"{name} ({architecture_of(config)}) cannot be served: {'; '.join(reasons)};"
            " docs/models.md says which models can"
        )


def check_model(model: str) -> None:
    """Refuse a model by a folder, or by the id of a hub, by its config alone.

    Raises:
        ConfigError: It cannot be served, or the folder holds no model.
    """
    folder = Path(model).expanduser()
    file = folder / CONFIG_FILE if folder.is_dir() else _config_of_a_hub(model)
    if file is None:
        return
    try:
        config = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{model}: its {CONFIG_FILE} cannot be read ({error}); this is no folder of a model"
        ) from None
    if not isinstance(config, dict):
        raise ConfigError(f"{model}: its {CONFIG_FILE} holds no object; this is no folder of a model")
    check_config(model, config)


def architecture_of(config: Config) -> str:
    """What the model calls itself."""
    named = config.get("architectures")
    return str(named[0] if named else config.get("model_type") or "of no type")


def _reasons(config: Config) -> Iterator[str]:
    text = {**config, **(config.get("text_config") or {})}
    for refusals, part in ((OF_THE_WHOLE, config), (OF_THE_TEXT, text)):
        for refusal in refusals:
            found = refusal.found(part)
            if found is not None:
                yield refusal.reason.format(found)


def _other_inputs(config: Config) -> str | None:
    if config.get("model_type") in WITH_PICTURES | TOWER_LEFT_OUT:
        return None
    taken = [f"{what} ({key})" for key, what in OTHER_INPUTS.items() if config.get(key)]
    return taken[0] if taken else None


def _two_halves(config: Config) -> str | None:
    return "is_encoder_decoder" if config.get("is_encoder_decoder") else None


def _other_task(config: Config) -> str | None:
    names = config.get("architectures") or []
    if config.get("model_type") in READ_AS_ANOTHER:
        return None
    return None if not names or any(name.endswith(WRITES_ON) for name in names) else str(names[0])


def quantisation_of(config: Config) -> Mapping[str, Any] | None:
    """How a model's weights are quantised, as it says beside the language model's part or in it."""
    settings = config.get(QUANTISATION) or (config.get("text_config") or {}).get(QUANTISATION)
    return settings if isinstance(settings, Mapping) else None


def _quantised(config: Config) -> str | None:
    settings = quantisation_of(config)
    if settings is None:
        return None
    method = settings.get("quant_method")
    # DeepSeek-V4's mix widths within a layer and name their scales in a way of their own.
    if method in DEQUANTISED and config.get("model_type") not in COMPRESSED:
        return None
    if method == "compressed-tensors":
        form = settings.get("format")
        return None if form == PACKED_INTEGERS and _are_plain_integers(settings) else f"{method}, {form}"
    return str(method or QUANTISATION)


def _are_plain_integers(settings: Config) -> bool:
    """Whether all weights are integers of one width around zero, with a scale for each row or group of it."""
    kinds = [(group or {}).get("weights") or {} for group in (settings.get("config_groups") or {}).values()]
    widths = {kind.get("num_bits") for kind in kinds}
    return widths in ({4}, {8}) and all(
        kind.get("type") == "int" and kind.get("symmetric") and kind.get("strategy") in ("group", "channel")
        for kind in kinds
    )


def _other_layers(config: Config) -> str | None:
    model_type = config.get("model_type")
    kinds: set[str] = set()
    for key in ("layer_types", "layers_block_type"):
        kinds |= set(config.get(key) or ()) - SERVED_LAYERS - {"attention"}
    if model_type in DELTA_NETS:
        kinds -= {"linear_attention"}
    if model_type in COMPRESSED:
        kinds -= {"compressed_sparse_attention", "heavily_compressed_attention"}
    if model_type in MAMBA:
        kinds -= {"linear_attention", "mlp", "moe"}
    if kinds:
        return ", ".join(sorted(kinds))
    return f"model_type {model_type}" if model_type in STATEFUL else None


def _older_form(config: Config) -> str | None:
    return str(config["model_type"]) if config.get("model_type") in OLDER else None


def _scaled(config: Config) -> str | None:
    names = [name for name in OWN_SCALES if config.get(name) not in (None, 1, 1.0)]
    return ", ".join(names) or None


def _indexed(config: Config) -> str | None:
    is_other = config.get("index_topk") is not None and config.get("model_type") not in COMPRESSED
    return "index_topk" if is_other else None


def _older_chatglm(config: Config) -> str | None:
    if config.get("model_type") != "chatglm":
        return None
    is_older = "position_encoding_2d" in config or config.get("padded_vocab_size") == CHATGLM_VOCABULARY
    return "ChatGLM 1 to 3" if is_older else None


def _peculiar(config: Config) -> str | None:
    return PECULIAR.get(str(config.get("model_type")))


def _both_ways(config: Config) -> str | None:
    # "vision": pictures' tokens alone see each other, and there are none.
    return "use_bidirectional_attention" if config.get("use_bidirectional_attention") in (True, "all") else None


def _moving_rope(config: Config) -> str | None:
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    if not isinstance(rope, Mapping) or config.get("model_type") in SCALED_BEYOND_CONTEXT:
        return None
    kinds = [rope, *rope.values()]
    names = [kind.get("rope_type") or kind.get("type") for kind in kinds if isinstance(kind, Mapping)]
    return next((name for name in names if name in MOVING_ROPES), None)


OF_THE_WHOLE = (
    Refusal(
        "{} needs transformers<4.42, whose code its tokenizer and its model were made for; take GLM-4", _older_chatglm
    ),
    Refusal("it takes {}, and pictures are taken of " + ", ".join(sorted(WITH_PICTURES)) + " alone", _other_inputs),
    Refusal("it is an encoder and a decoder ({}), and only decoders are served", _two_halves),
    Refusal("it is made for another task ({}) and has no head that writes on", _other_task),
    Refusal("its weights are quantised ({}): take those they were made from", _quantised),
)
OF_THE_TEXT = (
    Refusal("{}", _peculiar),
    Refusal("it has layers other than attention, gated delta nets and Nemotron-H's ({})", _other_layers),
    # The probe at start would not see it: an index of the best 2048 keys leaves none of a few tokens out.
    Refusal("its attention picks the keys it sees by an index ({})", _indexed),
    Refusal("its attention looks ahead ({})", _both_ways),
    Refusal("its attention or its projections have an older form ({})", _older_form),
    Refusal("it scales its logits in a way of its own ({})", _scaled),
    Refusal(
        "its rotary embedding depends on the longest sequence of a batch ({}), which may be another's", _moving_rope
    ),
)


def _config_of_a_hub(model: str) -> Path | None:
    """The config of a model of a hub; none where a hub cannot be asked now: then the worker finds out.

    Raises:
        ConfigError: The model is nowhere.
    """
    try:
        return locate_file(model, CONFIG_FILE, field="model")
    except Unanswered as error:
        _log.info("model.config_unknown", model=model, reason=error.message, next="the worker looks")
        return None
