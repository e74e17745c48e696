"""Jobs of raw operations: what comes of a file is the same whatever happened on the way, and nothing is done twice."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from harness.cut_jobs import Cuts
from harness.fake_worker import BASE_MODEL
from harness.jobs import JobRig, MemoryFiles, job_rig
from twinkle.core.job import Job, JobKind, JobState
from twinkle.jobs import ops
from twinkle.jobs.ops import OpsPlan

if TYPE_CHECKING:
    from conftest import Api

DATUM = {"tokens": [5, 6, 7], "inputs": {"target_tokens": [6, 7, 8], "weights": [1, 1, 0]}}
PASS = {"op": "forward_backward", "data": [DATUM]}
STEP = {"op": "optim_step", "adam_params": {"learning_rate": 1e-3}}


class BreakingFiles(MemoryFiles):
    """Files whose reader or writer breaks down when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.breaks_at_write = 0
        self.num_writes = 0

    async def write(self, name: str, content: bytes, *, purpose: str) -> str:
        self.num_writes += 1
        if self.num_writes == self.breaks_at_write:
            raise OSError("the object store is away")
        return await super().write(f"{name}-{self.num_writes}", content, purpose=purpose)


@pytest.fixture
def files() -> BreakingFiles:
    return BreakingFiles()


# A job is cut off at every place and goes on by the same steps, whichever database holds it; all other tests take both.
CUT_ON = pytest.mark.parametrize("api", ["sqlite", pytest.param("postgres", marks=pytest.mark.soak)], indirect=True)


@pytest.fixture
def cuts() -> Cuts:
    return Cuts()


@pytest.fixture
def rig(api: Api, files: BreakingFiles, cuts: Cuts) -> Iterator[JobRig]:
    plans = {JobKind.OPS: cuts.into(OpsPlan)}
    with job_rig(api.settings, plans=plans, open_files=lambda job, door: files) as one:
        yield one


@pytest.fixture
def tenant(api: Api) -> str:
    key = api.stores.tenants.key(api.new_key())
    assert key is not None
    return key.tenant


def _lines(*lines: object) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def _do(rig: JobRig, files: BreakingFiles, tenant: str, content: bytes, **spec: Any) -> Job:
    files.contents["file-in"] = content
    return rig.do(tenant, JobKind.OPS, {"model": BASE_MODEL, "data": "file-in", "rank": 8, "seed": 1, **spec})


