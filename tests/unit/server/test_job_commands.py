"""Jobs from the command line and from our client: handed over, followed, told what is to become of them."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from harness.fake_worker import BASE_MODEL
from harness.jobs import JobRig, MemoryFiles, job_rig
from harness.logs import logging_as_before
from twinkle.cli import main
from twinkle.cli.jobs.following import Lines, duration, exit_code_of, progress_words
from twinkle.client import AsyncClient, Client
from twinkle.client.errors import Conflict, InvalidInput, JobEndedBadly
from twinkle.core.clock import SystemClock
from twinkle.core.job import JobState
from twinkle.jobs.stored_files import StoredFiles
from twinkle.storage.blobs import open_blob_store
from twinkle.wire.bodies.jobs import JobRequest, JobStanding

if TYPE_CHECKING:
    from conftest import Api

DATUM = {"tokens": [5, 6], "inputs": {"target_tokens": [6, 7], "weights": [1, 1]}}
LINES = [{"op": "forward_backward", "data": [DATUM]}, {"op": "optim_step"}]
SUBMIT = ("submit", "ops", "--model", BASE_MODEL, "--data", "file-in", "--set", "window=2")


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str

    @property
    def documents(self) -> list[dict[str, Any]]:
        """What was said but for the log, which others in this process write to the same place."""
        return [json.loads(line) for line in self.out.splitlines() if line.startswith("{")]


# Commands see HTTP alone: both databases are held to the same behind it by the tests of routes, jobs and journal.
on_sqlite = pytest.mark.parametrize("api", ["sqlite"], indirect=True, scope="session")


@pytest.fixture
def files() -> MemoryFiles:
    one = MemoryFiles()
    one.contents["file-in"] = b"".join(json.dumps(line).encode() + b"\n" for line in LINES * 4)
    one.contents["file-bad"] = b'{"op": "optim_stop"}\n'
    return one


@pytest.fixture
def rig(api: Api, files: MemoryFiles) -> Iterator[JobRig]:
    with job_rig(api.settings, open_files=lambda job, door: files) as one:
        yield one


@pytest.fixture
def running(rig: JobRig, tenant: str) -> Iterator[None]:
    """Whatever this tenant submits is run."""
    with _running(rig, tenant):
        yield


@contextmanager
def _running(rig: JobRig, tenant: str) -> Iterator[None]:
    stopping = threading.Event()

    def run() -> None:
        while not stopping.wait(0.02):
            for job in rig.stores.jobs.page(tenant, limit=10, states=[JobState.QUEUED, JobState.RETRYING]):
                rig.run(job.id)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield
    stopping.set()
    thread.join(timeout=30)


@pytest.fixture
def tenant(api: Api, key: str) -> str:
    found = api.stores.tenants.key(key)
    assert found is not None
    return found.tenant


Twinkle = Callable[..., Done]


@pytest.fixture
def twinkle(
    api: Api, key: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Twinkle]:
    """Runs a command in this process, as the tenant."""
    for name in [name for name in os.environ if name.startswith(("TWINKLE_", "TINKER_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("TWINKLE_SERVER_URL", api.url)
    monkeypatch.setenv("TWINKLE_SERVER_TOKEN", key)

    def run(*arguments: str) -> Done:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", ["twinkle", *arguments])
            capsys.readouterr()
            with pytest.raises(SystemExit) as end:
                main()
        said = capsys.readouterr()
        return Done(int(end.value.code or 0), said.out, said.err)

    with logging_as_before():
        yield run


@pytest.mark.usefixtures("running")
@on_sqlite
def test_a_submitted_job_is_followed_to_its_end_and_its_exit_code_is_the_commands(twinkle: Twinkle) -> None:
    done = twinkle(*SUBMIT, "--name", "steps")
    failed = twinkle("submit", "ops", "--model", BASE_MODEL, "--data", "file-bad")

    assert done.code == 0
    assert done.out.startswith("submitted job-")
    assert " succeeded after " in done.out
    assert "results: file-" in done.out
    assert "\r" not in done.out
    assert "\x1b" not in done.out
    assert failed.code == 1
    assert "failed" in failed.out
    assert "did you mean" not in failed.err


@pytest.mark.usefixtures("running")
@on_sqlite
def test_machines_get_a_document_a_line_with_the_job_its_events_and_its_end(twinkle: Twinkle) -> None:
    done = twinkle(*SUBMIT, "--json")

    kinds = [one["type"] for one in done.documents]
    assert (done.code, kinds[0], kinds[-1]) == (0, "job", "job")
    assert set(kinds[1:-1]) == {"event"}
    assert done.documents[-1]["state"] == "succeeded"
    assert done.documents[-1]["failure"] is None
    assert done.documents[-1].keys() == {"type", *JobStanding.model_fields}


@on_sqlite
def test_a_job_is_handed_over_without_waiting_and_is_the_same_under_the_same_id(twinkle: Twinkle) -> None:
    first, again = (twinkle(*SUBMIT, "--detach", "--json", "--id", "mine") for _ in range(2))
    other = twinkle(*SUBMIT, "--detach", "--id", "mine", "--rank", "4")

    assert (first.code, again.code, other.code) == (0, 0, 2)
    assert first.documents[0]["id"] == again.documents[0]["id"]
    assert first.documents[0]["spec"]["window"] == 2
    assert "'mine' was used for another job" in other.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--set", "windwo=3"), "spec.windwo: is not known here; did you mean window?"),
        (("--set", "rank"), "--set rank: write FIELD=VALUE"),
        (("--data", "nowhere.jsonl"), "there is no file nowhere.jsonl"),
        (("--notify", "http://127.0.0.1/"), "notify_url: 127.0.0.1 is no address of the public internet"),
        (("--after", "job-nowhere"), "no job 'job-nowhere'"),
        (("--metadata", "a"), "--metadata a: write KEY=VALUE"),
    ],
)
@on_sqlite
def test_what_is_wrong_with_a_submission_is_one_line(twinkle: Twinkle, arguments: tuple[str, ...], words: str) -> None:
    done = twinkle(*SUBMIT, *arguments)

    assert done.code == 2
    assert done.err.startswith("twinkle: ")
    assert words in done.err
    assert len(done.err.splitlines()) == 1


@on_sqlite
def test_all_that_the_shared_options_say_arrives(twinkle: Twinkle) -> None:
    first = twinkle(*SUBMIT, "--detach", "--json").documents[0]["id"]
    done = twinkle(
        *SUBMIT, "--detach", "--json", "--name", "n", "--priority", "7", "--after", f"any:{first}", "--max-attempts",
        "5", "--notify", "https://example.com/h", "--metadata", "a=b", "--set", "seed=3",
    )  # fmt: skip

    (job,) = done.documents
    assert (job["name"], job["priority"], job["state"], job["max_attempts"]) == ("n", 7, "waiting", 5)
    assert (job["notify_url"], job["metadata"], job["spec"]["seed"]) == ("https://example.com/h", {"a": "b"}, 3)


@on_sqlite
def test_jobs_are_listed_shown_and_told_what_is_to_become_of_them(twinkle: Twinkle) -> None:
    job = twinkle(*SUBMIT, "--detach", "--json", "--name", "steps").documents[0]["id"]
    states = [twinkle("jobs", verb, job).out.strip() for verb in ("pause", "resume", "cancel")]
    twice = twinkle("jobs", "pause", job)
    shown = twinkle("jobs", "show", job)
    listed = twinkle("jobs", "list", "--state", "cancelled")
    retried = twinkle("jobs", "retry", job, "--json")

    assert states == [f"{job}: paused", f"{job}: queued", f"{job}: cancelled"]
    assert (twice.code, f"job {job} is cancelled" in twice.err) == (2, True)
    assert "steps" in shown.out and "cancelled" in shown.out
    assert job in listed.out
    assert json.loads(retried.out)[0]["state"] == "retrying"
    assert json.loads(twinkle("jobs", "list", "--json").out)[0]["id"] == job
    assert json.loads(twinkle("jobs", "show", job, "--json").out)["spec"]["window"] == 2
    assert json.loads(twinkle("jobs", "list", "--kind", "batch", "--json").out) == []


@on_sqlite
def test_what_happened_is_shown_again_and_waiting_ends_with_the_jobs_code(twinkle: Twinkle) -> None:
    job = twinkle(*SUBMIT, "--detach", "--json").documents[0]["id"]
    early = twinkle("jobs", "wait", job, "--timeout", "0.1")
    twinkle("jobs", "cancel", job)
    waited = twinkle("jobs", "wait", job, "--json")
    logs = twinkle("jobs", "logs", job)
    followed = twinkle("jobs", "logs", "-f", job, "--json")

    assert (early.code, "goes on" in early.out) == (75, True)
    assert (waited.code, json.loads(waited.out)["state"]) == (3, "cancelled")
    assert (logs.code, len(logs.out.splitlines())) == (0, 2)
    assert followed.code == 3
    assert [one["type"] for one in followed.documents] == ["event", "event", "job"]


@pytest.mark.parametrize("num_times", [1, 2, 20])
@on_sqlite
def test_ctrl_c_leaves_the_job_running_and_says_how_to_come_back_however_often(
    api: Api, key: str, rig: JobRig, tenant: str, num_times: int
) -> None:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("TWINKLE_", "TINKER_"))}
    # Whoever starts these tests in the background lets them, and what they start, ignore Ctrl-C.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "twinkle.cli", *SUBMIT],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**clean, "TWINKLE_SERVER_URL": api.url, "TWINKLE_SERVER_TOKEN": key, "PYTHONUNBUFFERED": "1"},
        )
    finally:
        signal.signal(signal.SIGINT, before)
    assert process.stdout is not None
    job = process.stdout.readline().split()[-1]
    process.stdout.readline()

    for _ in range(num_times):
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=0.03)
    said, complaints = process.communicate(timeout=60)

    assert process.returncode == 130, complaints
    assert f"detached; {job} goes on" in said
    assert f"twinkle jobs logs -f {job}" in said
    assert "Traceback" not in complaints
    assert rig.stores.jobs.find(job, tenant).state is JobState.QUEUED


@pytest.mark.usefixtures("running")
@on_sqlite
def test_on_a_terminal_a_bar_stands_under_what_happens_and_is_gone_at_the_end(api: Api, key: str) -> None:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("TWINKLE_", "TINKER_"))}
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "twinkle.cli", *SUBMIT],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**clean, "TWINKLE_SERVER_URL": api.url, "TWINKLE_SERVER_TOKEN": key, "TERM": "xterm", "COLUMNS": "160"},
    )
    os.close(theirs)
    said = b""
    with suppress(OSError):  # of a terminal that nobody is at any more
        while piece := os.read(ours, 65536):
            said += piece
    os.close(ours)

    assert process.wait(timeout=60) == 0, said
    text = said.decode()
    assert "status: submitted" in text
    assert "\x1b[2K" in text, "the bar is taken away again"
    assert " succeeded after " in text.rpartition("\x1b[2K")[2]


@on_sqlite
def test_a_file_of_this_machine_is_brought_to_the_server_and_results_are_a_file_like_any_other(
    api: Api, key: str, tenant: str, twinkle: Twinkle, files: MemoryFiles, tmp_path: Path
) -> None:
    data, results = tmp_path / "steps.jsonl", tmp_path / "results.jsonl"
    data.write_bytes(files.contents["file-in"])
    blobs, clock = open_blob_store(api.settings.resolved_object_store), SystemClock()
    with (
        job_rig(api.settings, open_files=lambda job, door: StoredFiles(job, api.stores, blobs, clock)) as rig,
        _running(rig, tenant),
    ):
        done = twinkle("submit", "ops", "--model", BASE_MODEL, "--data", str(data), "--json")
    with Client(api.url, key) as client:
        client.files.download(done.documents[-1]["result"]["results"], results)

    assert done.code == 0, done
    assert [json.loads(line)["line"] for line in results.read_text().splitlines()] == list(range(1, 9))


@on_sqlite
def test_the_answers_of_a_batch_are_brought_here_when_it_has_ended(
    api: Api, tenant: str, twinkle: Twinkle, tmp_path: Path
) -> None:
    lines, answers = tmp_path / "lines.jsonl", tmp_path / "answers.jsonl"
    body = {"prompt": [1, 2], "max_tokens": 2}
    request = {"method": "POST", "url": "/v1/completions", "body": body}
    lines.write_text("\n".join(json.dumps({"custom_id": f"n-{n}", **request}) for n in range(3)))
    blobs, clock = open_blob_store(api.settings.resolved_object_store), SystemClock()
    with (
        job_rig(api.settings, open_files=lambda job, door: StoredFiles(job, api.stores, blobs, clock)) as rig,
        _running(rig, tenant),
    ):
        options = ("--model", BASE_MODEL, "--endpoint", "/v1/completions", "--output", str(answers))
        done = twinkle("submit", "batch", str(lines), *options)

    assert done.code == 0, done
    assert [json.loads(line)["custom_id"] for line in answers.read_text().splitlines()] == ["n-0", "n-1", "n-2"]


@pytest.mark.usefixtures("running")
@on_sqlite
def test_a_job_is_a_future_of_our_client(api: Api, key: str) -> None:
    with Client(api.url, key) as client:
        job = client.jobs.submit("ops", {"model": BASE_MODEL, "data": "file-in"}, name="steps", client_id="mine")
        events = list(job.events())
        result = job.result(timeout_s=30)
        again = client.jobs.attach(job.id).show()
        page = client.jobs.page(kinds=["ops"], states=["succeeded"])
        with pytest.raises(Conflict):
            client.jobs.submit("ops", {"model": BASE_MODEL, "data": "file-2"}, client_id="mine")
        with pytest.raises(InvalidInput, match="did you mean rank"):
            client.jobs.submit("ops", {"model": BASE_MODEL, "data": "file-2", "rnk": 3})

    assert [event.number for event in events] == list(range(1, len(events) + 1))
    assert result["operations"] == 8
    assert (again.state, again.attempts[0].outcome, again.name) == ("succeeded", "succeeded", "steps")
    assert [one.id for one in page.jobs] == [job.id]


@pytest.mark.usefixtures("running")
@on_sqlite
async def test_the_same_in_an_event_loop_and_a_failure_is_an_error_with_its_reason(api: Api, key: str) -> None:
    async with AsyncClient(api.url, key) as client:
        bad = await client.jobs.submit("ops", {"model": BASE_MODEL, "data": "file-bad"})
        with pytest.raises(JobEndedBadly, match="1 of 1 lines cannot be done") as failed:
            await bad.result(timeout_s=30)
        requests = [JobRequest(kind="ops", spec={"model": BASE_MODEL, "data": "file-in"}) for _ in range(3)]
        jobs = await client.jobs.submit_many(requests)
        ended = [await job.wait(timeout_s=30) for job in jobs]
        events = [event.kind async for event in jobs[0].events()]

    assert failed.value.code == "invalid_data"
    assert [job.state for job in ended] == ["succeeded"] * 3
    assert events[0] == "status"


def _standing(**more: Any) -> JobStanding:
    values: dict[str, Any] = {"id": "job-1", "kind": "sft", "state": "running", "is_final": False, "attempt": 1}
    return JobStanding(**{**values, "max_attempts": 3, "created_at": 0.0, "started_at": 100.0, **more})


def test_how_far_a_job_is_says_what_is_left_and_what_was_spent_in_line() -> None:
    progress = {"done": 20, "total": 80, "unit": "steps", "loss": 1.23456, "tokens_per_s": 3400.0}
    job = _standing(progress={**progress, "queue_s": 75.0, "compute_s": 12})

    words = progress_words(job, now=160.0)

    assert words == "steps 20/80 (25%), loss 1.235, 3,400 tokens/s, 3:00 left, 1:15 in line, 12 s computing"
    assert progress_words(_standing(), now=160.0) == ""


def test_off_a_terminal_progress_is_a_line_in_ten_seconds_at_most() -> None:
    told: list[str] = []
    seconds = [0.0]
    lines = Lines(told.append, lambda: seconds[0])
    for second in range(61):
        seconds[0] = float(second)
        lines.standing(_standing(progress={"done": second, "total": 60}))

    assert len(told) == 6
    assert told[0].startswith("step 10/60 (17%)")


@pytest.mark.parametrize(
    ("job", "code"),
    [
        (_standing(state="succeeded", is_final=True), 0),
        (_standing(state="failed", is_final=True), 1),
        (_standing(state="cancelled", is_final=True), 3),
        (_standing(state="failed", is_final=True, result={"exit_code": 7}), 7),
    ],
)
def test_the_exit_code_is_the_jobs_and_a_scripts_is_its_own(job: JobStanding, code: int) -> None:
    assert exit_code_of(job) == code


def test_times_are_as_short_as_they_can_be() -> None:
    assert [duration(one) for one in (0, 59.4, 60, 3661)] == ["0 s", "59 s", "1:00", "1:01:01"]
