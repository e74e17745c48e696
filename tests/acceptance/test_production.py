"""The same code as separate processes on PostgreSQL, a separate Redis and S3, with a second worker standing by."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import boto3
import httpx
import psycopg
import pytest
import tinker

from harness.polling import wait_for
from harness.servers import free_port
from twinkle.core.lease import ProcessIdentity

TWINKLE = (sys.executable, "-m", "twinkle.cli")
NUM_STEPS = 10
READY_S = 150.0


class Deployment:
    """The processes of a deployment, each started by hand."""

    def __init__(self, folder: Path, settings: dict[str, str]) -> None:
        self._folder = folder
        self._environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("TWINKLE_", "TINKER_"))
        } | settings
        self.database_url = settings["TWINKLE_DATABASE_URL"]
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, name: str, *arguments: str) -> None:
        with (self._folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen([*TWINKLE, *arguments], stdout=log, stderr=log, env=self._environment)
        self._processes.append(process)

    def create_key(self, tenant: str) -> str:
        command = [*TWINKLE, "keys", "create", "--tenant", tenant]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=self._environment)
        return done.stdout.split()[-1]

    def holder(self) -> tuple[int, ProcessIdentity] | None:
        """The epoch of the mesh's lease, and the live process that holds it."""
        with psycopg.connect(self.database_url) as connection:
            row = connection.execute("SELECT epoch, owner FROM mesh").fetchone()
        identity = ProcessIdentity.parse(row[1]) if row and row[1] else None
        return None if identity is None or identity.is_known_dead() else (row[0], identity)

    def stop(self) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.wait(40)

    def logs(self) -> str:
        return "\n".join(f"--- {path.name}\n{path.read_text()[-5000:]}" for path in self._folder.glob("*.log"))


@pytest.fixture(scope="module")
def deployment(
    tmp_path_factory: pytest.TempPathFactory,
    make_database_url: Callable[[str], str],
    redis_url: str,
    s3_endpoint: str,
    tiny_model: Path,
) -> Iterator[tuple[Deployment, str]]:
    folder = tmp_path_factory.mktemp("deployment")
    port = free_port()
    deployment = Deployment(
        folder,
        {
            "TWINKLE_DATABASE_URL": make_database_url("postgres"),
            "TWINKLE_REDIS_URL": redis_url,
            "TWINKLE_OBJECT_STORE": "s3://twinkle-tests/production",
            "TWINKLE_LEASE_S": "4",
            "AWS_ENDPOINT_URL": s3_endpoint,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_REGION": "us-east-1",
        },
    )
    worker = ("worker", "--mesh", "main", "--model", str(tiny_model), "--model-name", "tiny")
    try:
        deployment.start("first-worker", *worker)
        deployment.start("second-worker", *worker)
        deployment.start("housekeeping", "housekeeping")
        deployment.start("server", "server", "--port", str(port))
        url = f"http://127.0.0.1:{port}"
        wait_for(lambda: _is_ready(url), what="readiness", deadline_s=READY_S)
        yield deployment, url
    except BaseException:
        print(deployment.logs())
        raise
    finally:
        deployment.stop()


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/api/v1/readyz", timeout=2).status_code == 200
    except httpx.TransportError:
        return False


def test_a_run_survives_the_death_of_its_worker_and_leaves_its_checkpoint_in_the_bucket(
    deployment: tuple[Deployment, str], s3_endpoint: str
) -> None:
    processes, url = deployment
    client = tinker.ServiceClient(base_url=url, api_key=processes.create_key("team"))
    run = client.create_lora_training_client(base_model="tiny", rank=4, seed=3).result()
    first_epoch, first_holder = wait_for(processes.holder, what="a lease holder")

    stepped = []
    for step in range(NUM_STEPS):
        inputs = {"target_tokens": [11 + step, 12, 13], "weights": [1.0, 1.0, 1.0]}
        datum = tinker.Datum(model_input=tinker.ModelInput.from_ints([10, 11 + step, 12]), loss_fn_inputs=inputs)
        run.forward_backward([datum], "cross_entropy")
        stepped.append(run.optim_step(tinker.AdamParams(learning_rate=1e-3)))
        if step == 4:
            stepped[0].result()
            os.kill(first_holder.pid, signal.SIGKILL)

    assert [future.result().metrics["step"] for future in stepped] == [float(n) for n in range(1, NUM_STEPS + 1)]
    second_epoch, second_holder = wait_for(processes.holder, what="the next lease holder")
    assert second_epoch > first_epoch
    assert second_holder != first_holder
    path = run.save_state("kept").result().path
    with psycopg.connect(processes.database_url) as connection:
        (files,) = connection.execute("SELECT files FROM checkpoint WHERE path = %s", (path,)).fetchone()
    bucket = boto3.client(
        "s3",
        endpoint_url=s3_endpoint,
        region_name="us-east-1",
        aws_access_key_id="test",
        aws_secret_access_key="test",
    )
    for file in json.loads(files).values():
        stored = bucket.head_object(Bucket="twinkle-tests", Key=f"production/{file['key']}")
        assert stored["ContentLength"] == file["size_bytes"]
