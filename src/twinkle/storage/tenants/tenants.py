"""Tenants' weights, limits and rates, as an administrator sets them and the API asks for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from twinkle.core.errors import NotFound
from twinkle.core.limits import TenantLimits
from twinkle.storage.database import Database
from twinkle.storage.journal.turns import RATE_BURST_S

_LIMITS = tuple(field.name for field in fields(TenantLimits))


@dataclass(frozen=True, kw_only=True)
class TenantAccount:
    """One tenant. ``own_limits`` are not the settings'; until ``paused_until`` its rate lets nothing of it run."""

    id: str
    name: str
    weight: float
    limits: TenantLimits
    own_limits: Mapping[str, int]
    paused_until: float


class Tenants:
    """What each tenant may use."""

    def __init__(self, database: Database, defaults: TenantLimits) -> None:
        self._database = database
        self._defaults = defaults

    def all(self) -> list[TenantAccount]:
        """Every tenant, by name."""
        return self._read("TRUE ORDER BY name", ())

    def account(self, tenant: str) -> TenantAccount:
        """One tenant, by its id.

        Raises:
            NotFound: There is none.
        """
        found = self._read("id = ?", (tenant,))
        if not found:
            raise NotFound(f"no tenant {tenant!r}")
        return found[0]

    def set(self, name: str, *, weight: float | None = None, limits: Mapping[str, int | None]) -> None:
        """Change a tenant's weight, and those of its limits that are given; ``None`` makes one the settings' again.

        Raises:
            NotFound: There is no tenant of that name.
        """
        columns: dict[str, float | None] = {limit: limits[limit] for limit in _LIMITS if limit in limits}
        if weight is not None:
            columns["weight"] = weight
        assignments = ", ".join(f"{column} = ?" for column in columns) or "weight = weight"
        with self._database.transaction() as transaction:
            changed = transaction.execute(
                f"UPDATE tenant SET {assignments} WHERE name = ?", (*columns.values(), name)
            ).rowcount
        if changed != 1:
            raise NotFound(f"no tenant {name!r}; `twinkle tenants list` shows who there is")

    def _read(self, where: str, parameters: tuple[str, ...]) -> list[TenantAccount]:
        rows = self._database.read(
            f"SELECT id, name, weight, paid_until, {', '.join(_LIMITS)} FROM tenant WHERE {where}", parameters
        )
        accounts = []
        for row in rows:
            set_here = {name: getattr(row, name) for name in _LIMITS}
            own = {name: value for name, value in set_here.items() if value is not None}
            settings = {name: getattr(self._defaults, name) for name in _LIMITS}
            accounts.append(
                TenantAccount(
                    id=row.id,
                    name=row.name,
                    weight=row.weight,
                    limits=TenantLimits(**settings | own),
                    own_limits=own,
                    paused_until=row.paid_until - RATE_BURST_S,
                )
            )
        return accounts
