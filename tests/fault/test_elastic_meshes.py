"""Meshes that are asked for, drained and given back under a tenant that works, with kills in the middle."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from harness.crashes import Crashes
from harness.history import History, judge, read_rows
from harness.polling import wait_until
from harness.served import TWINKLE, Served
from harness.tenant import Tenant, burst

# A minute of starting and stopping workers; what each step does is held in tests/contract/test_moves.py.
pytestmark = pytest.mark.soak

GOES_S = 90.0


@pytest.fixture(scope="module")
def crashes(tmp_path_factory: pytest.TempPathFactory) -> Crashes:
    return Crashes(tmp_path_factory.mktemp("crashes"))


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, crashes: Crashes) -> Iterator[Served]:
    """One mesh whose engine computes nothing but what was applied in which order."""
    home = tmp_path_factory.mktemp("elastic") / "home"
    flags = ("--engine", "null", "--mesh", "first=cpu")
    with Served(home, model="null", flags=flags, TWINKLE_SNAPSHOT_EVERY_OPS="7", **crashes.variables) as running:
        yield running


def meshes(service: Served, *words: str) -> str:
    """What ``twinkle meshes ...`` prints."""
    done = subprocess.run(
        [*TWINKLE, "meshes", *words, "--home", str(service.home)], capture_output=True, text=True, timeout=GOES_S
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def num_on(service: Served, mesh: str) -> int:
    ((count,),) = service.query("SELECT COUNT(*) FROM lane WHERE mesh = ?", mesh)
    return int(count)


def test_a_tenant_that_works_all_the_while_notices_nothing_of_meshes_that_come_and_go(
    service: Served, crashes: Crashes
) -> None:
    history = History()
    tenant = Tenant(service.url, service.create_key("elastic"), history)
    burst(tenant)

    def come_and_go() -> None:
        meshes(service, "add", "second", "--model", "null")
        wait_until(lambda: _is_alive(service, "second"), what="the second mesh", deadline_s=GOES_S)
        # The first one dies with an adapter stored and not yet handed over, its successor in the hand-over itself.
        crashes.arm("worker.departing")
        meshes(service, "drain", "first")
        crashes.wait("worker.departing", deadline_s=GOES_S)
        crashes.arm("move.handing_over")
        crashes.wait("move.handing_over", deadline_s=GOES_S)
        wait_until(lambda: num_on(service, "first") == 0, what="the first mesh is empty", deadline_s=GOES_S)
        meshes(service, "remove", "first")

    with ThreadPoolExecutor(1) as operator:
        coming_and_going = operator.submit(come_and_go)
        while not coming_and_going.done():
            burst(tenant)
        coming_and_going.result()
    burst(tenant)
    tenant.close()

    rows = read_rows(service.query)
    verdict = judge(history.events, rows, lambda key: (service.home / "objects" / key).read_bytes())
    assert verdict.violations == verdict.failed == []
    [left] = json.loads(meshes(service, "list", "--json"))
    assert (left["mesh"], left["state"], left["leaving"]) == ("second", "alive", 0)
    assert len(service.processes(r"twinkle\.cli worker")) >= 1
    assert not service.processes(r"--mesh first")


def _is_alive(service: Served, mesh: str) -> bool:
    return bool(service.query("SELECT 1 FROM mesh WHERE name = ? AND capabilities IS NOT NULL", mesh))
