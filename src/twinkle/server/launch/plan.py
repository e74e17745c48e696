"""What comes of a ``server_config.yaml``: settings, meshes, and what became of each of its keys."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

Fate: TypeAlias = Literal["used", "mapped", "changed", "meaningless"]
"""What becomes of a key: taken as it is, as a setting of ours, otherwise than it says, or not at all."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One key, and what became of it."""

    key: str
    value: Any
    fate: Fate
    note: str


@dataclass
class Plan:
    """What to start: settings by their variables, ``--mesh`` flags, and how each key of the file was taken."""

    settings: dict[str, str] = field(default_factory=dict)
    meshes: list[str] = field(default_factory=list)
    on_cluster: bool = False
    """Whether the ranks are to be on the nodes of a Ray cluster, on whatever devices."""
    findings: list[Finding] = field(default_factory=list)

    def note(self, key: str, value: object, fate: Fate, note: str) -> None:
        """Say what became of a key."""
        self.findings.append(Finding(key=key, value=value, fate=fate, note=note))

    def map(self, key: str, value: object, variable: str, text: str, *, note: str = "", fate: Fate = "mapped") -> None:
        """Set a variable. Where two keys set one, the larger number holds for both."""
        before = self.settings.get(variable)
        if before is not None and before != text and _number(before) >= _number(text):
            text = before
        self.settings[variable] = text
        self.note(key, value, fate, f"{variable}={text}" + (f"; {note}" if note else ""))


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("-inf")
