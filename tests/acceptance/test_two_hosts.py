"""Two hosts on one PostgreSQL, one Redis and one S3: one of them dies, the other goes on to the same bits."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import tinker

from harness.deployment import Deployment
from harness.leftovers import sdk_client
from harness.struck_training import NUM_STEPS, train

# A minute for two hosts; the death of a worker alone is held in tests/acceptance/test_production.py.
pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]

LOST_AFTER = 5


TWINKLE_CLIENT = """
import sys
from twinkle_client import init_twinkle_client
from twinkle_client.model import MultiLoraTransformersModel

init_twinkle_client(sys.argv[1], sys.argv[2])
model = MultiLoraTransformersModel("tiny")
model.add_adapter_to_model("default", {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"})
model.set_loss("CrossEntropyLoss")
model.set_optimizer("AdamW", lr=1e-2)
rows = [{"input_ids": [5, 6, 7, 8], "labels": [6, 7, 8, -100]}]
losses = []
for _ in range(2):
    losses.append(model.forward_backward(inputs=rows)["loss"])
    model.clip_grad_and_step()
    print("stepped", flush=True)
    sys.stdin.readline()
losses.append(model.forward_backward(inputs=rows)["loss"])
assert losses[2] < losses[1] < losses[0], losses
print("trained", flush=True)
"""


class Host(Deployment):
    """The processes of one host, with a home and settings of its own."""

    def __init__(self, folder: Path, settings: dict[str, str], **own: str) -> None:
        folder.mkdir()
        super().__init__(folder, {**settings, "TWINKLE_HOME": str(folder / "home"), **own})

    def start_all(self, model: Path) -> None:
        self.start("worker", "worker", "--mesh", "main", "--model", str(model), "--model-name", "tiny")
        self.start("housekeeping", "housekeeping")
        self.start_server()
        self.await_ready()

    def client(self, tenant: str) -> tinker.ServiceClient:
        return sdk_client(self.url, self.create_key(tenant))

    def lose(self) -> None:
        """SIGKILL to every process at once."""
        theirs = [psutil.Process(process.pid) for process in self.processes.values()]
        for process in [*theirs, *(child for one in theirs for child in one.children(recursive=True))]:
            process.kill()
        for own in self.processes.values():
            own.wait()


@pytest.fixture
def hosts(
    tmp_path: Path,
    make_empty_database_url: Callable[[str], str],
    redis_url: str,
    s3_url: str,
    tiny_model: Path,
) -> Iterator[tuple[Host, Host]]:
    shared = {
        "TWINKLE_DATABASE_URL": make_empty_database_url("postgres"),
        "TWINKLE_REDIS_URL": redis_url,
        "TWINKLE_OBJECT_STORE": s3_url,
        "TWINKLE_DOWNLOAD_URL_SECRET": "of both hosts, and as long as it has to be",
        "TWINKLE_LEASE_S": "4",
    }
    first = Host(tmp_path / "first", shared, TWINKLE_LONG_POLL_S="5")
    second = Host(tmp_path / "second", shared, TWINKLE_LONG_POLL_S="10", TWINKLE_LOG_LEVEL="debug")
    try:
        first.start_all(tiny_model)
        second.start_all(tiny_model)
        yield first, second
    except BaseException:
        print(first.logs(), second.logs())
        raise
    finally:
        first.stop()
        second.stop()


def test_a_run_through_one_host_goes_on_when_the_other_with_its_mesh_is_gone(hosts: tuple[Host, Host]) -> None:
    first, second = hosts
    holder = first.holder()
    assert holder is not None and first.name_of(holder[1].pid) == "worker"

    calm = train(first, "calm")
    words = [sys.executable, "-c", TWINKLE_CLIENT, second.url, second.create_key("other")]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdin is not None and other.stdout is not None
        try:
            # A run through the other client makes one step before and the others after.
            assert other.stdout.readline() == "stepped\n"
            struck = train(second, "struck", after=LOST_AFTER, strike=first.lose)
            rest = other.communicate("\n\n", timeout=200)[0]
        finally:
            other.kill()
    assert (rest, other.returncode) == ("stepped\ntrained\n", 0)

    assert struck.losses == calm.losses
    stored = second.database.read("SELECT path, files FROM checkpoint WHERE kind = 'training'")
    sha256s = {path: {name: file["sha256"] for name, file in json.loads(files).items()} for path, files in stored}
    assert sha256s[struck.path] == sha256s[calm.path]
    operations = second.database.read("SELECT seq, state FROM operation WHERE lane = ? ORDER BY seq", (struck.adapter,))
    assert operations == [(seq, "done") for seq in range(2 * NUM_STEPS + 2)]
    later = second.holder()
    assert later is not None and later[0] > holder[0] and second.name_of(later[1].pid) == "worker"
