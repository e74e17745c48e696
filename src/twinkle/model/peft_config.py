"""A script's PEFT config as the fused engine understands it."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import peft
import torch

from twinkle.checkpoint_engine.peft_settings import config_of, read_settings
from twinkle.checkpoint_engine.peft_tensors import is_named
from twinkle.core.errors import InvalidInput
from twinkle.core.process.events import event_log
from twinkle.module.adapter import LoraConfig
from twinkle.module.targets import GROUPED, Target

ALL_LINEAR = "all-linear"
MAX_PATTERN_CHARS = 512
MAX_REPEATS = 3
REPEATS = re.compile(r"[*+{]")
REPEATED_GROUP = re.compile(r"\)[*+{?]")

log = event_log()


@dataclasses.dataclass(frozen=True)
class Slots:
    """How large the adapters of a model may be, and which modules they train that do not say."""

    max_r: int
    target_modules: str | Sequence[str]


def read_slots(
    config: peft.LoraConfig | Mapping[str, Any] | None, *, max_r: int, target_modules: str | Sequence[str]
) -> Slots:
    """What ``config`` says of the slots, else the arguments beside it.

    Raises:
        InvalidInput: PEFT does not take the settings.
    """
    if config is None:
        return Slots(max_r, target_modules)
    if isinstance(config, Mapping):
        try:
            config = peft.LoraConfig(**{"r": max_r, **config})
        except (TypeError, ValueError) as error:
            raise InvalidInput("lora_config", f"is no LoraConfig: {error}") from error
    if not isinstance(config, peft.LoraConfig):
        raise InvalidInput("lora_config", f"is {config!r}; send a peft.LoraConfig, or its settings")
    named = config.target_modules
    return Slots(config.r, sorted(named) if isinstance(named, set) else named or target_modules)


def lora_config_of(
    config: Any, targets: Sequence[Target], default_modules: str | Sequence[str], *, applies_dropout: bool = False
) -> LoraConfig:
    """What a ``peft.LoraConfig`` asks of the engine. The first weights are drawn from torch's own generator.

    ``lora_dropout`` is not applied, but where the caller does; everything else that would change what the adapter
    computes is refused.
    """
    if not isinstance(config, peft.LoraConfig):
        raise InvalidInput("config_or_dir", f"is {config!r}; send a peft.LoraConfig")
    settings = read_settings(json.dumps(_plain(config.to_dict())).encode())
    if config.lora_dropout and not applies_dropout:
        log.warning("model.adapter.dropout_ignored", lora_dropout=config.lora_dropout, next="it trains without dropout")
    if config.init_lora_weights is not True:
        raise InvalidInput("init_lora_weights", f"is {config.init_lora_weights!r}, only True is supported")
    seed = int(torch.randint(2**62, ()).item())
    return _config_of(settings, config.target_modules or default_modules, targets, seed)


def lora_config_from(settings: Mapping[str, Any], targets: Sequence[Target], *, rank: int, seed: int) -> LoraConfig:
    """The same of a config that came as JSON; what PEFT of another version calls otherwise is passed over.

    ``lora_dropout`` is not applied, which whoever took the config in says.

    Raises:
        InvalidInput: It asks for what the engine does not compute, or names no layer of this model.
    """
    known = {field.name for field in dataclasses.fields(peft.LoraConfig)}
    given = {name: value for name, value in settings.items() if name in known}
    try:
        config = peft.LoraConfig(**{**given, "r": rank})
    except (TypeError, ValueError) as error:
        raise InvalidInput("config", f"is no LoraConfig: {error}") from error
    if config.init_lora_weights is not True:
        raise InvalidInput("init_lora_weights", f"is {config.init_lora_weights!r}, only True is supported")
    if isinstance(config.target_modules, str):
        _judge_pattern(config.target_modules)
    plain = read_settings(json.dumps({**_plain(config.to_dict()), "peft_type": "LORA"}).encode())
    return _config_of(plain, config.target_modules or ALL_LINEAR, targets, seed)


def _judge_pattern(pattern: str) -> None:
    """Refuse a stranger's regular expression that could be matched for ever, or is none."""
    if (
        len(pattern) > MAX_PATTERN_CHARS
        or len(REPEATS.findall(pattern)) > MAX_REPEATS
        or REPEATED_GROUP.search(pattern)
    ):
        raise InvalidInput(
            "target_modules",
            f"as a regular expression has at most {MAX_PATTERN_CHARS} characters and {MAX_REPEATS} repeats, none of a"
            " group; send a list of names",
        )
    try:
        re.compile(pattern)
    except re.error as error:
        raise InvalidInput("target_modules", f"is no regular expression: {error}; send a list of names") from error


def _config_of(
    settings: Mapping[str, Any], wanted: str | Sequence[str], targets: Sequence[Target], seed: int
) -> LoraConfig:
    paths = _paths(wanted, targets, settings["target_parameters"])
    return dataclasses.replace(config_of(settings, paths, targets), seed=seed)


def _paths(wanted: str | Sequence[str], targets: Sequence[Target], parameters: Sequence[str]) -> list[str]:
    linear = [target for target in targets if target.num_experts is None]
    experts = [
        target.path for target in targets if target.num_experts is not None and is_named(target.path, parameters)
    ]
    if wanted == ALL_LINEAR:
        return [target.path for target in linear if target.kind != "unembed"] + experts
    if isinstance(wanted, str):
        chosen = [target.path for target in linear if re.fullmatch(wanted, target.path)]
    else:
        chosen = [target.path for target in linear if is_named(target.path, list(wanted))]
        for name in wanted:
            if not any(is_named(path, [name]) for path in chosen):
                raise InvalidInput("target_modules", f"{name} is no layer that can be trained in this model")
    if not chosen and not experts:
        raise InvalidInput("target_modules", f"{wanted!r} matches no layer of this model")
    return chosen + experts


def leave_out_grouped(config: Any, model: torch.nn.Module) -> None:
    """Takes layers whose weight is many (DeepSeek-V4's) out of ``all-linear``: PEFT's update does not fit them.

    Raises:
        InvalidInput: The config names them.
    """
    paths = [path for path, _ in model.named_modules() if path.rpartition(".")[2] == GROUPED]
    named = getattr(config, "target_modules", None)
    if not paths or named is None:
        return
    if isinstance(named, str) and named.lower() == ALL_LINEAR:
        others = config.exclude_modules or ()
        config.exclude_modules = rf"(.*\.)?{GROUPED}|{others}" if isinstance(others, str) else {*others, GROUPED}
        log.info("model.adapter.left_out", modules=GROUPED, reason="its weight is many, one for each group of heads")
        return
    endings = [re.escape(name) for name in ([] if isinstance(named, str) else named)]
    pattern = named if isinstance(named, str) else rf"(.*\.)?({'|'.join(endings)})"
    found = next((path for path in paths if re.fullmatch(pattern, path)), None)
    if found is not None:
        reason = f"take in {found}, whose weight is many, one for each group of heads; leave {GROUPED} out"
        raise InvalidInput("target_modules", reason)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
