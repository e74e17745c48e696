"""Our own client and command line bringing files to the server: after a break only what is missing is sent."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import twinkle.client.files
from harness.cut_jobs import Cuts
from harness.jobs import job_rig
from harness.models import make_text_model
from twinkle.cli.app import app
from twinkle.client import Client
from twinkle.client.errors import NotFound
from twinkle.core.clock import SystemClock
from twinkle.core.job import JobKind, JobState
from twinkle.core.lease import ProcessIdentity
from twinkle.core.mesh import MeshCapabilities
from twinkle.jobs.check import CheckPlan
from twinkle.jobs.stored_files import StoredFiles
from twinkle.storage.blobs import open_blob_store
from twinkle.workers.jobs.toolbox import Toolbox

if TYPE_CHECKING:
    from conftest import Api, ServeApi

PART_BYTES = 40_000
LINES = b"".join(b'{"prompt": "%d and %d is", "completion": " %d"}\n' % (n, n, 2 * n) for n in range(3000))


class Killed(BaseException):
    """The client's process is gone."""


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(twinkle.client.files, "PART_BYTES", PART_BYTES)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "train.jsonl"
    path.write_bytes(LINES)
    return path


def test_a_killed_client_and_a_killed_api_lose_no_part_of_an_upload(
    serve_api: ServeApi, make_database_url: Callable[[str], str], path: Path, tmp_path: Path
) -> None:
    url, told, again = make_database_url("sqlite"), [], []

    def die(num_bytes: int, _: int) -> None:
        told.append(num_bytes)
        if num_bytes >= 2 * PART_BYTES:
            raise Killed

    with serve_api(url, home=tmp_path / "home", object_store=str(tmp_path / "objects")) as api:
        key = api.new_key()
        with pytest.raises(Killed), Client(api.url, key) as client:
            client.files.upload(path, progress=die)
    with (
        serve_api(url, home=tmp_path / "home", object_store=str(tmp_path / "objects")) as api,
        Client(api.url, key) as client,
    ):
        file = client.files.upload(path, progress=lambda num_bytes, _: again.append(num_bytes))
        client.files.download(file.id, tmp_path / "back.jsonl")

    assert told == [0, PART_BYTES, 2 * PART_BYTES]
    assert again[0] == 2 * PART_BYTES
    assert again[-1] == file.size_bytes == len(LINES)
    assert (file.status, file.num_lines) == ("processed", 3000)
    assert (tmp_path / "back.jsonl").read_bytes() == LINES


def test_what_the_tenant_has_is_not_sent_again(api: Api, key: str, path: Path) -> None:
    told: list[int] = []
    with Client(api.url, key) as client, Client(api.url, api.new_key()) as stranger:
        first = client.files.upload(path)
        path.rename(path.with_name("other.jsonl"))
        again = client.files.upload(path.with_name("other.jsonl"), progress=lambda num_bytes, _: told.append(num_bytes))
        stranger.files.upload(path.with_name("other.jsonl"), progress=lambda num_bytes, _: told.append(num_bytes))

        assert told[:2] == [len(LINES), 0]
        assert (again.filename, again.sha256, again.id == first.id) == ("other.jsonl", first.sha256, False)
        assert [file.id for file in client.files.page().files] == [again.id, first.id]
        client.files.delete(first.id)
        with pytest.raises(NotFound):
            client.files.show(first.id)
        with pytest.raises(NotFound):
            stranger.files.show(again.id)


