"""Scripts of tenants: what they get, what they print, and that nothing of them is left."""

from __future__ import annotations

import os
import pwd
import secrets
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

import twinkle
from harness.fake_worker import BASE_MODEL
from harness.jobs import JobRig, MemoryFiles, job_rig
from harness.polling import wait_for
from twinkle.core.clock import SystemClock
from twinkle.core.job import Job, JobKind, JobState
from twinkle.core.operation import OperationKind
from twinkle.workers.jobs.scripts import Scripts

if TYPE_CHECKING:
    from conftest import Api, ServeApi

_PYTHON = Path("/usr/bin/python3")
ALLOWED = {"script_tenants": ["alice"], "script_user": "same"}


class Bench:
    """A tenant who may run scripts, and what runs them."""

    def __init__(self, api: Api, rig: JobRig, files: MemoryFiles) -> None:
        self.api, self.rig, self.files = api, rig, files
        key = api.stores.tenants.create_key("alice", "test")
        found = api.stores.tenants.key(key)
        assert found is not None
        self.tenant = found.tenant

    def submit(self, source: str, *arguments: str, **spec: Any) -> Job:
        file_id = f"file-{secrets.token_hex(4)}"
        self.files.contents[file_id] = textwrap.dedent(source).encode()
        return self.rig.submit(self.tenant, JobKind.SCRIPT, {"data": file_id, "arguments": list(arguments), **spec})

    def do(self, source: str, *arguments: str, **spec: Any) -> Job:
        job = self.submit(source, *arguments, **spec)
        self.rig.run(job.id)
        return self.rig.stores.jobs.find(job.id, self.tenant)

    def printed(self, job: Job) -> str:
        events = self.rig.stores.jobs.events(job.id, self.tenant)
        return "\n".join(event.message for event in events if event.kind == "message")

    def folder(self, job: Job) -> Path:
        return self.api.settings.home / "scripts" / job.id


@pytest.fixture(scope="module")
def open_bench(serve_api: ServeApi, make_database_url: Callable[[str], str]) -> Callable[..., Any]:
    @contextmanager
    def opened(**settings: Any) -> Iterator[Bench]:
        with serve_api(make_database_url("sqlite"), **settings) as api:
            api.worker.start()
            files = MemoryFiles()
            runs_at = api.settings.model_copy(update={"script_server_url": api.url})
            scripts = Scripts(runs_at, api.stores.tenants, SystemClock())
            with job_rig(api.settings, open_files=lambda job, door: files, tools=scripts) as rig:  # type: ignore[arg-type]
                yield Bench(api, rig, files)
            api.worker.stop()

    return opened


@pytest.fixture(scope="module")
def bench(open_bench: Callable[..., Any]) -> Iterator[Bench]:
    with open_bench(**ALLOWED, script_memory_bytes=2**31, script_file_bytes=2**20) as opened:
        yield opened


