"""Our bodies and the SDK's types understand each other, and a bad body is named, never a crash."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Any

import orjson
import pytest
import tinker.types as sdk
from tinker._compat import model_dump
from tinker.types.optim_step_request import OptimStepRequest as SdkOptimStepRequest
from tinker.types.optimizer import DimuonOptimizerConfig, DimuonParams
from tinker.types.save_weights_external_response import SaveWeightsExternalResponseInternal
from tinker.types.save_weights_for_sampler_response import SaveWeightsForSamplerResponseInternal
from tinker.types.shared.untyped_api_future import UntypedAPIFuture

from twinkle.core.errors import InvalidInput
from twinkle.wire.bodies import checkpoints, futures, sampling, session, training
from twinkle.wire.bodies.base import RequestBody, ResponseBody, parse_body
from twinkle.wire.digest import EPHEMERAL_SAVE_IGNORES, body_digest

NOW = datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC)
MODEL = "s:train:0"
CHECKPOINT = checkpoints.CheckpointInfo(
    checkpoint_id="weights/a", checkpoint_type="training", time=NOW, tinker_path=f"tinker://{MODEL}/weights/a"
)


def _sent(request: Any) -> bytes:
    """What the SDK puts on the wire for one of its request objects."""
    return orjson.dumps(model_dump(request, exclude_unset=False, exclude_none=True, mode="json"))


def _assert_arrived(sent: Any, read: Any) -> None:
    if isinstance(sent, dict):
        # The SDK drops what it does not know, such as some discriminators.
        for name in sent.keys() & read.keys():
            _assert_arrived(sent[name], read[name])
    elif isinstance(sent, list):
        for one, other in zip(sent, read, strict=True):
            _assert_arrived(one, other)
    else:
        assert read == sent


@pytest.mark.parametrize(
    ("request_object", "body_class"),
    [
        (sdk.CreateSessionRequest(tags=["a"], user_metadata={"a": "b"}, sdk_version="1"), session.CreateSessionRequest),
        (sdk.SessionHeartbeatRequest(session_id="s"), session.SessionHeartbeatRequest),
        (
            sdk.CreateModelRequest(
                session_id="s", model_seq_id=0, base_model="m", lora_config=sdk.LoraConfig(rank=8, seed=1)
            ),
            training.CreateModelRequest,
        ),
        (sdk.GetInfoRequest(model_id=MODEL), training.GetInfoRequest),
        (sdk.SaveWeightsRequest(model_id=MODEL, path="a", seq_id=1, ttl_seconds=7200), training.SaveWeightsRequest),
        (
            sdk.SaveWeightsForSamplerRequest(model_id=MODEL, sampling_session_seq_id=1, seq_id=2, kind="inflight"),
            training.SaveWeightsForSamplerRequest,
        ),
        (
            sdk.LoadWeightsRequest(session_id="s", model_seq_id=1, path="tinker://r/weights/a", optimizer=True),
            training.LoadWeightsRequest,
        ),
        (
            sdk.LoadWeightsRequest(model_id=MODEL, seq_id=1, path="tinker://r/weights/a", optimizer=False),
            training.LoadWeightsRequest,
        ),
        (
            sdk.CreateSamplingSessionRequest(session_id="s", sampling_session_seq_id=0, base_model="m"),
            sampling.CreateSamplingSessionRequest,
        ),
        (sdk.FutureRetrieveRequest(request_id="r", allow_metadata_only=True), futures.RetrieveFutureRequest),
    ],
)
def test_what_the_sdk_sends_arrives(request_object: Any, body_class: type[RequestBody]) -> None:
    body = parse_body(body_class, _sent(request_object))

    for name, value in body.model_dump(exclude={"lora_config", "optimizer_config"}).items():
        assert value == getattr(request_object, name)


def test_lora_settings_and_the_optimizer_arrive() -> None:
    request = sdk.CreateModelRequest(
        session_id="s",
        model_seq_id=0,
        base_model="m",
        lora_config=sdk.LoraConfig(rank=8, train_mlp=False),
        optimizer_config=DimuonOptimizerConfig(),
    )

    body = parse_body(training.CreateModelRequest, _sent(request))

    assert body.lora_config == training.LoraConfig(rank=8, train_mlp=False)
    assert body.optimizer_config.type == "dimuon"
    assert not body.optimizer_config.is_supported
    assert training.OptimizerConfig().is_supported


def test_both_kinds_of_optimizer_settings_arrive() -> None:
    adam = SdkOptimStepRequest(optim_params=sdk.AdamParams(learning_rate=0.5), model_id=MODEL, seq_id=2)
    dimuon = SdkOptimStepRequest(optim_params=DimuonParams(learning_rate=0.5), model_id=MODEL, seq_id=2)

    adam_body = parse_body(training.OptimStepRequest, _sent(adam))
    dimuon_body = parse_body(training.OptimStepRequest, _sent(dimuon))

    assert adam_body.adam_params == training.AdamParams(learning_rate=0.5)
    assert training.AdamParams().model_dump() == sdk.AdamParams().model_dump()
    assert dimuon_body.optimizer_params == training.OptimizerParams(type="dimuon", learning_rate=0.5)


@pytest.mark.parametrize("number", ["NaN", "null", "Infinity", "-Infinity", "1e999"])
def test_a_learning_rate_that_is_not_finite_reaches_the_worker_as_a_float(number: str) -> None:
    raw = f'{{"model_id":"m","seq_id":1,"adam_params":{{"learning_rate":{number}}}}}'

    body = parse_body(training.OptimStepRequest, raw.encode())

    assert body.adam_params is not None
    assert not math.isfinite(body.adam_params.learning_rate)


@pytest.mark.parametrize(
    ("raw", "field"),
    [
        (b"", "body"),
        (b"nonsense", "body"),
        (b"\xff\xfe", "body"),
        (b"[]", "body"),
        (b"null", "body"),
        (b"[" * 100_000, "body"),
        (b"{}", "model_id"),
        (b'{"model_id":"","seq_id":1,"adam_params":{}}', "model_id"),
        (b'{"model_id":"a\\u0000","seq_id":1,"adam_params":{}}', "model_id"),
        (b'{"model_id":"\\ud800","seq_id":1,"adam_params":{}}', "body"),
        (b'{"model_id":"m","seq_id":0,"adam_params":{}}', "seq_id"),
        (b'{"model_id":"m","seq_id":true,"adam_params":{}}', "seq_id"),
        (b'{"model_id":"m","seq_id":NaN,"adam_params":{}}', "seq_id"),
        (b'{"model_id":"m","seq_id":1e3,"adam_params":{}}', "seq_id"),
        (b'{"model_id":"m","seq_id":9999999999999999999999,"adam_params":{}}', "seq_id"),
        (b'{"model_id":"m","seq_id":1}', "body"),
        (b'{"model_id":"m","seq_id":1,"adam_params":{"learning_rate":"1"}}', "adam_params.learning_rate"),
    ],
)
def test_a_bad_body_is_refused_by_the_name_of_the_field(raw: bytes, field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_body(training.OptimStepRequest, raw)

    assert caught.value.field == field


def test_the_address_of_a_bad_operation_can_still_be_read() -> None:
    key = training.peek_operation(b'{"model_id":"m","seq_id":3,"adam_params":{"learning_rate":"1"}}')

    assert key is not None
    assert (key.model_id, key.seq_id) == ("m", 3)


@pytest.mark.parametrize(
    "raw",
    [b"", b"[]", b"{}", b"\xff", b"[" * 100_000, b'{"model_id":"m","seq_id":true}', b'{"model_id":[],"seq_id":1}'],
)
def test_a_body_without_an_address_has_none(raw: bytes) -> None:
    assert training.peek_operation(raw) is None


@pytest.mark.parametrize("escape", [rb"\u0000", rb"\ud800", rb"\udc00a"])
def test_an_address_that_no_database_takes_is_none(escape: bytes) -> None:
    assert training.peek_operation(b'{"model_id":"%s","seq_id":1}' % escape) is None


def test_unknown_fields_are_ignored() -> None:
    body = parse_body(session.SessionHeartbeatRequest, b'{"session_id":"s","type":"session_heartbeat","new":1}')

    assert body.session_id == "s"


def test_metadata_of_any_shape_becomes_text() -> None:
    raw = b'{"user_metadata":{"a":"b","n":1,"x":NaN,"l":[1,null],"none":null}}'

    body = parse_body(session.CreateSessionRequest, raw)

    assert body.user_metadata == {"a": "b", "n": "1", "x": "NaN", "l": "[1,null]", "none": "null"}


@pytest.mark.parametrize(
    ("body_class", "raw"),
    [
        (training.LoadWeightsRequest, b'{"path":"p","optimizer":true}'),
        (training.LoadWeightsRequest, b'{"path":"p","optimizer":true,"model_id":"m"}'),
        (training.LoadWeightsRequest, b'{"path":"p","model_id":"m","seq_id":1,"session_id":"s","model_seq_id":0}'),
        (training.LoadWeightsRequest, b'{"path":"p","model_id":"m","seq_id":1,"session_id":"s"}'),
        (training.SaveWeightsForSamplerRequest, b'{"model_id":"m","seq_id":1}'),
        (training.SaveWeightsForSamplerRequest, b'{"model_id":"m","seq_id":1,"path":"a","sampling_session_seq_id":1}'),
        (checkpoints.CopyWeightsRequest, b'{"source_path":"p"}'),
        (checkpoints.CopyWeightsRequest, b'{"source_path":"p","session_id":"s"}'),
        (checkpoints.SetTtlRequest, b'{"ttl_seconds":0}'),
        (checkpoints.SetTtlRequest, b"{}"),
        (sampling.CreateSamplingSessionRequest, b'{"session_id":"s","sampling_session_seq_id":0}'),
        (session.FinishSessionRequest, b'{"reason":{"type":"other"}}'),
    ],
)
def test_bodies_that_contradict_themselves_are_refused(body_class: type[RequestBody], raw: bytes) -> None:
    with pytest.raises(InvalidInput):
        parse_body(body_class, raw)


def test_a_ttl_of_null_means_for_ever() -> None:
    assert parse_body(checkpoints.SetTtlRequest, b'{"ttl_seconds":null}').ttl_seconds is None


def test_an_access_token_is_not_printed() -> None:
    body = parse_body(
        training.LoadWeightsRequest, b'{"path":"p","model_id":"m","seq_id":1,"weights_access_token":"x9"}'
    )

    assert body.weights_access_token == "x9"
    assert "x9" not in repr(body)


@pytest.mark.parametrize(
    ("response", "sdk_class"),
    [
        (session.ClientConfigResponse(), sdk.ClientConfigResponse),
        (session.ClientConfigResponse(proto_compress_fwdbwd=True), sdk.ClientConfigResponse),
        (session.ClientDynamicConfigResponse(), sdk.ClientDynamicConfigResponse),
        (session.CreateSessionResponse(session_id="s"), sdk.CreateSessionResponse),
        (session.SessionHeartbeatResponse(), sdk.SessionHeartbeatResponse),
        (session.TelemetryResponse(), sdk.TelemetryResponse),
        (
            session.CapabilitiesResponse(supported_models=[session.SupportedModel(model_name="m")]),
            sdk.GetServerCapabilitiesResponse,
        ),
        (session.SessionResponse(training_run_ids=[MODEL], sampler_ids=[]), sdk.GetSessionResponse),
        (session.SessionsResponse(sessions=["s"]), sdk.ListSessionsResponse),
        (futures.FutureResponse(request_id="r"), UntypedAPIFuture),
        (futures.FutureResponse(request_id="r", model_id=MODEL, sample_sequence_ids=["r:0"]), UntypedAPIFuture),
        (futures.FailedResponse(error="x", category="user"), sdk.RequestFailedResponse),
        (
            futures.RetrieveFuturesResponse(
                completions=[futures.FinishedCompletion(request_id="a"), futures.FailedCompletion(request_id="b")],
                cursor=3,
            ),
            sdk.FuturesRetrieveResponse,
        ),
        (training.CreateModelResponse(model_id=MODEL), sdk.CreateModelResponse),
        (
            training.GetInfoResponse(model_data=training.ModelData(model_name="m"), model_id=MODEL, lora_rank=8),
            sdk.GetInfoResponse,
        ),
        (training.OptimStepResponse(metrics={"a": 1.5}), sdk.OptimStepResponse),
        (training.OptimStepResponse(), sdk.OptimStepResponse),
        (training.SaveWeightsResponse(path="tinker://r/weights/a"), sdk.SaveWeightsResponse),
        (
            training.SaveWeightsForSamplerResponse(sampling_session_id="s:sample:0"),
            SaveWeightsForSamplerResponseInternal,
        ),
        (
            training.SaveWeightsForSamplerResponse(path="tinker://r/sampler_weights/a"),
            sdk.SaveWeightsForSamplerResponse,
        ),
        (
            training.SaveWeightsExternalResponse(path="tinker://r/external_weights/a", size_bytes=3),
            SaveWeightsExternalResponseInternal,
        ),
        (training.LoadWeightsResponse(path="tinker://r/weights/a", model_id=MODEL), sdk.LoadWeightsResponse),
        (checkpoints.CheckpointsResponse(checkpoints=[CHECKPOINT]), sdk.CheckpointsListResponse),
        (
            checkpoints.TrainingRunsResponse(
                training_runs=[
                    checkpoints.TrainingRun(
                        training_run_id=MODEL,
                        base_model="m",
                        model_owner="o",
                        is_lora=True,
                        last_request_time=NOW,
                        last_checkpoint=CHECKPOINT,
                    )
                ],
                cursor=checkpoints.Cursor(offset=0, limit=20, total_count=1),
            ),
            sdk.TrainingRunsResponse,
        ),
        (checkpoints.WeightsInfoResponse(base_model="m", is_lora=True, lora_rank=8), sdk.WeightsInfoResponse),
        (checkpoints.CopyWeightsResponse(tinker_path="tinker://r/weights/a"), sdk.CopyWeightsResponse),
        (checkpoints.ExternalWeightsUrlsResponse(urls={"a": "b"}, expires=NOW), sdk.ExternalWeightsUrlsResponse),
        (sampling.CreateSamplingSessionResponse(sampling_session_id="s:sample:0"), sdk.CreateSamplingSessionResponse),
        (sampling.SamplerResponse(sampler_id="s:sample:0", base_model="m"), sdk.GetSamplerResponse),
        (sampling.JoinSamplingSessionResponse(client_counter=1), sdk.JoinSamplingSessionResponse),
    ],
)
def test_what_we_answer_the_sdk_reads(response: ResponseBody, sdk_class: Any) -> None:
    theirs = sdk_class.model_validate(orjson.loads(response.to_json()))

    _assert_arrived(response.model_dump(exclude_none=True), theirs.model_dump())


def test_a_metric_that_is_not_finite_passes_the_sdks_json_reader() -> None:
    raw = training.OptimStepResponse(metrics={"grad_norm": math.nan, "loss": math.inf}).to_json()

    metrics = sdk.OptimStepResponse.model_validate(orjson.loads(raw)).metrics

    assert metrics is not None
    assert math.isnan(metrics["grad_norm"])
    assert metrics["loss"] == math.inf


def test_a_resend_has_the_same_digest_whatever_its_order_and_unknown_fields() -> None:
    first = parse_body(training.SaveWeightsRequest, b'{"model_id":"m","seq_id":1,"path":"a"}')
    resent = parse_body(training.SaveWeightsRequest, b'{"path":"a","seq_id":1,"model_id":"m","new":2}')
    other = parse_body(training.SaveWeightsRequest, b'{"path":"b","seq_id":1,"model_id":"m"}')

    assert body_digest(first) == body_digest(resent)
    assert body_digest(first) != body_digest(other)


def test_a_resent_ephemeral_save_may_carry_a_new_sampling_session_number() -> None:
    first = parse_body(
        training.SaveWeightsForSamplerRequest, b'{"model_id":"m","seq_id":1,"sampling_session_seq_id":1}'
    )
    resent = parse_body(
        training.SaveWeightsForSamplerRequest, b'{"model_id":"m","seq_id":1,"sampling_session_seq_id":2}'
    )

    assert body_digest(first) != body_digest(resent)
    assert body_digest(first, ignore=EPHEMERAL_SAVE_IGNORES) == body_digest(resent, ignore=EPHEMERAL_SAVE_IGNORES)
