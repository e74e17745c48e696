"""The ``tinker`` command line, unmodified, against the served app."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner, Result
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace
from tinker.cli.__main__ import main_cli
from tinker.cli.exceptions import TinkerCliError

from harness.fake_worker import WEIGHTS

if TYPE_CHECKING:
    from conftest import Api, ServeApi


@pytest.fixture(scope="module")
def served(serve_api: ServeApi, make_database_url: Callable[[str], str]) -> Iterator[Api]:
    with serve_api(make_database_url("sqlite")) as api:
        api.worker.start()
        yield api
        api.worker.stop()


class Cli:
    """The command line of one tenant, run in this process: starting it anew takes seconds each time.

    Within a process it keeps the first credential it found, so all tests are of the same tenant.
    """

    def __init__(self, api: Api, home: Path) -> None:
        self.key = api.new_key()
        self.home = home
        self._environment = {"HOME": str(home), "TINKER_BASE_URL": api.url, "TINKER_TELEMETRY": "0"}

    def run(self, *arguments: str, key: str | None = None, stdin: str = "") -> Result:
        given = {"TINKER_API_KEY": self.key if key is None else key}
        done = CliRunner().invoke(main_cli, arguments, input=stdin, env=self._environment | given)
        assert done.exception is None or isinstance(done.exception, SystemExit | TinkerCliError), done.exception
        return done

    def json(self, *arguments: str) -> Any:
        done = self.run("--format", "json", *arguments)
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)


@pytest.fixture(scope="module")
def cli(served: Api, tmp_path_factory: pytest.TempPathFactory) -> Cli:
    return Cli(served, tmp_path_factory.mktemp("cli"))


@pytest.fixture
def path(served: Api, cli: Cli) -> str:
    """A checkpoint of a new run of the tenant's."""
    with served.sdk(cli.key) as service:
        training = service.create_lora_training_client(base_model="tiny/one", rank=4)
        return training.save_state("a").result().path


def test_auth_status_and_models(cli: Cli) -> None:
    status = cli.run("auth", "status")
    wrong = cli.run("auth", "status", key="tml-wrong")

    assert "Tinker accessible: yes" in status.stdout
    assert wrong.exit_code != 0
    assert "Tinker accessible: no" in wrong.stdout
    assert "tiny/one" in json.dumps(cli.json("model", "list"))


def test_logging_in_with_a_key(cli: Cli) -> None:
    login = cli.run("auth", "login", key="", stdin=f"{cli.key}\n")
    stored = json.loads((cli.home / ".tinker" / "credentials.json").read_text())

    assert login.exit_code == 0, login.output
    assert "Logged in as tenant-" in login.stdout
    assert cli.key in json.dumps(stored)
    assert cli.run("auth", "logout", key="").exit_code == 0


def test_runs_and_checkpoints_are_shown(cli: Cli, path: str) -> None:
    run_id = path.split("/")[2]

    runs = cli.json("run", "list")
    run = cli.json("run", "info", run_id)
    listed = [cli.json("checkpoint", "list"), cli.json("checkpoint", "list", "--run-id", run_id)]
    info = cli.json("checkpoint", "info", path)

    assert run_id in json.dumps(runs)
    assert run_id in json.dumps(run)
    assert all(path in json.dumps(answer) for answer in listed)
    assert path in json.dumps(info)


def test_a_checkpoint_is_published_timed_and_deleted(served: Api, cli: Cli, path: str) -> None:
    def run(*arguments: str) -> None:
        done = cli.run("checkpoint", *arguments)
        assert done.exit_code == 0, done.output

    run("publish", path)
    assert served.worker.stores.checkpoints.find(path).public
    run("unpublish", path)
    assert not served.worker.stores.checkpoints.find(path).public
    run("set-ttl", path, "--ttl", "3600")
    assert served.worker.stores.checkpoints.find(path).expires_at is not None
    run("set-ttl", path, "--remove")
    assert served.worker.stores.checkpoints.find(path).expires_at is None
    run("delete", path, "--yes")
    assert path not in json.dumps(cli.json("checkpoint", "list"))


def test_lists_go_page_by_page_and_a_runs_checkpoints_are_deleted_by_kind(served: Api, cli: Cli) -> None:
    with served.sdk(cli.key) as service:
        runs = [service.create_lora_training_client(base_model="tiny/one", rank=4).result() for _ in range(2)]
        saved = [runs[0].save_state(name).result().path for name in ("a", "b")]
        kept = runs[0].save_weights_for_sampler("s").result().path
    run_id = runs[0].model_id

    everything = json.dumps(cli.json("checkpoint", "list", "--limit", "0"))
    pages = [cli.json("run", "list", "--limit", limit)["runs"] for limit in ("1", "0")]
    deleted = cli.run("checkpoint", "delete", "--run-id", run_id, "--type", "weights", "--yes")

    assert all(path in everything for path in (*saved, kept))
    assert len(pages[0]) == 1 < len(pages[1])
    assert pages[0][0] == pages[1][0]
    assert deleted.exit_code == 0, deleted.output
    left = cli.json("checkpoint", "list", "--run-id", run_id)["checkpoints"]
    assert [checkpoint["tinker_path"] for checkpoint in left] == [kept]


def test_a_checkpoint_is_downloaded_and_leaves_nothing_behind(cli: Cli, path: str, tmp_path: Path) -> None:
    done = cli.run("checkpoint", "download", path, "--output", str(tmp_path / "out"))

    assert done.exit_code == 0, done.output
    assert [file.read_bytes() for file in (tmp_path / "out").rglob("adapter")] == [WEIGHTS]
    assert "external_weights" not in json.dumps(cli.json("checkpoint", "list"))


def test_billing(cli: Cli, path: str) -> None:
    hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    window = [f"{at:%Y-%m-%dT%H:%M:%SZ}" for at in (hour - timedelta(hours=1), hour + timedelta(hours=2))]

    usage = cli.json("billing", "usage", *window)
    stored = cli.json("billing", "checkpoint-storage")
    tables = [cli.run("billing", "usage", *window), cli.run("billing", "checkpoint-storage")]

    assert {row["event_info"]["type"] for row in usage["data"]} >= {"checkpoint", "storage"}
    assert stored["data"][0]["size_bytes"] >= len(WEIGHTS)
    assert [table.exit_code for table in tables] == [0, 0]


def test_a_session_is_exported_as_a_trace(cli: Cli, path: str, tmp_path: Path) -> None:
    session_id = path.split("/")[2].split(":")[0]
    file = tmp_path / "run.pftrace"

    done = cli.run("session", "export-trace", session_id, "--output", str(file))
    url = cli.json("session", "export-trace", session_id, "--url-only")["url"]

    assert done.exit_code == 0, done.output
    names = {packet.track_event.name for packet in Trace.FromString(file.read_bytes()).packet}
    assert {"create_model", "save_weights"} <= names
    assert f"/{session_id}.pftrace?" in url


def test_what_is_not_there_is_said_in_words(cli: Cli) -> None:
    for words in (("run", "info", "nobody:train:0"), ("session", "export-trace", "nobody")):
        done = cli.run(*words)

        assert done.exit_code != 0
        assert isinstance(done.exception, TinkerCliError)
