"""What bad input gets: an error that names the field, an unchanged adapter, and service as before."""

from __future__ import annotations

import math
from collections.abc import Iterator

import httpx
import pytest
import tinker

from harness.served import Served

GOOD = {"target_tokens": [11, 12, 13], "weights": [1.0, 1.0, 1.0]}


def datum(tokens: list[int], **inputs: object) -> tinker.Datum:
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)


@pytest.fixture(scope="module")
def client(served: Served) -> tinker.ServiceClient:
    return served.client("bad-input")


@pytest.fixture(scope="module")
def run(client: tinker.ServiceClient) -> tinker.TrainingClient:
    return client.create_lora_training_client(base_model="tiny", rank=4, seed=1).result()


@pytest.fixture
def unharmed(run: tinker.TrainingClient) -> Iterator[None]:
    """The adapter answers the same before and after, and the operation after the bad one is served."""
    probe = [datum([10, 11, 12], **GOOD)]
    before = run.forward(probe, "cross_entropy").result().loss_fn_outputs[0]["logprobs"].tolist()
    yield
    after = run.forward(probe, "cross_entropy").result().loss_fn_outputs[0]["logprobs"].tolist()
    assert after == before


BAD_PASSES = {
    "token outside the vocabulary": ([10, 99_999, 12], GOOD, "cross_entropy", r"data\[0\].model_input.*vocabulary"),
    "target outside the vocabulary": (
        [10, 11, 12],
        GOOD | {"target_tokens": [11, 12, 99_999]},
        "cross_entropy",
        r"data\[0\].loss_fn_inputs.target_tokens.*vocabulary",
    ),
    "longer than the context": (
        [10] * 3000,
        {"target_tokens": [11] * 3000, "weights": [1.0] * 3000},
        "cross_entropy",
        r"data\[0\].model_input.*2048",
    ),
    "NaN weight": ([10, 11, 12], GOOD | {"weights": [1.0, math.nan, 1.0]}, "cross_entropy", r"weights.*finite"),
    "infinite weight": ([10, 11, 12], GOOD | {"weights": [1.0, math.inf, 1.0]}, "cross_entropy", r"weights.*finite"),
    "unknown loss": ([10, 11, 12], GOOD, "hinge", r"loss_fn.*cross_entropy"),
    "missing loss input": ([10, 11, 12], {"weights": [1.0] * 3}, "cross_entropy", r"target_tokens"),
    "missing logprobs": ([10, 11, 12], GOOD | {"advantages": [1.0] * 3}, "importance_sampling", r"logprobs"),
    "targets too short": ([10, 11, 12], GOOD | {"target_tokens": [11, 12]}, "cross_entropy", r"target_tokens"),
    "weights too long": ([10, 11, 12], GOOD | {"weights": [1.0] * 5}, "cross_entropy", r"weights"),
    "empty datum": ([], {"target_tokens": [], "weights": []}, "cross_entropy", r"data\[0\].model_input"),
    "targets of the wrong type": (
        [10, 11, 12],
        GOOD | {"target_tokens": tinker.TensorData(data=[1.5, 2.5, 3.5], dtype="float32", shape=[3])},
        "cross_entropy",
        r"target_tokens.*int64",
    ),
}


@pytest.mark.parametrize("case", BAD_PASSES)
@pytest.mark.usefixtures("unharmed")
def test_a_bad_forward_backward_fails_its_own_future_and_names_the_field(run: tinker.TrainingClient, case: str) -> None:
    tokens, inputs, loss, message = BAD_PASSES[case]

    with pytest.raises(tinker.RequestFailedError, match=message) as caught:
        run.forward_backward([datum(tokens, **inputs)], loss).result()

    assert caught.value.category == tinker.types.RequestErrorCategory.User


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"learning_rate": math.nan}, "learning_rate"),
        ({"learning_rate": math.inf}, "learning_rate"),
        ({"learning_rate": -1.0}, "learning_rate"),
        ({"learning_rate": 1e-3, "beta1": 1.5}, "beta1"),
        ({"learning_rate": 1e-3, "grad_clip_norm": -2.0}, "grad_clip_norm"),
    ],
)
def test_a_bad_optim_step_fails_names_the_parameter_and_changes_nothing(
    client: tinker.ServiceClient, params: dict[str, float], field: str
) -> None:
    run = client.create_lora_training_client(base_model="tiny", rank=4, seed=3).result()
    probe = [datum([10, 11, 12], **GOOD)]
    before = run.forward_backward(probe, "cross_entropy").result().loss_fn_outputs[0]["logprobs"].tolist()

    with pytest.raises(tinker.RequestFailedError, match=f"adam_params.{field}"):
        run.optim_step(tinker.AdamParams(**params)).result()

    assert run.forward(probe, "cross_entropy").result().loss_fn_outputs[0]["logprobs"].tolist() == before
    assert run.optim_step(tinker.AdamParams(learning_rate=1e-2)).result().metrics["grad_norm"] > 0


