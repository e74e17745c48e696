"""Calls of models' methods over HTTP: which adapter they are about, what they are answered, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from harness.calls import optim_step, passes, send_passes
from harness.fake_worker import BASE_MODEL
from twinkle.core.operation import OperationKind
from twinkle.wire.calls import CALL_KINDS, decode_call

if TYPE_CHECKING:
    from conftest import Api, ServeApi

MODEL = f"/model/{BASE_MODEL}/twinkle"
CONFIG = {
    "peft_type": "LORA",
    "r": 4,
    "lora_alpha": 8,
    "target_modules": "all-linear",
    "lora_dropout": 0.0,
    "bias": "none",
    "modules_to_save": None,
    "init_lora_weights": True,
    "rank_pattern": {},
    "loftq_config": {},
    "_TWINKLE_TYPE_": "LoraConfig",
    "a_setting_of_tomorrow": 7,
}
ROWS = [{"input_ids": [1, 2, 3], "labels": [2, 3, -100]}, {"input_ids": [4, 5], "labels": [5, -100]}]


@pytest.fixture
def client(http: httpx.Client) -> httpx.Client:
    """A client in a session of its own, with an adapter ``a``."""
    session = http.post("/twinkle/create_session", json={"metadata": None}).json()["session_id"]
    http.headers["X-Twinkle-Session-Id"] = session
    assert add(http).status_code == 200
    return http


def add(http: httpx.Client, name: str = "a", **said: Any) -> httpx.Response:
    headers = {"x-idempotency-key": said.pop("key")} if "key" in said else {}
    config = json.dumps(CONFIG | said.pop("config", {}))
    body = {"adapter_name": name, "config": config, **said}
    return http.post(f"{MODEL}/add_adapter_to_model", json=body, headers=headers)


def call(
    http: httpx.Client, method: str, *, model: str = MODEL, headers: Any = None, **arguments: Any
) -> httpx.Response:
    return http.post(f"{model}/{method}", json={"adapter_name": "a", **arguments}, headers=headers)


def run_of(http: httpx.Client, name: str = "a") -> str:
    runs = http.get("/twinkle/training_runs").json()["training_runs"]
    session = http.headers["X-Twinkle-Session-Id"]
    return str(next(run["training_run_id"] for run in runs if run["training_run_id"].startswith(session)))


# -- models and adapters ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [BASE_MODEL, f"ms://{BASE_MODEL}", f"hf://{BASE_MODEL}", f"ms://ms://{BASE_MODEL}"])
def test_a_served_model_is_found_under_every_name_it_has(http: httpx.Client, name: str) -> None:
    assert http.post(f"/model/{name}/twinkle/create", json={}).json() == {"status": "ok"}
    assert http.get(f"/model/{name}/healthz").json() == {"status": "ok"}


def test_a_model_that_is_not_served_is_not_found_and_those_that_are_are_named(http: httpx.Client) -> None:
    answers = [
        http.post("/model/Qwen/Other/twinkle/create", json={}),
        http.get("/model/Qwen/Other/healthz"),
        http.post("/model/Qwen/Other/twinkle/step", json={"adapter_name": "a"}, headers={"X-Request-Id": "r"}),
        http.post("/model/Qwen/Other/twinkle/add_adapter_to_model", json={"adapter_name": "a", "config": CONFIG}),
    ]

    for answer in answers:
        assert answer.status_code == 404
        assert "'Qwen/Other' is not served here" in answer.json()["detail"]
        assert BASE_MODEL in answer.json()["detail"]


def test_a_model_whose_workers_have_all_gone_is_not_well_until_one_is_back(
    serve_api: ServeApi, make_database_url: Callable[[str], str]
) -> None:
    with serve_api(make_database_url("sqlite")) as api, api.http(api.new_key()) as http:
        nobody_yet = http.get(f"/model/{BASE_MODEL}/healthz")
        api.worker.register()
        well = http.get(f"/model/{BASE_MODEL}/healthz")
        api.worker.release()
        gone = http.get(f"/model/{BASE_MODEL}/healthz")

    assert [answer.status_code for answer in (nobody_yet, well, gone)] == [503, 200, 503]
    assert "operations are kept until one is back" in gone.json()["detail"]


def test_a_model_is_served_under_the_aliases_that_the_operator_gave_it(
    serve_api: ServeApi, make_database_url: Callable[[str], str]
) -> None:
    # An alias may also say where the weights of a served model are.
    aliases = {"Qwen/Big": BASE_MODEL, BASE_MODEL: "/a/folder"}
    with (
        serve_api(make_database_url("sqlite"), model_id_aliases=aliases) as api,
        api.http(api.new_key()) as http,
    ):
        api.worker.register()
        answers = [
            http.post(f"/model/{name}/twinkle/create", json={}) for name in ("Qwen/Big", "ms://Qwen/Big", BASE_MODEL)
        ]

    assert [answer.status_code for answer in answers] == [200] * 3


def test_an_adapter_is_made_of_a_peft_config_and_shown_among_the_runs(api: Api, client: httpx.Client) -> None:
    session = client.headers["X-Twinkle-Session-Id"]
    made = add(
        client,
        "b",
        config={"lora_dropout": 0.05, "target_modules": ["q_proj", "v_proj"], "use_rslora": True},
        gradient_accumulation_steps=2,
        save_dir="/tmp/mine",
    )

    assert made.status_code == 200
    assert made.json()["adapter_name"] == f"{session}-b"
    warnings = made.json()["warnings"]
    assert "lora_dropout=0.05 is not applied" in warnings[0]
    assert "save_dir is not used" in warnings[1]
    config = api.stores.adapters.find(made.json()["training_run_id"]).config
    assert (config.rank, config.alpha, config.gradient_accumulation_steps) == (4, 8.0, 2)
    assert config.peft == {
        "peft_type": "LORA",
        "r": 4,
        "lora_alpha": 8.0,
        "target_modules": ["q_proj", "v_proj"],
        "use_rslora": True,
    }
    runs = client.get("/training_runs").json()["training_runs"]
    assert made.json()["training_run_id"] in [run["training_run_id"] for run in runs]


def test_making_an_adapter_is_done_once_for_each_key(client: httpx.Client) -> None:
    first, again, other = add(client, "b", key="k"), add(client, "b", key="k"), add(client, "b", key="k", seed=3)

    assert first.json() == again.json()
    assert (other.status_code, other.json()["code"]) == (400, "conflict")


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"config": {"r": 65}}, "config.r: must be at most 64 here, not 65"),
        ({"config": {"r": 0}}, "config.r: must be greater than or equal to 1"),
        ({"config": {"use_dora": True}}, "config.use_dora: is True, only False is served"),
        ({"config": {"init_lora_weights": "gaussian"}}, "only True is served"),
        ({"config": {"peft_type": "IA3"}}, "config.peft_type: is 'IA3', only 'LORA' is served"),
        ({"config": {"target_modules": "(a+)+b"}}, "config.target_modules: as a pattern may hold names"),
        ({"config": {"layers_to_transform": [1]}}, "is not served; leave it out"),
        ({"is_trainable": False}, "is_trainable: must be true"),
        ({"name": "../a"}, "adapter_name: must not begin with"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps"),
    ],
)
def test_what_no_adapter_can_be_made_of_is_refused_in_words(
    client: httpx.Client, said: dict[str, Any], words: str
) -> None:
    refused = add(client, **{"name": "c", **said})

    assert refused.status_code == 400
    assert words in refused.json()["detail"]


def test_training_the_whole_model_is_refused_and_says_why(client: httpx.Client) -> None:
    body = {"adapter_name": "whole", "config": None}
    refused = client.post(f"{MODEL}/add_adapter_to_model", json=body)

    assert refused.status_code == 400
    assert "the whole model would be trained, which needs a mesh for one tenant alone" in refused.json()["detail"]


# -- calls ------------------------------------------------------------------------------------------------------------


def test_every_method_is_an_operation_of_its_adapter_in_the_order_of_the_calls(api: Api, client: httpx.Client) -> None:
    arguments: dict[str, dict[str, Any]] = {
        "forward": {"inputs": ROWS, "return_logits": True},
        "forward_only": {"inputs": ROWS, "disable_lora": True},
        "forward_backward": {"inputs": ROWS, "advantages": [0.5, 1.0], "old_logps": [[0.1], [float("nan")]]},
        "set_loss": {"loss_cls": "GRPOLoss", "epsilon": 0.2},
    }
    methods = [method for method in CALL_KINDS if method not in ("add_adapter_to_model", "save", "load")]
    methods.remove("resume_from_checkpoint")
    for place, method in enumerate(methods, 1):
        answer = call_with_nan(client, method, arguments.get(method, {}))
        assert answer.status_code == 200, answer.text
        assert (answer.json()["result"]["method"], answer.json()["result"]["seq"]) == (method, place)

    executed = api.worker.executed_of(run_of(client))
    assert [claim.kind for claim in executed[1:]] == [CALL_KINDS[method] for method in methods]
    passed = next(claim for claim in executed if claim.kind is OperationKind.FORWARD)
    assert passed.num_tokens == 5
    assert decode_call(api.worker.payload(passed)).arguments == arguments["forward"]


def call_with_nan(http: httpx.Client, method: str, arguments: dict[str, Any]) -> httpx.Response:
    """As clients write numbers: JSON of Python's own."""
    return http.post(f"{MODEL}/{method}", content=json.dumps({"adapter_name": "a", **arguments}))


