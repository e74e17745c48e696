"""The table of settings in ``operations.md``, from the settings themselves.

python docs/settings_table.py    # rewrites the table
"""

from __future__ import annotations

import re
from pathlib import Path

from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

from twinkle.core.settings import Settings

DOCUMENT = Path(__file__).parent / "operations.md"
PLACE = re.compile(r"(<!-- settings -->\n).*?(<!-- /settings -->)", re.DOTALL)


def main() -> None:
    """Rewrites the table in place."""
    DOCUMENT.write_text(with_table(DOCUMENT.read_text()))


def with_table(document: str) -> str:
    """Returns the document with the table as the settings are now."""
    rows = [_row(name, field) for name, field in Settings.model_fields.items()]
    table = "\n".join(["| variable | default | meaning |", "|---|---|---|", *rows])
    return PLACE.sub(lambda match: f"{match[1]}{table}\n{match[2]}", document)


def _row(name: str, field: FieldInfo) -> str:
    default = field.default
    if isinstance(default, SecretStr):
        default = default.get_secret_value()
    elif isinstance(default, BaseModel):
        default = default.model_dump(exclude_none=True)
    shown = f"`{default}`" if str(default) else "empty"
    return f"| `TWINKLE_{name.upper()}` | {shown} | {field.description or _MEANINGS[name]} |"


_MEANINGS = {
    "host": "where the API listens",
    "port": "where the API listens",
    "max_rank": "largest LoRA rank an adapter may have",
    "max_adapters_per_step": "adapters fused into one batch at most",
    "transfer_threads": "uploads to and downloads from the object store that a worker runs at once",
    "transfer_bytes": "bytes on their way to or from the object store, beyond which a worker begins no more",
    "max_resident_adapters": "adapters kept on the device; the longest unused is parked in host memory first",
    "sample_slots": "sequences sampled at once",
    "lease_s": "how long a worker that says nothing keeps its mesh",
    "sweep_s": "how often a worker looks into the journal without being nudged",
    "max_attempts": "attempts at an operation before it fails",
    "snapshot_every_ops": "a snapshot of an adapter is due after so many operations",
    "snapshot_every_s": "or after so many seconds, whichever comes first",
    "result_ttl_s": "how long results can be read",
    "flower_host": "where Flower listens",
    "flower_port": "where Flower listens",
    "flower_user": "Flower's only user",
    "flower_password": "Flower's password; `twinkle serve` makes one when it is empty",
    "log_level": "DEBUG, INFO, WARNING, ERROR",
    "log_json": "one JSON object a line instead of key=value",
}
"""For settings whose name says enough in the code."""


if __name__ == "__main__":
    main()
