"""Processes that cannot start: one line that names the setting and what to do, a code, and no waiting for ever."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from pydantic import SecretStr

from harness.faulty_s3 import FaultyS3
from harness.logs import logging_as_before
from harness.models import make_text_model
from twinkle.cli import main
from twinkle.cli.operator.status import show_status
from twinkle.core.clock import SystemClock
from twinkle.core.errors import ConfigError
from twinkle.core.lease import ProcessIdentity
from twinkle.core.settings import Settings
from twinkle.infra.platform import CPU, CUDA
from twinkle.server.run import serve_api
from twinkle.storage.blobs import FolderStore
from twinkle.storage.database import Database
from twinkle.storage.stores import Stores
from twinkle.tasks.housekeeping import run_housekeeping
from twinkle.tasks.surroundings import check_surroundings
from twinkle.workers.entry import run_worker
from twinkle.workers.jobs.process import run_jobs_worker
from twinkle.workers.processors.serving import run_processors
from twinkle.workers.ranks.world import EXIT_RANK_LOST
from twinkle.workers.starts import STARTS_FILE, Starts, within

LONGEST_S = 200.0
"""For a process that starts on a machine that others use too."""

NOBODY = "redis://127.0.0.1:1/0"


def bound_by_modes() -> None:
    """Run before a process begins: also root may read only what it may by a folder's mode."""
    drop = ctypes.CDLL(None).prctl
    for capability in (1, 2):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
        drop(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP


def process(*arguments: str, before: Callable[[], None] | None = None, **settings: str) -> subprocess.Popen[str]:
    """A process of the service with these settings."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TWINKLE_")}
    return subprocess.Popen(
        [sys.executable, "-m", "twinkle.cli", *arguments],
        env=environment | {f"TWINKLE_{name}": value for name, value in settings.items()},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=before,
    )


def start(
    *arguments: str, before: Callable[[], None] | None = None, **settings: str
) -> subprocess.CompletedProcess[str]:
    """One until it ends."""
    with process(*arguments, before=before, **settings) as started:
        try:
            stdout, stderr = started.communicate(timeout=LONGEST_S)
        except subprocess.TimeoutExpired:
            started.kill()
            raise
    return subprocess.CompletedProcess(arguments, started.returncode, stdout, stderr)


@pytest.mark.parametrize(
    "command", [("status",), ("keys", "create", "--tenant", "alice"), ("housekeeping",)], ids=" ".join
)
def test_a_folder_that_may_not_be_read_is_named_in_one_line(tmp_path: Path, command: tuple[str, ...]) -> None:
    (tmp_path / "theirs").mkdir(mode=0)

    done = start(
        *command,
        HOME=str(tmp_path / "theirs" / "home"),
        REDIS_URL=NOBODY,
        before=bound_by_modes,
    )

    assert done.returncode == 2 and "Permission denied" in done.stderr and "theirs" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "settings", "says"),
    [
        (
            ("server", "--port", "99999"),
            {"REDIS_URL": NOBODY},
            "TWINKLE_PORT: Input should be less than or equal to 65535",
        ),
        (("server", "--host", "203.0.113.1"), {"REDIS_URL": NOBODY}, "cannot listen on 203.0.113.1:"),
        (("status",), {"LOG_LEVEL": "LOUD"}, "TWINKLE_LOG_LEVEL: must be one of DEBUG, INFO"),
        (
            ("status",),
            {"DATABASE_URL": "mysql://x/y"},
            "TWINKLE_DATABASE_URL: must begin with one of sqlite://",
        ),
        (
            ("server",),
            {"REDIS_URL": "localhost:6379"},
            "TWINKLE_REDIS_URL: must begin with one of redis://",
        ),
        (
            ("server",),
            {"REDIS_URL": NOBODY, "OBJECT_STORE": "ftp://x/y"},
            "TWINKLE_OBJECT_STORE: must begin",
        ),
        (
            ("worker", "--engine", "null", "--model-name", "m"),
            {},
            "TWINKLE_DATABASE_URL: is not set, and there is no journal",
        ),
        (("housekeeping",), {}, "TWINKLE_DATABASE_URL: is not set"),
        (("jobs-worker",), {}, "TWINKLE_DATABASE_URL: is not set"),
        (("processors",), {}, "TWINKLE_DATABASE_URL: is not set"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_no_waiting_mends_ends_in_one_line_by_its_setting(
    tmp_path: Path, arguments: tuple[str, ...], settings: Mapping[str, str], says: str
) -> None:
    done = start(*arguments, HOME=str(tmp_path / "home"), **settings)

    assert done.returncode not in (0, 1) and says in done.stderr
    assert "Traceback" not in done.stderr + done.stdout


@pytest.mark.parametrize("command", [("housekeeping",), ("jobs-worker",), ("worker", "--engine", "null")], ids=" ".join)
def test_a_process_without_a_broker_refuses_instead_of_trying_one_of_its_own(
    tmp_path: Path, sqlite_url: str, command: tuple[str, ...]
) -> None:
    assert sqlite_url == f"sqlite:///{tmp_path}/journal.db", "the journal of this home"

    done = start(*command, HOME=str(tmp_path), MODEL_NAME="m")

    assert done.returncode == 2 and "TWINKLE_REDIS_URL: a broker must be named" in done.stderr


def test_a_bucket_that_is_not_there_is_named_at_the_start(tmp_path: Path, s3_url: str) -> None:
    missing = "s3://no-such-bucket-anywhere/x"

    done = start("server", HOME=str(tmp_path), REDIS_URL=NOBODY, OBJECT_STORE=missing, PORT="0")

    assert s3_url and done.returncode == 2
    assert "TWINKLE_OBJECT_STORE: there is no such bucket" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "process_of",
    [serve_api, run_worker, run_housekeeping, run_jobs_worker, run_processors],
    ids=lambda run: str(run.__name__),
)
def test_a_store_that_gives_back_other_bytes_than_were_written_is_told_by_every_process(
    process_of: Callable[[Settings], object],
    tmp_path: Path,
    sqlite_url: str,
    s3_endpoint: str,
    s3_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in ("tasks.housekeeping", "workers.jobs.process", "workers.processors.serving"):
        # This process goes on after it.
        monkeypatch.setattr(f"twinkle.{module}.configure_logging", lambda *_: None)
    store = FaultyS3(s3_endpoint)
    monkeypatch.setenv("AWS_ENDPOINT_URL", store.url)
    settings = Settings(
        home=tmp_path,
        database_url=sqlite_url,
        redis_url=SecretStr(NOBODY),
        object_store=s3_url,
        engine="null",
        model_name="m",
    )
    check_surroundings(settings)
    store.lies = True
    try:
        with pytest.raises(ConfigError, match="TWINKLE_OBJECT_STORE: it gave back other bytes than were written"):
            process_of(settings)
    finally:
        store.close()


@pytest.mark.parametrize(
    "run", [serve_api, run_worker, run_housekeeping, run_jobs_worker, run_processors], ids=lambda run: str(run.__name__)
)
def test_a_journal_of_a_later_version_is_told_by_every_process(
    run: Callable[[Settings], object], tmp_path: Path, sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("tasks.housekeeping", "workers.jobs.process", "workers.processors.serving"):
        # This process goes on after it.
        monkeypatch.setattr(f"twinkle.{module}.configure_logging", lambda *_: None)
    _set_revision(sqlite_url, "9999")
    settings = Settings(
        home=tmp_path, database_url=sqlite_url, redis_url=SecretStr(NOBODY), engine="null", model_name="m", port=0
    )

    with pytest.raises(ConfigError, match=r"schema is 9999, of a later version .* run the version that made it"):
        run(settings)


def test_a_command_says_the_same_in_one_line(
    sqlite_url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _set_revision(sqlite_url, "9999")
    monkeypatch.setenv("TWINKLE_DATABASE_URL", sqlite_url)
    monkeypatch.setattr(sys, "argv", ["twinkle", "tenants", "list"])

    with logging_as_before(), pytest.raises(SystemExit) as ended:
        main()
    stderr = capsys.readouterr().err

    assert ended.value.code == 2 and stderr.count("\n") == 1
    assert "TWINKLE_DATABASE_URL: the journal's schema is 9999" in stderr and "go back to a backup" in stderr


def _set_revision(url: str, revision: str) -> None:
    database = Database(url)
    with database.transaction() as transaction:
        transaction.execute("UPDATE alembic_version SET version_num = ?", (revision,))
    database.close()


@pytest.mark.parametrize(
    ("fault", "says"),
    [("get", "is not there to be read"), ("get_range", "other bytes"), ("delete", "can still be read")],
)
def test_a_store_that_keeps_too_little_or_too_much_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, says: str
) -> None:
    (tmp_path / "journal.db").touch()
    settings = Settings(home=tmp_path, redis_url=SecretStr(NOBODY))
    check_surroundings(settings)

    def forget(store: FolderStore, key: str) -> bytes:
        raise KeyError(key)

    wrong = {"get": forget, "get_range": lambda store, key, start, length: bytes(length), "delete": lambda *_: None}
    monkeypatch.setattr(FolderStore, fault, wrong[fault])

    with pytest.raises(ConfigError, match=f"TWINKLE_OBJECT_STORE: .*{says}"):
        check_surroundings(settings)


def test_an_api_whose_secret_is_not_that_of_the_one_that_runs_is_refused_by_the_settings_name(
    tmp_path: Path, redis_url: str
) -> None:
    shared = {"REDIS_URL": redis_url, "DATABASE_URL": f"sqlite:///{tmp_path}/journal.db", "PORT": "0"}
    first = process("server", HOME=str(tmp_path / "one"), DOWNLOAD_URL_SECRET="a" * 32, **shared)
    try:
        assert first.stderr is not None
        assert any("api.started" in line for line in first.stderr), "it did not start"
        second = start("server", HOME=str(tmp_path / "two"), DOWNLOAD_URL_SECRET="b" * 32, **shared)
        goes_on = first.poll() is None
    finally:
        first.terminate()
        first.communicate(timeout=LONGEST_S)

    assert second.returncode == 2 and goes_on
    assert "TWINKLE_DOWNLOAD_URL_SECRET: other processes of this service" in second.stderr
    assert "Traceback" not in second.stderr and "a" * 32 not in second.stderr and "b" * 32 not in second.stderr


def test_a_worker_that_is_killed_at_every_start_gives_up_with_the_reason_which_status_tells(
    tmp_path: Path, sqlite_url: str, redis_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    stores = Stores.at(sqlite_url, SystemClock())
    (tmp_path / "points").mkdir()
    (tmp_path / "points" / "worker.started").write_text("0 KILL")

    ended = start(
        *("worker", "--engine", "null", "--mesh", "first"),
        HOME=str(tmp_path),
        MODEL_NAME="m",
        REDIS_URL=redis_url,
        START_ATTEMPTS="1",
        TEST_CRASH_AT=str(tmp_path / "points"),
    )
    show_status(Settings(home=tmp_path), as_json=False)
    stores.close()
    told = capsys.readouterr().out

    assert ended.returncode == 2
    assert "the worker of mesh first did not start in 1 attempts" in ended.stderr
    assert "memory that does not suffice looks like this" in ended.stderr
    assert "Traceback" not in ended.stdout + ended.stderr
    assert "mesh first: the last worker did not start" in told and "no worker" in told


def test_a_worker_that_has_not_loaded_in_its_time_is_ended_told_of_and_waited_for_no_longer(
    tmp_path: Path, sqlite_url: str, redis_url: str
) -> None:
    stores = Stores.at(sqlite_url, SystemClock())

    ended = start(
        *("worker", "--mesh", "first"),
        HOME=str(tmp_path),
        MODEL=str(make_text_model(tmp_path / "model")),
        REDIS_URL=redis_url,
        START_ATTEMPTS="1",
        # No machine imports torch so quickly.
        START_TIMEOUT_S="0.05",
    )
    (mesh,) = stores.meshes.all()
    stores.close()

    assert ended.returncode == 2, ended.stderr[-2000:]
    assert "did not start in 1 attempts (TWINKLE_START_ATTEMPTS); the last time: it had not loaded" in ended.stderr
    assert mesh.trouble is not None and "within 0.05 s (TWINKLE_START_TIMEOUT_S)" in mesh.trouble
    assert mesh.announced is None
    assert "worker.start_hangs" in ended.stderr + ended.stdout


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("device", "is_damaged", "says"),
    [
        ("cuda:1", False, "TWINKLE_DEVICE: cuda:1 is missing"),
        ("cpu", True, "model cannot be loaded: Error while deserializing header"),
    ],
    ids=["device", "weights"],
)
def test_a_worker_that_cannot_compute_says_why_on_the_terminal_and_in_status_and_ends(
    tmp_path: Path,
    sqlite_url: str,
    redis_url: str,
    capsys: pytest.CaptureFixture[str],
    device: str,
    is_damaged: bool,
    says: str,
) -> None:
    if not is_damaged and CUDA.num_devices():
        pytest.skip("this machine has what is to be missing")
    stores = Stores.at(sqlite_url, SystemClock())
    model = make_text_model(tmp_path / "model")
    if is_damaged:
        weights = model / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1000])

    ended = start(
        *("worker", "--mesh", "first", "--device", device),
        HOME=str(tmp_path),
        MODEL=str(model),
        REDIS_URL=redis_url,
        START_ATTEMPTS="1",
    )
    show_status(Settings(home=tmp_path), as_json=False)
    stores.close()
    told = capsys.readouterr().out

    last = ended.stderr.strip().splitlines()[-1]
    assert ended.returncode == 2 and says in last and ("TWINKLE_MODEL: " in last) == is_damaged, last
    assert "Traceback" not in ended.stdout + ended.stderr
    assert "mesh first: the last worker did not start" in told and says in " ".join(told.split())


def test_the_trouble_of_a_mesh_is_forgotten_once_a_worker_has_taken_it(sqlite_url: str) -> None:
    stores = Stores.at(sqlite_url, SystemClock())
    stores.meshes.note_trouble("first", "no device")
    before = [mesh.trouble for mesh in stores.meshes.census()]
    stores.meshes.acquire("first", ProcessIdentity.current(), lease_s=60)
    after = [mesh.trouble for mesh in stores.meshes.census()]
    stores.close()

    assert (before, after) == (["no device"], [None])


def test_the_pauses_between_starts_grow_and_a_start_that_ends_well_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "starts").touch()
    monkeypatch.setenv(STARTS_FILE, str(tmp_path / "starts"))

    pauses = [Starts.begin().pause_s for _ in range(8)]
    failed = Starts.fail("the device fails")
    seen = Starts.begin()
    Starts.succeed()

    assert pauses == [0, 1, 2, 4, 8, 16, 30, 30]
    assert (failed.number, seen.reason) == (8, "the device fails")
    assert Starts.begin() == Starts()


def test_a_rank_that_is_lost_while_the_model_loads_is_the_reason_of_that_start_and_later_of_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "starts").touch()
    monkeypatch.setenv(STARTS_FILE, str(tmp_path / "starts"))
    Starts.begin()
    script = "from twinkle.workers.ranks.world import end_process; end_process('rank 1 is gone')"

    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=LONGEST_S, check=False)
    after_it = Starts.begin()
    Starts.succeed()
    Starts.fail_if_under_way("rank 0 is gone")

    assert ended.returncode == EXIT_RANK_LOST
    assert after_it == Starts(number=1, reason="rank 1 is gone")
    assert Starts.begin() == Starts()


def test_what_hangs_is_given_up_and_what_has_ended_in_time_is_not() -> None:
    given_up = threading.Event()

    with within(0.01, given_up.set):
        assert given_up.wait(LONGEST_S)
    given_up.clear()
    with within(LONGEST_S, given_up.set):
        (timer,) = (thread for thread in threading.enumerate() if thread.name == "start limit")
    timer.join(LONGEST_S)

    assert not timer.is_alive() and not given_up.is_set()


@pytest.mark.parametrize(
    ("command", "extra"),
    [(("keys", "list"), "server"), (("housekeeping",), "server"), (("server",), "server"), (("serve",), "worker")],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_package_that_is_not_installed_is_named_in_one_line(
    command: tuple[str, ...], extra: str, sqlite_url: str
) -> None:
    script = (
        "import sys; sys.modules.update(obstore=None, celery=None, uvicorn=None)\n"
        f"sys.argv = ['twinkle', *{command}]; from twinkle.cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        # What is missing is told to whoever has set all the rest.
        env={**os.environ, "TWINKLE_DATABASE_URL": sqlite_url, "TWINKLE_REDIS_URL": NOBODY},
        capture_output=True,
        text=True,
        timeout=LONGEST_S,
        check=False,
    )

    assert done.returncode == 2 and f"is not installed: pip install 'twinkle-queue[{extra}]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_device_that_is_missing_is_named() -> None:
    pytest.importorskip("torch")
    if CUDA.num_devices():
        pytest.skip("this machine has what is to be missing")
    with pytest.raises(ConfigError, match="TWINKLE_DEVICE: cuda:1 is missing: torch finds none here"):
        CUDA.require("cuda:1")
    CPU.require("cpu")
