"""The card of a model that is pushed: what it was made from and how well it did."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from twinkle.hub.caches import published_id
from twinkle.hub.reference import without_scheme

CARD_FILE = "README.md"
ADAPTER_FILE = "adapter_config.json"
METRICS_FILE = "metrics.jsonl"
"""What training writes beside a checkpoint, one object a line; its last is what the card shows."""


@dataclass(frozen=True, kw_only=True)
class ModelCard:
    """What a card says. What is left out is read from the folder, where it says so.

    Args:
        base: The id of the model that was trained. Default: as the adapter's config has it.
        data: Ids of the data sets.
        metrics: Figures. Default: the last line of ``metrics.jsonl``.
        text: Anything more, in Markdown.
    """

    base: str | None = None
    data: Sequence[str] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    text: str = ""


def write_card(folder: Path, repository: str, card: ModelCard) -> None:
    """Write the card into a folder, unless one is there: a person's words are never replaced."""
    file = folder / CARD_FILE
    if not file.exists():
        file.write_text(card_text(folder, repository, card), encoding="utf-8")


def card_text(folder: Path, repository: str, card: ModelCard) -> str:
    """The card of a folder: a header that hubs read, then the same for people."""
    is_adapter = (folder / ADAPTER_FILE).is_file()
    base = card.base or _base_of(folder)
    data = [without_scheme(name) for name in card.data]
    metrics = dict(card.metrics) or _last_metrics(folder)
    header = [f"library_name: {'peft' if is_adapter else 'transformers'}"]
    if base is not None:
        header += [f"base_model: {_quoted(base)}", f"base_model_relation: {'adapter' if is_adapter else 'finetune'}"]
    if data:
        header += ["datasets:", *(f"- {_quoted(name)}" for name in data)]
    header += ["tags:", "- twinkle", *(["- lora"] if is_adapter else [])]
    name = repository.rpartition("/")[2]
    parts = ["---", *header, "---", "", f"# {name}", ""]
    if base is not None:
        parts += [f"{'A LoRA adapter for' if is_adapter else 'Made from'} `{base}`, trained with Twinkle.", ""]
    if data:
        parts += ["Data: " + ", ".join(f"`{name}`" for name in data), ""]
    if metrics:
        parts += ["| metric | value |", "|---|---|", *(f"| {key} | {value:g} |" for key, value in metrics.items()), ""]
    if card.text:
        parts += [card.text.strip(), ""]
    return "\n".join(parts)


def _base_of(folder: Path) -> str | None:
    for name, key in ((ADAPTER_FILE, "base_model_name_or_path"), ("config.json", "_name_or_path")):
        file = folder / name
        if file.is_file() and (base := json.loads(file.read_text()).get(key)):
            # A path of this machine says nothing to others, and may say too much.
            published = published_id(str(base))
            return None if Path(published).is_absolute() else published
    return None


def _last_metrics(folder: Path) -> dict[str, float]:
    file = folder / METRICS_FILE
    if not file.is_file():
        return {}
    lines = [line for line in file.read_text().splitlines() if line.strip()]
    found = json.loads(lines[-1]) if lines else {}
    return {key: value for key, value in found.items() if isinstance(value, (int, float))}


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