def test_what_a_script_prints_are_events_and_its_environment_is_its_own(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_OF_THE_WORKER", "1")

    job = bench.do(
        """
        import os, sys
        print("arguments", sys.argv[1:])
        print("names", *sorted(os.environ))
        print("at", os.getcwd() == os.environ["HOME"], os.stat(".").st_mode & 0o777 == 0o700)
        print("far away", "x" * 100_000, file=sys.stderr)
        """,
        "--steps",
        "3",
    )

    assert (job.state, job.result) == (JobState.SUCCEEDED, {"exit_code": 0}), job.failure
    printed = bench.printed(job)
    assert "arguments ['--steps', '3']" in printed
    (names,) = [line.split()[1:] for line in printed.splitlines() if line.startswith("names")]
    assert set(names) - {"LC_CTYPE"} == {
        "HOME",
        "LANG",
        "PATH",
        "PYTHONDONTWRITEBYTECODE",
        "PYTHONUNBUFFERED",
        "TINKER_API_KEY",
        "TINKER_BASE_URL",
        "TMPDIR",
        "TWINKLE_JOB_ID",
        "TWINKLE_SERVER_TOKEN",
        "TWINKLE_SERVER_URL",
    }
    assert "at True True" in printed
    assert len(printed) < 10_000
    assert not bench.folder(job).exists()


def test_a_scripts_key_is_its_tenants_and_opens_nothing_when_the_script_has_ended(bench: Bench) -> None:
    job = bench.do(
        """
        import os
        print("key", os.environ["TWINKLE_SERVER_TOKEN"])
        from twinkle.client import Client
        with Client() as client:
            print("models", [model.model_name for model in client.models()])
        """
    )

    printed = bench.printed(job)
    assert f"models ['{BASE_MODEL}']" in printed, (printed, job.failure)
    (key,) = [line.split()[1] for line in printed.splitlines() if line.startswith("key")]
    assert bench.api.stores.tenants.key(key) is None


@pytest.mark.parametrize(
    ("source", "code"),
    [
        ("raise SystemExit(3)", "exit_code"),
        ("import os; os.kill(os.getpid(), 9)", "signal"),
        ("x = bytearray(2**32)", "exit_code"),
        ("open('big', 'wb').write(b'x' * 2**21)", "exit_code"),
    ],
)
def test_a_script_that_fails_or_wants_too_much_is_a_job_that_failed(bench: Bench, source: str, code: str) -> None:
    job = bench.do(source)

    assert job.state is JobState.FAILED
    assert job.failure is not None and job.failure.code in {code, "signal"}


def test_a_script_ends_when_its_processor_time_or_its_folder_is_used_up(open_bench: Callable[..., Any]) -> None:
    with open_bench(**ALLOWED, script_cpu_s=1, script_folder_bytes=2**20) as bench:
        busy = bench.do("while True: pass")
        full = bench.do(
            """
            import time
            for number in range(64):
                open(f"part-{number}", "wb").write(b"x" * 2**16)
            time.sleep(600)
            """
        )

    assert busy.failure is not None and busy.failure.code == "cpu_limit"
    assert full.failure is not None and full.failure.code == "folder_limit"


def test_a_script_ends_when_its_time_is_over(bench: Bench) -> None:
    job = bench.do("import time; time.sleep(600)", max_seconds=1)

    assert job.failure is not None and job.failure.code == "time_limit"


def test_a_cancelled_script_leaves_no_process_and_no_folder(bench: Bench) -> None:
    job = bench.submit(
        """
        import os, signal, subprocess, sys, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        away = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        print("pids", os.getpid(), away.pid)
        time.sleep(600)
        """
    )
    running = bench.rig.start(job.id)
    wait_for(lambda: "pids" in bench.printed(job), what="the processes")
    pids = [int(word) for word in bench.printed(job).split()[1:3]]
    assert all(psutil.pid_exists(pid) for pid in pids)
    bench.rig.stores.jobs.request_cancel(job.id, bench.tenant)
    running.join()

    assert bench.rig.stores.jobs.find(job.id, bench.tenant).state is JobState.CANCELLED
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert not bench.folder(job).exists()


def test_the_same_code_goes_on_with_its_run_when_it_is_started_again(bench: Bench) -> None:
    job = bench.submit(
        """
        import sys
        from pathlib import Path
        sys.path.insert(0, sys.argv[1])  # where this test has the package from
        from twinkle.client import Client, next_token_datum
        with Client() as client:
            run = client.create_run("tiny/one", rank=8)
            print("begins behind", run.num_accepted)
            for number in range(20):
                if run.num_accepted <= 2 * number:
                    run.forward_backward([next_token_datum([1, 2, 3])]).result()
                if run.num_accepted <= 2 * number + 1:
                    run.optim_step(1e-4).result()
                if number == 4 and not run.num_accepted:
                    Path("stop").touch()
                    import time; time.sleep(600)
        """,
        str(Path(twinkle.__file__).parents[1]),
    )
    running = bench.rig.start(job.id)

    def has_stopped() -> bool:
        assert running.is_alive(), bench.printed(job)
        return (bench.folder(job) / "stop").exists()

    wait_for(has_stopped, what="the first steps")
    bench.rig.stores.jobs.request_pause(job.id, bench.tenant)
    running.join()
    assert bench.rig.stores.jobs.find(job.id, bench.tenant).state is JobState.PAUSED
    bench.rig.stores.jobs.request_resume(job.id, bench.tenant)
    ended = bench.rig.run(job.id)

    assert ended is not None and ended.state is JobState.SUCCEEDED, bench.printed(job)
    assert "begins behind 0" in bench.printed(job) and "begins behind 10" in bench.printed(job)
    steps = [claim for claim in bench.api.worker.executed if claim.tenant == bench.tenant]
    lanes = {claim.lane for claim in steps}
    assert len(lanes) == 1
    kinds = [claim.kind for claim in steps if claim.kind is not OperationKind.CREATE_MODEL]
    assert kinds == [OperationKind.FORWARD_BACKWARD, OperationKind.OPTIM_STEP] * 20


def test_a_script_dies_with_its_runner(tmp_path: Path) -> None:
    runner = subprocess.Popen(
        [
            sys.executable,
            "-c",
            textwrap.dedent(
                f"""
                import asyncio, sys
                from pathlib import Path
                from twinkle.workers.jobs.script_process import LaunchPlan, ScriptProcess
                async def main():
                    code = "import os, time; open('pid', 'w').write(str(os.getpid())); time.sleep(600)"
                    plan = LaunchPlan(command=[sys.executable, "-c", code], environment={{}}, folder={str(tmp_path)!r},
                        uid=None, gid=None, wall_s=600, cpu_s=600, memory_bytes=2**33, file_bytes=2**20,
                        num_processes=4096)
                    await ScriptProcess.start(plan, Path({str(tmp_path)!r}), folder_bytes=2**30)
                    await asyncio.sleep(600)
                asyncio.run(main())
                """
            ),
        ]
    )
    pid_file = tmp_path / "pid"
    wait_for(lambda: pid_file.exists() and pid_file.read_text(), what="the script")
    runner.kill()
    runner.wait()

    wait_for(lambda: not psutil.pid_exists(int(pid_file.read_text())), what="its end")


@pytest.mark.parametrize(
    ("settings", "code", "words"),
    [
        ({}, "not_allowed", "the operator decides"),
        ({"script_tenants": ["bob"], "script_user": "same"}, "not_allowed", "the operator decides"),
        ({"script_tenants": ["*"]}, "not_configured", "names no system user"),
        ({"script_tenants": ["*"], "script_user": "nobody-at-all"}, "not_configured", "nobody-at-all"),
    ],
)
def test_no_script_runs_that_the_operator_has_not_allowed(
    open_bench: Callable[..., Any], settings: dict[str, Any], code: str, words: str
) -> None:
    with open_bench(**settings) as bench:
        job = bench.do("print('never')")

        assert job.state is JobState.FAILED
        assert job.failure is not None and job.failure.code == code
        assert words in job.failure.message
        assert "never" not in bench.printed(job)


@pytest.mark.skipif(os.geteuid() != 0 or not _PYTHON.exists(), reason="only root can become somebody else")
def test_a_script_runs_as_the_user_that_the_operator_named(open_bench: Callable[..., Any]) -> None:
    with tempfile.TemporaryDirectory(prefix="twinkle-scripts-") as folder:
        os.chmod(folder, 0o711)
        settings = {"script_tenants": ["*"], "script_user": "nobody", "script_python": str(_PYTHON)}
        with open_bench(**settings, script_processes=8, script_folder=f"{folder}/jobs") as bench:
            job = bench.do(
                """
                import os
                import subprocess
                print("is", os.getresuid(), os.getgroups())
                open("mine", "w").write("1")
                children = []
                try:
                    while True:
                        children.append(subprocess.Popen(["sleep", "600"]))
                except BlockingIOError:
                    print("children", len(children))
                try:
                    os.kill(os.getppid(), 9)
                except PermissionError:
                    print("harmless")
                """
            )
            printed = bench.printed(job)

    assert job.state is JobState.SUCCEEDED, job.failure
    nobody = pwd.getpwnam("nobody").pw_uid
    assert f"is {(nobody,) * 3} []" in printed
    assert "harmless" in printed
    # Others of that user count as well.
    (num_children,) = [int(line.split()[1]) for line in printed.splitlines() if line.startswith("children")]
    assert num_children < 8


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_a_folder_that_the_user_cannot_reach_is_told(open_bench: Callable[..., Any], tmp_path: Path) -> None:
    os.chmod(tmp_path, 0o700)
    with open_bench(script_tenants=["*"], script_user="nobody", script_folder=str(tmp_path / "jobs")) as bench:
        job = bench.do("print('never')")

    assert job.failure is not None and job.failure.code == "not_configured"
    assert "TWINKLE_SCRIPT_FOLDER" in job.failure.message
