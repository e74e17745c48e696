"""One contract for every object store: complete or not there, and errors of our own."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from twinkle.core.errors import StorageUnavailable
from twinkle.core.operation import Payload
from twinkle.storage.blobs import BlobStore, FolderStore, ObjectStore, open_blob_store
from twinkle.storage.payloads import read_payload, write_payload, write_result

NOW = 1_800_000_000.0


@pytest.mark.parametrize("data", [b"", b"\x00\xff", bytes(range(256)) * 20_480], ids=["empty", "binary", "5MB"])
def test_what_was_put_is_what_one_gets(blobs: BlobStore, data: bytes) -> None:
    blobs.put("checkpoints/run/weights/name", data)

    assert blobs.get("checkpoints/run/weights/name") == data


def test_putting_again_replaces_what_was_there(blobs: BlobStore) -> None:
    blobs.put("a/b", b"a longer first version")
    blobs.put("a/b", b"second")

    assert blobs.get("a/b") == b"second"


@pytest.mark.parametrize("key", ["nothing", "a/nothing", "a/b/nothing", "a"])
def test_a_key_nobody_put_is_missing(blobs: BlobStore, key: str) -> None:
    blobs.put("a/c", b"x")

    with pytest.raises((KeyError, StorageUnavailable) if key == "a" else KeyError):
        blobs.get(key)


def test_a_part_is_read_by_itself(blobs: BlobStore) -> None:
    data = bytes(range(256)) * 100
    blobs.put("a/b", data)

    assert blobs.size_bytes("a/b") == len(data)
    assert blobs.get_range("a/b", 250, 12) == data[250:262]
    assert blobs.get_range("a/b", len(data) - 3, 100) == data[-3:]
    with pytest.raises(KeyError):
        blobs.size_bytes("a/nothing")
    with pytest.raises(KeyError):
        blobs.get_range("a/nothing", 0, 1)


def test_only_a_store_with_a_door_of_its_own_signs_urls(blobs: BlobStore) -> None:
    blobs.put("a/b", b"for everybody")

    url = blobs.presigned_url("a/b", 60)

    if isinstance(blobs, FolderStore):
        assert url is None
    else:
        assert url is not None
        assert httpx.get(url).content == b"for everybody"


def test_what_was_deleted_is_missing_and_deleting_again_is_harmless(blobs: BlobStore) -> None:
    blobs.put("a/b", b"x")
    blobs.delete("a/b")
    blobs.delete("a/b")
    blobs.delete("never/was")

    with pytest.raises(KeyError):
        blobs.get("a/b")


def test_blobs_are_listed_in_the_order_of_their_keys_and_page_by_page(blobs: BlobStore) -> None:
    keys = ["a", "b/c.d", "b/c/d", "b/é", "b-c", "b.c/d", "c/d/e", "z"]
    for key in keys:
        blobs.put(key, b"x")
    ordered = sorted(keys, key=str.encode)

    pages, after = [], ""
    while page := blobs.scan(after=after, limit=3):
        pages.append(page)
        after = page[-1].key

    assert [blob.key for page in pages for blob in page] == ordered
    assert {blob.size_bytes for page in pages for blob in page} == {1}
    assert [len(page) for page in pages] == [3, 3, 2]


def test_a_folder_that_a_deletion_leaves_empty_goes_and_others_stay(tmp_path: Path) -> None:
    blobs = FolderStore(tmp_path / "objects")
    blobs.put("a/b/c", b"x")
    blobs.put("a/d", b"x")
    blobs.delete("a/b/c")

    assert sorted(path.name for path in (tmp_path / "objects").rglob("*")) == ["a", "d"]
    blobs.delete("a/d")
    assert list((tmp_path / "objects").iterdir()) == []
    blobs.put("a/b/c", b"x")


@pytest.mark.parametrize("key", ["", "/etc/passwd", "../x", "a/../../x", "a/..", ".", "a//b", "a/", "a/./b", "a\x00b"])
@pytest.mark.parametrize("verb", ["put", "get", "delete"])
def test_a_key_that_leads_elsewhere_is_refused(blobs: BlobStore, key: str, verb: str) -> None:
    calls: dict[str, Callable[[], object]] = {
        "put": lambda: blobs.put(key, b"x"),
        "get": lambda: blobs.get(key),
        "delete": lambda: blobs.delete(key),
    }

    with pytest.raises(ValueError, match="not a key"):
        calls[verb]()


def test_stores_below_different_folders_do_not_see_each_other(blobs: BlobStore, tmp_path: Path) -> None:
    other = FolderStore(tmp_path / "other")
    blobs.put("a", b"x")

    with pytest.raises(KeyError):
        other.get("a")


def test_the_url_says_which_store_it_is(tmp_path: Path, s3_url: str) -> None:
    assert isinstance(open_blob_store(str(tmp_path)), FolderStore)
    assert isinstance(open_blob_store(f"file://{tmp_path}"), FolderStore)
    assert isinstance(open_blob_store(s3_url), ObjectStore)


# -- when the disk or the server fails --------------------------------------------------------------------------------


def _break_disk(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os if call == "fsync" else Path, call, fail)


@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_a_torn_write_shows_nothing_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    store = FolderStore(tmp_path)
    store.put("a/b", b"old")
    with monkeypatch.context() as patch:
        _break_disk(patch, call)
        with pytest.raises(StorageUnavailable, match="a/b: No space left"):
            store.put("a/b", b"new")

    assert store.get("a/b") == b"old"
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["b"]


@pytest.mark.parametrize("key", ["file/below", "n" * 300, "file/a/b"])
def test_what_the_file_system_refuses_is_storage_unavailable(tmp_path: Path, key: str) -> None:
    store = FolderStore(tmp_path)
    store.put("file", b"x")

    with pytest.raises(StorageUnavailable):
        store.put(key, b"x")


def test_a_file_that_cannot_be_read_or_deleted_is_storage_unavailable_and_not_missing(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    store.put("folder/file", b"x")

    with pytest.raises(StorageUnavailable):
        store.get("folder")
    with pytest.raises(StorageUnavailable):
        store.delete("folder")


def test_no_message_shows_where_the_server_keeps_its_files(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    store.put("folder/file", b"x")

    with pytest.raises(StorageUnavailable) as caught:
        store.get("folder")

    assert str(tmp_path) not in caught.value.message


def test_a_bucket_that_is_not_there_is_storage_unavailable(s3_url: str) -> None:
    store = ObjectStore("s3://no-such-bucket/folder")

    with pytest.raises(StorageUnavailable) as caught:
        store.put("a", b"x")

    assert "http" not in caught.value.message


# -- payloads ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "is_inline"), [(0, True), (10, True), (11, False)])
def test_a_payload_is_inline_up_to_the_limit_and_a_blob_above(blobs: BlobStore, size: int, is_inline: bool) -> None:
    data = b"x" * size
    for payload in (
        write_payload(blobs, "s:train:0:req:1", data, inline_bytes=10, now=NOW),
        write_result(blobs, "s:train:0:req:1", data, inline_bytes=10, now=NOW),
    ):
        assert (payload.inline is not None, payload.blob is not None) == (is_inline, not is_inline)
        assert read_payload(blobs, payload) == data


def test_a_resend_is_stored_once_and_each_operation_has_blobs_of_its_own(blobs: BlobStore) -> None:
    data = b"x" * 100

    resent = {write_payload(blobs, "a:req:1", data, inline_bytes=1, now=NOW).blob for _ in range(2)}
    payloads = {write_payload(blobs, f"a:req:{seq}", data, inline_bytes=1, now=NOW).blob for seq in range(2)}
    results = {write_result(blobs, f"a:req:{seq}", data, inline_bytes=1, now=NOW).blob for seq in range(2)}

    assert (len(resent), len(payloads), len(results)) == (1, 2, 2)


def test_a_payload_is_stored_whatever_its_lane_is_called(blobs: BlobStore) -> None:
    payload = write_payload(blobs, "../../etc//\x00:req:1", b"x" * 100, inline_bytes=1, now=NOW)

    assert read_payload(blobs, payload) == b"x" * 100
    assert payload.size_bytes == 100


def test_a_blob_that_is_gone_is_worth_another_attempt(blobs: BlobStore) -> None:
    with pytest.raises(StorageUnavailable):
        read_payload(blobs, Payload(blob="blobs/aa/aa"))
