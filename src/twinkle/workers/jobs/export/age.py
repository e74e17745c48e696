"""Files encrypted to age recipients (filippo.io/age), where the optional package ``pyrage`` is installed."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from twinkle.core.errors import InvalidInput
from twinkle.core.file_names import ENCRYPTED_SUFFIX

_FIELD = "age_encryption_recipients"


def encrypt_files(files: dict[str, bytes], recipients: Sequence[str]) -> dict[str, bytes]:
    """The same files, each readable by any of the recipients and named ``*.age``.

    Args:
        files: Contents by name.
        recipients: ``age1...`` keys, or SSH public keys.

    Raises:
        InvalidInput: A recipient is no such key, or this worker cannot encrypt.
    """
    if importlib.util.find_spec("pyrage") is None:
        raise InvalidInput(_FIELD, "this server cannot encrypt (pyrage is not installed); save without recipients")
    pyrage = importlib.import_module("pyrage")
    keys = [_recipient(pyrage, text) for text in recipients]
    return {f"{name}{ENCRYPTED_SUFFIX}": bytes(pyrage.encrypt(data, keys)) for name, data in files.items()}


def _recipient(pyrage: ModuleType, text: str) -> Any:
    kind = pyrage.ssh if text.startswith("ssh-") else pyrage.x25519
    try:
        return kind.Recipient.from_str(text)
    except pyrage.RecipientError as error:
        raise InvalidInput(_FIELD, f"{text[:80]!r} is neither an age1... key nor an SSH public key") from error
