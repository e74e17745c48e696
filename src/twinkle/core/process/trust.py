"""What the operator of this process allows strangers to bring along: their code, or data alone."""

from __future__ import annotations

import os
from collections.abc import Mapping

from twinkle.core.errors import InvalidInput

TRUST_VARIABLE = "TWINKLE_TRUST_REMOTE_CODE"


def trust_remote_code() -> bool:
    """Whether the operator allows code among arguments; not unless ``TWINKLE_TRUST_REMOTE_CODE`` is ``1``.

    Code of hubs needs more than that: its id and revision (:mod:`twinkle.hub.trust`).
    """
    return os.environ.get(TRUST_VARIABLE, "0").strip().lower() in ("1", "true", "yes", "on")


def check_unsafe(*args: object, **kwargs: object) -> None:
    """Refuse arguments that are code where only data is trusted: functions and classes, also within containers.

    Raises:
        InvalidInput: There is one, and ``trust_remote_code`` says no.
    """
    if trust_remote_code():
        return
    for field, value in {**{f"args[{index}]": value for index, value in enumerate(args)}, **kwargs}.items():
        _check(field, value)


def _check(field: str, value: object) -> None:
    if callable(value):
        raise InvalidInput(
            field, f"is code ({value!r}), which is not taken here; send data, or have {TRUST_VARIABLE}=1 set"
        )
    if isinstance(value, Mapping):
        for key, item in value.items():
            _check(f"{field}.{key}", item)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for index, item in enumerate(value):
            _check(f"{field}[{index}]", item)