def test_a_broken_download_goes_on_and_is_held_against_its_digest(
    api: Api, key: str, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(twinkle.client.files, "_DOWNLOAD_BYTES", 50_000)
    told: list[int] = []

    def die(num_bytes: int, _: int) -> None:
        told.append(num_bytes)
        if len(told) == 1:
            raise Killed

    with Client(api.url, key) as client:
        file = client.files.upload(path)
        target = tmp_path / "back"
        with pytest.raises(Killed):
            client.files.download(file.id, target, progress=die)
        assert not target.exists()
        client.files.download(file.id, target, progress=die)

    assert told[:2] == [50_000, 100_000]
    assert target.read_bytes() == LINES
    assert [one.name for one in tmp_path.iterdir() if one.name.endswith(".part")] == []


def test_the_command_line_uploads_lists_shows_downloads_and_deletes(
    api: Api, key: str, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TWINKLE_SERVER_URL", api.url)
    monkeypatch.setenv("TWINKLE_SERVER_TOKEN", key)

    def run(*arguments: str) -> str:
        with pytest.raises(SystemExit) as ended:
            app([*arguments])
        assert ended.value.code == 0
        return capsys.readouterr().out

    file_id = run("files", "upload", str(path)).split()[-1]
    (listed,) = json.loads(run("files", "list", "--json"))
    shown = run("files", "show", file_id)
    brought = json.loads(run("files", "download", file_id, str(tmp_path / "back.jsonl"), "--json"))
    (secret,) = json.loads(run("jobs", "webhook-secret", "--json")).values()

    assert (listed["id"], listed["filename"], listed["num_lines"]) == (file_id, "train.jsonl", 3000)
    assert "3000 lines" in shown
    assert (tmp_path / "back.jsonl").read_bytes() == LINES
    assert brought == {"id": file_id, "path": str(tmp_path / "back.jsonl")}
    assert f"{secret}\n" == run("jobs", "webhook-secret")
    assert json.loads(run("files", "delete", file_id, "--json")) == [{"id": file_id, "deleted": True}]
    assert json.loads(run("files", "list", "--json")) == []


@pytest.fixture
def alone(serve_api: ServeApi, make_database_url: Callable[[str], str]) -> Iterator[Api]:
    """An app whose meshes are no other test's."""
    with serve_api(make_database_url("sqlite")) as served:
        yield served


def test_a_check_tells_of_the_rows_or_of_all_that_is_wrong_with_them(alone: Api, path: Path, tmp_path: Path) -> None:
    _serve_model(alone, make_text_model(tmp_path / "tiny"))
    clock, blobs = SystemClock(), open_blob_store(alone.settings.resolved_object_store)
    tools = Toolbox(alone.settings, alone.stores, blobs, clock)
    with Client(alone.url, alone.new_key()) as client:
        good = client.files.upload(path)
        path.write_bytes(LINES + b'{"prompt": 5, "completion": "x"}\n')
        bad = client.files.upload(path)
        jobs = [client.jobs.submit("check", {"model": "checked", "data": file.id}) for file in (good, bad)]
        cuts = Cuts()
        with job_rig(
            alone.settings,
            plans={JobKind.CHECK: cuts.into(CheckPlan)},
            open_files=lambda job, door: StoredFiles(job, alone.stores, blobs, clock),
            tools=tools,
        ) as rig:
            cuts.at = (1, True)
            rig.run(jobs[0].id)
            for job in jobs:
                rig.run(job.id)
            rig.ask(tools.close())
        checked, refused = (job.show() for job in jobs)

    assert checked.state == JobState.SUCCEEDED, checked.failure
    assert [one.outcome for one in checked.attempts] == ["failed", "succeeded"], "the first was cut off"
    assert checked.result is not None
    assert (checked.result["rows"], checked.result["format"]) == (3000, "completion")
    assert sum(part["rows"] for part in checked.result["report"]["tokens"]["histogram"]) == 3000
    assert refused.state == JobState.FAILED
    assert refused.failure is not None
    assert refused.failure.code == "invalid_data"
    (error,) = refused.failure.details["errors"]
    assert (error["line"], error["column"]) == (3001, "prompt")


def _serve_model(api: Api, model: Path) -> None:
    """A mesh that says that it serves a model, whoever computes on it."""
    lease = api.stores.meshes.acquire("checks", ProcessIdentity.current(), lease_s=1e6)
    assert lease is not None
    capabilities = MeshCapabilities(
        base_model="checked",
        architecture="Qwen3",
        vocab_size=400,
        max_context_length=256,
        max_rank=8,
        device="cpu",
        determinism="none",
        tokenizer_path=str(model),
    )
    api.stores.meshes.publish(lease, capabilities)
