"""A script's PEFT config as the fused engine understands it."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from typing import Any

import peft
import torch

from twinkle.checkpoint_engine.peft_settings import config_of, read_settings
from twinkle.checkpoint_engine.peft_tensors import is_named
from twinkle.core.errors import InvalidInput
from twinkle.core.events import event_log
from twinkle.module.adapter import LoraConfig
from twinkle.module.targets import Target

ALL_LINEAR = "all-linear"

log = event_log()


def lora_config_of(config: Any, targets: Sequence[Target], default_modules: str | Sequence[str]) -> LoraConfig:
    """What a ``peft.LoraConfig`` asks of the engine. The first weights are drawn from torch's own generator.

    ``lora_dropout`` is not applied; everything else that would change what the adapter computes is refused.
    """
    if not isinstance(config, peft.LoraConfig):
        raise InvalidInput("config_or_dir", f"is {config!r}; send a peft.LoraConfig")
    settings = read_settings(json.dumps(_plain(config.to_dict())).encode())
    if config.lora_dropout:
        log.warning("model.adapter.dropout_ignored", lora_dropout=config.lora_dropout, next="it trains without dropout")
    if config.init_lora_weights is not True:
        raise InvalidInput("init_lora_weights", f"is {config.init_lora_weights!r}, only True is supported")
    paths = _paths(config.target_modules or default_modules, targets, settings["target_parameters"])
    seed = int(torch.randint(2**62, ()).item())
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


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
