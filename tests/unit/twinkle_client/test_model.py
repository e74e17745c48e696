"""A model and a sampler at a server: what scripts of both generations call and read, waited for or not."""

from __future__ import annotations

import asyncio
import copy
import json
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig

from harness.polling import wait_until
from harness.scripted_server import Reply, ScriptedServer, Seen
from harness.twinkle_upstream import RUN, UpstreamServer
from twinkle.client.backoff import RetryPolicy
from twinkle.data_format import SamplingParams
from twinkle.dataset import DatasetMeta
from twinkle_client import answers
from twinkle_client.answers import GradNorm, Text
from twinkle_client.arguments import encode_arguments
from twinkle_client.client import TwinkleClient
from twinkle_client.connection import Connection
from twinkle_client.endpoint import find_endpoint
from twinkle_client.errors import CallFailed, ConfigError, InvalidInput, RunClosed
from twinkle_client.model import MegatronModel, MultiLoraMegatronModel, MultiLoraTransformersModel, TransformersModel
from twinkle_client.sampler import TorchSampler, vLLMSampler

ROWS = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}]
CONFIG = {"r": 4, "lora_alpha": 8}


@pytest.fixture
def upstream() -> Iterator[UpstreamServer]:
    with UpstreamServer() as server:
        yield server


@pytest.fixture
def connection(upstream: UpstreamServer) -> Iterator[Connection]:
    opened = connect(upstream)
    yield opened
    opened.close()


@pytest.fixture
def model(connection: Connection) -> MultiLoraTransformersModel:
    made = MultiLoraTransformersModel("ms://mock-model", connection=connection)
    made.add_adapter_to_model("a", CONFIG)
    return made


def connect(server: ScriptedServer) -> Connection:
    policy = RetryPolicy(first_s=0.01, longest_s=0.02)
    connection = Connection(find_endpoint(server.url), policy=policy, call_timeout_s=20)
    connection.open_session()
    return connection


# At another's server.


def test_every_call_of_a_model_is_understood_by_another_server(
    model: MultiLoraTransformersModel, upstream: UpstreamServer
) -> None:
    model.set_loss("CrossEntropyLoss", reduction="sum")
    model.set_optimizer("Adam", lr=1e-4)
    model.set_lr_scheduler("CosineWarmupScheduler", num_warmup_steps=1, num_training_steps=10)
    model.set_template("Template")
    model.set_processor("InputProcessor")
    model.add_metric("LossMetric", is_training=True)
    model.apply_patch("NoopPatch")
    model.forward(inputs=ROWS)
    assert model.forward_only(inputs=ROWS, disable_lora=True).result[0]["logprobs"] == [-0.75, -0.11, -1.21]
    assert model.forward_backward(inputs=ROWS, advantages=[0.5]).result[1] == 0.637
    assert model.calculate_loss() == model.calculate_loss().result == 0.637
    assert model.backward() is None
    assert model.clip_grad_norm(1.0).result == "0.0"
    assert [model.step(), model.zero_grad(), model.lr_step(), model.clip_grad_and_step()] == [None] * 4
    assert model.calculate_metric(is_training=True).result == {"loss": 0.5, "grad_norm": 0.1}
    assert model.get_train_configs().result == "{}"
    assert model.get_state_dict().result == {}
    saved = model.save("step-1", save_optimizer=True, consumed_train_samples=8)
    model.load(saved, load_optimizer=True)
    assert model.resume_from_checkpoint(saved)["status"] == "ok"
    upload = model.upload_to_hub(saved, "mock/dummy", hub_token="t", async_upload=False)
    assert model.upload_status(upload).status == "completed"

    path = f"twinkle://{RUN}/weights/step-1"
    assert upstream.bodies("set_template") == [
        {"template_cls": "Template", "adapter_name": "a", "model_id": "mock-model"}
    ]
    assert upstream.bodies("save") == [
        {"name": "step-1", "adapter_name": "a", "save_optimizer": True, "consumed_train_samples": 8}
    ]
    assert upstream.bodies("load") == [{"name": path, "adapter_name": "a", "load_optimizer": True}]
    assert upstream.bodies("upload_to_hub")[0]["checkpoint_dir"] == path
    assert {seen.path.rpartition("/")[0] for seen in upstream.seen if "/model/" in seen.path} == {
        "/api/v1/model/mock-model/twinkle",
        "/api/v1/model/mock-model/twinkle/upload_status",
    }


