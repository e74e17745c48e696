"""The command line from outside: light, clear about errors, careful with keys."""

from __future__ import annotations

import getpass
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from harness.clock import HandClock
from harness.journal import CONFIG, Bench, done, failed, new_sampler, submission
from harness.logs import logging_as_before
from twinkle.cli import main
from twinkle.cli.flags import settings_of_service
from twinkle.core.adapter import Checkpoint, CheckpointKind, StoredFile
from twinkle.core.clock import SystemClock
from twinkle.core.lease import ProcessIdentity
from twinkle.core.mesh import MeshCapabilities
from twinkle.core.operation import OperationKind
from twinkle.core.settings import Settings
from twinkle.server.app import prepare_database
from twinkle.storage.blobs import FolderStore
from twinkle.storage.database import Database
from twinkle.storage.journal.meshes import Meshes
from twinkle.storage.journal.records import Records
from twinkle.storage.sampling.ephemeral import NewEphemeralWeights
from twinkle.storage.stores import Stores

COMMANDS = [
    "serve",
    "server",
    "worker",
    "housekeeping",
    "jobs-worker",
    "flower",
    "keys",
    "tenants",
    "ops",
    "audit",
    "data",
    "submit",
    "jobs",
    "orphans",
    "status",
    "top",
    "version",
]
HEAVY = ["torch", "sqlalchemy", "celery", "tinker", "transformers", "fastapi", "redis", "pydantic", "numpy"]


