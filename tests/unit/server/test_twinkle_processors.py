"""Data sets and loaders over HTTP: their answers, their limits, whose they are, and what no client may have."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
from structlog.testing import capture_logs

from harness.polling import wait_for
from harness.processor_calls import ProcessorCalls
from harness.processor_service import processors_of
from twinkle.core.lease import Lease
from twinkle.core.operation import Outcome
from twinkle.storage.blobs import open_blob_store
from twinkle.storage.journal.executing import Committed
from twinkle.storage.journal.journal import Journal
from twinkle_client.client import TwinkleClient
from twinkle_client.dataloader import DataLoader
from twinkle_client.dataset import Dataset, DatasetMeta, IterableDataset
from twinkle_client.errors import InvalidInput
from twinkle_client.processor import InputProcessor

ROWS = [{"query": f"q{n}", "response": "{{NAME}}"} for n in range(6)]
META = {"data": ROWS}


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def served(
    request: pytest.FixtureRequest, serve_api: Any, make_database_url: Callable[[str], str], tmp_path_factory: Any
) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("opened")
    settings = {"tenant_max_processors": 3, "processor_processes": 1, "processor_folders": [str(folder)]}
    with serve_api(make_database_url(request.param), **settings) as api, processors_of(api.settings):
        # The process with the rows starts here, and not in whichever test comes first.
        ProcessorCalls(api.url, api.new_key()).create("dataset", "Dataset", dataset_meta=json.dumps(META))
        yield api


@pytest.fixture
def calls(served: Any) -> ProcessorCalls:
    return ProcessorCalls(served.url, served.new_key())


def _create(**arguments: Any) -> dict[str, Any]:
    return {"processor_type": "dataset", "class_type": "Dataset", "dataset_meta": json.dumps(META), **arguments}


def test_a_data_set_and_its_loader_answer_as_the_documents_client_expects(calls: ProcessorCalls) -> None:
    dataset = calls.create("dataset", "Dataset", dataset_meta=json.dumps(META))
    init_args = {"model_name": "N", "model_author": "A"}
    assert (
        calls.call(
            dataset, "map", preprocess_func="SelfCognitionProcessor", dataset_meta=None, init_args=init_args, num_proc=4
        )
        is None
    )
    assert calls.call(dataset, "__len__") == 6
    assert calls.call(dataset, "__getitem__", idx=0)["messages"][-1] == {"role": "assistant", "content": "N"}
    loader = calls.create("dataloader", "DataLoader", dataset=dataset, batch_size=4, num_workers=4)
    assert calls.call(loader, "__len__") == 2
    assert calls.call(loader, "__iter__") == "ok"
    assert [len(batch) for batch in calls.rest(loader)] == [4, 2]
    assert calls.next(loader) is None


def test_a_call_that_comes_twice_under_one_key_is_done_once(calls: ProcessorCalls) -> None:
    key = {"x-idempotency-key": uuid4().hex}
    first, second = (calls.post("/create", _create(), **key) for _ in range(2))
    assert first.json() == second.json()
    processor = first.json()["processor_id"]
    calls.call(processor, "__iter__")
    body, key = {"processor_id": processor, "function": "__next__"}, {"x-idempotency-key": uuid4().hex}
    assert [calls.post("/call", body, **key).json()["result"]["query"] for _ in range(2)] == ["q0", "q0"]
    assert calls.next(processor)["query"] == "q1"
    other = calls.post("/call", {"processor_id": processor, "function": "__len__"}, **key)
    assert (other.status_code, other.json()["code"]) == (400, "conflict")


def test_an_answer_that_the_journal_will_never_take_ends_its_call_and_takes_no_row(
    calls: ProcessorCalls, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = calls.create("dataset", "Dataset", dataset_meta=json.dumps(META))
    calls.call(dataset, "__iter__")
    assert calls.next(dataset)["query"] == "q0"
    commit = Journal.commit

    def refuse(journal: Journal, lease: Lease, outcomes: list[Outcome], *records: Any) -> Committed:
        if outcomes[0].lane == dataset and outcomes[0].failure is None:
            journal.database.read("SELECT hat FROM operation")
        return commit(journal, lease, outcomes, *records)

    with monkeypatch.context() as refused:
        refused.setattr(Journal, "commit", refuse)
        body, key = {"processor_id": dataset, "function": "__next__"}, {"x-idempotency-key": uuid4().hex}
        answer = wait_for(lambda: _final(calls.post("/call", body, **key)), what="an answer", deadline_s=60)

    assert answer.status_code == 500
    assert "internal error, incident" in answer.text
    assert "hat" not in answer.text
    assert [row["query"] for row in calls.rest(dataset)] == ["q1", "q2", "q3", "q4", "q5"]


def test_each_failed_call_has_one_line_in_the_log_that_says_which_and_why_and_nothing_of_what_was_sent(
    calls: ProcessorCalls, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = calls.create("dataset", "Dataset", dataset_meta=json.dumps(META))
    with capture_logs() as lines:
        calls.post("/call", {"processor_id": dataset, "function": "__getitem__", "idx": 987_654_321})
        calls.call(dataset, "__iter__")
        assert len(calls.rest(dataset)) == len(ROWS)

    told = [line for line in lines if line["event"] == "operation.failed"]
    assert [(line["op"], line["seq"], line["log_level"], line["method"], line["category"]) for line in told] == [
        (f"{dataset}:req:1", 1, "warning", "__getitem__", "user"),
        (f"{dataset}:req:{3 + len(ROWS)}", 3 + len(ROWS), "info", "__next__", "user"),
    ]
    assert all(line["tenant"] and line["kind"] == "call" and line["adapter"] == dataset for line in told)
    assert told[1]["reason"] == "exhausted"
    assert "987654321" not in str(lines)


def _final(answer: httpx.Response) -> httpx.Response | None:
    return None if answer.status_code in {502, 503} else answer


def test_another_tenants_processor_is_like_none_at_all(served: Any, calls: ProcessorCalls) -> None:
    mine = calls.create("dataset", "Dataset", dataset_meta=json.dumps(META))
    stranger = ProcessorCalls(served.url, served.new_key())
    nobodys = f"pid:{uuid4().hex}"
    for processor in (mine, nobodys):
        called = stranger.post("/call", {"processor_id": processor, "function": "__len__"})
        assert called.status_code == 404
        assert called.json()["detail"].replace(processor, "") == "no data set, loader or other processor ''; it may" + (
            " have ended with its session"
        )
        body = {"processor_type": "dataloader", "class_type": "DataLoader", "dataset": processor, "batch_size": 1}
        assert stranger.post("/create", body).status_code == 404


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (_create(processor_type="os"), "processor_type"),
        (_create(class_type="system"), "class_type"),
        (_create(class_type="__init__"), "class_type"),
        (_create(data_files="/etc/passwd"), "data_files"),
        (_create(dataset_meta="/etc/\u0000passwd"), "dataset_meta"),
        (_create(dataset_meta="ms://../../etc"), "dataset_meta"),
        (_create(dataset_meta={"dataset_id": "org/name", "cache_dir": "/"}), "dataset_meta"),
        (_create(dataset_meta={"dataset_id": "org/name", "split": "../x"}), "dataset_meta"),
        (_create(dataset_meta={"data": [1]}), "dataset_meta"),
        (_create(dataset_meta={"data": ROWS, "data_slice": {"start": 0, "stop": 10**15, "step": 1}}), "dataset_meta"),
        (_create(dataset_meta='{"data": '), "dataset_meta"),
        (_create(processor_type="reward", class_type="GSM8KAccuracyReward", dataset_meta=None), "dataset_meta"),
    ],
)
def test_what_is_not_offered_is_refused_at_once(calls: ProcessorCalls, body: dict[str, Any], field: str) -> None:
    refused = calls.post("/create", body)
    assert (refused.status_code, refused.json()["code"]) == (400, "invalid_input"), refused.text
    assert refused.json()["detail"].startswith(f"{field}: ")


@pytest.mark.parametrize("function", ["__class__", "__reduce__", "__init__", "save_as", "_do", "unrecorded", "report"])
def test_only_listed_methods_are_called(calls: ProcessorCalls, function: str) -> None:
    dataset = calls.create("dataset", "Dataset", dataset_meta=json.dumps(META))
    refused = calls.post("/call", {"processor_id": dataset, "function": function, "output_path": "/tmp/x"})
    assert (refused.status_code, refused.json()["code"]) == (400, "invalid_input")


def test_a_path_outside_what_the_operator_opened_is_refused_in_words(calls: ProcessorCalls, tmp_path: Path) -> None:
    (tmp_path / "secret.jsonl").write_text('{"password": "open sesame"}\n')
    refused = calls.post("/create", _create(dataset_meta=str(tmp_path / "secret.jsonl")))
    assert (refused.status_code, refused.json()["code"]) == (400, "invalid_input")
    assert "upload the file" in refused.json()["detail"]


def test_a_tenant_has_so_many_and_those_that_failed_or_ended_do_not_count(calls: ProcessorCalls) -> None:
    made = [calls.create("dataset", "Dataset", dataset_meta=json.dumps(META)) for _ in range(2)]
    for _ in range(3):
        assert calls.post("/create", _create(dataset_meta="/nowhere.jsonl")).status_code == 400
    made.append(calls.create("dataset", "Dataset", dataset_meta=json.dumps(META)))
    refused = calls.post("/create", _create())
    assert (refused.status_code, refused.json()["code"]) == (400, "limit_reached")
    calls.delete(made[0])
    calls.create("dataset", "Dataset", dataset_meta=json.dumps(META))
    assert calls.post("/call", {"processor_id": made[0], "function": "__len__"}).status_code == 404


def test_one_that_nothing_is_heard_of_ends_and_what_it_was_made_of_goes(served: Any, calls: ProcessorCalls) -> None:
    large = [{"text": "x" * 1000} for _ in range(20)]
    dataset = calls.create("dataset", "Dataset", dataset_meta=json.dumps({"data": large}))
    blobs = open_blob_store(served.settings.resolved_object_store)
    (row,) = served.stores.database.read("SELECT payload_blob FROM operation WHERE lane = ?", (dataset,))
    assert blobs.get(row.payload_blob)
    assert served.stores.processors.expire(idle_s=3600) == 0
    with served.stores.database.transaction() as transaction:
        transaction.execute("UPDATE processor SET used_at = 0 WHERE id = ?", (dataset,))
        transaction.execute(
            "UPDATE session SET heartbeat_at = 0 WHERE id = (SELECT session FROM processor WHERE id = ?)", (dataset,)
        )
    assert served.stores.processors.expire(idle_s=3600) == 1
    assert calls.post("/call", {"processor_id": dataset, "function": "__len__"}).status_code == 404
    (kept,) = served.stores.database.read("SELECT payload, payload_blob FROM operation WHERE lane = ?", (dataset,))
    assert (kept.payload, kept.payload_blob) == (None, None)
    doomed = served.stores.database.read("SELECT key FROM doomed_blob WHERE key = ?", (row.payload_blob,))
    assert len(doomed) == 1


def test_no_mesh_of_processors_is_offered_as_a_model(served: Any, calls: ProcessorCalls) -> None:
    calls.create("dataset", "Dataset", dataset_meta=json.dumps(META))
    with served.http(served.new_key()) as http:
        for path in ("/twinkle/get_server_capabilities", "/get_server_capabilities", "/models"):
            assert "processors" not in http.get(path).text


# The classes of the client.


@pytest.fixture
def client(served: Any) -> Iterator[TwinkleClient]:
    with TwinkleClient(served.url, served.new_key()) as client:
        yield client


def test_a_script_of_the_documents_reads_a_file_of_its_own_machine(client: TwinkleClient, tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    meta = DatasetMeta(str(file), data_slice=range(5))
    dataset = Dataset(dataset_meta=meta, connection=client.connection)
    dataset.map("SelfCognitionProcessor", meta, init_args={"model_name": "N", "model_author": "A"})
    loader = DataLoader(dataset=dataset, batch_size=2)
    batches = list(loader)
    assert len(dataset) == 5
    assert len(loader) == 3
    assert [len(batch) for batch in batches] == [2, 2, 1]
    assert batches[0][1]["messages"][-1]["content"] == "N"
    assert [row["query"] for row in dataset] == [f"q{n}" for n in range(5)]


def test_a_loader_counts_what_the_script_was_given_and_not_what_is_fetched_ahead(client: TwinkleClient) -> None:
    dataset = Dataset(dataset_meta=DatasetMeta(data=ROWS), connection=client.connection)
    loader = DataLoader(dataset=dataset, batch_size=2)
    first = next(iter(loader))
    assert loader.get_state() == {"consumed_train_samples": 2}
    resumed = DataLoader(dataset=dataset, batch_size=2)
    resumed.resume_from_checkpoint(loader.get_state())
    rest = list(resumed)
    assert [row["query"] for batch in [first, *rest] for row in batch] == [f"q{n}" for n in range(6)]
    assert resumed.get_state() == {"consumed_train_samples": 6}
    assert [len(batch) for batch in resumed] == [2, 2, 2]


def test_streams_and_processors_come_by_the_same_names(client: TwinkleClient) -> None:
    with IterableDataset(dataset_meta=DatasetMeta(data=ROWS), connection=client.connection) as stream:
        assert [row["query"] for row in stream] == [f"q{n}" for n in range(6)]
    processor = InputProcessor(connection=client.connection)
    assert processor([{"input_ids": [1, 2]}, {"input_ids": [3]}])["input_ids"] == [[1, 2], [3, 0]]


def test_code_of_the_script_is_refused_before_anything_is_sent(client: TwinkleClient) -> None:
    dataset = Dataset(dataset_meta=DatasetMeta(data=ROWS), connection=client.connection)
    with pytest.raises(InvalidInput, match="preprocess_func"):
        dataset.map(lambda columns: columns)
    with pytest.raises(InvalidInput, match=r"twinkle_client\.dataset"):
        DataLoader(dataset=[1, 2], batch_size=1)  # type: ignore[arg-type]
