"""Where the arguments of a script are said."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twinkle.core.errors import ConfigError

PREFIX = "TWINKLE_"
OPERATORS = frozenset({"TRUST_REMOTE_CODE", "MODEL_ID_ALIASES", "HUBS", "OFFLINE", "FORBID_HF"})
"""Variables that are said to the machine, not to a script."""
DOTENV = (".env", ".env.local")
INSTALL = "pip install 'twinkle-queue[scripts]'"


@dataclass(frozen=True)
class Said:
    """A value, and where it was said. ``is_meant``: for this script, and not for whatever reads the same place."""

    value: Any
    source: str
    is_meant: bool = True


def of_command_line(argv: Sequence[str] | None) -> dict[str, Said]:
    """``--key value``, several values after one key, ``--key=value``, ``key=value``, ``--flag`` and ``--no-flag``.

    Raises:
        ConfigError: A word belongs to no key.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    said: dict[str, Said] = {}
    while words:
        word = words.pop(0)
        key, equals, value = word.removeprefix("--").partition("=")
        if equals:
            said[_key(key)] = Said(value, word)
        elif not word.startswith("--"):
            raise ConfigError(f"{word}: belongs to no argument; write --key value or key=value")
        else:
            values = []
            while words and not words[0].startswith("--") and not _is_pair(words[0]):
                values.append(words.pop(0))
            if not values and key[:3] in ("no-", "no_"):
                said[_key(key[3:])] = Said(False, word)
            else:
                said[_key(key)] = Said(values[0] if len(values) == 1 else values or True, word)
    return said


def of_dotenv(file: str | Path | None) -> dict[str, Said]:
    """What a ``.env`` says, with or without our prefix.

    Raises:
        ConfigError: The file that was named is not there, or nothing is installed that reads it.
    """
    found = Path(file) if file is not None else next((Path(name) for name in DOTENV if Path(name).is_file()), None)
    if found is None:
        return {}
    if not found.is_file():
        raise ConfigError(f"env_file: {found}: no such file")
    try:
        from dotenv import dotenv_values
    except ModuleNotFoundError:
        raise ConfigError(f"{found} needs python-dotenv to be read: {INSTALL}") from None
    values = {name: value for name, value in dotenv_values(found).items() if value is not None}
    return {
        name.removeprefix(PREFIX): Said(value, str(found), is_meant=False)
        for name, value in values.items()
        if name.removeprefix(PREFIX) not in OPERATORS
    }


def of_environment(find: Callable[[str], object | None]) -> dict[str, Said]:
    """Variables with our prefix, and those in capitals that are called like an argument."""
    said = {}
    for name, value in os.environ.items():
        if name.startswith(PREFIX):
            if name.removeprefix(PREFIX) not in OPERATORS:
                said[name.removeprefix(PREFIX)] = Said(value, name, is_meant=False)
        elif name.isupper() and find(name) is not None:
            said.setdefault(name, Said(value, name, is_meant=False))
    return said


def of_file(file: str | Path) -> dict[str, Said]:
    """A file of YAML or JSON, flat or by group: ``model: {model_id: ...}`` says the same as ``model_id: ...``.

    Raises:
        ConfigError: It is not there, or no such file.
    """
    path = Path(file)
    if not path.is_file():
        raise ConfigError(f"config: {path}: no such file")
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".json":
        try:
            content = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"config: {path} is no JSON: {error}") from None
    else:
        try:
            import yaml
        except ModuleNotFoundError:
            raise ConfigError(f"{path} needs pyyaml to be read: {INSTALL}") from None
        try:
            content = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"config: {path} is no YAML: {error}") from None
    if not isinstance(content, Mapping):
        raise ConfigError(f"config: {path} holds no mapping")
    return {key: Said(value, str(path)) for key, value in content.items()}


def _key(word: str) -> str:
    return word.replace("-", "_")


def _is_pair(word: str) -> bool:
    key, equals, _ = word.partition("=")
    return bool(equals) and key.replace("-", "_").isidentifier()
