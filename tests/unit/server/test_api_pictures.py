"""Pictures over HTTP: counted and judged before anything is accepted, and kept with the operation."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from typing import TYPE_CHECKING

import httpx
import numpy as np
import pytest
import tinker

from harness.byte_tokenizer import write_tokenizer
from harness.calls import retrieve
from harness.fake_worker import BASE_MODEL, CAPABILITIES, FakeWorker
from harness.picture_files import picture_file
from twinkle.core.lease import ProcessIdentity
from twinkle.wire.pictures import WirePicture
from twinkle.wire.training import ForwardBackwardBody, WireDatum, encode_forward_backward

if TYPE_CHECKING:
    from conftest import Api

TOKEN = CAPABILITIES.pictures.token_id
PICTURE = picture_file(1)
"""24 x 16 pixels: 6 tokens."""
LARGE = picture_file(2, width=64, height=64)
"""More than fits the journal: 64 tokens in some 12 KB."""


def image(data: bytes = PICTURE, **changes: object) -> dict[str, object]:
    return {"type": "image", "data": base64.b64encode(data).decode(), "format": "png", **changes}


def sample(sampler_id: str, *chunks: dict[str, object]) -> dict[str, object]:
    return {
        "sampling_session_id": sampler_id,
        "seq_id": 0,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}, *chunks]},
        "sampling_params": {"max_tokens": 5},
    }


@pytest.fixture
def sampler_id(http: httpx.Client, session_id: str) -> str:
    body = {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": BASE_MODEL}
    return str(http.post("/create_sampling_session", json=body).json()["sampling_session_id"])


def test_the_sdk_trains_on_and_samples_from_pictures_and_their_tokens_are_counted(api: Api, key: str) -> None:
    chunks = [
        tinker.EncodedTextChunk(tokens=[1, 2]),
        tinker.types.ImageChunk(data=LARGE, format="png", expected_tokens=64),
        tinker.EncodedTextChunk(tokens=[3]),
    ]
    prompt = tinker.ModelInput(chunks=chunks)
    datum = tinker.Datum(model_input=prompt, loss_fn_inputs={"target_tokens": [0] * 67, "weights": [1.0] * 67})
    client = api.sdk(key)
    run = client.create_lora_training_client(base_model=BASE_MODEL, rank=8).result()
    (output,) = run.forward_backward([datum], "cross_entropy").result().loss_fn_outputs
    sampler = run.save_weights_and_get_sampling_client().result()
    asked = tinker.SamplingParams(max_tokens=4)
    (sequence,) = sampler.sample(prompt, 1, asked).result().sequences

    assert len(output["logprobs"].data) == 67
    assert len(sequence.tokens) == 4
    training = next(claim for claim in api.worker.executed if claim.lane == run.model_id and claim.seq == 1)
    sampled = api.worker.executed[-1]
    assert (training.num_tokens, sampled.num_tokens) == (67, 67 + 4)
    assert training.payload.blob is not None and sampled.payload.blob is not None


def test_a_picture_that_does_not_fit_is_a_future_that_fails_and_leaves_no_hole(
    http: httpx.Client, model_id: str
) -> None:
    data = (datum_of(num_tokens=7),)
    raw = encode_forward_backward(ForwardBackwardBody(model_id, 1, False, "cross_entropy", {}, data))
    ticket = http.post("/forward_backward", content=raw, headers={"content-type": "application/x-protobuf"})
    after = http.post("/optim_step", json={"model_id": model_id, "seq_id": 2, "adam_params": {}}).json()

    assert ticket.status_code == 200
    failed = retrieve(http, ticket.json()["request_id"]).json()
    assert failed["category"] == "user"
    assert "data[0].model_input[0].expected_tokens: is 7, but this model makes 6 tokens" in failed["error"]
    assert retrieve(http, after["request_id"]).status_code == 200


def datum_of(num_tokens: int) -> WireDatum:
    tokens = np.full(num_tokens, TOKEN, dtype=np.int64)
    inputs = {"target_tokens": tokens, "weights": np.ones(num_tokens, dtype=np.float32)}
    return WireDatum(tokens, inputs, (WirePicture(0, num_tokens, PICTURE),))


@pytest.mark.parametrize(
    ("chunk", "reason"),
    [
        (image(expected_tokens=9), "prompt.chunks[1].expected_tokens: is 9, but this model makes 6 tokens"),
        (image(PICTURE[:10]), "prompt.chunks[1].data: is not a png file"),
        (image(format="webp"), "prompt.chunks[1].format: must be one of png, jpeg"),
        (
            {"type": "image_asset_pointer", "location": "https://example.org/a.png", "format": "png"},
            "prompt.chunks[1]: points to a picture, but this server reads nobody's files",
        ),
    ],
)
def test_a_sample_of_a_picture_that_cannot_be_is_refused_at_once(
    http: httpx.Client, sampler_id: str, chunk: dict[str, object], reason: str
) -> None:
    refused = http.post("/asample", json=sample(sampler_id, chunk))
    assert refused.status_code == 400
    assert reason in refused.json()["detail"]


def test_a_resent_sample_finds_its_future_though_its_pictures_were_counted_meanwhile(
    http: httpx.Client, sampler_id: str
) -> None:
    first, again = (http.post("/asample", json=sample(sampler_id, image())).json() for _ in range(2))
    assert first == again


def test_limits_are_those_of_the_settings(serve_api, make_database_url) -> None:
    limits = {"max_picture_bytes": len(PICTURE), "max_picture_pixels": 24 * 16, "max_pictures": 1}
    with serve_api(make_database_url("sqlite"), **limits) as api:
        api.worker.register()
        with api.http(api.new_key()) as http:
            session = http.post("/create_session", json={"type": "create_session"}).json()["session_id"]
            body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": BASE_MODEL}
            sampler = http.post("/create_sampling_session", json=body).json()["sampling_session_id"]
            answers = [
                http.post("/asample", json=sample(sampler, *chunks)).json()
                for chunks in (
                    [image(LARGE)],
                    [image(picture_file(1, width=8, height=400)[: len(PICTURE)])],
                    [image(), image()],
                )
            ]
    assert [answer["detail"].partition(":")[2].split(",")[0].strip() for answer in answers] == [
        f"is a file of {len(LARGE)} bytes",
        "is a picture of 8 x 400 pixels",
        "holds 2 pictures",
    ]


def test_a_mesh_whose_samples_vllm_draws_trains_on_pictures_and_refuses_them_in_prompts(
    serve_api, make_database_url
) -> None:
    with serve_api(make_database_url("sqlite")) as served:
        worker = FakeWorker(served.settings, capabilities=CAPABILITIES.model_copy(update={"sampler": "vllm"}))
        worker.start()
        key = served.new_key()
        run = served.sdk(key).create_lora_training_client(base_model=BASE_MODEL, rank=8).result()
        prompt = tinker.ModelInput(chunks=[tinker.types.ImageChunk(data=PICTURE, format="png", expected_tokens=6)])
        datum = tinker.Datum(model_input=prompt, loss_fn_inputs={"target_tokens": [0] * 6, "weights": [1.0] * 6})
        run.forward_backward([datum], "cross_entropy").result()
        with served.http(key) as http:
            session = http.post("/create_session", json={"type": "create_session"}).json()["session_id"]
            body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": BASE_MODEL}
            sampler = http.post("/create_sampling_session", json=body).json()["sampling_session_id"]
            refused = http.post("/asample", json=sample(sampler, image()))
        worker.stop()

    assert refused.status_code == 400
    assert "prompt: holds a picture, but here vllm draws samples, of text alone" in refused.json()["detail"]


def test_a_sample_is_judged_by_what_the_meshes_of_its_own_model_offer(serve_api, make_database_url) -> None:
    with serve_api(make_database_url("sqlite"), max_sample_tokens=2 * CAPABILITIES.max_context_length) as served:
        lease = served.stores.meshes.acquire("another", ProcessIdentity.current(), lease_s=3600)
        # Its name comes first; it takes no pictures, and its context is longer than a sample may be.
        others = {"base_model": "other", "pictures": None, "max_context_length": 10 * CAPABILITIES.max_context_length}
        served.stores.meshes.publish(lease, CAPABILITIES.model_copy(update=others))
        served.worker.register()
        with served.http(served.new_key()) as http:
            session = http.post("/create_session", json={"type": "create_session"}).json()["session_id"]
            body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": BASE_MODEL}
            sampler = http.post("/create_sampling_session", json=body).json()["sampling_session_id"]
            until_its_end = {**sample(sampler), "seq_id": 1, "sampling_params": {}}
            answers = [http.post("/asample", json=one) for one in (sample(sampler, image()), until_its_end)]

    assert [answer.status_code for answer in answers] == [200, 200], [answer.text for answer in answers]


TEMPLATE = """{%- for message in messages %}<s>{{ message.role }}:
{%- if message.content is string %}{{ message.content }}
{%- else %}{%- for part in message.content %}{% if part.type == 'image' %}<p>{% else %}{{ part.text }}{% endif %}
{%- endfor %}{%- endif %}<e>{%- endfor %}
{%- if add_generation_prompt %}<s>assistant:{% endif %}"""


@pytest.fixture(scope="module")
def chat_api(serve_api, make_database_url, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = write_tokenizer(folder)
    tokenizer.add_special_tokens(["<p>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<e>", "chat_template": TEMPLATE}))
    rules = replace(CAPABILITIES.pictures, token_id=tokenizer.token_to_id("<p>"))
    with serve_api(make_database_url("sqlite")) as served:
        update = {"tokenizer_path": str(folder), "pictures": rules}
        worker = FakeWorker(served.settings, capabilities=CAPABILITIES.model_copy(update=update))
        worker.start()
        with httpx.Client(base_url=f"{served.url}/v1", headers={"X-API-Key": served.new_key()}, timeout=30) as http:
            yield http, worker, rules
        worker.stop()


def chat(*parts: dict[str, object]) -> dict[str, object]:
    return {"model": BASE_MODEL, "messages": [{"role": "user", "content": list(parts)}], "max_tokens": 3}


def url(address: str) -> dict[str, object]:
    return {"type": "image_url", "image_url": {"url": address}}


def words(text: str) -> dict[str, object]:
    return {"type": "text", "text": text}


DATA_URL = f"data:image/png;base64,{base64.b64encode(PICTURE).decode()}"


def test_a_conversation_may_hold_pictures_where_the_template_puts_them(chat_api) -> None:
    http, worker, rules = chat_api
    answer = http.post("/chat/completions", json=chat(words("see "), url(DATA_URL), words(" this")))

    assert answer.status_code == 200
    prompt = json.loads(worker.payload(worker.executed[-1]))["prompt"]["chunks"]
    assert [(chunk["type"], chunk.get("expected_tokens")) for chunk in prompt] == [
        ("encoded_text", None),
        ("image", 6),
        ("encoded_text", None),
    ]
    assert base64.b64decode(prompt[1]["data"]) == PICTURE
    assert answer.json()["usage"]["prompt_tokens"] == len(prompt[0]["tokens"]) + 6 + len(prompt[2]["tokens"])
    assert rules.token_id not in prompt[0]["tokens"] + prompt[2]["tokens"]


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ([url("https://example.org/a.png")], "messages[0].content[0].image_url.url: is an address, and this server"),
        ([url("file:///etc/passwd")], "messages[0].content[0].image_url.url: is an address"),
        ([url("data:text/plain;base64,aGk=")], "must begin data:image/png;base64,"),
        ([url("data:image/gif;base64,R0lG")], "must be one of png, jpeg, not 'gif'"),
        ([words("<p>"), url(DATA_URL)], "messages: hold 1 pictures, but the model's chat template"),
    ],
)
def test_what_is_no_picture_of_the_conversation_is_refused_by_name(chat_api, parts, reason) -> None:
    answer = chat_api[0].post("/chat/completions", json=chat(*parts))
    assert answer.status_code == 400
    assert reason in answer.text
