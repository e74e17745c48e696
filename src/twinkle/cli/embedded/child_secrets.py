"""Which secrets each process of the service needs: it gets those, and no others that stand in our environment."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum

_LOOKS_SECRET = re.compile(r"TOKEN(?!IZ)|SECRET|PASSW|PASSPHRASE|CREDENTIAL|KEY(S|FILE)?$|_PAT$|_DSN$", re.IGNORECASE)


class Secret(StrEnum):
    """What opens something; the values are how messages and documents call it."""

    DATABASE = "the journal's database"
    BROKER = "the broker"
    OBJECTS = "the object store"
    HUBS = "the hubs"
    SIGNING = "what this service signs"
    ADMIN = "what administrators may ask"
    FLOWER = "Flower"
    RAY = "the Ray cluster"


_SETTINGS = {
    "TWINKLE_DATABASE_URL": Secret.DATABASE,
    "TWINKLE_REDIS_URL": Secret.BROKER,
    "TWINKLE_DOWNLOAD_URL_SECRET": Secret.SIGNING,
    "TWINKLE_ADMIN_KEY": Secret.ADMIN,
    "TWINKLE_FLOWER_PASSWORD": Secret.FLOWER,
}
_PREFIXES = {
    "PG": Secret.DATABASE,
    "AWS_": Secret.OBJECTS,
    "AZURE_": Secret.OBJECTS,
    "GOOGLE_": Secret.OBJECTS,
    "HF_": Secret.HUBS,
    "HUGGING_FACE_": Secret.HUBS,
    "MODELSCOPE_": Secret.HUBS,
    "RAY_AUTH_TOKEN": Secret.RAY,
}
"""Of variables that other libraries read. What looks like a secret and is none of these is nobody's here."""

API = frozenset({Secret.DATABASE, Secret.BROKER, Secret.OBJECTS, Secret.HUBS, Secret.SIGNING, Secret.ADMIN})
JOBS = API - {Secret.ADMIN}
HOUSEKEEPING = JOBS - {Secret.SIGNING, Secret.HUBS}
WORKER = JOBS - {Secret.SIGNING} | {Secret.RAY}
FLOWER = frozenset({Secret.BROKER, Secret.FLOWER})
BROKER: frozenset[Secret] = frozenset()


def only_its_own(environment: Mapping[str, str], needed: frozenset[Secret]) -> dict[str, str]:
    """The environment without secrets that a process does not need."""
    return {name: value for name, value in environment.items() if _may_have(name, needed)}


def _may_have(name: str, needed: frozenset[Secret]) -> bool:
    if name in _SETTINGS:
        return _SETTINGS[name] in needed
    if name.startswith("TWINKLE_"):
        return True
    prefix = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), None)
    return (prefix is not None and _PREFIXES[prefix] in needed) or _LOOKS_SECRET.search(name) is None