def test_an_error_of_another_server_is_its_last_line(connection: Connection) -> None:
    model = MultiLoraTransformersModel("mock-model", connection=connection)
    model.add_adapter_to_model("zzz", CONFIG)
    with pytest.raises(CallFailed, match=r"^AssertionError: Adapter zzz not found$"):
        model.forward(inputs=ROWS)


def test_a_config_is_sent_as_the_text_that_servers_want(
    model: MultiLoraTransformersModel, upstream: UpstreamServer
) -> None:
    peft = LoraConfig(r=8, target_modules={"b", "a"}, lora_alpha=32)
    model.add_adapter_to_model("default", peft, gradient_accumulation_steps=2)

    plain, ofpeft = (json.loads(body["config"]) for body in upstream.bodies("add_adapter_to_model"))
    assert plain == {**CONFIG, "_TWINKLE_TYPE_": "LoraConfig"}
    assert (ofpeft["_TWINKLE_TYPE_"], ofpeft["r"], ofpeft["target_modules"]) == ("LoraConfig", 8, ["a", "b"])
    assert upstream.bodies("add_adapter_to_model")[1]["gradient_accumulation_steps"] == 2


# Both generations of scripts.


def test_a_saved_checkpoint_is_a_text_and_an_object(model: MultiLoraTransformersModel) -> None:
    saved = model.save("x", is_sampler=True)

    assert saved == f"twinkle://{RUN}/sampler_weights/20261120_225700" == saved.twinkle_path
    assert saved.checkpoint_dir is not None and saved.checkpoint_dir.endswith("sampler_weights/20261120_225700")
    for again in (pickle.loads(pickle.dumps(saved)), copy.copy(saved)):
        assert (again, again.checkpoint_dir) == (saved, saved.checkpoint_dir)


def test_metrics_update_a_dict_and_have_a_result(model: MultiLoraTransformersModel) -> None:
    metrics = model.calculate_metric()
    log: dict[str, object] = {"step": 1}
    log.update(metrics)

    assert log["loss"] == metrics.result["loss"] == metrics.loss == 0.5


def test_a_pass_of_a_real_model_is_read_by_key_and_by_attribute() -> None:
    def answer(seen: Seen) -> Reply:
        if seen.path.endswith("create_session"):
            return Reply(200, {"session_id": "s"})
        if seen.path.endswith("add_adapter_to_model"):
            return Reply(200, {"status": "ok", "adapter_name": "s-a", "warnings": ["save_dir is ignored"]})
        return Reply(200, {"result": {"logps": [[-1.0, -2.0]], "loss": 3.0, "logits": None}})

    with ScriptedServer(answer) as server:
        connection = connect(server)
        model = MultiLoraTransformersModel("m", connection=connection)
        with pytest.warns(UserWarning, match="save_dir is ignored"):
            model.add_adapter_to_model("a", CONFIG, save_dir="/tmp/x")
        output = model.forward_backward(inputs=ROWS[0])
        connection.close()

    assert output["loss"] == output.loss == output.result["loss"] == 3.0
    assert output.result.logps == [[-1.0, -2.0]]


# Arguments.


def test_numbers_of_any_library_are_sent_as_lists(model: MultiLoraTransformersModel, upstream: UpstreamServer) -> None:
    row = {"input_ids": np.arange(3), "labels": torch.tensor([1, 2, -100]), "length": np.int64(3)}
    model.forward_backward(
        inputs=[row], advantages=torch.tensor([0.5]), old_logps=[np.zeros(2)], ref_outputs={"logps": torch.ones(1, 2)}
    )

    assert upstream.bodies("forward_backward") == [
        {
            "inputs": [{"input_ids": [0, 1, 2], "labels": [1, 2, -100], "length": 3}],
            "advantages": [0.5],
            "old_logps": [[0.0, 0.0]],
            "ref_outputs": {"logps": [[1.0, 1.0]]},
            "adapter_name": "a",
        }
    ]