def test_a_call_finds_its_adapter_by_its_full_name_and_by_its_run_without_a_session(
    client: httpx.Client, api: Api, key: str
) -> None:
    session, run = client.headers["X-Twinkle-Session-Id"], run_of(client)
    with api.http(key) as bare:
        answers = [call(bare, "step", adapter_name=name) for name in (f"{session}-a", run)]
        nameless = call(bare, "step")

    assert [answer.json()["result"]["seq"] for answer in answers] == [1, 2]
    assert nameless.status_code == 400
    assert "X-Twinkle-Session-Id: is missing" in nameless.json()["detail"]


def test_a_client_without_a_session_has_the_one_of_its_request_id(http: httpx.Client, api: Api, key: str) -> None:
    http.headers["X-Request-Id"] = "20261120_225656-9cf3f550"
    assert add(http).status_code == 200
    with api.http(key) as other:
        other.headers["X-Request-Id"] = "another"
        refused = call(other, "step")

    assert call(http, "step").json()["result"]["seq"] == 1
    assert refused.status_code == 404
    assert "call add_adapter_to_model first" in refused.json()["detail"]


def test_a_call_sent_again_under_its_key_is_the_same_call_and_a_request_id_is_no_key(client: httpx.Client) -> None:
    named = {"x-idempotency-key": "call-1"}
    first = call(client, "forward_backward", headers=named, inputs=ROWS)
    again = call(client, "forward_backward", headers=named, inputs=ROWS)
    other = call(client, "forward_backward", headers=named, inputs=ROWS[:1])
    same_request_id = [call(client, "step", headers={"x-request-id": "same"}) for _ in range(2)]

    assert first.json() == again.json()
    assert (other.status_code, other.json()["code"]) == (400, "conflict")
    assert [answer.json()["result"]["seq"] for answer in same_request_id] == [2, 3]


