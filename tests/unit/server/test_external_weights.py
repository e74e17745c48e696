"""Weights taken away: saved by the SDK, fetched without a key, by nobody whose URL is not whole and in time."""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
import tinker

from harness.fake_worker import WEIGHTS
from twinkle.core.settings import Settings
from twinkle.server.access.signing import secret_of
from twinkle.server.answering.downloads import Part, read_range

if TYPE_CHECKING:
    from conftest import Api, ServeApi


@pytest.fixture
def service(api: Api, key: str) -> Iterator[tinker.ServiceClient]:
    with api.sdk(key) as client:
        yield client


def _save(service: tinker.ServiceClient, name: str = "out") -> str:
    training = service.create_lora_training_client(base_model="tiny/one", rank=4)
    return training.save_weights_external(name, ttl_seconds=3600).result().path


def _url(service: tinker.ServiceClient, path: str) -> str:
    answer = service.create_rest_client().get_external_weights_urls(path).result()
    assert answer.expires.timestamp() > 0
    (url,) = answer.urls.values()
    return url


def test_saved_weights_are_fetched_by_whoever_has_the_url(service: tinker.ServiceClient) -> None:
    path = _save(service)

    got = httpx.get(_url(service, path))

    assert path.split("/")[3:] == ["external_weights", "out"]
    assert (got.status_code, got.content) == (200, WEIGHTS)
    assert got.headers["content-length"] == str(len(WEIGHTS))
    (listed,) = service.create_rest_client().list_user_checkpoints().result().checkpoints
    assert (listed.checkpoint_type, listed.size_bytes) == ("external", len(WEIGHTS))


@pytest.mark.parametrize(
    ("asked", "status", "content", "where"),
    [
        ("bytes=0-9", 206, WEIGHTS[:10], "bytes 0-9/2048"),
        ("bytes=2040-", 206, WEIGHTS[2040:], "bytes 2040-2047/2048"),
        ("bytes=-8", 206, WEIGHTS[-8:], "bytes 2040-2047/2048"),
        ("bytes=2000-9999", 206, WEIGHTS[2000:], "bytes 2000-2047/2048"),
        ("bytes=0-1,4-5", 200, WEIGHTS, None),
        ("lines=1-2", 200, WEIGHTS, None),
    ],
)
def test_a_download_is_resumed_where_it_broke_off(
    service: tinker.ServiceClient, asked: str, status: int, content: bytes, where: str | None
) -> None:
    got = httpx.get(_url(service, _save(service)), headers={"Range": asked})

    assert (got.status_code, got.content, got.headers.get("content-range")) == (status, content, where)


def test_a_range_behind_the_end_and_a_head(service: tinker.ServiceClient) -> None:
    url = _url(service, _save(service))

    behind = httpx.get(url, headers={"Range": "bytes=2048-"})
    head = httpx.head(url)

    assert (behind.status_code, behind.headers["content-range"]) == (416, "bytes */2048")
    assert (head.status_code, head.headers["content-length"], head.content) == (200, "2048", b"")


@pytest.mark.parametrize("header", ["bytes=", "bytes=-", "bytes=5-3", "bytes=a-b", "0-3", "bytes=0-1,2-3"])
def test_nonsense_asks_for_the_whole_file(header: str) -> None:
    assert read_range(header, 10) is None


def test_an_empty_file_has_no_part() -> None:
    assert read_range("bytes=0-", 0) == Part(0, 0)


def _tampered(url: str) -> Iterator[str]:
    parts = urlsplit(url)
    signature = parse_qs(parts.query)["signature"][0]
    expires = int(parse_qs(parts.query)["expires"][0])
    yield url.replace(f"expires={expires}", f"expires={expires + 1}")
    yield url.replace(signature, signature[::-1])
    yield url.replace(signature, "")
    yield url.replace(signature, "ä" * 64)
    yield url.replace("/adapter", "/other")


def test_a_tampered_url_opens_nothing(service: tinker.ServiceClient) -> None:
    refused = [httpx.get(url) for url in _tampered(_url(service, _save(service)))]

    assert [answer.status_code for answer in refused] == [403] * 5
    assert {answer.json()["code"] for answer in refused} == {"forbidden"}


def test_a_url_ends_with_its_time(api: Api, service: tinker.ServiceClient) -> None:
    links = api.state().artifacts.links
    past = int(api.state().common.clock.now()) - 1
    checkpoint = api.worker.stores.checkpoints.find(_save(service))

    refused = httpx.get(links.file_url_of(checkpoint, "adapter", base_url=api.url, expires_at=past))

    assert refused.status_code == 403
    assert "expired" in refused.json()["detail"]


def test_a_deleted_file_is_not_found(service: tinker.ServiceClient) -> None:
    path = _save(service)
    url = _url(service, path)
    service.create_rest_client().delete_checkpoint_from_tinker_path(path).result()

    assert httpx.get(url).status_code == 404


def test_only_its_owner_gets_urls_unless_it_is_public(api: Api, service: tinker.ServiceClient) -> None:
    path = _save(service)
    with api.sdk(api.new_key()) as stranger:
        with pytest.raises(tinker.NotFoundError):
            _url(stranger, path)
        service.create_rest_client().publish_checkpoint_from_tinker_path(path).result()

        assert httpx.get(_url(stranger, path)).content == WEIGHTS


def test_a_bucket_may_serve_its_files_itself(
    serve_api: ServeApi, make_database_url: Callable[[str], str], s3_url: str
) -> None:
    for presign in (True, False):
        with serve_api(make_database_url("sqlite"), object_store=s3_url, presign_downloads=presign) as api:
            api.worker.start()
            with api.sdk(api.new_key()) as service:
                url = _url(service, _save(service))
                part = httpx.get(url, headers={"Range": "bytes=3-5"})
                assert url.startswith(api.url) is not presign
                assert (part.status_code, part.content) == (206, WEIGHTS[3:6])
            api.worker.stop()


def test_the_secret_is_made_once_and_for_its_owners_eyes(api: Api) -> None:
    path = api.settings.home / "download-url-secret"

    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert secret_of(api.settings) == secret_of(api.settings) == path.read_bytes()
    assert len(path.read_bytes()) >= 32
    given = Settings(home=api.settings.home, download_url_secret="from outside")
    assert secret_of(given) == b"from outside"


def test_the_url_is_the_one_clients_use(serve_api: ServeApi, make_database_url: Callable[[str], str]) -> None:
    with serve_api(make_database_url("sqlite"), public_url="https://example.org/train/") as api:
        api.worker.start()
        with api.sdk(api.new_key()) as service:
            assert _url(service, _save(service)).startswith("https://example.org/train/api/v1/downloads/")
        api.worker.stop()