def test_an_optim_step_after_a_failed_forward_backward_is_not_applied_and_says_which_one_failed(
    client: tinker.ServiceClient,
) -> None:
    run = client.create_lora_training_client(base_model="tiny", rank=4, seed=2).result()
    good = [datum([10, 11, 12], **GOOD)]
    before = run.forward(good, "cross_entropy").result().loss_fn_outputs[0]["logprobs"].tolist()
    run.forward_backward(good, "cross_entropy").result()
    failed = run.forward_backward([datum([10, 99_999, 12], **GOOD)], "cross_entropy")
    stepped = run.optim_step(tinker.AdamParams(learning_rate=1e-2))

    with pytest.raises(tinker.RequestFailedError):
        failed.result()
    with pytest.raises(tinker.RequestFailedError, match=r"operation 3 .*cleared"):
        stepped.result()

    assert run.forward(good, "cross_entropy").result().loss_fn_outputs[0]["logprobs"].tolist() == before
    run.forward_backward(good, "cross_entropy").result()
    assert run.optim_step(tinker.AdamParams(learning_rate=1e-2)).result().metrics["step"] == 1.0


def test_an_unknown_base_model_is_refused_with_those_there_are(client: tinker.ServiceClient) -> None:
    with pytest.raises(tinker.BadRequestError, match=r"base_model.*tiny"):
        client.create_lora_training_client(base_model="no/such-model", rank=4).result()


def test_a_rank_beyond_the_limit_is_refused_with_the_limit(client: tinker.ServiceClient) -> None:
    with pytest.raises(tinker.BadRequestError, match=r"rank.*128"):
        client.create_lora_training_client(base_model="tiny", rank=100_000_000).result()


def test_a_bad_checkpoint_name_fails_the_save(run: tinker.TrainingClient) -> None:
    with pytest.raises(tinker.RequestFailedError, match="path"):
        run.save_state("../../evil").result()


def test_a_missing_checkpoint_fails_the_load(run: tinker.TrainingClient) -> None:
    with pytest.raises(tinker.RequestFailedError, match="no checkpoint"):
        run.load_state(f"tinker://{run.model_id}/weights/never-saved").result()


def test_a_prompt_that_cannot_be_served_fails_the_sample(client: tinker.ServiceClient) -> None:
    sampler = client.create_sampling_client(base_model="tiny").result()
    params = tinker.SamplingParams(max_tokens=2)

    with pytest.raises(tinker.RequestFailedError, match=r"prompt.*vocabulary"):
        sampler.sample(tinker.ModelInput.from_ints([99_999]), num_samples=1, sampling_params=params).result()
    with pytest.raises(tinker.RequestFailedError, match=r"prompt.*2048"):
        sampler.sample(tinker.ModelInput.from_ints([10] * 3000), num_samples=1, sampling_params=params).result()


CHUNKS = {
    "image": (
        tinker.types.ImageChunk(data=b"\x89PNG", format="png", expected_tokens=3),
        "is a picture, but this model takes text alone",
    ),
    "dmel": (tinker.types.DmelChunk(dmel=b"sound"), "is a chunk of kind dmel"),
}


@pytest.mark.parametrize("kind", CHUNKS)
@pytest.mark.usefixtures("unharmed")
def test_what_is_no_text_is_refused_by_its_kind(
    client: tinker.ServiceClient, run: tinker.TrainingClient, kind: str
) -> None:
    chunk, words = CHUNKS[kind]
    prompt = tinker.ModelInput(chunks=[tinker.types.EncodedTextChunk(tokens=[10, 11]), chunk])
    sampler = client.create_sampling_client(base_model="tiny").result()
    example = tinker.Datum(model_input=prompt, loss_fn_inputs=GOOD)

    with pytest.raises(tinker.RequestFailedError, match=rf"model_input\[1\]: {words}"):
        run.forward_backward([example], "cross_entropy").result(timeout=60)
    with pytest.raises(tinker.BadRequestError, match=rf"prompt\.chunks\[1\]: {words}"):
        sampler.sample(prompt, 1, tinker.SamplingParams(max_tokens=1)).result(timeout=60)


@pytest.mark.parametrize("key", [None, "tml-wrong", "nonsense"])
def test_a_wrong_or_missing_key_is_401(served: Served, key: str | None) -> None:
    headers = {} if key is None else {"X-API-Key": key}

    answer = httpx.get(f"{served.url}/api/v1/get_server_capabilities", headers=headers)

    assert answer.status_code == 401
    assert answer.json()["detail"]


def test_what_is_somebody_elses_is_as_if_it_did_not_exist(served: Served, run: tinker.TrainingClient) -> None:
    stranger = served.client("stranger")
    path = run.save_state("mine").result().path

    with pytest.raises(tinker.NotFoundError) as theirs:
        stranger.create_rest_client().get_training_run(run.model_id).result()
    with pytest.raises(tinker.NotFoundError) as nobodys:
        stranger.create_rest_client().get_training_run("no-such-session:train:0").result()
    with pytest.raises(tinker.TinkerError, match="checkpoint"):
        stranger.create_training_client_from_state(path).result()

    assert str(theirs.value).replace(run.model_id, "X") == str(nobodys.value).replace("no-such-session:train:0", "X")
