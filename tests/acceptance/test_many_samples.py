"""As many samples outstanding at once as the SDK ever has, from one client."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator

import psutil
import pytest
import tinker

from harness.polling import wait_until
from harness.served import Served

NUM_SAMPLES = 2000
SUBMITTED_WITHIN_S = 120.0
ANSWERED_WITHIN_S = 240.0
MAX_GROWTH_BYTES = 400 << 20
# Of the API beside its connections, and of a client: databases, logs, the broker.
OTHER_FILES = 200

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]


@pytest.fixture(params=["each its poll", "one poll"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    settings = {"TWINKLE_LEASE_S": "600"}
    if request.param == "one poll":
        settings["TWINKLE_POLL_SAMPLES_TOGETHER"] = "true"
    with Served(
        tmp_path_factory.mktemp("samples") / "home", model="null", flags=("--engine", "null"), **settings
    ) as it:
        yield it


def num_queued(served: Served) -> int:
    return int(served.query("SELECT COUNT(*) FROM operation WHERE kind = 'sample' AND state = 'queued'")[0][0])


def test_two_thousand_samples_of_one_client_are_accepted_held_and_answered(served: Served) -> None:
    api = served.part("the API")
    service = served.client("many")
    sampling = service.create_sampling_client(base_model="null").result()
    prompt, params = tinker.ModelInput.from_ints(range(200)), tinker.SamplingParams(max_tokens=16)
    sampling.sample(prompt, 1, params).result()
    before = api.memory_info().rss
    with served.standing_still(served.engine_pid()):
        started = time.monotonic()
        futures = [sampling.sample(prompt, 1, params) for _ in range(NUM_SAMPLES)]
        wait_until(lambda: num_queued(served) == NUM_SAMPLES, what="all in the journal", deadline_s=SUBMITTED_WITHIN_S)
        submitted_s = time.monotonic() - started
        held = sum(connection.status == psutil.CONN_ESTABLISHED for connection in api.net_connections("tcp"))
        num_files, growth = api.num_fds(), api.memory_info().rss - before
    started = time.monotonic()
    answers = [future.result(timeout=ANSWERED_WITHIN_S) for future in futures]
    answered_s = time.monotonic() - started
    service.close("success")

    assert [len(answer.sequences[0].tokens) for answer in answers] == [16] * NUM_SAMPLES
    print(f"{submitted_s=:.1f} {answered_s=:.1f} {held=} {num_files=} {growth=}")
    assert growth < MAX_GROWTH_BYTES
    assert num_files < NUM_SAMPLES + 400 + OTHER_FILES < resource.getrlimit(resource.RLIMIT_NOFILE)[0]
