"""Processes that sign: all with one secret, or the later one does not run."""

from __future__ import annotations

import pytest

from harness.journal import Bench
from twinkle.core.errors import ConfigError
from twinkle.server.access.joining import fingerprint_of
from twinkle.server.access.signing import Signer
from twinkle.storage.tenants.deployment import FORGOTTEN_AFTER_S, RENEW_EVERY_S

OURS, OTHERS = fingerprint_of(Signer(b"ours")), fingerprint_of(Signer(b"another"))


def test_who_signs_with_another_secret_is_refused_as_long_as_others_run(bench: Bench) -> None:
    deployment = bench.stores.deployment
    deployment.join(OURS)
    for _ in range(5):
        bench.clock.move(RENEW_EVERY_S)
        deployment.join(OURS)
        with pytest.raises(ConfigError, match="TWINKLE_DOWNLOAD_URL_SECRET: other processes"):
            deployment.join(OTHERS)

    bench.clock.move(FORGOTTEN_AFTER_S)
    deployment.join(OTHERS)

    with pytest.raises(ConfigError, match="stop them all"):
        deployment.join(OURS)


def test_nothing_of_the_secret_is_in_the_journal(bench: Bench) -> None:
    bench.stores.deployment.join(OURS)

    assert bench.rows("SELECT fingerprint FROM shared_secret") == [(OURS,)]
    assert OURS != OTHERS and len(OURS) == 32 and b"ours" not in OURS.encode()