def test_a_client_that_prefers_so_gets_a_ticket_at_once_or_after_its_time(api: Api, client: httpx.Client) -> None:
    with api.worker.paused():
        at_once = call(client, "step", headers={"Prefer": "respond-async"})
        later = call(client, "step", headers={"Prefer": "respond-async, wait=1"})
    quick = call(client, "step", headers={"Prefer": "respond-async, wait=20"})
    ended = client.get(f"/twinkle/futures/{at_once.json()['request_id']}", params={"wait_s": 20})

    assert (at_once.status_code, later.status_code) == (202, 202)
    assert at_once.headers["preference-applied"] == "respond-async"
    assert quick.json()["result"]["seq"] == 3
    assert ended.json()["result"]["seq"] == 1


def test_a_client_that_goes_away_loses_nothing(api: Api, client: httpx.Client) -> None:
    with api.worker.paused(), pytest.raises(httpx.ReadTimeout):
        client.post(f"{MODEL}/step", json={"adapter_name": "a"}, timeout=0.5)

    assert call(client, "step").json()["result"]["seq"] == 2


def test_calls_that_come_at_once_are_all_done_one_after_the_other(client: httpx.Client) -> None:
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda _: call(client, "zero_grad"), range(16)))

    assert sorted(answer.json()["result"]["seq"] for answer in answers) == list(range(1, 17))


