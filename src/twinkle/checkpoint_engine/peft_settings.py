"""``adapter_config.json``: written so that plain PEFT computes what we do, read strictly.

PEFT's rank and alpha patterns are regular expressions that match a path or its end; those read here must be literal,
since they come from files of strangers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from twinkle.checkpoint_engine.peft_tensors import is_named
from twinkle.core.errors import InvalidInput
from twinkle.core.file_names import ADAPTER_CONFIG_FILE
from twinkle.hub.caches import published_id
from twinkle.module.adapter import AS_LOADED, LoraConfig, StoredPaths, TrainedModule
from twinkle.module.lora import LoraAdapter
from twinkle.module.targets import Target, TargetKind

CONFIG_FILE = ADAPTER_CONFIG_FILE

REFUSED_SETTINGS: Mapping[str, tuple[object, str]] = {
    "use_dora": (False, "train it without DoRA"),
    "bias": ("none", "train it with bias='none'"),
    "lora_bias": (False, "train it with lora_bias=False"),
    "modules_to_save": (None, "train those modules by LoRA, or not at all"),
    "trainable_token_indices": (None, "train it without new token embeddings"),
    "fan_in_fan_out": (False, "it was made for another architecture"),
    "layer_replication": (None, "it needs a base model with other layers"),
    "alora_invocation_tokens": (None, "train it as an ordinary LoRA"),
    "arrow_config": (None, "load one of its experts by itself"),
    "use_qalora": (False, "train it without QALoRA"),
    "use_bdlora": (None, "train it without block-diagonal matrices"),
    "kasa_config": (None, "it changes the base weights"),
    "monteclora_config": (None, "train it as an ordinary LoRA"),
}
"""Settings that change what an adapter computes: the only value that is supported, and what to do about others."""

WRITTEN_SETTINGS = ("use_dora", "bias", "modules_to_save", "fan_in_fan_out")
LANGUAGE_MODEL = "language_model"
"""What a model that takes pictures calls the part that is trained."""
COMPRESSOR = "compressor"
"""A part of attention with an index in it, whose layers are called as others are, and are not trained."""
LITERAL_PATTERN = re.compile(r"(?P<anything>\.\*)?(?P<literal>(?:[\w]|\\?[.-])+)", re.ASCII)


def write_settings(adapter: LoraAdapter, base_model_name: str) -> bytes:
    """The config file of an adapter."""
    config = adapter.config
    modules, parameters = _targets(adapter)
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": published_id(base_model_name),
        "lora_dropout": 0.0,
        "target_modules": modules,
        "target_parameters": parameters or None,
        "inference_mode": True,
        "init_lora_weights": True,
        **{name: REFUSED_SETTINGS[name][0] for name in WRITTEN_SETTINGS},
        **scaling_settings(config, adapter.layout.beside_experts, adapter.layout.paths),
    }
    return json.dumps(settings, indent=2, sort_keys=True).encode()


def scaling_settings(config: LoraConfig, beside_experts: frozenset[str], paths: StoredPaths) -> dict[str, Any]:
    """The settings that say how large each module's update is."""
    modules = config.modules or ()
    names = {module: re.escape(paths.stored(weight_name(module.path, beside_experts))) for module in modules}
    return {
        "r": config.rank,
        "lora_alpha": config.alpha,
        "use_rslora": config.use_rslora,
        "rank_pattern": {names[module]: module.rank for module in modules if module.rank != config.rank},
        "alpha_pattern": {names[module]: module.alpha for module in modules if module.alpha != config.alpha},
    }


def _targets(adapter: LoraAdapter) -> tuple[list[str], list[str]]:
    """PEFT's ``target_modules`` and ``target_parameters``: path ends, or whole paths where some are not meant."""
    layout = adapter.layout
    modules: set[str] = set()
    parameters: set[str] = set()
    has_index = any(COMPRESSOR in shape.path.split(".") for shape in layout.shapes)
    for shape in layout.shapes:
        name = layout.paths.stored(weight_name(shape.path, layout.beside_experts))
        is_parameter = shape.num_experts is not None or shape.path in layout.beside_experts
        # Beside a language model there is a tower, whose layers may be called alike.
        is_alone = not has_index and LANGUAGE_MODEL not in name.split(".")
        if adapter.config.modules is None and (is_alone or is_parameter):
            name = ".".join(name.split(".")[-3 if is_parameter else -1 :])
        (parameters if is_parameter else modules).add(name)
    return sorted(modules), sorted(parameters)


