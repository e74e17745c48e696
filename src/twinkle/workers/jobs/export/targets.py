"""Where exports go: what the operator allows, and the ways there.

Credentials are in no message and no log: logs show what a function was at when it failed, so here they are plain in no
variable.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import obstore
from obstore.exceptions import BaseError as ObstoreError
from obstore.store import from_url
from pydantic import SecretStr

from twinkle.core.errors import ConfigError, InvalidInput, StorageUnavailable
from twinkle.hub.model_card import ModelCard
from twinkle.hub.operation import HubOperation
from twinkle.hub.remote import Unanswered
from twinkle.storage.blobs import speaks_http
from twinkle.workers.jobs.export.requests import sha256_of

TENANT = "{tenant}"
"""Of an allowed address: whoever the export is for."""
_FOLDER = "file://"
_TIMEOUT = "60s"
_SHORTEST_TOKEN = 8
_RETRY_TIMEOUT = timedelta(seconds=120)


def check_allowed(url: str, *, tenant: str, allowed: str) -> None:
    """Refuse an address below none that the operator has named.

    Args:
        url: The address.
        tenant: Whose export it is.
        allowed: Addresses, separated by commas; ``{tenant}`` in them stands for the tenant.

    Raises:
        InvalidInput: It is not allowed.
    """
    named = [entry.strip().replace(TENANT, tenant) for entry in allowed.split(",") if entry.strip()]
    for entry in named:
        # Whole parts of a path: s3://team allows s3://team/x, and not s3://teamwork.
        if entry.endswith("://") and url.startswith(entry):
            return
        if f"{url}/".startswith(f"{entry.removesuffix('/')}/"):
            return
    known = ", ".join(named) or "none"
    raise InvalidInput("to", f"{url} is not among the targets that are allowed here: {known}; leave it out to download")


def put_in_folder(url: str, path: str, source: Path) -> None:
    """Copy a file below a ``file://`` address; it appears there whole, and is left alone if it is there.

    Raises:
        InvalidInput: A link leads out of the folder.
        StorageUnavailable: It could not be written.
    """
    root = Path(url.removeprefix(_FOLDER))
    target = root / path
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.parent.resolve().is_relative_to(root.resolve()):
            raise InvalidInput("to", f"{path} would lie outside of the folder")
        if target.is_file() and sha256_of(target) == sha256_of(source):
            return
        temporary = target.with_name(f".{target.name}.part")
        with temporary.open("wb") as out, source.open("rb") as file:
            shutil.copyfileobj(file, out, 2**20)
            out.flush()
            os.fsync(out.fileno())
        temporary.rename(target)
    except OSError as error:
        raise StorageUnavailable(f"the folder of the export could not be written: {error.strerror}") from error


def put_in_bucket(url: str, path: str, source: Path, credentials: Mapping[str, SecretStr] | None) -> None:
    """Put a file below the address of a bucket, in parts, and look whether it is there whole.

    Args:
        url: Of the bucket, perhaps with a prefix.
        path: Below it.
        source: The file.
        credentials: The tenant's own; None: the operator's, as the environment has them.

    Raises:
        StorageUnavailable: It could not be stored.
    """
    try:
        store = _bucket(url, credentials)
        with source.open("rb") as file:
            obstore.put(store, path, file)
        found = int(obstore.head(store, path)["size"])
    except (ObstoreError, OSError) as error:
        # What the store says may hold what was sent to it.
        raise StorageUnavailable(f"the bucket could not be written: {type(error).__name__}") from None
    if found != source.stat().st_size:
        raise StorageUnavailable(f"the bucket holds {found} bytes of {path}, not {source.stat().st_size}")


def push_to_hub(url: str, folder: str, *, token: SecretStr, is_private: bool, card: ModelCard) -> str:
    """Put a folder into a repository in one commit; where to look at it. Pushing the same again changes nothing.

    Raises:
        StorageUnavailable: The hub did not answer.
        InvalidInput: It refuses.
    """
    try:
        return HubOperation.push_to_hub(url, folder, token=token.get_secret_value(), private=is_private, card=card)
    except Unanswered as error:
        raise StorageUnavailable(without_secret(error.message, token)) from None
    except ConfigError as error:
        raise InvalidInput("to", without_secret(error.message, token)) from None


def without_secret(message: str, secret: SecretStr) -> str:
    """A message without a secret in it. A short one, which no hub gives, is looked for as a word of its own alone:
    otherwise what it spells would be cut out of ordinary words, and could be told from the gaps.
    """
    text = secret.get_secret_value()
    if not text:
        return message
    pattern = re.escape(text)
    if len(text) < _SHORTEST_TOKEN:
        pattern = rf"(?<![\w-]){pattern}(?![\w-])"
    return re.sub(pattern, "(secret)", message)


def _bucket(url: str, credentials: Mapping[str, SecretStr] | None) -> Any:
    opens: Any = from_url
    return opens(
        url,
        config={name: value.get_secret_value() for name, value in credentials.items()} if credentials else None,
        client_options={"allow_http": speaks_http(), "timeout": _TIMEOUT},
        retry_config={"retry_timeout": _RETRY_TIMEOUT},
    )