def _results(files: MemoryFiles, ids: list[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for file_id in ids for line in files.contents[file_id].splitlines()]


def _text(files: MemoryFiles, result: dict[str, Any]) -> bytes:
    """All results as they lie in the files, without what says which job it was."""
    session = result["run_id"].split(":")[0]
    return b"".join(files.contents[part] for part in result["files"]).replace(session.encode(), b"SESSION")


def _assert_nothing_twice(api: Api, result: dict[str, Any]) -> None:
    executed = [claim.seq for claim in api.worker.executed_of(result["run_id"])]
    assert executed == sorted(set(executed))


def _course(num_steps: int) -> list[dict[str, Any]]:
    """Training steps with everything else between them."""
    lines: list[dict[str, Any]] = []
    for step in range(num_steps):
        lines += [PASS, STEP]
        if step % 4 == 3:
            lines += [
                {"op": "save_weights_for_sampler", "name": f"s{step}"},
                {"op": "sample", "prompt": [1, 2], "source": f"s{step}", "sampling_params": {"max_tokens": 3}},
                {"op": "save_weights", "name": f"w{step}"},
                {"op": "load_weights", "path": f"w{step}"},
                {"op": "sample", "prompt": [3], "num_samples": 2, "sampling_params": {"max_tokens": 2}},
                {"op": "forward", "data": [DATUM]},
            ]
    return lines


def test_each_line_has_its_result_in_the_order_of_the_file(
    api: Api, rig: JobRig, files: BreakingFiles, tenant: str
) -> None:
    content = _lines(*_course(4)[:2]) + b"\n" + _lines(*_course(4)[2:])

    job = _do(rig, files, tenant, content, window=3)

    assert job.state is JobState.SUCCEEDED, job.failure
    assert job.result is not None
    results = _results(files, job.result["files"])
    assert [one["line"] for one in results] == [1, 2, *range(4, 16)]
    assert [one["op"] for one in results] == [line["op"] for line in _course(4)]
    assert all("error" not in one for one in results)
    assert results[0]["result"]["logprobs"] == [[-1.0, -1.0, -1.0]]
    assert results[9]["result"]["sequences"][0]["tokens"] == [0, 1, 2]
    assert (job.result["operations"], job.result["failed"], job.progress["done"]) == (14, 0, 14)


def test_a_dry_run_counts_what_the_lines_name_and_does_none_of_them(
    rig: JobRig, files: BreakingFiles, tenant: str
) -> None:
    job = _do(rig, files, tenant, _lines(*_course(8)), dry_run=True)

    assert job.result is not None, job.failure
    told = job.result
    assert (told["steps"], told["samples"], told["storage"]["checkpoints"]) == (8, 6, 4)
    assert told["tokens"] == {
        "trained": 24,
        "forwarded": 6,
        "prefilled": 6,
        "drawn": 14,
        "drawn_least": 6,
        "drawn_is_exact": False,
    }
    assert rig.stores.database.read("SELECT 1 FROM session WHERE job = ?", (job.id,)) == []
    wrong = _do(rig, files, tenant, _lines({"op": "optim_stop"}), dry_run=True)
    assert wrong.failure is not None and wrong.failure.code == "invalid_data"


def test_what_comes_out_is_the_same_when_attempts_broke_down_on_the_way(
    api: Api, rig: JobRig, files: BreakingFiles, tenant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops, "_PART_BYTES", 600)
    calm = _do(rig, files, tenant, _lines(*_course(12)), window=4)
    files.breaks_at_write = files.num_writes + 3

    job = _do(rig, files, tenant, _lines(*_course(12)), window=4)
    broken = job.state
    rig.run(job.id)
    struck = rig.stores.jobs.find(job.id, tenant)

    assert broken is JobState.RETRYING
    assert calm.result is not None
    assert struck.result is not None
    assert struck.attempt == 2
    assert _text(files, struck.result) == _text(files, calm.result)
    _assert_nothing_twice(api, struck.result)


def test_a_file_with_wrong_lines_fails_before_anything_is_done_with_all_of_them(
    api: Api, rig: JobRig, files: BreakingFiles, tenant: str
) -> None:
    content = _lines(PASS) + b"{oops\n" + _lines(
        {"op": "optim_stp"},
        {"op": "optim_step", "adam_parms": {}},
        {"op": "sample", "prompt": [1], "source": "nowhere"},
        {"op": "save_weights", "name": "a"},
        {"op": "save_weights", "name": "a"},
        [1],
    )  # fmt: skip
    num_before = len(api.worker.executed)

    job = _do(rig, files, tenant, content)

    assert job.state is JobState.FAILED
    assert job.failure is not None
    assert (job.failure.code, job.failure.field, job.failure.details["num_errors"]) == ("invalid_data", "data", 6)
    errors = {error["line"]: (error["param"], error["message"]) for error in job.failure.details["errors"]}
    assert sorted(errors) == [2, 3, 4, 5, 7, 8]
    assert "is no JSON" in errors[2][1]
    assert errors[3][0] == "op"
    assert errors[4] == ("adam_parms", "is not known here; did you mean adam_params?")
    assert "no save_weights_for_sampler further up has this name" in errors[5][1]
    assert "was saved further up already" in errors[7][1]
    assert len(api.worker.executed) == num_before


def test_a_failed_operation_stops_what_comes_behind_its_window_and_its_results_are_kept(
    rig: JobRig, files: BreakingFiles, tenant: str
) -> None:
    bad = {"op": "sample", "prompt": [1], "source": "tinker://nobody:train:0/sampler_weights/x"}
    course = [PASS, STEP, bad, *([PASS, STEP] * 10)]

    job = _do(rig, files, tenant, _lines(*course), window=4)

    assert job.state is JobState.FAILED
    assert job.failure is not None
    assert job.failure.code == "operation_failed"
    assert job.failure.message.startswith("line 3: ")
    results = _results(files, job.failure.details["files"])
    assert [one["line"] for one in results] == list(range(1, 7))
    assert ["error" in one for one in results] == [False, False, True, False, False, False]


def test_failed_operations_are_passed_over_where_that_is_wanted(rig: JobRig, files: BreakingFiles, tenant: str) -> None:
    bad = {"op": "sample", "prompt": [1], "source": "tinker://nobody:train:0/sampler_weights/x"}

    job = _do(rig, files, tenant, _lines(PASS, bad, STEP), on_error="continue")

    assert job.state is JobState.SUCCEEDED
    assert job.result is not None
    assert (job.result["operations"], job.result["failed"]) == (3, 1)


def test_a_cancelled_job_keeps_its_results_and_leaves_a_checkpoint(
    api: Api, rig: JobRig, files: BreakingFiles, tenant: str
) -> None:
    files.contents["file-in"] = _lines(*[PASS, STEP] * 200)
    spec = {"model": BASE_MODEL, "data": "file-in", "rank": 8, "window": 4}
    job = rig.submit(tenant, JobKind.OPS, spec)
    running = rig.start(job.id)
    while not rig.stores.jobs.find(job.id, tenant).progress.get("done"):
        running.join(timeout=0.01)

    rig.stores.jobs.request_cancel(job.id, tenant)
    running.join(timeout=30)

    ended = rig.stores.jobs.find(job.id, tenant)
    assert ended.state is JobState.CANCELLED
    assert ended.result is not None
    results = _results(files, ended.result["files"])
    assert [one["line"] for one in results] == list(range(1, len(results) + 1))
    assert 0 < len(results) == ended.result["operations"] < 400
    assert ended.result["checkpoint"] == f"tinker://{ended.result['run_id']}/weights/cancelled"
    executed = [claim.seq for claim in api.worker.executed_of(ended.result["run_id"])]
    assert executed == list(range(min(executed), len(results) + 2))


def test_a_paused_job_goes_on_where_it_was_and_does_nothing_twice(
    api: Api, rig: JobRig, files: BreakingFiles, tenant: str
) -> None:
    files.contents["file-in"] = _lines(*[PASS, STEP] * 100)
    spec = {"model": BASE_MODEL, "data": "file-in", "rank": 8, "window": 4}
    job = rig.submit(tenant, JobKind.OPS, spec)
    running = rig.start(job.id)
    while not rig.stores.jobs.find(job.id, tenant).progress.get("done"):
        running.join(timeout=0.01)
    rig.stores.jobs.request_pause(job.id, tenant)
    running.join(timeout=30)
    paused = rig.stores.jobs.find(job.id, tenant)
    rig.stores.jobs.request_resume(job.id, tenant)
    rig.run(job.id)
    ended = rig.stores.jobs.find(job.id, tenant)

    assert (paused.state, ended.state) == (JobState.PAUSED, JobState.SUCCEEDED)
    assert ended.result is not None
    assert [one["line"] for one in _results(files, ended.result["files"])] == list(range(1, 201))
    executed = [claim.seq for claim in api.worker.executed_of(ended.result["run_id"])]
    assert executed == sorted(set(executed))


@CUT_ON
def test_wherever_an_attempt_is_cut_off_the_output_is_the_same_to_the_byte(
    api: Api, rig: JobRig, files: BreakingFiles, tenant: str, cuts: Cuts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops, "_PART_BYTES", 1500)
    course = _lines(*_course(4))
    calm = _do(rig, files, tenant, course, window=3)
    assert calm.result is not None
    num_cut = 0
    for place in [(number, is_written) for number in range(1, 9) for is_written in (False, True)]:
        cuts.at = place
        job = _do(rig, files, tenant, course, window=3)
        num_cut += job.state is JobState.RETRYING
        rig.run(job.id)
        ended = rig.stores.jobs.find(job.id, tenant)

        assert ended.result is not None, (place, ended.failure)
        assert _text(files, ended.result) == _text(files, calm.result), place
        _assert_nothing_twice(api, ended.result)
    assert num_cut >= 12


@CUT_ON
def test_a_job_that_stops_at_a_failure_stops_at_the_same_line_when_it_is_cut_off(
    rig: JobRig, files: BreakingFiles, tenant: str, cuts: Cuts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops, "_PART_BYTES", 300)
    bad = {"op": "sample", "prompt": [1], "source": "tinker://nobody:train:0/sampler_weights/x"}
    course = _lines(*[PASS, STEP] * 3, bad, *[PASS, STEP] * 10)
    calm = _do(rig, files, tenant, course, window=4)
    assert calm.failure is not None
    for place in [(number, is_written) for number in range(1, 9) for is_written in (False, True)]:
        cuts.at = place
        job = _do(rig, files, tenant, course, window=4)
        rig.run(job.id)
        ended = rig.stores.jobs.find(job.id, tenant)

        assert ended.failure is not None, place
        assert _text(files, ended.failure.details) == _text(files, calm.failure.details), place


@pytest.mark.parametrize("place", [(3, True), (5, False), (7, True)])
def test_a_job_that_is_cancelled_when_its_runner_is_gone_loses_nothing_and_can_be_taken_up_again(
    api: Api, rig: JobRig, files: BreakingFiles, tenant: str, cuts: Cuts, place: tuple[int, bool]
) -> None:
    cuts.at = place
    job = _do(rig, files, tenant, _lines(*[PASS, STEP] * 30), window=4)
    rig.stores.jobs.request_cancel(job.id, tenant)
    rig.run(job.id)
    cancelled = rig.stores.jobs.find(job.id, tenant)
    rig.stores.jobs.request_retry(job.id, tenant)
    rig.run(job.id)
    ended = rig.stores.jobs.find(job.id, tenant)

    assert job.state is JobState.RETRYING
    assert (cancelled.state, ended.state) == (JobState.CANCELLED, JobState.SUCCEEDED), ended.failure
    assert cancelled.result is not None
    assert ended.result is not None
    assert cancelled.result["checkpoint"].endswith("/weights/cancelled")
    assert [one["line"] for one in _results(files, ended.result["files"])] == list(range(1, 61))
    _assert_nothing_twice(api, ended.result)
    assert api.worker.executed_of(ended.result["run_id"])[-1].seq == 61
