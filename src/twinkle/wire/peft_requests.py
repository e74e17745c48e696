"""A PEFT config that came over the wire: what the service takes of it, what it leaves out, and what it refuses.

Which layers a name means is the worker's to judge, who has the model; here it is only made sure that judging is quick.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import AfterValidator, Field
from pydantic_core import from_json

from twinkle.core.errors import InvalidInput
from twinkle.wire.bodies.base import MAX_INT32, RequestBody, Text, parse_object

ALL_LINEAR = "all-linear"
_TYPE = "LORA"
MAX_MODULES = 512
MAX_CONFIG_CHARS = 64 * 1024
_MAX_QUANTIFIERS = 3
_DEFAULT_RANK = 8
_DEFAULT_ALPHA = 8.0

_REFUSED: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        "peft_type": (_TYPE,),
        "init_lora_weights": (True,),
        "use_dora": (False,),
        "lora_bias": (False,),
        "fan_in_fan_out": (False,),
        "use_qalora": (False,),
        "trainable_token_indices": (),
        "layer_replication": (),
        "alora_invocation_tokens": (),
        "arrow_config": (),
        "use_bdlora": (),
        "kasa_config": (),
        "monteclora_config": (),
        "exclude_modules": (),
        "layers_to_transform": (),
        "layers_pattern": (),
        "megatron_config": (),
    }
)
"""What would change what the adapter computes: the values that are taken; ``None`` and empty ones always are."""
_IGNORED: Mapping[str, str] = MappingProxyType(
    {
        "lora_dropout": "it trains without dropout, so that a replay computes the same",
        "bias": "biases are not trained",
        "modules_to_save": "those modules are not trained",
    }
)
_NOTHING: tuple[object, ...] = (None, False, 0, 0.0, "none", [], {}, "")
# Literal names, dots, numbers, choices without a quantifier: nothing that makes a search try over and over.
_PATTERN = re.compile(r"(?:\.\*|\\\.|\.|\\d\+|\[0-9\]\+|[\w-]|\((?:\?:)?[\w.-]+(?:\|[\w.-]+)*\))+\$?", re.ASCII)


def _quick(wanted: str | list[str] | None) -> str | list[str] | None:
    is_pattern = isinstance(wanted, str) and wanted != ALL_LINEAR
    if is_pattern and not _is_quick(str(wanted)):
        raise ValueError(
            "as a pattern may hold names, '.', '.*', '[0-9]+' and choices like (q_proj|v_proj), and at most"
            f" {_MAX_QUANTIFIERS} of '*' and '+'; else send 'all-linear' or a list of names"
        )
    return wanted


def _is_quick(pattern: str) -> bool:
    quantifiers = re.findall(r"[*+]", pattern)
    return _PATTERN.fullmatch(pattern) is not None and len(quantifiers) <= _MAX_QUANTIFIERS


ModuleName = Annotated[str, Field(min_length=1, max_length=256)]
Pattern = Annotated[dict[ModuleName, Annotated[float, Field(gt=0, allow_inf_nan=False)]], Field(max_length=MAX_MODULES)]


class PeftSettings(RequestBody):
    """What of ``peft.LoraConfig`` is served."""

    r: int = Field(default=_DEFAULT_RANK, ge=1, le=MAX_INT32)
    lora_alpha: float = Field(default=_DEFAULT_ALPHA, gt=0, le=1e6, allow_inf_nan=False)
    target_modules: Annotated[
        Annotated[Text, Field(max_length=1024)] | Annotated[list[ModuleName], Field(max_length=MAX_MODULES)] | None,
        AfterValidator(_quick),
    ] = None
    target_parameters: Annotated[list[ModuleName], Field(max_length=MAX_MODULES)] | None = None
    use_rslora: bool = False
    rank_pattern: Pattern | None = None
    alpha_pattern: Pattern | None = None


@dataclass(frozen=True, kw_only=True)
class ReadPeft:
    """A config as far as it is served, and what its sender is to know of the rest."""

    settings: PeftSettings
    warnings: tuple[str, ...]

    @property
    def kept(self) -> dict[str, Any]:
        """What it says in PEFT's own words, without what says nothing."""
        said = self.settings.model_dump(exclude_none=True)
        return {
            "peft_type": _TYPE,
            "target_modules": ALL_LINEAR,
            **{key: value for key, value in said.items() if value},
        }


def read_peft(config: str | Mapping[str, Any]) -> ReadPeft:
    """Reads a config, an object or its JSON text. Settings that nobody here knows are left out.

    Raises:
        InvalidInput: It is none, or asks for what is not served; the setting is named.
    """
    values = _object_of(config)
    for name, taken in _REFUSED.items():
        value = values.get(name)
        if value not in (*taken, *(() if True in taken else _NOTHING), None):
            wanted = f"only {taken[0]!r} is served" if taken else "it is not served; leave it out"
            raise InvalidInput(f"config.{name}", f"is {_short(value)}, {wanted}")
    warnings = tuple(
        f"{name}={_short(values[name])} is not applied: {why}"
        for name, why in _IGNORED.items()
        if values.get(name) not in _NOTHING
    )
    known = {name: values[name] for name in PeftSettings.model_fields if name in values}
    if "rank" in values and "r" not in values:
        known["r"] = values["rank"]
    return ReadPeft(settings=parse_object(PeftSettings, known, within="config"), warnings=warnings)


def _object_of(config: str | Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(config, str):
        return config
    try:
        values = from_json(config)
    except ValueError:
        raise InvalidInput("config", "is no JSON; send a LoRA config as an object or as its JSON text") from None
    if not isinstance(values, dict):
        raise InvalidInput("config", "must be a JSON object: a LoRA config")
    return values


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
