"""Folders of the server's disk that the operator opened: what lies in one is copied, and nothing beside it is read."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from harness.fake_worker import BASE_MODEL
from twinkle.core.errors import InvalidInput, TooLarge
from twinkle.core.scopes import Scope
from twinkle.storage.opened_folders import OpenedFolders

if TYPE_CHECKING:
    from conftest import Api, ServeApi

MODEL = f"/model/{BASE_MODEL}/twinkle"
SAMPLER = f"/sampler/{BASE_MODEL}/twinkle"
LARGEST = 10_000


def tensors(num_bytes: int = 64) -> bytes:
    header = json.dumps({"a": {"dtype": "U8", "shape": [num_bytes], "data_offsets": [0, num_bytes]}}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(num_bytes)


def write_adapter(folder: Path, *, weights: bytes | None = None, **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    said = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "base_model_name_or_path": BASE_MODEL} | config
    (folder / "adapter_config.json").write_text(json.dumps(said))
    (folder / "adapter_model.safetensors").write_bytes(tensors() if weights is None else weights)
    return folder


@dataclass
class Desk:
    """A served app with one opened folder, and a client with an adapter ``a``."""

    api: Api
    http: httpx.Client
    opened: Path

    def call(self, method: str, key: str | None = None, **arguments: Any) -> httpx.Response:
        headers = {} if key is None else {"x-idempotency-key": key}
        return self.http.post(f"{MODEL}/{method}", json={"adapter_name": "a", **arguments}, headers=headers)

    def sample(self, folder: Path, http: httpx.Client | None = None, key: str | None = None) -> httpx.Response:
        body = {"inputs": [[1, 2, 3]], "adapter_uri": str(folder), "sampling_params": {"max_tokens": 2}}
        headers = {} if key is None else {"x-idempotency-key": key}
        return (http or self.http).post(f"{SAMPLER}/sample", json=body, headers=headers)

    def refused(self, folder: object, method: str = "load") -> str:
        answer = self.call(method, name=str(folder), resume_only_model=True)
        assert answer.status_code in (400, 413), answer.text
        return str(answer.json()["detail"])

    def checkpoints(self) -> dict[str, int]:
        listed = self.http.get("/checkpoints").json()["checkpoints"]
        return {one["tinker_path"]: one["size_bytes"] for one in listed}


@pytest.fixture(scope="module")
def served(
    serve_api: ServeApi, make_database_url: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Api, Path]]:
    opened = tmp_path_factory.mktemp("opened")
    settings = {"load_folders": [str(opened)], "load_folder_bytes": LARGEST, "tenant_max_checkpoints": 3}
    with serve_api(make_database_url("sqlite"), **settings) as api:
        api.worker.start()
        yield api, opened
        api.worker.stop()


@pytest.fixture
def desk(served: tuple[Api, Path]) -> Iterator[Desk]:
    api, opened = served
    with api.http(api.new_key()) as http:
        http.headers["X-Twinkle-Session-Id"] = http.post("/twinkle/create_session", json={}).json()["session_id"]
        config = json.dumps({"r": 4, "target_modules": "all-linear"})
        assert http.post(f"{MODEL}/add_adapter_to_model", json={"adapter_name": "a", "config": config}).is_success
        yield Desk(api, http, opened)


def test_what_a_call_loads_is_what_the_folder_held_when_it_came(desk: Desk) -> None:
    folder = write_adapter(desk.opened / "mine", weights=tensors(100))
    meant = desk.call("load", key="k", name=str(folder)).json()["result"]
    size_bytes = sum(file.stat().st_size for file in folder.iterdir())
    write_adapter(folder, weights=tensors(200))
    again = desk.call("load", key="k", name=str(folder)).json()["result"]
    now = desk.call("resume_from_checkpoint", name=str(folder), resume_only_model=True).json()["result"]
    shutil.rmtree(folder)
    gone = desk.call("load", key="k", name=str(folder)).json()["result"]

    assert meant == again == gone != now
    kept = desk.api.stores.checkpoints.find(meant["path"])
    assert (kept.content, kept.name, kept.config.rank) == (meant["content"], "mine", 4)
    blobs = desk.api.state().artifacts.blobs
    assert blobs.get(kept.files["adapter_model.safetensors"].key) == tensors(100)
    assert desk.checkpoints()[meant["path"]] == size_bytes and len(desk.checkpoints()) == 2


def test_the_same_content_is_one_checkpoint_however_often_and_in_whichever_call_it_is_named(desk: Desk) -> None:
    folder = write_adapter(desk.opened / "often")
    loaded = desk.call("load", name=str(folder)).json()["result"]
    sampled = [desk.sample(folder), desk.sample(folder, key="s")]
    write_adapter(folder, weights=tensors(300))
    resent = desk.sample(folder, key="s")

    paths = {answer.json()["checkpoint"] for answer in (*sampled, resent)}
    assert paths == {loaded["path"].replace("tinker://", "twinkle://")} and len(desk.checkpoints()) == 1
    assert resent.json() == sampled[1].json()


def test_what_lies_beside_the_opened_folders_is_refused_alike_whether_it_is_there_or_not(
    desk: Desk, tmp_path: Path
) -> None:
    beside = write_adapter(tmp_path / "beside")
    write_adapter(Path(f"{desk.opened}-more"))
    (desk.opened / "way_out").symlink_to(beside)
    half = write_adapter(desk.opened / "half")
    (half / "adapter_model.safetensors").unlink()
    (half / "adapter_model.safetensors").symlink_to(beside / "adapter_model.safetensors")

    for path in (
        beside,
        tmp_path / "nothing",
        f"{desk.opened}-more",
        desk.opened / ".." / "x",
        desk.opened / "way_out",
    ):
        assert "lies outside of the folders that the operator has opened" in desk.refused(path)
    assert "is a link that leads out" in desk.refused(half)
    assert desk.refused(half).startswith("name: ")
    assert desk.sample(beside).json()["detail"].startswith("adapter_uri: ")
    assert desk.checkpoints() == {}


def test_links_that_stay_inside_are_followed_as_caches_of_hubs_have_them(desk: Desk) -> None:
    blobs = write_adapter(desk.opened / "hub" / "blobs")
    snapshot = desk.opened / "hub" / "snapshots"
    snapshot.mkdir()
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(Path("..") / "blobs" / file.name)

    assert desk.call("load", name=str(snapshot)).is_success


@pytest.mark.parametrize(
    ("made", "words"),
    [
        ({"weights": tensors()[:-1]}, "is not whole"),
        ({"weights": b"PK\x03\x04 a pickle in a zip"}, "is no safetensors file"),
        ({"weights": tensors(LARGEST)}, "are taken from a folder"),
        ({"base_model_name_or_path": "Qwen/Other"}, "is an adapter of 'Qwen/Other', and this is"),
        ({"peft_type": "IA3"}, "is of no LoRA adapter"),
        ({"r": "4"}, "is of no LoRA adapter"),
    ],
)
def test_what_is_no_adapter_of_the_model_is_refused_in_words(desk: Desk, made: dict[str, Any], words: str) -> None:
    folder = write_adapter(desk.opened / "wrong", **made)

    assert words in desk.refused(folder)
    assert desk.checkpoints() == {}


def test_a_folder_brings_weights_alone(desk: Desk) -> None:
    folder = str(write_adapter(desk.opened / "weights"))

    assert desk.call("load", name=folder, load_optimizer=True).json()["detail"].startswith("load_optimizer: ")
    assert desk.call("resume_from_checkpoint", name=folder).json()["detail"].startswith("resume_only_model: ")


def test_what_is_brought_in_counts_among_the_tenants_checkpoints_and_is_deleted_like_them(desk: Desk) -> None:
    folders = [write_adapter(desk.opened / f"n{number}", weights=tensors(number + 1)) for number in range(4)]
    taken = [desk.call("load", name=str(folder)) for folder in folders]

    assert [answer.is_success for answer in taken] == [True, True, True, False]
    assert "you have 3 checkpoints, and 3 may be" in taken[3].json()["detail"]
    run, _, name = taken[0].json()["result"]["path"].removeprefix("tinker://").partition("/")
    assert desk.http.delete(f"/twinkle/training_runs/{run}/checkpoints/{name}").is_success
    assert len(desk.checkpoints()) == 2


def test_a_key_that_may_only_sample_uses_what_is_brought_in_and_brings_nothing(desk: Desk) -> None:
    folder = write_adapter(desk.opened / "shared")
    tenant = desk.api.stores.tenants.key(desk.http.headers["X-API-Key"])
    assert tenant is not None
    name = desk.api.stores.tenants.name_of(tenant.tenant)
    with desk.api.http(desk.api.stores.tenants.create_key(name, "few", scopes=frozenset({Scope.SAMPLE}))) as few:
        before = desk.sample(folder, few)
        desk.call("load", name=str(folder))
        after = desk.sample(folder, few)

    assert (before.status_code, after.status_code) == (403, 200)
    assert "this key may make none" in before.json()["detail"]


def test_without_an_opened_folder_none_is_read(api: Api, http: httpx.Client, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "closed")
    body = {"inputs": [[1, 2, 3]], "adapter_uri": str(folder)}
    answer = http.post(f"{SAMPLER}/sample", json=body)

    assert answer.status_code == 400
    assert "folders of the server's disk and models of hubs are not read here" in answer.json()["detail"]


def test_a_folder_that_changes_while_it_is_read_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_adapter(tmp_path / "growing")
    folders = OpenedFolders([str(tmp_path)], names=["adapter_model.safetensors"], max_bytes=LARGEST)
    read = os.read

    def grow(file: int, size: int) -> bytes:
        data: bytes = read(file, size)
        if data:
            with (folder / "adapter_model.safetensors").open("ab") as more:
                more.write(b"more")
        return data

    monkeypatch.setattr("twinkle.storage.opened_folders.os.read", grow)

    with pytest.raises((InvalidInput, TooLarge), match="changed while it was read"):
        folders.read(str(folder), field="name")


def test_no_pipe_is_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "adapter_model.safetensors")
    folders = OpenedFolders([str(tmp_path)], names=["adapter_model.safetensors"], max_bytes=LARGEST)

    with pytest.raises(InvalidInput, match="is no file"):
        folders.read(str(tmp_path), field="name")
