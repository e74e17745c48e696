"""Prepared data as plans are given it: made once, in a process of its own, found again, read by number."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import ParamSpec, TypeVar

import pytest
from sqlmodel import Session

from harness.clock import HandClock
from harness.data_files import jsonl
from harness.hub_server import Hubs, hub_server
from harness.models import make_text_model
from twinkle.core.job import JobFailed
from twinkle.core.lease import ProcessIdentity
from twinkle.core.mesh import MeshCapabilities
from twinkle.jobs.data import DataRequest, DataUse
from twinkle.storage.blobs import FILES, FolderStore
from twinkle.storage.files.records import ContentFacts, FilePiece, NewFile
from twinkle.storage.sql_engine import sql_engine
from twinkle.storage.stores import Stores
from twinkle.storage.tables import TenantRow
from twinkle.workers.jobs.data_tools import DataTools
from twinkle.workers.jobs.heavy import HeavyWork

P = ParamSpec("P")
T = TypeVar("T")

REQUEST = DataRequest(tenant="t0", model="tiny", file="file-good")


@pytest.fixture
def stores(tmp_path: Path, sqlite_url: str) -> Stores:
    stores = Stores.at(sqlite_url, HandClock())
    with Session(sql_engine(sqlite_url)) as session:
        session.add_all([TenantRow(id=name, name=name, created_at=0.0) for name in ("t0", "t1")])
        session.commit()
    model = make_text_model(tmp_path / "tiny")
    lease = stores.meshes.acquire("default", ProcessIdentity.current(), lease_s=1e9)
    assert lease is not None
    capabilities = MeshCapabilities(
        base_model="tiny",
        architecture="Qwen3",
        vocab_size=400,
        max_context_length=128,
        max_rank=8,
        device="cpu",
        determinism="none",
        tokenizer_path=str(model),
    )
    stores.meshes.publish(lease, capabilities)
    return stores


@pytest.fixture
def blobs(tmp_path: Path) -> FolderStore:
    return FolderStore(tmp_path / "objects")


class Here(HeavyWork):
    """Does everything in this process, which has the libraries already."""

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.to_thread(function, *args, **kwargs)


def _tools(stores: Stores, blobs: FolderStore, tmp_path: Path, heavy: HeavyWork) -> DataTools:
    return DataTools(stores, blobs, object_store=str(tmp_path / "objects"), heavy=heavy, clock=HandClock())


def _put(stores: Stores, blobs: FolderStore, file_id: str, data: bytes, tenant: str = "t0") -> None:
    blobs.put(key := f"{FILES}1970-01-01/{tenant}-{file_id}", data)
    facts = ContentFacts(sha256=hashlib.sha256(data).hexdigest(), size_bytes=len(data))
    new = NewFile(id=file_id, tenant=tenant, purpose="fine-tune", name="data.jsonl")
    stores.files.add(new, facts, [FilePiece(key=key, size_bytes=len(data))])


def test_the_same_rows_are_made_once_whoever_of_the_tenant_asks(
    stores: Stores, blobs: FolderStore, tmp_path: Path
) -> None:
    tools = _tools(stores, blobs, tmp_path, heavy := HeavyWork())
    data = jsonl(*({"prompt": f"{n} is", "completion": f" {n}"} for n in range(50)))
    _put(stores, blobs, "file-good", data)
    _put(stores, blobs, "file-same", data)
    _put(stores, blobs, "file-strange", data, tenant="t1")

    async def ask() -> None:
        first, same = await asyncio.gather(
            tools.prepare_data(REQUEST), tools.prepare_data(replace(REQUEST, file="file-same"))
        )
        again = await tools.prepare_data(REQUEST)
        other = await tools.prepare_data(replace(REQUEST, system="Be brief.", max_rows=10))
        strange = await tools.prepare_data(replace(REQUEST, tenant="t1", file="file-strange"))

        assert first == same == again
        assert first.num_rows == 50
        assert (other.num_rows, other.folder) != (50, first.folder)
        assert (strange.digest, strange.num_trained) == (first.digest, first.num_trained)
        assert strange.folder != first.folder
        rows = await tools.read_rows(first, [49, 3])
        assert [row.number for row in rows] == [49, 3]
        for key in [blob.key for blob in blobs.scan(after="prepared/", limit=100)]:
            blobs.delete(key)
        with pytest.raises(JobFailed) as gone:
            await tools.read_rows(other, [0])
        assert gone.value.failure.is_transient

    try:
        asyncio.run(ask())
    finally:
        heavy.stop()


def test_wrong_data_fails_the_job_with_its_errors_and_leaves_nothing(
    stores: Stores, blobs: FolderStore, tmp_path: Path
) -> None:
    tools = _tools(stores, blobs, tmp_path, Here())
    _put(stores, blobs, "file-good", jsonl({"text": "fine"}) + b"{\n" + jsonl({"text": 5}))

    async def ask(request: DataRequest) -> JobFailed:
        with pytest.raises(JobFailed) as failed:
            await tools.prepare_data(request)
        assert not failed.value.failure.is_transient
        return failed.value

    failure = asyncio.run(ask(REQUEST)).failure

    assert failure.code == "invalid_data"
    assert failure.message.startswith("2 rows of 3 cannot be used: line 2: is no JSON")
    assert [(error["line"], error["column"]) for error in failure.details["errors"]] == [(2, ""), (3, "text")]
    stores.waste.delete(blobs, older_than_s=0)
    assert blobs.scan(after="prepared/", limit=10) == []
    assert asyncio.run(ask(replace(REQUEST, file="file-none"))).failure.code == "file_not_found"
    assert asyncio.run(ask(replace(REQUEST, tenant="t1"))).failure.code == "file_not_found"
    assert asyncio.run(ask(replace(REQUEST, model="other"))).failure.field == "base_model"
    too_long = asyncio.run(ask(replace(REQUEST, max_length=1000))).failure
    assert (too_long.field, too_long.message) == (
        "max_length",
        "max_length: is 1000; send 2 to 128, which the model takes",
    )
    assert asyncio.run(ask(replace(REQUEST, use=DataUse.PREFERENCE))).failure.field == "format"


def test_the_death_of_the_process_may_pass_and_the_next_one_is_whole() -> None:
    heavy = HeavyWork()

    async def die_and_live() -> int:
        with pytest.raises(JobFailed) as died:
            await heavy.run(os.abort)
        assert died.value.failure.is_transient
        return await heavy.run(abs, -3)

    try:
        assert asyncio.run(die_and_live()) == 3
    finally:
        heavy.stop()


@pytest.fixture
def hubs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hubs]:
    for name in ("TWINKLE_OFFLINE", "HF_HUB_OFFLINE", "HF_TOKEN", "MODELSCOPE_API_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    with hub_server() as served:
        monkeypatch.setenv("MODELSCOPE_CACHE", str(tmp_path / "modelscope"))
        monkeypatch.setenv("MODELSCOPE_HOME", str(tmp_path / "modelscope-home"))
        monkeypatch.setenv("MODELSCOPE_ENDPOINT", served.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "huggingface"))
        monkeypatch.setenv("HF_ENDPOINT", served.url)
        monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "no-token"))
        yield served


@pytest.mark.parametrize("hub", ["hf", "ms"])
def test_a_data_set_of_a_hub_is_prepared_in_the_process_of_a_job_and_asked_for_once(
    stores: Stores, blobs: FolderStore, tmp_path: Path, hubs: Hubs, hub: str
) -> None:
    rows = jsonl(*({"prompt": f"{n} is", "completion": f" {n}"} for n in range(30))).decode()
    hubs.put("datasets/org/sums", {"train.jsonl": rows, "README.md": ""})
    request = replace(REQUEST, file=None, dataset=f"{hub}://org/sums")
    tools = _tools(stores, blobs, tmp_path, heavy := HeavyWork())

    async def ask() -> None:
        first = await tools.prepare_data(request)
        num_asked = len(hubs.asked)
        again = await tools.prepare_data(request)

        assert (first.num_rows, again) == (30, first)
        assert len(hubs.asked) == num_asked > 0
        assert [row.number for row in await tools.read_rows(first, [29])] == [29]
        with pytest.raises(JobFailed) as failed:
            await tools.prepare_data(replace(request, dataset=f"{hub}://org/nothing"))
        assert "org/nothing" in failed.value.failure.message

    try:
        asyncio.run(ask())
    finally:
        heavy.stop()