def test_data_sets_and_slices_are_sent_as_the_text_that_servers_want() -> None:
    class Remote:
        processor_id = "pid:1"

    meta = DatasetMeta("ms://swift/self-cognition", data_slice=range(6))
    sent = json.loads(
        encode_arguments({"dataset_meta": meta, "dataset": Remote(), "names": {"b", "a"}, "path": Path("/x")})
    )

    assert (sent["dataset"], sent["names"], sent["path"]) == ("pid:1", ["a", "b"], "/x")
    assert json.loads(sent["dataset_meta"]) == {
        "dataset_id": "ms://swift/self-cognition",
        "subset_name": "default",
        "split": "train",
        "data": None,
        "data_slice": {"_slice_type_": "range", "start": 0, "stop": 6, "step": 1},
        "_TWINKLE_TYPE_": "DatasetMeta",
    }


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        (lambda row: row, "code of this process"),
        (object(), "JSON cannot carry"),
        ([{"f": print}], r"x\[0\]\.f: is print"),
    ],
)
def test_code_and_objects_of_this_process_are_refused_in_words(argument: object, words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        encode_arguments({"x": argument})


def test_classes_of_the_library_are_sent_by_their_names_and_others_are_refused(
    model: MultiLoraTransformersModel, upstream: UpstreamServer
) -> None:
    class Mine:
        """A loss of a script."""

    model.set_optimizer(torch.optim.AdamW, lr=1e-4)
    assert upstream.bodies("set_optimizer") == [{"optimizer_cls": "AdamW", "adapter_name": "a", "lr": 1e-4}]
    with pytest.raises(InvalidInput, match="loss_cls: is Mine, code of this process"):
        model.set_loss(Mine)


def test_names_of_the_documents_are_there(connection: Connection) -> None:
    with pytest.warns(UserWarning, match="device_mesh: the server chooses"):
        TransformersModel(model_id="m", connection=connection, device_mesh=None)
    assert MultiLoraMegatronModel("m", connection=connection).model_id == "m"
    with pytest.raises(InvalidInput, match="MultiLoraMegatronModel"):
        MegatronModel("m")
    with pytest.raises(InvalidInput, match="add_adapter_to_model first"):
        TransformersModel("m", connection=connection).step()


def test_without_a_server_the_classes_say_what_to_call() -> None:
    script = (
        "from twinkle_client.model import MultiLoraTransformersModel\n"
        "try: MultiLoraTransformersModel('m')\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert said.startswith(ConfigError.__name__) and "init_twinkle_client" in said


# Samples.


def test_samples_are_one_for_each_prompt_and_all_in_a_row(connection: Connection) -> None:
    sampler = vLLMSampler("ms://mock-model", connection=connection)
    sampler.set_template("Template", model_id="ms://mock-model")
    sampler.add_adapter_to_sampler("a", {"r": 4})
    sampler.apply_patch("NoopPatch")
    responses = sampler.sample([{"input_ids": [1]}, {"input_ids": [2, 3]}], {"max_tokens": 2, "logprobs": 1})

    assert [len(response.sequences) for response in responses] == [1, 1]
    sequence = responses[0].sequences[0]
    assert (sequence.tokens, sequence.get("stop_reason"), sequence["logprobs"][0][0][1]) == ([23, 13], "length", -0.86)
    assert responses.get("sequences", [])[1].new_input_feature["labels"] == [-100, -100, 23, 13]


def test_samples_in_the_old_form_have_their_logprobs_as_numbers(
    connection: Connection, upstream: UpstreamServer
) -> None:
    sampler = TorchSampler("mock-model", connection=connection)
    responses = sampler.sample(
        inputs=[[1, 2]], sampling_params={"max_tokens": 2}, adapter_uri="twinkle://r/w", num_samples=3
    )

    assert [sequence.get("logprobs", []) for sequence in responses["sequences"]] == [[-0.86, -0.18]] * 3
    (sent,) = upstream.bodies("sample")
    assert sent["sampling_params"] == {"max_tokens": 2, "num_samples": 3, "logprobs": 1}
    assert (sent["adapter_uri"], sent["num_samples"], sent["inputs"]) == ("twinkle://r/w", 3, [{"input_ids": [1, 2]}])


def test_sampling_params_say_only_what_was_said(connection: Connection, upstream: UpstreamServer) -> None:
    sampler = vLLMSampler("mock-model", connection=connection)
    sampler.sample({"input_ids": [1]}, SamplingParams(max_tokens=4, logprobs=1), adapter_name="a")
    sampler.sample({"input_ids": [1]}, adapter_name="a", use_base_model=True)

    first, second = upstream.bodies("sample")
    assert first["sampling_params"]["max_tokens"] == 4 and "seed" not in first["sampling_params"]
    assert (second["adapter_name"], second["sampling_params"]) == ("", None)


def test_samples_do_not_wait_for_each_other() -> None:
    together = threading.Barrier(4)

    def answer(seen: Seen) -> Reply:
        if seen.path.endswith("/create_session"):
            return Reply(200, {"session_id": "s"})
        if seen.path.endswith("/sample"):
            together.wait(20)
            is_refused = not json.loads(seen.content)["inputs"][0]["input_ids"]
            return Reply(400, {"detail": "empty"}) if is_refused else Reply(200, {"samples": []})
        return Reply(200, {"status": "ok"})

    with ScriptedServer(answer) as server:
        connection = connect(server)
        sampler = vLLMSampler("m", connection=connection)
        futures = [sampler.submit.sample({"input_ids": tokens}) for tokens in ([], [1], [2], [3])]

        assert [future.result(20) for future in futures[1:]] == [[]] * 3
        assert str(futures[0].exception(20)) == "empty"
        connection.close()


# Not waited for.


class Slow(ScriptedServer):
    """Accepts calls at once, notes their order, and has outcomes when the test says so."""

    def __init__(self) -> None:
        self.accepted: list[tuple[str, str]] = []
        self.may_end = threading.Event()
        self.refuses: set[str] = set()
        super().__init__(self._reply)

    def _reply(self, seen: Seen) -> Reply:
        method = seen.path.rpartition("/")[2]
        if method == "create_session":
            return Reply(200, {"session_id": "s", "offers": ["idempotency", "futures"]})
        if "/futures/" in seen.path:
            request_id = method.partition("?")[0]
            if not self.may_end.wait(0.05 if method.endswith("=20") else 0):
                return Reply(202, {"request_id": request_id})
            return Reply(200, {"result": {"number": int(request_id[1:])}})
        if method in ("create", "add_adapter_to_model"):
            return Reply(200, {"status": "ok"})
        if method in self.refuses:
            return Reply(400, {"detail": f"{method} is refused", "code": "user"})
        self.accepted.append((method, seen.headers["prefer"]))
        return Reply(202, {"request_id": f"r{len(self.accepted)}"})


@pytest.fixture
def slow() -> Iterator[Slow]:
    with Slow() as server:
        yield server


@pytest.fixture
def patient(slow: Slow) -> Iterator[MultiLoraTransformersModel]:
    connection = connect(slow)
    model = MultiLoraTransformersModel("m", connection=connection)
    model.add_adapter_to_model("a", CONFIG)
    yield model
    slow.may_end.set()
    connection.close()


def test_calls_are_handed_over_in_their_order_and_collected_in_any(
    slow: Slow, patient: MultiLoraTransformersModel
) -> None:
    futures = [patient.submit.forward_only(inputs=ROWS) for _ in range(3)]
    steps = patient.submit.calculate_metric()
    assert [future.accepted(20) for future in futures] == ["r1", "r2", "r3"]
    assert not futures[0].done()
    with pytest.raises(TimeoutError, match="r2"):
        futures[1].result(0.01)

    slow.may_end.set()
    assert steps.result(20).number == 4
    assert [future.result(20)["number"] for future in reversed(futures)] == [3, 2, 1]
    assert futures[0].done() and futures[0].exception() is None
    assert [method for method, _ in slow.accepted] == ["forward_only"] * 3 + ["calculate_metric"]
    assert {preference for _, preference in slow.accepted} == {"respond-async"}


def test_a_blocking_call_waits_for_its_turn(slow: Slow, patient: MultiLoraTransformersModel) -> None:
    slow.may_end.set()
    for _ in range(5):
        patient.submit.forward_only(inputs=ROWS)
    assert patient.calculate_metric().number == 6


def test_another_process_collects_by_the_id_alone(slow: Slow, patient: MultiLoraTransformersModel) -> None:
    request_id = patient.submit.forward_only(inputs=ROWS).accepted(20)
    slow.may_end.set()
    with TwinkleClient(slow.url) as elsewhere:
        assert request_id is not None
        assert elsewhere.future(request_id).result(20).number == 1


def test_a_client_opens_models_and_samplers_of_its_own_session(slow: Slow) -> None:
    with TwinkleClient(slow.url) as client:
        assert client.model("ms://some/model").connection is client.connection
        assert client.sampler("ms://some/model").connection is client.connection


def test_a_text_can_be_printed_as_the_whole_answer_that_older_clients_get() -> None:
    assert Text("AdamW").model_dump() == {"result": "AdamW"}


def test_answers_are_dumped_as_the_models_that_upstreams_are(model: MultiLoraTransformersModel) -> None:
    saved = model.save("x", is_sampler=True)
    model.forward(inputs=ROWS)
    calls = {
        "forward_only": model.forward_only(inputs=ROWS),
        "calculate_loss": model.calculate_loss(),
        "clip_grad_norm": model.clip_grad_norm(),
        "calculate_metric": model.calculate_metric(),
        "get_train_configs": model.get_train_configs(),
        "get_state_dict": model.get_state_dict(),
    }

    assert saved.model_dump() == {"twinkle_path": str(saved), "checkpoint_dir": saved.checkpoint_dir}
    assert GradNorm(1.5).model_dump() == {"result": "1.5"}
    for name, answer in calls.items():
        assert answer.model_dump() == {"result": answer.result}, name
        assert json.loads(answer.model_dump_json()) == answer.model_dump(), name
    [sampled] = answers.samples({"samples": [{"sequences": [{"stop_reason": "stop", "tokens": [1, 2]}]}]})
    dumped = sampled.model_dump()
    assert dumped["sequences"][0]["tokens"] == [1, 2] and dumped["prompt_logprobs"] is None


def test_an_adapter_that_was_removed_is_what_no_call_is_about() -> None:
    def answer(seen: Seen) -> Reply:
        if seen.path.endswith("create_session"):
            return Reply(200, {"session_id": "s"})
        if seen.path.endswith("add_adapter_to_model"):
            return Reply(200, {"status": "ok", "adapter_name": "s-a"})
        return Reply(200, {"status": "ok", "training_run_id": "s:train:0"})

    with ScriptedServer(answer) as server:
        connection = connect(server)
        model = MultiLoraTransformersModel("m", connection=connection)
        model.add_adapter_to_model("a", CONFIG)
        assert [model.remove_adapter(), model.remove_adapter("a")] == [None, None]
        with pytest.raises(InvalidInput, match="call add_adapter_to_model first"):
            model.step()
        model.add_adapter_to_model("b", CONFIG)
        model.submit.remove_adapter("a").result()
        connection.close()
        sent = [seen for seen in server.seen if seen.path.endswith("remove_adapter")]

    assert model.adapter_name == "b"
    assert [json.loads(seen.content)["adapter_name"] for seen in sent] == ["a"] * 3


def test_futures_are_awaited_in_an_event_loop(slow: Slow, patient: MultiLoraTransformersModel) -> None:
    async def collect() -> list[int]:
        futures = [patient.submit.forward_only(inputs=ROWS) for _ in range(3)]
        slow.may_end.set()
        return [(await future)["number"] for future in futures]

    assert asyncio.run(collect()) == [1, 2, 3]


def test_a_call_that_is_refused_takes_those_after_it_with_it_until_it_is_known(
    slow: Slow, patient: MultiLoraTransformersModel
) -> None:
    slow.refuses, _ = {"forward_backward"}, slow.may_end.set()
    refused = patient.submit.forward_backward(inputs=ROWS)
    wait_until(refused.done, what="the refusal")
    unsent = patient.submit.step()

    with pytest.raises(RunClosed, match="forward_backward is refused"):
        unsent.result(20)
    slow.refuses = set()
    assert patient.calculate_metric().number == 1
    assert [method for method, _ in slow.accepted] == ["calculate_metric"]


def test_a_script_that_ends_has_its_calls_handed_over(slow: Slow) -> None:
    script = (
        "import sys; from twinkle_client import init_twinkle_client\n"
        "from twinkle_client.model import MultiLoraTransformersModel\n"
        "init_twinkle_client(sys.argv[1]); model = MultiLoraTransformersModel('m')\n"
        "model.add_adapter_to_model('a', {'r': 4})\n"
        "for _ in range(4): model.submit.step()"
    )
    subprocess.run([sys.executable, "-c", script, slow.url], check=True, timeout=120)

    assert [method for method, _ in slow.accepted] == ["step"] * 4
