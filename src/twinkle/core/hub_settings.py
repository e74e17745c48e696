"""What an operator says about hubs: one reading of a few ``TWINKLE_*`` variables, for rooms that run without pydantic.

The same fields stand in :class:`twinkle.core.settings.Settings`, which checks them when a service starts.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from twinkle.core.errors import ConfigError

MODELSCOPE = "ms"
HUGGING_FACE = "hf"
HUB_NAMES = {MODELSCOPE: "ModelScope", HUGGING_FACE: "Hugging Face"}
DEFAULT_HUBS = "ms,hf"
VARIABLES = (
    "TWINKLE_HUBS",
    "TWINKLE_FORBID_HF",
    "TWINKLE_OFFLINE",
    "TWINKLE_MODEL_ID_ALIASES",
    "TWINKLE_TRUST_REMOTE_CODE",
)
"""All that are read here."""

_NO = frozenset({"", "0", "false", "no", "off"})
_YES = frozenset({"1", "true", "yes", "on"})


@dataclass(frozen=True, kw_only=True)
class HubSettings:
    """Which hubs are asked, and whom to trust.

    Args:
        hubs: Where an id without a scheme is looked for, first to last.
        offline: Whether caches alone are looked at.
        aliases: What stands for an id: another id or a folder, with or without a scheme on either side.
        trusted: Ids with the revision whose code may run, like ``ms://org/plugin@v1.2``, and folders.
    """

    hubs: tuple[str, ...] = (MODELSCOPE, HUGGING_FACE)
    offline: bool = False
    aliases: Mapping[str, str] = field(default_factory=dict)
    trusted: tuple[str, ...] = ()

    @classmethod
    def read(cls, environment: Mapping[str, str] | None = None) -> HubSettings:
        """Read the variables.

        Raises:
            ConfigError: One of them is not understood.
        """
        variables = os.environ if environment is None else environment
        hubs = parse_hubs(variables.get("TWINKLE_HUBS", DEFAULT_HUBS))
        if _flag(variables, "TWINKLE_FORBID_HF"):
            hubs = tuple(hub for hub in hubs if hub != HUGGING_FACE)
        return cls(
            hubs=hubs,
            offline=_flag(variables, "TWINKLE_OFFLINE"),
            aliases=parse_aliases(variables.get("TWINKLE_MODEL_ID_ALIASES", "")),
            trusted=parse_trusted(variables.get("TWINKLE_TRUST_REMOTE_CODE", "")),
        )


def parse_hubs(text: str) -> tuple[str, ...]:
    """The hubs of a list like ``hf,ms``.

    Raises:
        ConfigError: One is unknown, named twice, or there is none.
    """
    hubs = tuple(name.strip().removesuffix("://") for name in text.split(",") if name.strip())
    unknown = [hub for hub in hubs if hub not in HUB_NAMES]
    if unknown or not hubs or len(set(hubs)) < len(hubs):
        raise ConfigError(f"TWINKLE_HUBS: {text!r} is not understood; name ms, hf or both, like ms,hf")
    return hubs


def parse_aliases(text: str) -> dict[str, str]:
    """The map of a JSON object of texts.

    Raises:
        ConfigError: It is something else.
    """
    if not text.strip():
        return {}
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"TWINKLE_MODEL_ID_ALIASES: is not JSON ({error})") from None
    if not isinstance(found, dict) or not all(isinstance(value, str) and value for value in found.values()):
        raise ConfigError('TWINKLE_MODEL_ID_ALIASES: send a JSON object like {"org/name": "/a/folder"}')
    return found


def parse_trusted(text: str) -> tuple[str, ...]:
    """Whose code may run: ids with revisions and folders, separated by commas.

    ``0`` says nobody, which is the default. ``1`` would say everybody, for ever, and is taken for nobody as well: what
    needs trust then says what to write here.
    """
    if text.strip().lower() in _NO | _YES:
        return ()
    return tuple(entry.strip() for entry in text.split(",") if entry.strip())


def _flag(variables: Mapping[str, str], name: str) -> bool:
    value = variables.get(name, "").strip().lower()
    if value not in _NO | _YES:
        raise ConfigError(f"{name}: {value!r} is neither 1 nor 0")
    return value in _YES
