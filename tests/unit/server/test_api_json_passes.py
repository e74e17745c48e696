"""SDK 0.16.1 sends passes as JSON and reads results as JSON: the operations are those of a newer SDK all the same."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import zstandard
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.types import Datum, ForwardBackwardInput, ModelInput
from tinker.types.forward_backward_request import ForwardBackwardRequest

from harness.calls import optim_step, passes, retrieve, send_passes
from harness.fake_worker import BASE_MODEL
from twinkle.core.operation import OperationKind
from twinkle.wire.training import decode_data

if TYPE_CHECKING:
    from conftest import Api

SDK_016 = {"accept": "application/json"}
"""With which it asks for every result."""
INPUTS = {
    "cross_entropy": {"target_tokens": [1, 2, 3], "weights": [1.0, 1.0, 1.0]},
    "ppo": {
        "target_tokens": [1, 2, 3],
        "logprobs": [-0.10000000149011612, -0.20000000298023224, -0.30000001192092896],
        "advantages": [0.0, 1.0, 1.0],
    },
}
CONFIGS: dict[str, dict[str, float] | None] = {"cross_entropy": None, "ppo": {"clip_low_threshold": 0.8}}


def sent(model_id: str, seq_id: int, loss_fn: str = "cross_entropy", *, forward_only: bool = False) -> dict[str, Any]:
    """What SDK 0.16.1 was seen to send."""
    inputs = {
        name: {"data": data, "dtype": "int64" if name == "target_tokens" else "float32", "shape": [3]}
        for name, data in INPUTS[loss_fn].items()
    }
    datum = {"loss_fn_inputs": inputs, "model_input": {"chunks": [{"tokens": [1, 2, 3]}]}}
    passed = {"data": [datum] * 2, "loss_fn": loss_fn, "loss_fn_config": CONFIGS[loss_fn]}
    return {
        "forward_input" if forward_only else "forward_backward_input": passed,
        "model_id": model_id,
        "seq_id": seq_id,
    }


def in_protobuf(model_id: str, seq_id: int, loss_fn: str, *, forward_only: bool) -> bytes:
    """The same from the SDK of today."""
    datum = Datum(model_input=ModelInput.from_ints([1, 2, 3]), loss_fn_inputs=INPUTS[loss_fn])
    passed = ForwardBackwardInput(data=[datum] * 2, loss_fn=loss_fn, loss_fn_config=CONFIGS[loss_fn])
    request = ForwardBackwardRequest(forward_backward_input=passed, model_id=model_id, seq_id=seq_id)
    message = forward_backward_request_to_proto(request)
    message.forward_only = forward_only
    return message.SerializeToString()


@pytest.mark.parametrize("loss_fn", INPUTS)
@pytest.mark.parametrize("forward_only", [True, False])
def test_the_operation_is_the_one_that_todays_sdk_asks_for(
    api: Api, http: httpx.Client, model_id: str, loss_fn: str, forward_only: bool
) -> None:
    path = "/forward" if forward_only else "/forward_backward"

    first = http.post(path, json=sent(model_id, 1, loss_fn, forward_only=forward_only)).json()
    resent = send_passes(http, in_protobuf(model_id, 1, loss_fn, forward_only=forward_only)).json()
    other = send_passes(http, in_protobuf(model_id, 2, loss_fn, forward_only=forward_only)).json()
    retrieve(http, other["request_id"])

    assert resent == first, "what another body under this number would not be"
    _, in_json, in_binary = api.worker.executed_of(model_id)
    assert in_json.kind is in_binary.kind is (OperationKind.FORWARD if forward_only else OperationKind.FORWARD_BACKWARD)
    assert in_json.num_tokens == in_binary.num_tokens == 6
    read, meant = (decode_data(api.worker.payload(claim)) for claim in (in_json, in_binary))
    assert read.loss_fn_config == meant.loss_fn_config == (CONFIGS[loss_fn] or {})
    for ours, theirs in zip(read.data, meant.data, strict=True):
        assert ours.inputs.keys() == theirs.inputs.keys()
        assert all(ours.inputs[name].tobytes() == theirs.inputs[name].tobytes() for name in theirs.inputs)


def test_results_come_as_json_to_who_reads_nothing_else(http: httpx.Client, session_id: str, model_id: str) -> None:
    passed = http.post("/forward_backward", json=sent(model_id, 1)).json()["request_id"]
    session = {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": BASE_MODEL, "model_path": None}
    sampler = http.post("/create_sampling_session", json=session).json()["sampling_session_id"]
    sample = {
        "num_samples": 2,
        "prompt": {"chunks": [{"tokens": [1, 2, 3]}]},
        "sampling_params": {"max_tokens": 2},
        "sampling_session_id": sampler,
        "seq_id": 0,
        "prompt_logprobs": True,
        "topk_prompt_logprobs": 0,
    }
    drawn = http.post("/asample", json=sample).json()["request_id"]

    outputs, samples = (retrieve(http, request_id, **SDK_016) for request_id in (passed, drawn))

    logprobs = {"data": [-1.0] * 3, "dtype": "float32", "shape": [3]}
    assert outputs.json() == {
        "loss_fn_output_type": "ArrayRecord",
        "loss_fn_outputs": [{"logprobs": logprobs}] * 2,
        "metrics": {"loss:sum": 1.0},
    }
    sequence = {"stop_reason": "length", "tokens": [0, 1], "logprobs": [-1.0, -1.0]}
    assert samples.json() == {"type": "sample", "sequences": [sequence] * 2, "prompt_logprobs": [None, -1.5, -1.5]}
    for newer in ("application/x-protobuf", "application/x-protobuf, application/json", "*/*"):
        assert retrieve(http, passed, accept=newer).headers["content-type"] == "application/x-protobuf"


def test_a_large_result_is_announced_and_then_comes_as_json(api: Api, http: httpx.Client, model_id: str) -> None:
    request_id = send_passes(http, passes(model_id, 1, length=4000)).json()["request_id"]
    retrieve(http, request_id)

    body = {"request_id": request_id, "allow_metadata_only": True}
    announced = http.post("/retrieve_future", json=body, headers=SDK_016).json()
    whole = retrieve(http, request_id, **SDK_016).json()

    assert announced["status"] == "complete_metadata"
    assert announced["response_payload_size"] > api.settings.inline_payload_bytes
    assert whole["loss_fn_outputs"][0]["logprobs"]["shape"] == [4000]


def test_where_there_is_no_room_for_a_result_the_client_is_told_to_ask_again(
    api: Api, http: httpx.Client, model_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    request_id = send_passes(http, passes(model_id, 1, length=4000)).json()["request_id"]
    retrieve(http, request_id)
    budget = api.state().common.results.budget
    with monkeypatch.context() as full:
        # Somebody else's, and all that may be.
        full.setattr(budget, "_held_bytes", 1)
        full.setattr(budget, "limit_bytes", 1)
        pending = http.post("/retrieve_future", json={"request_id": request_id}, headers=SDK_016)

    # It gives up after any other refusal.
    assert (pending.status_code, pending.json()["queue_state"]) == (408, "paused_capacity")
    assert retrieve(http, request_id, **SDK_016).status_code == 200


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown dtype": ({"dtype": "int8"}, "data[0].loss_fn_inputs.weights.dtype: must be 'int64' or 'float32'"),
    "no number": ({"data": [1.0, None, 1.0]}, "data[0].loss_fn_inputs.weights.data[1]: must be a valid number"),
    "a huge shape": ({"shape": [2**70]}, "data[0].loss_fn_inputs.weights.shape: holds a number outside"),
}


@pytest.mark.parametrize("name", [*BAD, "too many bytes"])
def test_what_is_wrong_fails_in_its_turn_and_names_the_field(
    api: Api, http: httpx.Client, model_id: str, name: str
) -> None:
    body = sent(model_id, 1)
    weights = body["forward_backward_input"]["data"][0]["loss_fn_inputs"]["weights"]
    change, words = BAD.get(name, ({"data": [1] * 30_000, "shape": [30_000], "dtype": "int64"}, "more than 200000"))
    weights |= change

    bad = http.post("/forward_backward", json=body)
    good = http.post("/optim_step", json=optim_step(model_id, 2)).json()

    failed = retrieve(http, bad.json()["request_id"], **SDK_016).json()
    assert failed["category"] == "user" and words in failed["error"]
    assert retrieve(http, good["request_id"]).json() == {"metrics": {"seq": 2}}


def test_a_body_beyond_the_limit_is_refused_before_it_is_read(http: httpx.Client, model_id: str) -> None:
    body = json.dumps(sent(model_id, 1)).encode()
    kind = {"content-type": "application/json"}

    plain = http.post("/forward", content=body + b" " * 200_000, headers=kind)
    bomb = zstandard.compress(body + b" " * 50_000_000)
    packed = http.post("/forward_backward", content=bomb, headers=kind | {"content-encoding": "zstd"})

    assert plain.status_code == packed.status_code == 413


def test_a_run_of_an_older_sdk_is_numbered_like_any_other(api: Api, http: httpx.Client, model_id: str) -> None:
    tickets = [
        http.post("/forward_backward", json=sent(model_id, 2)).json(),
        http.post("/forward", json=sent(model_id, 3, forward_only=True)).json(),
        http.post("/forward_backward", json=sent(model_id, 1)).json(),
    ]
    again = http.post("/forward", json=sent(model_id, 3, forward_only=True)).json()
    conflict = http.post("/forward_backward", json=sent(model_id, 1, "ppo"))

    assert all(retrieve(http, ticket["request_id"], **SDK_016).status_code == 200 for ticket in tickets)
    assert again == tickets[1] and conflict.json()["code"] == "conflict"
    assert [claim.seq for claim in api.worker.executed_of(model_id)] == [0, 1, 2, 3]
