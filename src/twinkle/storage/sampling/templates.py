"""How conversations become prompts, session by session: what one API process was told, every one of them knows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from twinkle.core.errors import LimitReached
from twinkle.storage.database import Database

MAX_PER_SESSION = 128


@dataclass(frozen=True, kw_only=True)
class TemplatePlace:
    """Where a template holds: what a session samples from a base model, or from the adapter of a name."""

    session: str
    base_model: str
    adapter_name: str


class SamplerTemplates:
    """They are kept as long as their sessions."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def set(self, place: TemplatePlace, settings: Mapping[str, Any]) -> None:
        """Keep settings from now on; they take the place of those before.

        Raises:
            LimitReached: The session has very many already.
        """
        with self._database.transaction() as transaction:
            # Two that are set at once wait for each other here.
            transaction.execute("SELECT id FROM session WHERE id = ? FOR UPDATE", (place.session,))
            row = transaction.execute(
                "SELECT COUNT(*) AS num FROM sampler_template WHERE session = ?"
                " AND NOT (base_model = ? AND adapter_name = ?)",
                (place.session, place.base_model, place.adapter_name),
            ).fetchone()
            assert row is not None, "a count is a row"
            if row.num >= MAX_PER_SESSION:
                raise LimitReached(
                    f"the session has templates for {row.num} adapters, as many as it may; begin another"
                )
            transaction.execute(
                "INSERT INTO sampler_template (session, base_model, adapter_name, settings) VALUES (?, ?, ?, ?)"
                " ON CONFLICT (session, base_model, adapter_name) DO UPDATE SET settings = excluded.settings",
                (place.session, place.base_model, place.adapter_name, json.dumps(dict(settings))),
            )

    def find(self, place: TemplatePlace) -> dict[str, Any] | None:
        """What was set for an adapter, else for all of the session's samples from its base model."""
        rows = self._database.read(
            "SELECT settings FROM sampler_template WHERE session = ? AND base_model = ? AND adapter_name IN (?, '')"
            " ORDER BY adapter_name DESC LIMIT 1",
            (place.session, place.base_model, place.adapter_name),
        )
        found: dict[str, Any] | None = json.loads(rows[0].settings) if rows else None
        return found