@pytest.mark.parametrize(
    ("method", "arguments", "status", "words"),
    [
        ("forward", {}, 400, "inputs: must be a list of rows"),
        ("forward", {"inputs": []}, 400, "at least one"),
        ("forward_backward", {"inputs": [1]}, 400, "inputs[0]: must be an object"),
        ("forward_only", {"inputs": [{}] * 16_385}, 400, "at most 16384 go in one call"),
        ("destroy", {}, 404, "no method 'destroy' of a model; there are add_metric"),
        ("step", {"adapter_name": None}, 400, "adapter_name: must be a valid string"),
        ("step", {"adapter_name": "b"}, 404, "no adapter 'b' in session"),
    ],
)
def test_calls_that_cannot_be_meant_are_refused_before_they_are_accepted(
    client: httpx.Client, method: str, arguments: dict[str, Any], status: int, words: str
) -> None:
    refused = call(client, method, **arguments)

    assert refused.status_code == status
    assert words in refused.json()["detail"]
    assert call(client, "step").json()["result"]["seq"] == 1


def test_a_large_call_is_read_and_counted_whole(api: Api, client: httpx.Client) -> None:
    rows = [{"messages": [{"role": "user", "content": "é" * 5000}]} for _ in range(4)]

    assert call(client, "forward_backward", inputs=rows).status_code == 200

    (claim,) = api.worker.executed_of(run_of(client))[1:]
    assert claim.payload.blob is not None
    assert claim.num_tokens == 4 * (10_000 + len("user"))


def test_a_run_of_one_dialect_is_not_trained_through_the_other(client: httpx.Client, model_id: str) -> None:
    run = run_of(client)
    refused = [
        client.post("/optim_step", json=optim_step(run, 1)),
        send_passes(client, passes(run, 1)),
        call(client, "step", adapter_name=model_id),
    ]

    assert [answer.status_code for answer in refused] == [400, 400, 400]
    for answer in refused:
        assert "a run is trained through the dialect that made it" in answer.json()["detail"]


def test_an_adapter_is_removed_behind_its_calls_once_and_its_name_is_free(api: Api, client: httpx.Client) -> None:
    run = run_of(client)
    path = call(client, "save", name="kept").json()["twinkle_path"]
    with api.worker.paused():
        step = call(client, "step", headers={"prefer": "respond-async"}).json()
        first, again = (
            call(client, "remove_adapter", headers={"prefer": "respond-async", "x-idempotency-key": key}).json()
            for key in ("bye", "once more")
        )
        refused = call(client, "step")
    ended = client.get(f"/twinkle/futures/{first['request_id']}", params={"wait_s": 20})
    made = add(client).json()["training_run_id"]
    resent = call(client, "remove_adapter", headers={"x-idempotency-key": "bye"}).json()

    assert first == again == {"request_id": f"{run}:req:3"} != step
    assert client.get(f"/twinkle/futures/{step['request_id']}").json()["result"]["seq"] == 2
    assert ended.json() == resent == {"status": "ok", "training_run_id": run}
    assert (refused.status_code, f"{run} was unloaded" in refused.json()["detail"]) == (400, True)
    assert made != run and call(client, "step").json()["result"]["seq"] == 1
    assert client.post("/twinkle/weights_info", json={"twinkle_path": path}).status_code == 200
    with api.http(api.new_key()) as stranger:
        assert call(stranger, "remove_adapter", adapter_name=made).status_code == 404


# -- checkpoints ------------------------------------------------------------------------------------------------------


def test_checkpoints_are_saved_under_safe_names_and_loaded_by_path_and_by_name(
    api: Api, client: httpx.Client, key: str
) -> None:
    run = run_of(client)
    named = call(client, "save", name="step 1/final", save_optimizer=True).json()
    numbered = call(client, "save", is_sampler=True).json()
    loads = [
        call(client, "load", name=named["twinkle_path"].replace("tinker://", "twinkle://")),
        call(client, "load", name="step_1_final", load_optimizer=True),
        call(client, "resume_from_checkpoint", name=named["twinkle_path"], resume_only_model=True),
    ]

    assert named["twinkle_path"].endswith(f"{run}/weights/step_1_final")
    assert numbered["twinkle_path"].endswith(f"{run}/sampler_weights/checkpoint-2")
    paths = [answer.json()["result"]["path"] for answer in loads]
    assert paths == [f"tinker://{run}/weights/step_1_final"] * 3
    listed = client.get(f"/training_runs/{run}/checkpoints").json()["checkpoints"]
    assert {one["checkpoint_id"] for one in listed} == {"weights/step_1_final", "sampler_weights/checkpoint-2"}


