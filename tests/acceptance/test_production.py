"""The same code as separate processes on PostgreSQL, a separate Redis and S3, with a second worker standing by."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import boto3
import pytest
import tinker

from harness.deployment import Deployment
from harness.leftovers import sdk_client
from harness.polling import wait_for

NUM_STEPS = 10


@pytest.fixture(scope="module")
def deployment(
    tmp_path_factory: pytest.TempPathFactory,
    make_empty_database_url: Callable[[str], str],
    redis_url: str,
    s3_endpoint: str,
    tiny_model: Path,
) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("deployment")
    deployment = Deployment(
        folder,
        {
            "TWINKLE_DATABASE_URL": make_empty_database_url("postgres"),
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
        deployment.start_server()
        deployment.await_ready()
        yield deployment
    except BaseException:
        print(deployment.logs())
        raise
    finally:
        deployment.stop()


def test_a_run_survives_the_death_of_its_worker_and_leaves_its_checkpoint_in_the_bucket(
    deployment: Deployment, s3_endpoint: str
) -> None:
    client = sdk_client(deployment.url, deployment.create_key("team"))
    run = client.create_lora_training_client(base_model="tiny", rank=4, seed=3).result()
    first_epoch, first_holder = wait_for(deployment.holder, what="a lease holder")

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
    second_epoch, second_holder = wait_for(deployment.holder, what="the next lease holder")
    assert second_epoch > first_epoch
    assert second_holder != first_holder
    path = run.save_state("kept").result().path
    ((files,),) = deployment.database.read("SELECT files FROM checkpoint WHERE path = ?", (path,))
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
