"""What all processes of one deployment that sign must have in common, known in the journal by a fingerprint."""

from __future__ import annotations

from twinkle.core.clock import Clock
from twinkle.core.errors import ConfigError
from twinkle.storage.database import Database

RENEW_EVERY_S = 10.0
FORGOTTEN_AFTER_S = 30.0
"""So long after the last process that had a secret, another one may take its place."""

_SIGNING = "signing"


class Deployment:
    """Which secret the processes that run now sign with. The fingerprint tells nothing of it."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    def join(self, fingerprint: str) -> None:
        """Run with this secret, and say so; to be said again every ``RENEW_EVERY_S``.

        Raises:
            ConfigError: Others run with another one: what they have signed would be refused here, and the other way
                round.
        """
        with self._database.transaction() as transaction:
            transaction.execute(
                "INSERT INTO shared_secret (name, fingerprint, seen_at) VALUES (?, ?, ?) ON CONFLICT (name) DO NOTHING",
                (_SIGNING, fingerprint, self._clock.now()),
            )
            row = transaction.execute(
                "SELECT fingerprint, seen_at FROM shared_secret WHERE name = ? FOR UPDATE", (_SIGNING,)
            ).fetchone()
            assert row is not None, "it was there, or was made just now"
            silent_s = self._clock.now() - row.seen_at
            if row.fingerprint != fingerprint and silent_s < FORGOTTEN_AFTER_S:
                raise ConfigError(
                    "TWINKLE_DOWNLOAD_URL_SECRET: other processes of this service (API, jobs workers) sign with another"
                    f" secret, the last of them {max(silent_s, 0):.0f} s ago; give all of them the same one. To change"
                    f" it, stop them all and wait for {FORGOTTEN_AFTER_S:.0f} s"
                )
            transaction.execute(
                "UPDATE shared_secret SET fingerprint = ?, seen_at = ? WHERE name = ?",
                (fingerprint, self._clock.now(), _SIGNING),
            )
