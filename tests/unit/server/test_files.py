"""Files and uploads, driven by OpenAI's own client on both databases."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import openai
import pytest

from harness.clock import HandClock

if TYPE_CHECKING:
    from conftest import Api, ServeApi

LINES = b"".join(json.dumps({"messages": [{"role": "user", "content": str(n)}]}).encode() + b"\n" for n in range(5000))


def _client(api: Api, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{api.url}/v1", api_key=key, timeout=30, max_retries=0)


@pytest.fixture
def client(api: Api, key: str) -> openai.OpenAI:
    return _client(api, key)


def _num_blobs(api: Api) -> int:
    folder = Path(api.settings.resolved_object_store)
    doomed = {row.key for row in api.stores.database.read("SELECT key FROM doomed_blob")}
    return len({str(path.relative_to(folder)) for path in folder.rglob("files/*/*/*") if path.is_file()} - doomed)


def test_a_file_comes_in_and_goes_out_as_it_was(client: openai.OpenAI) -> None:
    made = client.files.create(file=("train.jsonl", LINES), purpose="fine-tune")

    assert (made.bytes, made.filename, made.purpose, made.status) == (
        len(LINES),
        "train.jsonl",
        "fine-tune",
        "processed",
    )
    assert made.expires_at is None
    assert client.files.retrieve(made.id) == made
    assert client.files.content(made.id).content == LINES
    assert [file.id for file in client.files.list()] == [made.id]
    part = client.files.content(made.id, extra_headers={"Range": "bytes=100-299999"})
    assert part.content == LINES[100:300_000]
    assert part.response.status_code == 206
    deleted = client.files.delete(made.id)
    assert (deleted.id, deleted.deleted) == (made.id, True)
    with pytest.raises(openai.NotFoundError):
        client.files.content(made.id)
    assert list(client.files.list()) == []


def test_a_stream_of_unknown_length_is_taken_in_too(api: Api, key: str) -> None:
    boundary = "xyz"
    head = f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="a.csv"\r\n\r\n'.encode()
    tail = f'\r\n--{boundary}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nuser_data\r\n--{boundary}--\r\n'

    def stream() -> Iterator[bytes]:
        # The purpose comes last.
        yield head
        for start in range(0, len(LINES), 7000):
            yield LINES[start : start + 7000]
        yield tail.encode()

    headers = {"Authorization": f"Bearer {key}", "Content-Type": f"multipart/form-data; boundary={boundary}"}
    answer = httpx.post(f"{api.url}/v1/files", content=stream(), headers=headers)

    assert answer.status_code == 200, answer.text
    assert (answer.json()["bytes"], answer.json()["status"]) == (len(LINES), "uploaded")


def test_files_are_listed_page_by_page_in_either_order_and_by_purpose(client: openai.OpenAI) -> None:
    made = [client.files.create(file=(f"{n}.jsonl", b"{}\n" * (n + 1)), purpose="fine-tune").id for n in range(5)]
    other = client.files.create(file=("b.jsonl", b'{"a": 1}\n'), purpose="batch")

    assert [file.id for file in client.files.list(limit=2)] == [other.id, *reversed(made)]
    assert [file.id for file in client.files.list(limit=2, order="asc", purpose="fine-tune")] == made
    assert other.expires_at == other.created_at + 30 * 24 * 3600
    with pytest.raises(openai.NotFoundError):
        client.files.list(after="file-none")


def test_wrong_lines_are_told_by_line_and_column_and_the_file_stays_to_be_looked_at(client: openai.OpenAI) -> None:
    made = client.files.create(file=("a.jsonl", b'{"a": 1}\n{"a": }\n[]\n'), purpose="fine-tune")

    assert made.status == "error"
    assert made.status_details is not None
    assert made.status_details.splitlines() == [
        "2 of 3 lines are no JSON objects",
        "line 2, column 7: is no JSON: Expecting value",
        "line 3, column 1: is a list; each line must be an object",
    ]
    assert client.files.content(made.id).content.endswith(b"[]\n")


@pytest.mark.parametrize(
    ("file", "options", "words"),
    [
        (("a.jsonl", b"{}"), {"purpose": "assistants"}, "purpose: is 'assistants'; send one of fine-tune, batch"),
        (("a.jsonl", b""), {"purpose": "batch"}, "file: is empty"),
        (("a.csv", b"a,b"), {"purpose": "batch"}, "must be a .jsonl file"),
        (("a.jsonl", b"{}\n" * 50_001), {"purpose": "batch"}, "has 50001 lines; a batch's may have 50000"),
        (
            ("a.jsonl", b"{}"),
            {"purpose": "batch", "expires_after": {"anchor": "created_at", "seconds": 10}},
            "expires_after.seconds: must be a whole number from 3600 to 2592000",
        ),
    ],
)
def test_what_cannot_be_a_file_is_refused_by_its_field_and_leaves_nothing(
    api: Api, client: openai.OpenAI, file: tuple[str, bytes], options: dict[str, object], words: str
) -> None:
    before = _num_blobs(api)

    with pytest.raises(openai.BadRequestError, match=words):
        client.files.create(file=file, **options)  # type: ignore[arg-type]

    assert _num_blobs(api) == before
    assert list(client.files.list()) == []


def test_a_broken_form_is_refused(api: Api, key: str) -> None:
    url, headers = f"{api.url}/v1/files", {"Authorization": f"Bearer {key}"}
    form = headers | {"Content-Type": "multipart/form-data; boundary=x"}

    answers = [
        httpx.post(url, json={"purpose": "batch"}, headers=headers),
        httpx.post(url, content=b"nonsense", headers=form),
        httpx.post(url, content=b'--x\r\nContent-Disposition: form-data; name="file"\r\n\r\nabc', headers=form),
        httpx.post(url, files={"other": ("a", b"x")}, headers=headers),
        httpx.post(url, files={"file": ("a", b"x")}, headers=headers),
        httpx.post(url, files=[("file", ("a", b"x")), ("file", ("b", b"y"))], headers=headers),
        httpx.post(url, files={"file": ("a", b"x")}, data={"purpose": "batch" * 20_000}, headers=headers),
    ]

    assert [answer.status_code for answer in answers] == [400, 400, 400, 400, 400, 400, 413]
    assert [answer.json()["error"]["param"] for answer in answers[:6]] == [
        "content-type",
        "body",
        "body",
        "file",
        "purpose",
        "file",
    ]


def test_an_upload_in_parts_is_the_file_that_was_cut(api: Api, client: openai.OpenAI, tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_bytes(LINES)
    before = _num_blobs(api)

    md5 = hashlib.md5(LINES).hexdigest()
    done = client.uploads.upload_file_chunked(
        file=path, mime_type="text/jsonl", purpose="fine-tune", part_size=100_000, md5=md5
    )

    assert done.status == "completed"
    assert done.file is not None
    assert (done.file.bytes, done.file.status) == (len(LINES), "processed")
    assert client.files.content(done.file.id).content == LINES
    again = client.uploads.complete(done.id, part_ids=[])
    assert again.file == done.file
    # The same bytes at once are no second content.
    same = client.files.create(file=("same.jsonl", LINES), purpose="fine-tune")
    client.files.delete(done.file.id)
    assert client.files.content(same.id).content == LINES
    client.files.delete(same.id)
    assert _num_blobs(api) == before


def test_parts_have_the_order_that_is_said_at_the_end(client: openai.OpenAI) -> None:
    upload = client.uploads.create(bytes=6, filename="a.txt", mime_type="text/plain", purpose="user_data")
    second = client.uploads.parts.create(upload.id, data=b"def")
    client.uploads.parts.create(upload.id, data=b"def")
    first = client.uploads.parts.create(upload.id, data=b"abc")

    with pytest.raises(openai.BadRequestError, match="3 bytes together, 6 were announced"):
        client.uploads.complete(upload.id, part_ids=[first.id])
    with pytest.raises(openai.BadRequestError, match="md5"):
        client.uploads.complete(upload.id, part_ids=[first.id, second.id], md5="0" * 32)
    with pytest.raises(openai.BadRequestError, match="names 'part_none'"):
        client.uploads.complete(upload.id, part_ids=["part_none"])
    done = client.uploads.complete(upload.id, part_ids=[first.id, second.id])

    assert done.file is not None
    assert client.files.content(done.file.id).content == b"abcdef"


def test_a_cancelled_upload_takes_no_more(client: openai.OpenAI) -> None:
    upload = client.uploads.create(bytes=6, filename="a.txt", mime_type="text/plain", purpose="user_data")
    part = client.uploads.parts.create(upload.id, data=b"abcdef")

    assert client.uploads.cancel(upload.id).status == "cancelled"
    with pytest.raises(openai.BadRequestError, match="is cancelled"):
        client.uploads.parts.create(upload.id, data=b"x")
    with pytest.raises(openai.BadRequestError):
        client.uploads.complete(upload.id, part_ids=[part.id])


def test_another_tenants_files_answer_like_those_that_never_were(api: Api, client: openai.OpenAI) -> None:
    file = client.files.create(file=("a.jsonl", LINES), purpose="fine-tune")
    upload = client.uploads.create(bytes=6, filename="a.txt", mime_type="text/plain", purpose="user_data")
    stranger = api.new_key()

    def attempts(file_id: str, upload_id: str) -> list[tuple[int, str]]:
        with httpx.Client(base_url=api.url, headers={"Authorization": f"Bearer {stranger}"}) as http:
            answers = [
                http.get(f"/v1/files/{file_id}"),
                http.get(f"/v1/files/{file_id}/content"),
                http.delete(f"/v1/files/{file_id}"),
                http.get("/v1/files", params={"after": file_id}),
                http.post(f"/v1/uploads/{upload_id}/parts", files={"data": ("a", b"abcdef")}),
                http.post(f"/v1/uploads/{upload_id}/complete", json={"part_ids": []}),
                http.post(f"/v1/uploads/{upload_id}/cancel"),
            ]
            native = {"X-API-Key": stranger}
            answers += [
                http.put(f"/api/native/v1/uploads/{upload_id}/parts/0", content=b"x", headers=native),
                http.post(f"/api/native/v1/uploads/{upload_id}/complete", headers=native),
                http.get(f"/api/native/v1/files/{file_id}", headers=native),
            ]
        return [(answer.status_code, answer.text.replace(file_id, "F").replace(upload_id, "U")) for answer in answers]

    theirs = attempts(file.id, upload.id)

    assert [status for status, _ in theirs] == [404] * 10
    assert theirs == attempts("file-none", "upload_none")
    assert list(_client(api, stranger).files.list()) == []
    # That somebody has these bytes already is not to be learnt either.
    opened = httpx.post(
        f"{api.url}/api/native/v1/uploads",
        json={"filename": "a.jsonl", "size_bytes": len(LINES), "sha256": hashlib.sha256(LINES).hexdigest()},
        headers={"X-API-Key": stranger},
    ).json()
    assert "file" not in opened
    assert opened["parts"] == []


@pytest.fixture(scope="module")
def small(serve_api: ServeApi, make_database_url: Callable[[str], str]) -> Iterator[Api]:
    """An app in which little has room."""
    limits = {"max_file_bytes": 150_000, "tenant_max_files_bytes": 200_000, "max_body_bytes": 40_000}
    with serve_api(make_database_url("sqlite"), clock=HandClock(1e9), **limits) as served:
        yield served


def test_a_tenant_stores_no_more_than_it_may_and_room_comes_back(small: Api) -> None:
    client = _client(small, small.new_key())
    with pytest.raises(openai.APIStatusError, match="has more than 150000 bytes") as too_large:
        client.files.create(file=("b", b"y" * 160_000), purpose="user_data")
    first = client.files.create(file=("a", b"x" * 120_000), purpose="user_data")

    with pytest.raises(openai.BadRequestError, match="delete files that you no longer need"):
        client.files.create(file=("b", b"y" * 120_000), purpose="user_data")
    with pytest.raises(openai.BadRequestError, match="max_files_bytes"):
        client.uploads.create(bytes=120_000, filename="b", mime_type="x", purpose="user_data")

    assert too_large.value.status_code == 413
    assert small.stores.files.taken_bytes(_tenant_of(small, first.id)) == 120_000
    client.files.delete(first.id)
    client.files.create(file=("b", b"y" * 120_000), purpose="user_data")
    assert small.state().common.bodies.budget.held_bytes == 0


def _tenant_of(api: Api, file_id: str) -> str:
    (row,) = api.stores.database.read("SELECT tenant FROM file WHERE id = ?", (file_id,))
    return str(row.tenant)


def test_in_a_bucket_a_file_is_whole_also_when_several_complete_it_at_once(
    serve_api: ServeApi, make_database_url: Callable[[str], str], s3_url: str
) -> None:
    parts = [LINES[at : at + 60_000] for at in range(0, len(LINES), 60_000)]
    with serve_api(make_database_url("postgres"), object_store=s3_url) as api:
        client = _client(api, api.new_key())
        upload = client.uploads.create(
            bytes=len(LINES), filename="train.jsonl", mime_type="text/jsonl", purpose="fine-tune"
        )
        with ThreadPoolExecutor(8) as threads:
            sent = threads.map(lambda part: client.uploads.parts.create(upload.id, data=part).id, parts)
            ids = list(sent)
            done = list(threads.map(lambda _: client.uploads.complete(upload.id, part_ids=ids), range(8)))

        (file,) = {one.file.id for one in done if one.file is not None}
        assert client.files.content(file).content == LINES
        part = client.files.content(file, extra_headers={"Range": "bytes=59990-120010"})
        assert part.content == LINES[59_990:120_011]
        assert api.stores.files.taken_bytes(_tenant_of(api, file)) == len(LINES)
        client.files.delete(file)
        assert list(client.files.list()) == []


def test_a_client_that_leaves_in_the_middle_leaves_nothing_behind(small: Api) -> None:
    key = small.new_key()

    def stream() -> Iterator[bytes]:
        yield b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
        for _ in range(10):
            yield b"x" * 10_000
        raise ConnectionError("the cable is out")

    headers = {"Authorization": f"Bearer {key}", "Content-Type": "multipart/form-data; boundary=x"}
    with pytest.raises(ConnectionError):
        httpx.post(f"{small.url}/v1/files", content=stream(), headers=headers)

    client = _client(small, key)
    assert list(client.files.list()) == []
    # There is room for all that it may have.
    client.files.create(file=("a", io.BytesIO(b"y" * 150_000)), purpose="user_data")