def weight_name(path: str, beside_experts: frozenset[str]) -> str:
    """What PEFT calls a target: a Linear is one of its ``target_parameters`` by its weight."""
    return f"{path}.weight" if path in beside_experts else path


def read_settings(content: bytes) -> dict[str, Any]:
    """The settings of a config file, or ``InvalidInput`` that names the one that cannot be served."""
    try:
        settings = json.loads(content)
    except ValueError as error:
        raise InvalidInput(CONFIG_FILE, "is not JSON") from error
    if not isinstance(settings, dict) or settings.get("peft_type") != "LORA":
        raise InvalidInput(CONFIG_FILE, "does not describe a LoRA adapter")
    for name, (supported, remedy) in REFUSED_SETTINGS.items():
        value = settings.get(name)
        if value not in (supported, None, False, [], {}):
            raise InvalidInput(CONFIG_FILE, f"{name} is {value!r}, only {supported!r} is supported; {remedy}")
    rank, alpha = settings.get("r"), settings.get("lora_alpha")
    if not _is_number(rank, int) or not _is_number(alpha, int, float):
        raise InvalidInput(CONFIG_FILE, "r must be an integer and lora_alpha a number")
    for name, types in (("rank_pattern", (int,)), ("alpha_pattern", (int, float))):
        settings[name] = settings.get(name) or {}
        _check_pattern(name, settings[name], *types)
    parameters = settings["target_parameters"] = settings.get("target_parameters") or []
    if not isinstance(parameters, list) or not all(isinstance(name, str) for name in parameters):
        raise InvalidInput(CONFIG_FILE, "target_parameters must be a list of names")
    return settings


def config_of(
    settings: Mapping[str, Any],
    trained_paths: Sequence[str],
    targets: Sequence[Target],
    paths: StoredPaths = AS_LOADED,
) -> LoraConfig:
    """The config of an adapter that was made elsewhere.

    Args:
        settings: As ``read_settings`` returns them.
        trained_paths: Of the targets it trains.
        targets: Of the base model.
        paths: What modules are called in files.
    """
    parameters = settings["target_parameters"]
    rank, alpha = settings["r"], float(settings["lora_alpha"])
    modules: list[TrainedModule] = []
    for path in trained_paths:
        stored = paths.stored(path)
        name = f"{stored}.weight" if is_named(f"{stored}.weight", parameters) else stored
        own_rank = next((value for key, value in settings["rank_pattern"].items() if _matches(key, name)), rank)
        own_alpha = next((value for key, value in settings["alpha_pattern"].items() if _matches(key, name)), alpha)
        modules.append(TrainedModule(path, own_rank, float(own_alpha)))
    kinds: dict[str, TargetKind] = {target.path: target.kind for target in targets}
    trained = {kinds[path] for path in trained_paths}
    is_plain = all((module.rank, module.alpha) == (rank, alpha) for module in modules) and set(trained_paths) == {
        target.path for target in targets if target.kind in trained
    }
    return LoraConfig(
        rank=rank,
        alpha=alpha,
        train_attn="attn" in trained,
        train_mlp="mlp" in trained,
        train_unembed="unembed" in trained,
        use_rslora=bool(settings.get("use_rslora")),
        modules=None if is_plain else tuple(modules),
    )


def _check_pattern(name: str, pattern: object, *types: type) -> None:
    if not isinstance(pattern, dict) or not all(_is_number(value, *types) for value in pattern.values()):
        raise InvalidInput(CONFIG_FILE, f"{name} must map names to numbers")
    for key in pattern:
        if not LITERAL_PATTERN.fullmatch(key):
            raise InvalidInput(
                CONFIG_FILE, f"{name} holds the regular expression {key!r}; write out the names that it stands for"
            )


def _matches(key: str, name: str) -> bool:
    match = LITERAL_PATTERN.fullmatch(key)
    assert match is not None, "checked when the settings were read"
    literal = match["literal"].replace("\\", "")
    return name.endswith(literal) if match["anything"] else is_named(name, [literal])


def _is_number(value: object, *types: type) -> bool:
    return isinstance(value, types) and not isinstance(value, bool)
