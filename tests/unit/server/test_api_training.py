"""Numbered operations over plain HTTP: order, resends, and bad bodies that must not leave a hole."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import httpx
import pytest
import tinker
import zstandard

from harness.calls import optim_step, passes, retrieve, send_passes
from harness.fake_worker import BASE_MODEL
from twinkle.core.operation import OperationKind
from twinkle.wire.training_result import decode_forward_backward_output

if TYPE_CHECKING:
    from conftest import Api


def test_operations_run_in_the_order_of_their_numbers_when_the_first_chunk_comes_last(
    api: Api, http: httpx.Client, model_id: str
) -> None:
    tickets = {seq: send_passes(http, passes(model_id, seq)).json()["request_id"] for seq in (2, 3, 1, 4)}

    results = {seq: retrieve(http, request_id) for seq, request_id in tickets.items()}

    metrics = {seq: decode_forward_backward_output(result.content).metrics for seq, result in results.items()}
    assert metrics == {seq: {"loss:sum": float(seq)} for seq in (1, 2, 3, 4)}
    assert [claim.seq for claim in api.worker.executed_of(model_id)] == [0, 1, 2, 3, 4]


def test_a_resend_gets_the_same_future_and_runs_once(api: Api, http: httpx.Client, model_id: str) -> None:
    first = send_passes(http, passes(model_id, 1)).json()
    retrieve(http, first["request_id"])
    again = send_passes(http, passes(model_id, 1)).json()
    step = http.post("/optim_step", json=optim_step(model_id, 2)).json()
    step_again = http.post("/optim_step", json=optim_step(model_id, 2)).json()
    retrieve(http, step["request_id"])

    assert again == first
    assert step_again == step
    assert [claim.seq for claim in api.worker.executed_of(model_id)] == [0, 1, 2]


@pytest.mark.parametrize("length", [4, 30_000])
def test_another_body_under_a_used_number_is_refused_at_once_and_changes_nothing(
    http: httpx.Client, model_id: str, length: int
) -> None:
    ticket = send_passes(http, passes(model_id, 1, length=4, token=6)).json()

    refused = send_passes(http, passes(model_id, 1, length=length % 15_000 + 4, token=7))

    assert refused.status_code == 400
    assert refused.json()["code"] == "conflict"
    assert "seq_id 1" in refused.json()["detail"]
    assert int(refused.headers["content-length"]) > 0
    assert retrieve(http, ticket["request_id"]).status_code == 200


def test_a_resent_ephemeral_save_is_known_by_its_number_though_its_sampling_session_counts_on(
    api: Api, http: httpx.Client, model_id: str
) -> None:
    body = {"model_id": model_id, "seq_id": 1, "sampling_session_seq_id": 0}

    first, again = (http.post("/save_weights_for_sampler", json=body | {"sampling_session_seq_id": n}) for n in (0, 1))

    assert first.json() == again.json()
    result = retrieve(http, first.json()["request_id"]).json()
    assert result["sampling_session_id"] == f"{model_id.partition(':train:')[0]}:sample:0"
    assert [claim.seq for claim in api.worker.executed_of(model_id)] == [0, 1]


def test_a_create_model_with_a_drawn_seed_can_be_resent(api: Api, http: httpx.Client, session_id: str) -> None:
    body = {"session_id": session_id, "model_seq_id": 7, "base_model": "tiny/one"}
    first, again = (http.post("/create_model", json=body).json() for _ in range(2))
    other = http.post("/create_model", json=body | {"lora_config": {"rank": 4}})

    retrieve(http, first["request_id"])

    assert first == again == {"request_id": f"{session_id}:train:7:req:0", "model_id": f"{session_id}:train:7"}
    assert other.status_code == 400
    (claim,) = api.worker.executed_of(first["model_id"])
    payload = json.loads(api.worker.payload(claim))
    assert payload == {
        "base_model": "tiny/one",
        "rank": 32,
        "seed": payload["seed"],
        "dialect": "tinker",
        "peft": None,
        "gradient_accumulation_steps": 1,
        "train_attn": True,
        "train_mlp": True,
        "train_unembed": True,
        "alpha": 32.0,
    }
    assert api.worker.stores.adapters.find(first["model_id"]).config.seed == payload["seed"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"base_model": "no/such"}, "base_model: 'no/such' is not served here; this server serves: tiny/one"),
        ({"lora_config": {"rank": 65}}, "lora_config.rank: must be at most 64 here, not 65"),
        ({"lora_config": {"rank": 0}}, "lora_config: is missing, or of rank 0: the whole model would be trained"),
        ({"lora_config": {"rank": -1}}, "lora_config.rank"),
        ({"lora_config": None}, "lora_config: is missing, or of rank 0: the whole model would be trained"),
        ({"lora_config": {"train_attn": False, "train_mlp": False, "train_unembed": False}}, "at least one of"),
        ({"optimizer_config": {"type": "dimuon", "version": 1}}, "optimizer_config.type: 'dimuon'"),
        ({"model_seq_id": "zero"}, "model_seq_id"),
    ],
)
def test_a_bad_create_model_is_refused_by_name(
    http: httpx.Client, session_id: str, change: dict[str, object], words: str
) -> None:
    body = {"session_id": session_id, "model_seq_id": 0, "base_model": "tiny/one"} | change

    refused = http.post("/create_model", json=body)

    assert refused.status_code == 400
    assert words in refused.json()["detail"]


def test_the_payload_is_kept_inline_or_as_a_blob_in_the_same_form(api: Api, http: httpx.Client, model_id: str) -> None:
    small, large = passes(model_id, 1), passes(model_id, 2, length=4000, forward_only=True)
    compressed = zstandard.ZstdCompressor().compress(large)
    tickets = [
        send_passes(http, small).json()["request_id"],
        send_passes(http, compressed, **{"content-encoding": "zstd"}).json()["request_id"],
    ]

    results = [retrieve(http, ticket) for ticket in tickets]

    _, first, second = api.worker.executed_of(model_id)
    assert (first.kind, first.num_tokens, first.payload.blob) == (OperationKind.FORWARD_BACKWARD, 4, None)
    assert (second.kind, second.num_tokens, second.payload.inline) == (OperationKind.FORWARD, 4000, None)
    assert [api.worker.payload(claim) for claim in (first, second)] == [small, large]
    assert [result.headers["content-type"] for result in results] == ["application/x-protobuf"] * 2
    assert len(results[1].content) > api.settings.inline_payload_bytes


def test_a_result_can_be_read_again(http: httpx.Client, model_id: str) -> None:
    ticket = http.post("/optim_step", json=optim_step(model_id, 1)).json()["request_id"]

    answers = [retrieve(http, ticket).json() for _ in range(3)]

    assert answers == [{"metrics": {"seq": 1}}] * 3


def _zstd_bomb(model_id: str) -> bytes:
    return zstandard.ZstdCompressor().compress(passes(model_id, 1) + b"\x0a" + b"\x00" * 50_000_000)


BAD_BODIES = {
    "oversized": (lambda model_id: passes(model_id, 1, length=60_000), {}, "has more than 200000 bytes"),
    "a zstd bomb": (_zstd_bomb, {"content-encoding": "zstd"}, "more than 200000 bytes"),
    "broken after its address": (lambda model_id: passes(model_id, 1)[:60] + b"\xff\xff", {}, "not a valid"),
}


@pytest.mark.parametrize("name", BAD_BODIES)
def test_a_bad_pass_whose_number_is_known_fails_in_its_turn_and_the_next_is_served(
    http: httpx.Client, model_id: str, name: str
) -> None:
    make, headers, words = BAD_BODIES[name]
    bad = send_passes(http, make(model_id), **headers)
    again = send_passes(http, make(model_id), **headers)
    good = send_passes(http, passes(model_id, 2))

    failed = retrieve(http, bad.json()["request_id"])

    assert bad.status_code == 200
    assert again.json() == bad.json()
    assert failed.status_code == 200
    assert failed.json()["category"] == "user"
    assert words in failed.json()["error"]
    assert retrieve(http, good.json()["request_id"]).headers["content-type"] == "application/x-protobuf"


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("optim_step", {"adam_params": {"learning_rate": "fast"}}, "adam_params.learning_rate"),
        ("optim_step", {}, "needs either adam_params or optimizer_params"),
        ("optim_step", {"optimizer_params": {"type": "dimuon", "learning_rate": 0.1}}, "optimizer_params.type"),
        ("save_weights", {"path": "a/b"}, "path: a checkpoint's name"),
        ("save_weights", {"path": "a", "ttl_seconds": -1}, "ttl_seconds"),
        ("save_weights_for_sampler", {}, "needs either path or sampling_session_seq_id"),
        ("load_weights", {"path": "somewhere"}, "path: must begin with tinker://"),
    ],
)
def test_a_bad_json_operation_whose_number_is_known_fails_in_its_turn(
    http: httpx.Client, model_id: str, path: str, body: dict[str, object], words: str
) -> None:
    bad = http.post(f"/{path}", json=body | {"model_id": model_id, "seq_id": 1})
    good = http.post("/optim_step", json=optim_step(model_id, 2)).json()

    failed = retrieve(http, bad.json()["request_id"]).json()

    assert failed["category"] == "user"
    assert words in failed["error"]
    assert retrieve(http, good["request_id"]).json() == {"metrics": {"seq": 2}}


@pytest.mark.parametrize(
    ("content", "headers", "status"),
    [
        (b"this is no protobuf", {}, 400),
        (b"", {}, 400),
        (b"this is no zstd", {"content-encoding": "zstd"}, 400),
        (b"\x1f\x8b", {"content-encoding": "gzip"}, 400),
        (b"\x00" * 300_000, {}, 413),
        (passes("", 1), {}, 400),
    ],
)
def test_a_pass_without_an_address_is_refused_with_a_body(
    http: httpx.Client, content: bytes, headers: dict[str, str], status: int
) -> None:
    refused = send_passes(http, content, **headers)

    assert refused.status_code == status
    assert refused.json()["detail"]
    assert int(refused.headers["content-length"]) == len(refused.content)


def test_a_number_from_nowhere_is_refused(http: httpx.Client, model_id: str) -> None:
    refused = http.post("/optim_step", json=optim_step(model_id, 2_000_000))

    assert refused.status_code == 400
    assert "seq_id: 2000000 is more than 10000 ahead" in refused.json()["detail"]


def test_the_secrets_of_a_body_are_not_kept(api: Api, http: httpx.Client, model_id: str) -> None:
    body = {"model_id": model_id, "seq_id": 1, "path": f"tinker://{model_id}/weights/a", "optimizer": True}

    ticket = http.post("/load_weights", json=body | {"weights_access_token": "tml-secret"}).json()
    retrieve(http, ticket["request_id"])

    claim = api.worker.executed_of(model_id)[-1]
    assert json.loads(api.worker.payload(claim)) == {"path": body["path"], "optimizer": True}


def test_get_info_says_what_an_adapter_is(http: httpx.Client, model_id: str) -> None:
    info = http.post("/get_info", json={"model_id": model_id}).json()

    assert info["model_data"] == {
        "model_name": "tiny/one",
        "arch": "Qwen3ForCausalLM",
        "tokenizer_id": "/srv/models/tiny/one",
    }
    assert (info["lora_rank"], info["is_lora"], info["model_name"]) == (8, True, "tiny/one")
    for header in ({"X-Forwarded-For": "203.0.113.7"}, {"Host": "twinkle.example"}):
        # Whoever may be elsewhere has no use for a folder of this machine.
        told = http.post("/get_info", json={"model_id": model_id}, headers=header)
        assert "/srv/" not in told.text


def test_an_unloaded_adapter_ends_after_what_was_sent_and_everything_else_says_so(
    api: Api, http: httpx.Client, model_id: str
) -> None:
    with api.worker.paused():
        saved = http.post("/save_weights", json={"model_id": model_id, "seq_id": 1, "path": "kept"}).json()
        first, again = (http.post("/unload_model", json={"model_id": model_id}).json() for _ in range(2))
        refused = [
            http.post("/optim_step", json=optim_step(model_id, 2)),
            send_passes(http, passes(model_id, 3)),
            http.post("/get_info", json={"model_id": model_id}),
        ]
    ended = retrieve(http, first["request_id"])
    path = retrieve(http, saved["request_id"]).json()["path"]

    assert first == again == {"request_id": f"{model_id}:req:2", "model_id": model_id}
    assert (ended.status_code, ended.json()) == (200, {"model_id": model_id, "type": "unload_model"})
    assert [answer.status_code for answer in refused] == [400] * 3
    assert {answer.json()["detail"] for answer in refused} == {
        f"model_id: {model_id} was unloaded; make a new run of one of its checkpoints to go on"
    }
    assert http.post("/weights_info", json={"tinker_path": path}).status_code == 200
    assert http.get(f"/training_runs/{model_id}").status_code == 200


def test_an_adapter_of_somebody_else_cannot_be_unloaded(api: Api, model_id: str) -> None:
    with api.http(api.new_key()) as stranger:
        theirs = stranger.post("/unload_model", json={"model_id": model_id})
        nobodys = stranger.post("/unload_model", json={"model_id": "nothing:train:0"})

    assert theirs.status_code == nobodys.status_code == 404
    assert theirs.json()["code"] == nobodys.json()["code"]


def test_the_sdks_resource_unloads_a_model(api: Api, key: str) -> None:
    # As `AsyncModelsResource.unload` of SDKs up to 0.25 sends it, and as they read its future.
    body = tinker.types.UnloadModelRequest(model_id="s:train:0").model_dump(mode="json")
    assert body == {"model_id": "s:train:0", "type": "unload_model"}
    run = api.sdk(key).create_lora_training_client(base_model=BASE_MODEL, rank=8)
    with api.http(key) as http:
        ticket = http.post("/unload_model", json=body | {"model_id": run.model_id})
        future = tinker.types.UntypedAPIFuture.model_validate(ticket.json())
        answer = tinker.types.UnloadModelResponse.model_validate(retrieve(http, future.request_id).json())

    assert (answer.model_id, answer.type) == (run.model_id, "unload_model")
    with pytest.raises(tinker.BadRequestError, match="was unloaded"):
        run.optim_step(tinker.AdamParams()).result()