@dataclass(frozen=True)
class Done:
    """How a command ended and what it said."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


Twinkle = Callable[..., Done]


@pytest.fixture
def twinkle(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], make_migrated_url: Callable[[str], str]
) -> Iterator[Twinkle]:
    """Runs a command in this process: a process of its own would spend seconds on imports.

    Where a key is to be the first thing in a folder, its journal lies there already: to make it takes longer.
    """
    for name in [name for name in os.environ if name.startswith("TWINKLE_")]:
        monkeypatch.delenv(name)

    def run(*arguments: str, **variables: str) -> Done:
        if arguments[:2] == ("keys", "create") and "--home" in arguments:
            journal = Path(arguments[arguments.index("--home") + 1]) / "journal.db"
            if journal.parent.exists() and not journal.exists():
                shutil.copy(make_migrated_url("sqlite").removeprefix("sqlite:///"), journal)
                journal.chmod(0o600)
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", ["twinkle", *arguments])
            for name, value in variables.items():
                patch.setenv(name, value)
            with pytest.raises(SystemExit) as end:
                main()
        said = capsys.readouterr()
        return Done(int(end.value.code or 0), said.out, said.err)

    mask = os.umask(0o077)
    os.umask(mask)
    with logging_as_before():
        yield run
    # Commands keep what they write to its owner; the tests after this one need not.
    os.umask(mask)


def test_help_names_every_command_and_imports_nothing_heavy() -> None:
    script = (
        "import sys, json; sys.argv = ['twinkle', '--help']; from twinkle.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        f"print(json.dumps([name for name in {HEAVY} if name in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(done.stdout.splitlines()[-1]) == []
    for command in COMMANDS:
        assert f"  {command} " in done.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(twinkle: Twinkle, command: str) -> None:
    done = twinkle(command, "--help")
    assert done.returncode == 0
    assert "Usage:" in done.stdout


def test_a_new_key_stands_alone_on_the_last_line_opens_its_tenant_and_is_stored_as_a_hash(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "twinkle.cli", "keys", "create", "--tenant", "alice", "--home", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    key = done.stdout.splitlines()[-1]
    assert re.fullmatch(r"tml-[A-Za-z0-9_-]{43}", key)
    tenants = Stores.at(f"sqlite:///{tmp_path}/journal.db", SystemClock()).tenants
    found = tenants.key(key)
    assert found is not None
    assert tenants.name_of(found.tenant) == "alice"
    stored = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert key.encode() not in stored


def test_keys_are_listed_without_the_keys(twinkle: Twinkle, tmp_path: Path) -> None:
    key = twinkle("keys", "create", "--tenant", "alice", "--home", str(tmp_path)).stdout.splitlines()[-1]
    twinkle("keys", "create", "--tenant", "bob", "--home", str(tmp_path))
    as_json = twinkle("keys", "list", "--home", str(tmp_path), "--json")
    table = twinkle("keys", "list", "--home", str(tmp_path))
    assert [row["tenant"] for row in json.loads(as_json.stdout)] == ["alice", "bob"]
    assert "alice" in table.stdout
    assert "\x1b[" not in table.stdout
    assert key not in as_json.stdout + table.stdout


def test_a_key_is_shown_rotated_and_revoked_by_the_beginning_of_its_id(twinkle: Twinkle, tmp_path: Path) -> None:
    home = ("--home", str(tmp_path))
    twinkle("keys", "create", "--tenant", "alice", "--scopes", "sample,read", "--days", "1", *home)
    [made] = json.loads(twinkle("keys", "list", "--json", *home).stdout)
    shown = json.loads(twinkle("keys", "show", made["id"][:8], "--json", *home).stdout)
    new = twinkle("keys", "rotate", made["id"][:8], "--grace-hours", "2", *home).stdout.splitlines()[-1]
    said = twinkle("keys", "revoke", made["id"], *home).stdout
    tenants = Stores.at(f"sqlite:///{tmp_path}/journal.db", SystemClock()).tenants

    assert shown == made and made["scopes"] == ["read", "sample"] and made["expires_at"] > made["created_at"]
    assert "opens nothing any more" in said and tenants.key_with_id(made["id"]) is None
    found = tenants.key(new)
    assert found is not None and {str(scope) for scope in found.scopes} == {"read", "sample"}
    assert "revoked" in twinkle("keys", "list", "--tenant", "alice", *home).stdout


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (("--tenant", ""), "--tenant"),
        (("--tenant", "alice", "--name=--help"), "--name"),
        (("--tenant", "alice", "--scopes", "write"), "'write' is none"),
    ],
)
def test_a_key_that_makes_no_sense_is_refused_in_one_line(
    twinkle: Twinkle, tmp_path: Path, given: tuple[str, ...], says: str
) -> None:
    done = twinkle("keys", "create", *given, "--home", str(tmp_path))

    assert done.returncode != 0 and says in done.stderr and "Traceback" not in done.stderr


def test_a_tenant_is_suspended_with_a_reason_and_resumed(twinkle: Twinkle, tmp_path: Path) -> None:
    home = ("--home", str(tmp_path))
    twinkle("keys", "create", "--tenant", "alice", *home)
    said = twinkle("tenants", "suspend", "alice", "--reason", "unpaid since May", "--now", *home).stdout
    shown = twinkle("tenants", "show", "alice", *home).stdout
    twinkle("tenants", "resume", "alice", *home)

    assert "0 samples were cancelled" in said and "unpaid since May" in shown
    assert "unpaid" not in twinkle("tenants", "show", "alice", *home).stdout
    assert "no tenant 'bob'" in twinkle("tenants", "suspend", "bob", "--reason", "x", *home).stderr


def test_suspending_keeps_what_was_accepted_and_with_now_cancels_the_tenants_samples_alone(
    twinkle: Twinkle, tmp_path: Path
) -> None:
    home = ("--home", str(tmp_path))
    twinkle("keys", "create", "--tenant", "alice", *home)
    bench = Bench(f"sqlite:///{tmp_path}/journal.db", HandClock(SystemClock().now()))
    bench.created(bench.lease(), "a")
    bench.append(submission("a", 1, OperationKind.FORWARD_BACKWARD))
    for tenant in ("t0", "t1"):
        bench.journal.open_lane(new_sampler(f"s-{tenant}", tenant=tenant))
        bench.append(replace(submission(f"s-{tenant}", 1, OperationKind.SAMPLE), tenant=tenant))

    def states() -> list[str]:
        asked = (("a", 1), ("s-t0", 1), ("s-t1", 1))
        return [bench.status(lane, seq).state.value for lane, seq in asked]

    twinkle("tenants", "suspend", "t0", "--reason", "unpaid", *home)
    suspended = states()
    said = twinkle("tenants", "suspend", "t0", "--reason", "unpaid", "--now", *home).stdout

    assert suspended == ["queued", "queued", "queued"]
    assert "1 samples were cancelled" in said and states() == ["queued", "failed", "queued"]
    failure = bench.status("s-t0", 1).failure
    assert failure is not None and failure.code == "cancelled"
    told = json.loads(twinkle("audit", "--event", "samples_cancel", "--json", *home).stdout)
    assert [one["details"] for one in told] == [{"number": "1"}]


def test_what_the_operator_did_is_told_with_who_and_when_and_by_what_was_asked(
    twinkle: Twinkle, tmp_path: Path
) -> None:
    home = ("--home", str(tmp_path))
    twinkle("keys", "create", "--tenant", "alice", *home)
    twinkle("tenants", "set", "alice", "--max-jobs", "7", "--max-runs", "default", *home)
    twinkle("tenants", "suspend", "alice", "--reason", "unpaid", *home)
    told = json.loads(twinkle("audit", "--json", *home).stdout)
    table = twinkle("audit", "--tenant", "alice", "--event", "tenant_s", *home).stdout

    assert [one["event"] for one in told] == ["apikey_create", "tenant_limits_set", "tenant_suspend"]
    assert {one["actor"] for one in told} == {f"operator {getpass.getuser()}"}
    assert told[1]["details"] == {"max_jobs": "7", "max_runs": "default"}
    assert "reason=unpaid" in table and "apikey_create" not in table
    assert json.loads(twinkle("audit", "--json", "--actor", "key", *home).stdout) == []
    assert "no tenant 'bob'" in twinkle("audit", "--tenant", "bob", *home).stderr


def test_an_operation_is_listed_explained_and_cancelled(twinkle: Twinkle, tmp_path: Path) -> None:
    home = ("--home", str(tmp_path))
    twinkle("keys", "create", "--tenant", "alice", *home)
    bench = Bench(f"sqlite:///{tmp_path}/journal.db", HandClock(SystemClock().now() - 3600))
    lease = bench.lease()
    bench.created(lease, "a")
    bench.append(submission("a", 1, OperationKind.FORWARD_BACKWARD))
    (claim,) = bench.claim(lease)
    bench.journal.commit(lease, [failed(claim, "invalid_input")])
    bench.append(submission("a", 2, OperationKind.FORWARD_BACKWARD))

    ended = json.loads(twinkle("ops", "list", "--state", "failed", "--json", *home).stdout)
    table = twinkle("ops", "list", "--state", "failed", *home).stdout.splitlines()
    told = twinkle("ops", "show", claim.request_id, *home).stdout
    listed = json.loads(twinkle("ops", "list", "--state", "waiting", "--json", *home).stdout)
    why = twinkle("ops", "why", listed[0]["request_id"], *home).stdout
    said = twinkle("ops", "cancel", listed[0]["request_id"], "--reason", "too large", *home).stdout
    shown = twinkle("ops", "show", listed[0]["request_id"], *home).stdout

    assert [(one["request_id"], one["attempts"], bool(one["message"])) for one in ended] == [
        (claim.request_id, 1, True)
    ]
    heads = next(line for line in table if "attempts" in line)
    row = next(line for line in table if claim.request_id in line)
    assert row[heads.index("attempts") :].split()[0] == "1"
    assert "1, at 0 its worker died or the device failed" in told
    assert [(one["kind"], one["attempts"]) for one in listed] == [("forward_backward", 0)]
    assert "no worker" in why and "ends as cancelled in its turn" in said
    assert "ends as cancelled in its turn" in shown and "too large" in shown
    assert "cancelled, waits" in twinkle("ops", "list", *home).stdout
    assert "some of waiting, running, failed, done" in twinkle("ops", "list", "--state", "lost", *home).stderr
    assert "no operation 'x'" in twinkle("ops", "show", "x", *home).stderr


@pytest.mark.parametrize(
    "command",
    [
        ("status",),
        ("top", "--once"),
        ("keys", "list"),
        ("keys", "show", "x"),
        ("tenants", "list"),
        ("tenants", "show", "x"),
        ("runs", "list"),
        ("runs", "show", "x"),
        ("tokens", "list"),
        ("ops", "list"),
        ("ops", "show", "x"),
        ("ops", "why", "x"),
        ("meshes", "list"),
        ("orphans",),
        ("audit",),
    ],
    ids=" ".join,
)
def test_looking_at_a_service_that_is_not_there_says_so_and_leaves_no_trace(
    twinkle: Twinkle, tmp_path: Path, command: tuple[str, ...]
) -> None:
    done = twinkle(*command, "--home", str(tmp_path / "nothing"))

    assert done.returncode == 2 and "there is no journal in" in done.stderr and "--home" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("database", ["sqlite", "postgres"])
def test_a_database_that_holds_no_journal_is_not_made_one_by_looking(
    twinkle: Twinkle, tmp_path: Path, make_empty_database_url: Callable[[str], str], database: str
) -> None:
    url = f"sqlite:///{tmp_path}/other.db" if database == "sqlite" else make_empty_database_url("postgres")

    done = twinkle("keys", "list", "--home", str(tmp_path / "home"), TWINKLE_DATABASE_URL=url)

    assert done.returncode == 2 and "there is no journal in the database of TWINKLE_DATABASE_URL" in done.stderr
    assert list(tmp_path.iterdir()) == []
    if database == "postgres":
        assert Database(url).read("SELECT tablename FROM pg_tables WHERE schemaname = 'public'") == []


@pytest.mark.parametrize(
    "command",
    [
        ("server", "--host", "203.0.113.1"),
        ("worker", "--engine", "null", "--model-name", "m"),
        ("housekeeping",),
        ("jobs-worker",),
        ("processors",),
        ("keys", "list"),
    ],
    ids=lambda command: command[0],
)
def test_what_an_earlier_version_left_open_is_closed_by_every_command(
    twinkle: Twinkle, tmp_path: Path, command: tuple[str, ...]
) -> None:
    home = tmp_path / "home"
    with logging_as_before():
        prepare_database(Settings(home=home))
    home.chmod(0o755)
    (home / "journal.db").chmod(0o644)

    # None of them starts: there is no broker, or no such address.
    variables = {"TWINKLE_REDIS_URL": "redis://127.0.0.1:1/0"} if command[0] == "server" else {}
    twinkle(*command, "--home", str(home), **variables)

    assert home.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o077 for path in home.glob("journal.db*")} == {0}


def test_the_embedded_journal_is_its_owners_alone_whichever_command_makes_it(twinkle: Twinkle, tmp_path: Path) -> None:
    old_mask = os.umask(0o022)
    try:
        twinkle("keys", "create", "--tenant", "alice", "--home", str(tmp_path / "home"))
    finally:
        os.umask(old_mask)

    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "home").iterdir() if path.is_file()}
    assert (tmp_path / "home").stat().st_mode & 0o777 == 0o700
    assert modes["journal.db"] == 0o600 and set(modes.values()) == {0o600}


def test_what_a_process_of_the_service_writes_is_its_owners_alone(tmp_path: Path) -> None:
    old_mask = os.umask(0o022)
    try:
        with logging_as_before():
            prepare_database(settings_of_service(home=tmp_path / "home"))
    finally:
        os.umask(old_mask)

    assert (tmp_path / "home").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "home" / "journal.db").stat().st_mode & 0o777 == 0o600


def test_status_tells_a_live_mesh_from_one_without_worker(twinkle: Twinkle, tmp_path: Path) -> None:
    twinkle("keys", "create", "--tenant", "alice", "--home", str(tmp_path))
    assert "no mesh" in twinkle("status", "--home", str(tmp_path)).stdout
    meshes = Meshes(Database(f"sqlite:///{tmp_path}/journal.db"), SystemClock())
    lease = meshes.acquire("first", ProcessIdentity.current(), lease_s=60)
    gone = meshes.acquire("second", ProcessIdentity.current(), lease_s=60)
    assert lease is not None
    assert gone is not None
    meshes.release(gone)
    capabilities = MeshCapabilities(
        base_model="tiny",
        architecture="qwen3",
        vocab_size=1,
        max_context_length=1,
        max_rank=1,
        device="cpu",
        determinism="none",
        memory_bytes=2 * 10**9,
        memory_held={"base model": 10**9, "adapters": 5 * 10**8, "pictures": 0},
    )
    meshes.publish(lease, capabilities)
    text = twinkle("status", "--home", str(tmp_path)).stdout
    assert "mesh first: 1.50 of 2.00 GB of memory held: base model 1.00, adapters 0.50" in " ".join(text.split())
    rows = json.loads(twinkle("status", "--home", str(tmp_path), "--json").stdout)
    assert [(row["name"], row["alive"], row["base_model"]) for row in rows] == [
        ("first", True, "tiny"),
        ("second", False, None),
    ]
    codes = [
        twinkle("status", "--home", str(tmp_path), "--alive", name).returncode for name in ("first", "second", "x")
    ]
    assert codes == [0, 1, 1]


def test_tenants_get_weights_and_limits_and_lose_them_again(twinkle: Twinkle, tmp_path: Path) -> None:
    home = ("--home", str(tmp_path))
    twinkle("keys", "create", "--tenant", "alice", *home)
    changed = twinkle("tenants", "set", "alice", "--weight", "2", "--max-adapters", "3", "--max-running", "0", *home)
    (alice,) = json.loads(twinkle("tenants", "list", "--json", *home).stdout)
    twinkle("tenants", "set", "alice", "--max-adapters", "default", *home)
    (later,) = json.loads(twinkle("tenants", "list", "--json", *home).stdout)
    refused = [
        twinkle("tenants", "set", *arguments, *home)
        for arguments in (("bob", "--weight", "2"), ("alice", "--weight", "0"), ("alice", "--max-running", "-1"))
    ]

    assert changed.returncode == 0
    assert (alice["weight"], alice["own_limits"]) == (2.0, {"max_adapters": 3, "max_running": 0})
    assert (later["weight"], later["own_limits"], later["limits"]["max_adapters"]) == (2.0, {"max_running": 0}, 1000)
    assert [done.returncode for done in refused] == [2, 2, 2]
    assert "no tenant 'bob'" in refused[0].stderr and "--max-running must be a whole number" in refused[2].stderr
    assert "no limit" in twinkle("tenants", "list", *home).stdout


def test_a_tenants_limits_are_shown_with_whose_they_are_and_what_is_used(twinkle: Twinkle, tmp_path: Path) -> None:
    home = ("--home", str(tmp_path))
    twinkle("keys", "create", "--tenant", "alice", *home)
    twinkle("tenants", "set", "alice", "--max-jobs", "7", *home)

    shown = [" ".join(line.split()) for line in twinkle("tenants", "show", "alice", *home).stdout.splitlines()]
    told = json.loads(twinkle("tenants", "show", "alice", "--json", *home).stdout)

    assert "max_jobs 7 its own 0" in shown
    assert "max_running_jobs 16 the settings' 0" in shown
    assert (told["limits"]["max_jobs"], told["own_limits"], told["jobs"]) == (7, {"max_jobs": 7}, {})
    assert "no tenant 'bob'" in twinkle("tenants", "show", "bob", *home).stderr
    assert twinkle("tenants", "limits", "alice", *home).stdout == twinkle("tenants", "show", "alice", *home).stdout
    assert twinkle("tenants", "limits", "alice", "--max-jobs", "8", *home).returncode == 0


def test_what_a_tenant_used_and_has_stored_is_shown_with_its_limits(twinkle: Twinkle, tmp_path: Path) -> None:
    home = ("--home", str(tmp_path))
    twinkle("keys", "create", "--tenant", "alice", *home)
    bench = Bench(f"sqlite:///{tmp_path}/journal.db", HandClock(SystemClock().now() - 2 * 86_400))
    lease = bench.lease()
    bench.created(lease, "a")
    for number, tokens in ((1, 700), (2, 50)):
        bench.append(submission("a", number, OperationKind.FORWARD_BACKWARD))
        (claim,) = bench.claim(lease)
        bench.journal.commit(lease, [done(claim, num_tokens=tokens)])
        bench.clock.move(1.5 * 86_400)
    _save(bench, "a", "one", size_bytes=1_500_000_000)
    bench.close()

    told = json.loads(twinkle("tenants", "show", "t0", "--json", *home).stdout)
    shown = " ".join(twinkle("tenants", "show", "t0", *home).stdout.split())

    # With one for what began the run.
    assert [told["usage"][span]["tokens trained"] for span in ("last day", "last 30 days")] == [50, 751]
    assert told["held"]["checkpoint_bytes"] == 1_500_000_000
    assert told["held"]["kept_bytes"] == 0 and "max_kept_bytes 1099511627776 the settings' 0" in shown
    assert "tokens trained 50 751" in shown and "stored now: 1.500 GB of checkpoints" in shown


def test_orphans_are_counted_and_given_to_housekeeping_if_asked(twinkle: Twinkle, tmp_path: Path) -> None:
    home = ("--home", str(tmp_path))
    twinkle("keys", "create", "--tenant", "alice", *home)
    objects = FolderStore(tmp_path / "objects")
    for name in ("a", "b"):
        objects.put(f"payloads/2020-01-01/{name}/x", b"1234")

    shown = json.loads(twinkle("orphans", "--json", *home).stdout)
    deleted = twinkle("orphans", "--delete", *home)
    after = twinkle("orphans", *home)

    assert shown == [{"kind": "payloads", "blobs": 2, "bytes": 8}]
    assert "housekeeping deletes them" in deleted.stdout
    assert "nothing" in after.stdout
    settings = Settings(home=tmp_path)
    assert Stores.at(settings.resolved_database_url, SystemClock()).waste.delete(objects, older_than_s=0) == 2


def _save(bench: Bench, run: str, name: str, *, size_bytes: int, tenant: str = "t0") -> None:
    """A checkpoint as a worker publishes it."""
    checkpoint = Checkpoint(
        path=f"tinker://{run}/weights/{name}",
        tenant=tenant,
        adapter=run,
        kind=CheckpointKind.TRAINING,
        name=name,
        seq=1,
        config=CONFIG,
        files={"x": StoredFile(key=f"checkpoints/{name}", size_bytes=size_bytes, sha256="0")},
        created_at=0.0,
    )
    with bench.database.transaction() as transaction:
        Records(checkpoints=[checkpoint]).insert(transaction, bench.clock.now())


def test_tenants_are_listed_with_what_their_checkpoints_take_up(
    twinkle: Twinkle, tmp_path: Path, clock: HandClock
) -> None:
    twinkle("keys", "create", "--tenant", "alice", "--home", str(tmp_path))
    bench = Bench(f"sqlite:///{tmp_path}/journal.db", clock)
    bench.created(bench.lease(), "a")
    for name in ("one", "two"):
        _save(bench, "a", name, size_bytes=750_000_000)
    weights = NewEphemeralWeights(
        adapter="a", seq=1, size_bytes=250_000_000, opened_at=clock.now(), expires_at=None, max_open=32
    )
    bench.journal.open_lane(replace(new_sampler("nameless"), weights=weights))
    bench.close()

    rows = json.loads(twinkle("tenants", "list", "--json", "--home", str(tmp_path)).stdout)
    table = twinkle("tenants", "list", "--home", str(tmp_path)).stdout

    stored = {row["name"]: row["stored"] for row in rows}
    nameless = {"num_ephemeral": 1, "ephemeral_bytes": 250_000_000, "file_bytes": 0}
    assert stored["t0"] == {"num_checkpoints": 2, "size_bytes": 1_500_000_000, **nameless}
    assert set(stored["alice"].values()) == {0}
    assert "1.500" in table and "0.250" in table and "0.000" in table


def test_a_weights_access_token_is_shown_once_listed_and_revoked(
    twinkle: Twinkle, tmp_path: Path, clock: HandClock
) -> None:
    home = ("--home", str(tmp_path))
    twinkle("keys", "create", "--tenant", "alice", *home)
    bench = Bench(f"sqlite:///{tmp_path}/journal.db", clock)
    bench.created(bench.lease(), "a")
    _save(bench, "a", "one", size_bytes=1)

    made = twinkle("tokens", "create", "tinker://a/weights/one", "--days", "1", "--name", "bob", *home)
    secret = made.stdout.splitlines()[-1]
    of_run = twinkle("tokens", "create", "a", *home)
    (second, first) = json.loads(twinkle("tokens", "list", "--json", *home).stdout)
    table = twinkle("tokens", "list", "--run", "a", *home).stdout
    tokens = bench.stores.access_tokens
    grants = [tokens.grant(secret, "tinker://a/weights/one", reader="t1", purpose="load")]
    revoked = twinkle("tokens", "revoke", first["id"], *home)
    grants.append(tokens.grant(secret, "tinker://a/weights/one", reader="t1", purpose="load"))
    refused = [
        twinkle("tokens", "create", target, *more, *home)
        for target, *more in (["absent"], ["tinker://a/weights/absent"], ["a", "--days", "0"])
    ]
    bench.close()

    assert (made.returncode, of_run.returncode, revoked.returncode) == (0, 0, 0)
    assert re.fullmatch(r"wat-[A-Za-z0-9_-]{43}", secret) and secret not in table
    assert (first["path"], first["owner"], first["name"]) == ("tinker://a/weights/one", "t0", "bob")
    assert (second["path"], second["run"]) == (None, "a")
    assert [grant is not None for grant in grants] == [True, False]
    assert [done.returncode for done in refused] == [2, 2, 2]
    assert "no training run 'absent'" in refused[0].stderr


def test_a_table_that_goes_into_a_pipe_is_whole_however_wide_it_is(
    twinkle: Twinkle, tmp_path: Path, clock: HandClock
) -> None:
    twinkle("keys", "create", "--tenant", "alice", "--home", str(tmp_path))
    bench = Bench(f"sqlite:///{tmp_path}/journal.db", clock)
    run = "0123456789abcdef" * 8 + ":train:0"
    bench.created(bench.lease(), run)
    bench.close()

    lines = twinkle("runs", "list", "--home", str(tmp_path), COLUMNS="80").stdout.splitlines()

    (line,) = [line for line in lines if line.lstrip().startswith(run)]
    assert line.split()[:3] == [run, "t0", CONFIG.base_model]
    assert line.rstrip().endswith("UTC")


def test_top_in_a_pipe_shows_a_tenants_name_whole_and_as_it_is(
    twinkle: Twinkle, tmp_path: Path, clock: HandClock
) -> None:
    twinkle("keys", "create", "--tenant", "alice", "--home", str(tmp_path))
    bench = Bench(f"sqlite:///{tmp_path}/journal.db", clock)
    name = "team [bold]" + "of:train:spotters" * 6
    with bench.database.transaction() as transaction:
        transaction.execute("UPDATE tenant SET name = ? WHERE id = 't0'", (name,))
    bench.created(bench.lease(), "a")
    bench.append(submission("a", 1))
    bench.close()

    said = twinkle("top", "--home", str(tmp_path), COLUMNS="80").stdout

    assert name in said


def test_top_shows_each_tenants_line(twinkle: Twinkle, tmp_path: Path, clock: HandClock) -> None:
    twinkle("keys", "create", "--tenant", "alice", "--home", str(tmp_path))
    assert "no mesh" in twinkle("top", "--home", str(tmp_path)).stdout
    bench = Bench(f"sqlite:///{tmp_path}/journal.db", clock)
    lease = bench.lease()
    bench.created(lease, "a")
    bench.append(*(submission("a", seq, num_tokens=70) for seq in (1, 2)))
    bench.close()

    (mesh,) = json.loads(twinkle("top", "--json", "--home", str(tmp_path)).stdout)
    shown = twinkle("top", "--once", "--home", str(tmp_path)).stdout

    assert [(line["tenant"], line["num_operations"], line["tokens_waiting"]) for line in mesh["tenants"]] == [
        ("t0", 2, 140)
    ]
    assert "mesh0: training not measured yet" in shown and "t0" in shown


def test_an_unknown_variable_is_refused_with_the_nearest_name_and_no_traceback(
    twinkle: Twinkle, tmp_path: Path
) -> None:
    done = twinkle("status", "--home", str(tmp_path), TWINKLE_DATABSE_URL="sqlite:///x")
    assert done.returncode == 2
    assert done.stderr == "twinkle: unknown setting TWINKLE_DATABSE_URL; did you mean TWINKLE_DATABASE_URL?\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve"], "--model is missing"),
        (["serve", "--model", "./nowhere"], "no such folder"),
        (["serve", "--model", "m", "--mesh", "cpu"], "expected NAME=DEVICE"),
        (["serve", "--model", "m", "--mesh", "a=cpu", "--mesh", "a=cpu"], "one mesh only"),
        (["serve", "--model", "m", "--mesh", "a=cpu,model="], "expected NAME=DEVICE"),
        (["serve", "--mesh", "a=cpu,model=./nowhere"], "no such folder"),
        (["serve", "--mesh", "a=cpu,model=m", "--mesh", "b=cpu"], "--model is missing for mesh b"),
        (["flower"], "TWINKLE_FLOWER_PASSWORD is missing"),
    ],
)
def test_a_wrong_flag_gets_one_clear_line(twinkle: Twinkle, arguments: list[str], message: str, tmp_path: Path) -> None:
    done = twinkle(*arguments, TWINKLE_HOME=str(tmp_path / "home"))
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.fixture
def refused_model(tmp_path: Path) -> Path:
    """A folder whose config tells that its model cannot be served."""
    folder = tmp_path / "bloom"
    folder.mkdir()
    config = {"architectures": ["BloomForCausalLM"], "model_type": "bloom"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("flags", [["serve"], ["serve", "--mesh", "a=cpu"], ["worker"]])
def test_a_model_that_cannot_be_served_is_refused_before_anything_starts(
    twinkle: Twinkle, refused_model: Path, tmp_path: Path, flags: list[str]
) -> None:
    done = twinkle(*flags, "--model", str(refused_model), "--home", str(tmp_path / "home"))

    reason = "its attention or its projections have an older form (bloom); docs/models.md says which models can"
    assert done.stderr == f"twinkle: {refused_model} (BloomForCausalLM) cannot be served: {reason}\n"
    assert (done.returncode, done.stdout) == (2, "")
    assert not (tmp_path / "home").exists()


@contextmanager
def killed(process: subprocess.Popen[str]) -> Iterator[None]:
    """A block behind which a process has ended: one that was not refused would work for ever."""
    try:
        yield
    finally:
        process.kill()


def test_a_refused_worker_that_would_be_started_again_waits_to_be_stopped(refused_model: Path) -> None:
    command = [sys.executable, "-m", "twinkle.cli", "worker", "--model", str(refused_model), "--stay-refused"]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as worker,
        killed(worker),
    ):
        assert worker.stdout is not None
        said = next(line for line in worker.stdout if "worker.refused" in line)
        assert "an older form (bloom)" in said
        assert worker.poll() is None
        worker.terminate()
        rest = worker.stdout.read()
        worker.wait()
    assert worker.returncode == 2
    assert "Traceback" not in rest


def test_a_database_that_does_not_answer_is_worth_another_try(twinkle: Twinkle) -> None:
    done = twinkle("keys", "list", TWINKLE_DATABASE_URL="postgresql://nobody@127.0.0.1:9/none")
    assert done.returncode == 75
    assert "did not answer" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "settings", "says"),
    [
        (("--port", "99999"), {}, "TWINKLE_PORT: Input should be less than or equal to 65535"),
        (("--host", "203.0.113.1"), {}, "cannot listen on 203.0.113.1:"),
        ((), {"TWINKLE_LOG_LEVEL": "LOUD"}, "TWINKLE_LOG_LEVEL: must be one of DEBUG, INFO"),
        ((), {"TWINKLE_DATABASE_URL": "mysql://x/y"}, "TWINKLE_DATABASE_URL: must begin with one of sqlite://"),
        ((), {"TWINKLE_REDIS_URL": "localhost:6379"}, "TWINKLE_REDIS_URL: must begin with one of redis://"),
        ((), {"TWINKLE_OBJECT_STORE": "ftp://x/y"}, "TWINKLE_OBJECT_STORE: must begin"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_serve_refuses_what_it_cannot_start_with_in_one_line_and_starts_nothing(
    twinkle: Twinkle, tmp_path: Path, arguments: tuple[str, ...], settings: dict[str, str], says: str
) -> None:
    home = tmp_path / "home"

    done = twinkle("serve", "--home", str(home), "--model", "m", "--engine", "null", *arguments, **settings)

    assert done.returncode == 2 and says in done.stderr, done.stderr
    assert "Traceback" not in done.stderr + done.stdout and not list(home.glob("journal.db*"))


@pytest.mark.parametrize(
    "command",
    [
        ("server",),
        ("worker", "--engine", "null", "--model-name", "m"),
        ("housekeeping",),
        ("jobs-worker",),
        ("processors",),
    ],
    ids=lambda command: command[0],
)
def test_every_process_tries_broker_and_object_store_before_it_begins_and_names_the_setting(
    twinkle: Twinkle, tmp_path: Path, redis_url: str, s3_url: str, command: tuple[str, ...]
) -> None:
    with logging_as_before():
        prepare_database(Settings(home=tmp_path))
    wrong = urlsplit(redis_url)._replace(netloc=f":wrong@127.0.0.1:{urlsplit(redis_url).port}").geturl()
    bucket = "s3://no-such-bucket-anywhere/x"
    tried = [
        (wrong, s3_url, "TWINKLE_REDIS_URL: the broker lets nobody in"),
        (redis_url, bucket, "TWINKLE_OBJECT_STORE: there is no such bucket"),
        (redis_url, "ftp://x/y", "TWINKLE_OBJECT_STORE: must begin"),
    ]

    for broker, objects, says in tried:
        home = {"TWINKLE_HOME": str(tmp_path), "TWINKLE_REDIS_URL": broker, "TWINKLE_OBJECT_STORE": objects}
        done = twinkle(*command, **home)

        assert done.returncode == 2 and says in done.stderr, done.stderr
        assert "Traceback" not in done.stderr + done.stdout and "wrong" not in done.stderr