def test_a_checkpoint_of_another_run_is_bound_to_what_it_means_when_it_is_asked_for(
    api: Api, client: httpx.Client
) -> None:
    path = call(client, "save", name="kept").json()["twinkle_path"]
    add(client, "b")
    answer = call(client, "load", adapter_name="b", name=path).json()["result"]

    assert answer["content"] == api.stores.checkpoints.find(path).content
    assert answer["grant"] is None


@pytest.mark.parametrize("name", ["/etc/passwd", "../weights", "ms://Qwen/Other", "Qwen/Other", "~/mine", "C:\\mine"])
def test_folders_of_the_server_and_models_of_hubs_are_not_loaded(client: httpx.Client, name: str) -> None:
    for method in ("load", "resume_from_checkpoint"):
        refused = call(client, method, name=name)
        assert refused.status_code == 400
        assert "folders of the server's disk and models of hubs are not read here" in refused.json()["detail"]
    assert "output_dir" in call(client, "save", output_dir="/tmp/x").json()["detail"]


def test_a_checkpoint_is_pushed_to_a_hub_by_a_job_that_its_owner_sees(api: Api, client: httpx.Client) -> None:
    saved = call(client, "save", name="kept").json()
    body = {"checkpoint_dir": saved, "hub_model_id": "me/model", "hub_token": "hub-secret-token"}
    sent = [client.post(f"{MODEL}/upload_to_hub", json=body, headers={"x-idempotency-key": "u"}) for _ in range(2)]

    request_id = sent[0].json()["request_id"]
    assert sent[1].json()["request_id"] == request_id
    status = client.get(f"{MODEL}/upload_status/{request_id}").json()
    assert status == {"request_id": request_id, "status": "pending", "error": None}
    job = httpx.get(f"{api.url}/api/native/v1/jobs/{request_id}", headers=client.headers).json()
    assert (job["kind"], job["name"]) == ("export", "upload to ms://me/model")
    assert job["spec"]["private"] is True
    assert job["spec"]["to"] == "ms://me/model"
    assert "hub-secret-token" not in json.dumps(job)
    httpx.post(f"{api.url}/api/native/v1/jobs/{request_id}/cancel", headers=client.headers)
    ended = client.get(f"{MODEL}/upload_status/{request_id}").json()
    assert (ended["status"], ended["error"]) == ("failed", "the upload was cancelled")


def test_an_upload_without_a_token_or_of_what_is_not_ones_own_is_refused(api: Api, client: httpx.Client) -> None:
    saved = call(client, "save", name="kept").json()["twinkle_path"]
    body = {"checkpoint_dir": saved, "hub_model_id": "hf://me/model"}
    without_token = client.post(f"{MODEL}/upload_to_hub", json={**body, "hub_token": None})
    folder = client.post(f"{MODEL}/upload_to_hub", json={**body, "checkpoint_dir": "/srv/weights", "hub_token": "t"})
    with api.http(api.new_key()) as stranger:
        theirs = stranger.post(f"{MODEL}/upload_to_hub", json={**body, "hub_token": "t"})
        status = stranger.get(f"{MODEL}/upload_status/job-nobodys")

    assert (without_token.status_code, folder.status_code) == (400, 400)
    assert "needs hub_token" in without_token.json()["detail"]
    assert "checkpoint_dir: must begin with" in folder.json()["detail"]
    assert (theirs.status_code, status.status_code) == (404, 404)


def test_someone_elses_adapter_answers_like_an_unknown_one(api: Api, client: httpx.Client) -> None:
    session, run = client.headers["X-Twinkle-Session-Id"], run_of(client)
    with api.http(api.new_key()) as stranger:
        theirs = [call(stranger, "step", adapter_name=name) for name in (f"{session}-a", run)]
        stranger.headers["X-Twinkle-Session-Id"] = session
        theirs += [call(stranger, "step"), call(stranger, "save"), add(stranger), call(stranger, "load", name="x")]
        future = stranger.get(f"/twinkle/futures/{run}:req:0")

    assert [answer.status_code for answer in [*theirs, future]] == [404] * 7
