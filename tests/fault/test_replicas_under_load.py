"""Meshes of one kind under ``twinkle serve``: as many as the load wants, and the least again when it has gone."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.history import History, judge, read_rows
from harness.polling import wait_until
from harness.served import Served
from harness.tenant import Tenant, burst

# A minute of starting and stopping workers; the rule is held in tests/contract/test_replicas.py.
pytestmark = pytest.mark.soak

GOES_S = 180.0
SETTINGS = {"TWINKLE_REPLICA_OPERATIONS": "1", "TWINKLE_REPLICA_GROW_S": "0", "TWINKLE_REPLICA_SHRINK_S": "10"}
ALL = {"big", "big-2", "big-3"}


def test_meshes_come_with_the_load_and_go_with_it_and_tenants_notice_nothing(tmp_path: Path) -> None:
    flags = ("--engine", "null", "--mesh", "big=cpu,replicas=1-3")
    with Served(tmp_path / "home", model="null", flags=flags, **SETTINGS) as service:
        history = History()
        tenant = Tenant(service.url, service.create_key("busy"), history)
        assert meshes(service) == {"big"}

        def has_shared() -> bool:
            burst(tenant, runs=4, steps=20)
            return ran_on(service) == ALL

        wait_until(has_shared, what="work on three meshes", deadline_s=GOES_S)
        run = tenant.new_run(tenant.new_session(), 0)
        run.train(3)
        wait_until(lambda: meshes(service) == {"big"}, what="the least again", deadline_s=GOES_S)
        wait_until(lambda: not service.processes(r"--mesh big-"), what="a worker less", deadline_s=GOES_S)
        run.train(3)
        tenant.close()

        verdict = judge(
            history.events, read_rows(service.query), lambda key: (service.home / "objects" / key).read_bytes()
        )
        assert verdict.violations == verdict.failed == []
        assert service.query("SELECT DISTINCT mesh FROM lane") == [("big",)]


def meshes(service: Served) -> set[str]:
    return {name for (name,) in service.query("SELECT name FROM mesh WHERE capabilities IS NOT NULL")}


def ran_on(service: Served) -> set[str]:
    """The meshes on which something of a tenant's is."""
    return {name for (name,) in service.query("SELECT DISTINCT mesh FROM lane")}
