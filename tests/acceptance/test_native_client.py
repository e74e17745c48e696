"""The native client against a whole service: what was accepted survives its client, its API, and its own numbers."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import psutil
import pytest

from harness.polling import wait_for
from harness.served import Served
from twinkle.client import AsyncClient, Client, Run, WaitReason, as_completed, gather, next_token_datum
from twinkle.client.errors import Cancelled, Conflict, InvalidInput, NotFound, OperationFailed

MODEL = "null"
TIMEOUT_S = 120.0
DATUM = next_token_datum(range(33))

SUBMIT_AND_DIE = """
import os, signal
from twinkle.client import Client, next_token_datum

run = Client().create_run("null", rank=8)
datum = next_token_datum(range(33))
futures = [future for _ in range(20) for future in (run.forward_backward([datum]), run.optim_step())]
print(run.id, futures[-1].accepted().result(60), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""

SUBMIT_AND_END = """
from twinkle.client import Client

run = Client().create_run("null", rank=8)
for _ in range(20):
    run.optim_step()
print(run.id)
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A service whose engine computes nothing but counts everything."""
    with Served(tmp_path_factory.mktemp("native") / "home", model=MODEL, flags=("--engine", "null")) as it:
        yield it


@pytest.fixture
def key(served: Served) -> str:
    """The key of a tenant of its own."""
    return served.create_key(f"tenant-{time.monotonic_ns()}")


@pytest.fixture
def client(served: Served, key: str) -> Iterator[Client]:
    """A client of the new tenant."""
    with Client(served.url, key) as it:
        yield it


def run_script(served: Served, key: str, script: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TWINKLE_SERVER_URL": served.url, "TWINKLE_SERVER_TOKEN": key}
    return subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )


def steps(run: Run, count: int) -> list[float]:
    """The optimizer's own count after each of so many steps, all queued at once."""
    together = gather(*[run.optim_step() for _ in range(count)])
    return [step.metrics["step"] for step in together.result(TIMEOUT_S) if step.metrics]


def test_what_a_killed_process_submitted_is_collected_and_continued_by_another(
    served: Served, key: str, client: Client
) -> None:
    killed = run_script(served, key, SUBMIT_AND_DIE)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    run_id, last = killed.stdout.split()

    outcome = client.future(last).result(TIMEOUT_S)
    run = client.attach(run_id)
    ids = [f"{run_id}:req:{seq}" for seq in range(1, 41)]
    everything = gather(*[client.future(request_id) for request_id in reversed(ids)]).result(TIMEOUT_S)

    assert last == ids[-1]
    assert outcome.metrics["step"] == 20.0
    assert [step.metrics["step"] for step in everything[::2]] == [float(step) for step in range(20, 0, -1)]
    assert [passed.metrics["num_tokens:sum"] for passed in everything[1::2]] == [32.0] * 20
    assert steps(run, 3) == [21.0, 22.0, 23.0]


def test_a_script_that_ends_without_waiting_has_handed_everything_over(
    served: Served, key: str, client: Client
) -> None:
    done = run_script(served, key, SUBMIT_AND_END)
    assert done.returncode == 0, done.stderr

    assert steps(client.attach(done.stdout.strip()), 1) == [21.0]


def test_a_thousand_queued_operations_are_applied_in_their_order(client: Client) -> None:
    run = client.create_run(MODEL, rank=8)

    assert steps(run, 1000) == [float(step) for step in range(1, 1001)]


def test_the_client_outlives_a_killed_api(served: Served, client: Client) -> None:
    run = client.create_run(MODEL, rank=8)
    futures = [run.optim_step() for _ in range(300)]
    futures[20].result(TIMEOUT_S)
    api = served.part("the API")
    api.kill()

    assert [step.metrics["step"] for step in gather(*futures).result(TIMEOUT_S)] == [float(n) for n in range(1, 301)]


def test_a_failed_operation_says_why_and_the_run_goes_on(client: Client) -> None:
    run = client.create_run(MODEL, rank=8)
    failed, after = run.optim_step(float("nan")), run.optim_step()

    with pytest.raises(OperationFailed, match=r"learning_rate") as caught:
        failed.result(TIMEOUT_S)
    assert (caught.value.category, caught.value.request_id) == ("user", f"{run.id}:req:1")
    assert after.result(TIMEOUT_S).metrics == {"step": 1.0, "state": after.result().metrics["state"]}
    with pytest.raises(NotFound):
        client.future(f"{run.id}:req:99").result(TIMEOUT_S)


def test_an_unloaded_run_ends_behind_what_was_called_before_and_its_checkpoints_stay(client: Client) -> None:
    run = client.create_run(MODEL, rank=8)
    step, saved = run.optim_step(), run.save_state("last")
    ended = run.unload()
    late = run.optim_step()

    assert ended.result(TIMEOUT_S).model_id == run.id
    assert step.result(TIMEOUT_S).metrics is not None
    with pytest.raises(InvalidInput, match="was unloaded"):
        late.result(TIMEOUT_S)
    again = client.resume_run(saved.result(TIMEOUT_S).path)
    assert again.optim_step().result(TIMEOUT_S).metrics is not None


def test_large_batches_and_results_travel_too(client: Client) -> None:
    run = client.create_run(MODEL, rank=8)
    lengths = [30_000, 1, 20_000]
    data = [next_token_datum(range(length + 1)) for length in lengths]

    futures = [run.forward(data), run.forward_backward(data), run.optim_step()]
    forward, backward, step = gather(*futures).result(TIMEOUT_S)

    assert [len(logprobs) for logprobs in forward.logprobs] == lengths
    assert [len(logprobs) for logprobs in backward.logprobs] == lengths
    assert step.metrics["step"] == 1.0


def test_two_objects_that_train_one_run_do_not_mix_their_steps(client: Client) -> None:
    mine = client.create_run(MODEL, rank=8)
    theirs = client.attach(mine.id)
    mine.optim_step(1e-3).result(TIMEOUT_S)

    with pytest.raises(Conflict):
        theirs.optim_step(1e-4).result(TIMEOUT_S)
    assert client.attach(mine.id).optim_step().result(TIMEOUT_S).metrics["step"] == 2.0


def test_a_checkpoint_is_resumed_with_its_optimizer_or_without(client: Client) -> None:
    run = client.create_run(MODEL, rank=8, seed=3)
    steps(run, 4)
    path = run.save_state("four").result(TIMEOUT_S).path

    with_optimizer, without = client.resume_run(path), client.resume_run(path, with_optimizer=False)

    assert (steps(with_optimizer, 1), steps(without, 1)) == ([5.0], [1.0])
    assert (with_optimizer.base_model, with_optimizer.rank) == (MODEL, 8)
    run.load_state(path).result(TIMEOUT_S)
    assert steps(run, 1) == [5.0]
    assert [checkpoint.tinker_path for checkpoint in client.checkpoints(run.id)] == [path]
    assert run.id in [found.training_run_id for found in client.runs()]


def test_a_run_is_forked_and_taken_back(client: Client) -> None:
    run = client.create_run(MODEL, rank=8)
    steps(run, 5)

    fork = client.fork_run(run.id, step=3)
    assert steps(fork, 1) == [4.0]
    rewound = client.rewind_run(run.id, step=2)
    assert steps(rewound, 1) == [3.0]

    assert fork.begun is not None
    assert fork.begun.result(TIMEOUT_S).source == run.id
    history = client.history(run.id)
    assert ([fork.id], len(history.rewinds)) == ([branch.run_id for branch in history.forks], 1)
    assert steps(client.attach(run.id), 1) == [4.0]


def test_samples_come_from_a_checkpoint_and_are_cancelled(served: Served, client: Client) -> None:
    run = client.create_run(MODEL, rank=8)
    sampler = client.sampler(path=run.save_weights_for_sampler("first").result(TIMEOUT_S).path)
    drawn = gather(*[sampler.sample([1, 2, 3], max_tokens=4, num_samples=2) for _ in range(50)]).result(TIMEOUT_S)
    assert [len(sequence.tokens) for result in drawn for sequence in result.sequences] == [4] * 100

    with served.standing_still(served.engine_pid()):
        sample = sampler.sample([1, 2, 3], max_tokens=4)
        request_id = sample.accepted().result(TIMEOUT_S)
        assert sample.cancel()
        with pytest.raises(Cancelled):
            sample.result(TIMEOUT_S)
        with pytest.raises(Cancelled):
            client.future(request_id).result(TIMEOUT_S)


def test_threads_share_a_client_and_each_keeps_its_order(client: Client) -> None:
    counted: dict[int, list[float]] = {}

    def train(number: int) -> None:
        counted[number] = steps(client.create_run(MODEL, rank=8), 25)

    threads = [threading.Thread(target=train, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)

    assert counted == {number: [float(step) for step in range(1, 26)] for number in range(6)}


async def test_the_blocking_client_works_inside_a_running_loop(served: Served, key: str) -> None:
    with Client(served.url, key) as client:
        run = client.create_run(MODEL, rank=8)
        blocked = run.optim_step().result(TIMEOUT_S)
        awaited = await run.optim_step()

    assert (blocked.metrics, awaited.metrics) != (None, None)
    assert [step.metrics["step"] for step in (blocked, awaited) if step.metrics] == [1.0, 2.0]


async def test_the_asynchronous_client_trains_several_runs_at_once(served: Served, key: str) -> None:
    async with AsyncClient(served.url, key) as client:
        runs = await asyncio.gather(*[client.create_run(MODEL, rank=8) for _ in range(8)])
        futures = [run.forward_backward([DATUM]) for run in runs] + [run.optim_step() for run in runs]
        done = [await future async for future in as_completed(futures, timeout=TIMEOUT_S)]

    assert len(done) == 16
    assert [future.request_id for future in futures[:8]] == [f"{run.id}:req:1" for run in runs]


def test_a_waiting_operation_says_where_it_stands(served: Served, client: Client) -> None:
    run = client.create_run(MODEL, rank=8)
    done = run.optim_step()
    done.result(TIMEOUT_S)
    with served.standing_still(served.engine_pid()):
        futures = [run.optim_step() for _ in range(3)]
        last = futures[-1].status().result(TIMEOUT_S)

    assert (last.reason, last.seq_id, last.request_id) == (
        WaitReason.WAITING_FOR_PREDECESSOR,
        4,
        futures[-1].request_id,
    )
    assert last.place is not None
    assert last.place.num_own_before >= 1
    assert (last.attempt, last.max_attempts, last.last_error) == (0, 3, None)
    assert done.status().result(TIMEOUT_S).reason is WaitReason.DONE


def test_a_wait_that_timed_out_can_be_taken_up_again(served: Served, client: Client) -> None:
    run = client.create_run(MODEL, rank=8)
    run.optim_step().result(TIMEOUT_S)
    with served.standing_still(served.engine_pid()):
        future = run.optim_step()
        future.accepted().result(TIMEOUT_S)
        with pytest.raises(TimeoutError):
            future.result(0.5)

    assert wait_for(future.done, what="the outcome", deadline_s=TIMEOUT_S)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_ten_thousand_open_futures_need_few_connections(served: Served, client: Client) -> None:
    runs = [client.create_run(MODEL, rank=8) for _ in range(10)]
    with served.standing_still(served.engine_pid()):
        futures = [run.optim_step() for _ in range(1000) for run in runs]
        gather(*[future.accepted() for future in futures[-10:]]).result(400)
        api = served.part("the API")
        ours = {connection.laddr for connection in psutil.Process().net_connections() if connection.raddr}
        held = [connection for connection in api.net_connections() if connection.raddr in ours]
        assert sum(not future.done() for future in futures) == 10_000

    done = sum(1 for future in as_completed(futures, timeout=400) if future.result().metrics)

    assert done == 10_000
    assert len(held) <= 32
