"""Checkpoints as tar files, for SDKs that download them so: signed URLs, the weights only, in pieces."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable, Iterator
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
import tinker

from twinkle.core.file_names import OPTIMIZER_FILE

if TYPE_CHECKING:
    from conftest import Api, ServeApi

BLOCK = tarfile.BLOCKSIZE
FILES = {
    "adapter_config.json": b'{"r": 4}',
    # Longer than one piece, and no multiple of a block.
    "adapter_model.safetensors": bytes(range(251)) * 5000,
    OPTIMIZER_FILE: b"moments",
}


@pytest.fixture
def service(api: Api, key: str) -> Iterator[tinker.ServiceClient]:
    with api.sdk(key) as client:
        yield client


def _give_files(api: Api, path: str, files: dict[str, bytes]) -> None:
    """Let a checkpoint consist of these: the worker's twin writes one file only."""
    stored = {}
    for name, data in files.items():
        stored[name] = {"key": f"{path.removeprefix('tinker://')}/{name}", "size_bytes": len(data), "sha256": "0"}
        api.state().artifacts.blobs.put(stored[name]["key"], data)
    with api.worker.journal.database.transaction() as transaction:
        transaction.execute("UPDATE checkpoint SET files = ? WHERE path = ?", (json.dumps(stored), path))


@pytest.fixture
def path(api: Api, service: tinker.ServiceClient) -> str:
    training = service.create_lora_training_client(base_model="tiny/one", rank=4)
    path = training.save_state("out").result().path
    _give_files(api, path, FILES)
    return path


def _ask(http: httpx.Client, path: str) -> httpx.Response:
    run_id, segment, name = path.removeprefix("tinker://").split("/")
    return http.get(f"/training_runs/{run_id}/checkpoints/{segment}/{name}/archive", follow_redirects=False)


def _url(http: httpx.Client, path: str) -> str:
    return str(_ask(http, path).headers["location"])


def _as_the_library_writes_it(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def test_the_answer_leads_to_a_tar_of_the_weights_that_needs_no_key(api: Api, http: httpx.Client, path: str) -> None:
    answer = _ask(http, path)
    url = answer.headers["location"]
    fetched = httpx.get(url)

    assert answer.status_code == 302
    lifetime_s = parsedate_to_datetime(answer.headers["expires"]).timestamp() - api.state().common.clock.now()
    assert lifetime_s == pytest.approx(api.settings.download_url_ttl_s, abs=10)
    expected = {name: FILES[name] for name in ("adapter_config.json", "adapter_model.safetensors")}
    assert fetched.content == _as_the_library_writes_it({**expected, "checkpoint_complete": b""})
    assert fetched.headers["content-length"] == str(len(fetched.content))
    assert httpx.get(_url(http, path)).content == fetched.content


@pytest.mark.parametrize("kind", ["save_weights_for_sampler", "save_weights_external"])
def test_every_kind_of_checkpoint_has_one(http: httpx.Client, service: tinker.ServiceClient, kind: str) -> None:
    training = service.create_lora_training_client(base_model="tiny/one", rank=4)
    path = getattr(training, kind)("out").result().path

    with tarfile.open(fileobj=io.BytesIO(httpx.get(_url(http, path)).content)) as tar:
        assert tar.getnames() == ["adapter", "checkpoint_complete"]


def test_any_part_of_it_is_the_part_of_the_whole(http: httpx.Client, path: str) -> None:
    url = _url(http, path)
    whole = httpx.get(url).content
    # Within a header, over the ends of a header, a file and its padding, over a piece, the end.
    cuts = [(0, 10), (500, 530), (BLOCK, BLOCK + 8), (1030, 1540), (1536, 1536 + 2**20 + 1), (len(whole) - 5, None)]

    for start, end in cuts:
        part = httpx.get(url, headers={"Range": f"bytes={start}-{'' if end is None else end - 1}"})
        assert (part.status_code, part.content) == (206, whole[start:end])
    head = httpx.head(url)
    assert (head.status_code, head.headers["content-length"], head.content) == (200, str(len(whole)), b"")
    assert httpx.get(url, headers={"Range": f"bytes={len(whole)}-"}).status_code == 416


def test_memory_does_not_grow_with_the_archive(
    api: Api, http: httpx.Client, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = _url(http, path)
    blobs = api.state().artifacts.blobs
    lengths: list[int] = []
    read = type(blobs).get_range

    def noted(store: object, key: str, start: int, length: int) -> bytes:
        lengths.append(length)
        return read(store, key, start, length)  # type: ignore[arg-type]

    monkeypatch.setattr(type(blobs), "get_range", noted)
    httpx.get(url)

    assert max(lengths) == 2**20
    assert sum(lengths) == sum(len(data) for name, data in FILES.items() if name != OPTIMIZER_FILE)


def test_a_tampered_or_old_url_opens_nothing(api: Api, http: httpx.Client, path: str) -> None:
    url = _url(http, path)
    query = parse_qs(urlsplit(url).query)
    (signature,), (expires,), (content,) = query["signature"], query["expires"], query["content"]
    links = api.state().artifacts.links
    checkpoint = api.worker.stores.checkpoints.find(path)
    old = links.archive_url_of(checkpoint, base_url=api.url, expires_at=int(api.state().common.clock.now()) - 1)
    of_file = links.file_url_of(checkpoint, path, base_url=api.url, expires_at=int(expires))

    tampered = [
        url.replace(f"expires={expires}", f"expires={int(expires) + 1}"),
        url.replace(content, content[::-1]),
        url.replace("generation=0", "generation=1"),
        url.replace(signature, parse_qs(urlsplit(of_file).query)["signature"][0]),
        url.replace(signature, signature[::-1]),
        url.replace("/out.tar", "/other.tar"),
        old,
    ]
    assert [httpx.get(one).status_code for one in tampered] == [403] * 7


def test_an_archive_goes_with_its_checkpoint(
    api: Api, http: httpx.Client, service: tinker.ServiceClient, path: str
) -> None:
    url = _url(http, path)
    with api.worker.journal.database.transaction() as transaction:
        transaction.execute("UPDATE checkpoint SET content = 'another' || ? WHERE path = ?", (path, path))
    replaced, anew = httpx.get(url), httpx.get(_url(http, path))
    service.create_rest_client().delete_checkpoint_from_tinker_path(path).result()

    assert (replaced.status_code, anew.status_code) == (404, 200)
    assert "was replaced" in replaced.json()["detail"]
    assert httpx.get(url).status_code == 404
    assert _ask(http, path).status_code == 404


def test_a_file_that_is_gone_or_cut_short_is_told_before_the_first_byte(
    api: Api, http: httpx.Client, path: str
) -> None:
    url = _url(http, path)
    key = api.worker.stores.checkpoints.find(path).files["adapter_model.safetensors"].key

    api.state().artifacts.blobs.put(key, b"short")
    cut = httpx.get(url)
    api.state().artifacts.blobs.delete(key)
    gone = httpx.get(url)

    assert (cut.status_code, gone.status_code) == (503, 404)


def test_somebody_elses_answers_like_one_that_is_not_there_unless_it_is_public(
    api: Api, http: httpx.Client, service: tinker.ServiceClient, path: str
) -> None:
    with api.http(api.new_key()) as stranger:
        foreign, absent = _ask(stranger, path), _ask(stranger, path.replace("/out", "/absent"))
        service.create_rest_client().publish_checkpoint_from_tinker_path(path).result()
        public = httpx.get(_url(stranger, path))

    assert foreign.status_code == absent.status_code == 404
    assert foreign.text.replace("/out", "/N") == absent.text.replace("/absent", "/N")
    assert public.status_code == 200
    entries = http.get("/audit", params={"event_type": "checkpoints"}).json()["entries"]
    assert [entry["event"] for entry in entries] == ["checkpoint_create", "checkpoint_publish"]


def test_the_audit_log_tells_of_a_download(http: httpx.Client, path: str) -> None:
    _ask(http, path)

    (entry,) = (entry for entry in http.get("/audit").json()["entries"] if entry["event"] == "checkpoint_read")
    assert (entry["tinker_path"], entry["event_details"]["purpose"]) == (path, "download")


def test_a_bucket_with_a_door_of_its_own_leaves_archives_to_the_api(
    serve_api: ServeApi, make_database_url: Callable[[str], str], s3_url: str
) -> None:
    with serve_api(make_database_url("sqlite"), object_store=s3_url, presign_downloads=True) as api:
        api.worker.start()
        key = api.new_key()
        with api.sdk(key) as service, api.http(key) as http:
            path = service.create_lora_training_client(base_model="tiny/one", rank=4).save_state("a").result().path
            _give_files(api, path, FILES)
            url = _url(http, path)
            assert url.startswith(api.url)
            with tarfile.open(fileobj=io.BytesIO(httpx.get(url).content)) as tar:
                member = tar.extractfile("adapter_model.safetensors")
                assert member is not None and member.read() == FILES["adapter_model.safetensors"]
        api.worker.stop()
