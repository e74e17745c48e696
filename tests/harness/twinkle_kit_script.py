"""Every method of the client that the package `twinkle-kit` brings, once; it runs under that package, not under ours.

    python twinkle_kit_script.py URL KEY MODEL

Prints what it saw as one line of JSON: ``seen`` by name, ``refused`` with the words, ``calls`` as ``METHOD path`` with
the run's and the model's names put back into braces.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import requests
from peft import LoraConfig

from twinkle.dataset import DatasetMeta
from twinkle_client import init_twinkle_client
from twinkle_client.dataloader import DataLoader
from twinkle_client.dataset import Dataset, IterableDataset, IterablePackingDataset, LazyDataset, PackingDataset
from twinkle_client.model import MultiLoraTransformersModel, multi_lora_transformers
from twinkle_client.processor import InputProcessor
from twinkle_client.sampler import vLLMSampler

ROWS = [
    {"input_ids": [11, 12, 13, 14], "labels": [-100, 13, 14, -100]},
    {"input_ids": [21, 22, 23], "labels": [22, 23, -100]},
]
QUESTIONS = [{"query": f"What is {number}?", "response": f"I am {{{{NAME}}}}, number {number}."} for number in range(6)]
CHAT = {"messages": [{"role": "user", "content": "Who are you?"}]}
NOBODY = "NobodyWroteThis"

seen: dict[str, Any] = {}
refused: dict[str, str] = {}
calls: list[str] = []


def main(arguments: Sequence[str]) -> int:
    """Calls everything; returns the exit code."""
    url, key, model_name = arguments
    _record(url)
    client = init_twinkle_client(base_url=url, api_key=key)
    _look_around(client)
    model = MultiLoraTransformersModel(f"ms://{model_name}")
    model.add_adapter_to_model(
        "a", LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"), gradient_accumulation_steps=1
    )
    _set(model)
    _train(model)
    saved = _save(model)
    _inspect(client, saved, model_name)
    _refuse(model)
    _sample(model_name, saved)
    _process(model_name)
    _process_otherwise(model_name)
    _upload(model, saved)
    seen["deleted"] = client.delete_checkpoint(_run_of(saved), "weights/step-1").success
    _expect_refusal("delete", lambda: client.delete_checkpoint(_run_of(saved), "weights/none"))
    _expect_refusal("run", lambda: client.get_training_run("nobody"))
    client.close()
    known = {_run_of(saved): "{run}", model_name: "{model}"}
    print(
        json.dumps({"seen": seen, "refused": refused, "calls": sorted({_with_names_back(one, known) for one in calls})})
    )
    return 0


def _record(base_url: str) -> None:
    send = requests.Session.request

    def recorded(self: requests.Session, method: str, url: str, **options: Any) -> requests.Response:
        path = url.removeprefix(base_url).removeprefix("/api/v1")
        function = (options.get("json") or {}).get("function")
        calls.append(f"{method.upper()} {path}" + (f" {function}" if function else ""))
        return send(self, method, url, **options)

    requests.Session.request = recorded


def _with_names_back(call: str, known: dict[str, str]) -> str:
    for name, braced in known.items():
        call = call.replace(name, braced)
    call = re.sub(r"(?<=upload_status/)\S+", "{request}", call)
    return re.sub(r"(?<=/)(sampler_)?weights/[^ /]+$", "{checkpoint}", call).replace(
        "training_runs/nobody", "training_runs/{run}"
    )


def _look_around(client: Any) -> None:
    seen["healthy"] = client.health_check()
    seen["capacity"] = client.get_capacity_info().model_dump()
    seen["models"] = [one.model_name for one in client.get_server_capabilities().supported_models]
    seen["runs_before"] = len(client.list_training_runs())
    runs, cursor = client.list_training_runs_with_cursor(limit=5)
    seen["cursor"] = [cursor.limit, cursor.offset, cursor.total_count == len(runs)]


def _set(model: Any) -> None:
    model.set_loss("CrossEntropyLoss", reduction="sum")
    model.set_optimizer("AdamW", lr=1e-2)
    model.set_lr_scheduler("CosineWarmupScheduler", num_warmup_steps=1, num_training_steps=10)
    model.set_template("Template")
    model.set_processor("InputProcessor")
    model.add_metric("LossMetric", is_training=True)


def _train(model: Any) -> None:
    # The last layer of an adapter that has not learned computes nothing: its rate is zero at the first step.
    forward = model.forward(inputs=ROWS).result
    seen["forward"] = _shape(forward)
    seen["loss"] = model.calculate_loss().result
    model.backward()
    seen["grad_norm"] = model.clip_grad_norm(1.0).result
    model.step()
    model.zero_grad()
    model.lr_step()
    losses = []
    for _ in range(3):
        done = model.forward_backward(inputs=ROWS).result
        losses.append(done["loss"] if isinstance(done, dict) else done[1])
        model.clip_grad_and_step(max_grad_norm=1.0)
    seen["losses"] = losses
    seen["reference"] = _shape(model.forward_only(inputs=ROWS, disable_lora=True).result)
    seen["metric"] = model.calculate_metric(is_training=True).result
    seen["configs"] = type(model.get_train_configs().result).__name__
    seen["state_dict"] = len(model.get_state_dict().result)


def _shape(result: Any) -> Any:
    """Rows and their lengths, as real backends answer."""
    return [len(row) for row in result["logps"]] if isinstance(result, dict) else None


def _save(model: Any) -> str:
    saved = model.save("step-1", save_optimizer=True, consumed_train_samples=8)
    for_sampler = model.save("x", is_sampler=True)
    model.load(saved.twinkle_path)
    model.load(saved.twinkle_path, load_optimizer=True)
    seen["progress"] = model.resume_from_checkpoint(saved.twinkle_path)
    seen["only_model"] = model.resume_from_checkpoint(saved.twinkle_path, resume_only_model=True)
    seen["paths"] = [saved.twinkle_path.partition("/weights/")[2], "sampler_weights" in for_sampler.twinkle_path]
    seen["for_sampler"] = for_sampler.twinkle_path
    return saved.twinkle_path


def _run_of(path: str) -> str:
    return path.partition("://")[2].partition("/")[0]


def _inspect(client: Any, saved: str, model_name: str) -> None:
    run_id = _run_of(saved)
    run = client.get_training_run(run_id)
    seen["run"] = [run.training_run_id == run_id, run.base_model == model_name, run.is_lora, run.lora_rank]
    seen["listed"] = run_id in [one.training_run_id for one in client.list_training_runs()]
    seen["found"] = run_id in [one.training_run_id for one in client.find_training_run_by_model(model_name)]
    checkpoints = client.list_checkpoints(run_id)
    seen["checkpoints"] = sorted({one.checkpoint_type for one in checkpoints})
    seen["step_1"] = "weights/step-1" in [one.checkpoint_id for one in checkpoints]
    parsed = client.get_checkpoint_path(run_id, "weights/step-1")
    seen["same_path"] = parsed.twinkle_path == saved == client.get_checkpoint_twinkle_path(run_id, "weights/step-1")
    seen["latest"] = client.get_latest_checkpoint_path(run_id) is not None
    info = client.get_weights_info(saved)
    seen["weights"] = [info.base_model == model_name, info.is_lora, info.lora_rank]


def _refuse(model: Any) -> None:
    for name, call in {
        "loss": model.set_loss,
        "optimizer": model.set_optimizer,
        "lr_scheduler": model.set_lr_scheduler,
        "template": model.set_template,
        "processor": model.set_processor,
        "metric": model.add_metric,
        "patch": model.apply_patch,
    }.items():
        _expect_refusal(name, lambda call=call: call(NOBODY))
    _expect_refusal("load", lambda: model.load("/etc/passwd"))


def _expect_refusal(name: str, call: Callable[[], object]) -> None:
    try:
        call()
    except requests.HTTPError as error:
        refused[name] = str(error)


def _sample(model_name: str, saved: str) -> None:
    sampler = vLLMSampler(f"ms://{model_name}")
    sampler.set_template("Template", model_id=model_name)
    sampler.add_adapter_to_sampler("a", json.dumps({"r": 4}))
    params = {"max_tokens": 4, "num_samples": 2, "logprobs": 1, "temperature": 1.0, "seed": 3}
    drawn = sampler.sample(ROWS, sampling_params=params, adapter_uri=saved)
    seen["drawn"] = [len(one.sequences) for one in drawn]
    sequence = drawn[0].sequences[0]
    seen["logprobs"] = [pair[0][0] for pair in sequence.logprobs] == sequence.tokens
    row = sequence.new_input_feature
    seen["row"] = row["input_ids"] == ROWS[0]["input_ids"] + sequence.tokens
    talked = sampler.sample([CHAT], sampling_params={"max_tokens": 2}, adapter_uri=seen["for_sampler"])
    seen["talked"] = [message["role"] for message in talked[0].sequences[0].new_input_feature["messages"]]
    _expect_refusal("sampler_patch", lambda: sampler.apply_patch(NOBODY))
    _expect_refusal("adapter_uri", lambda: sampler.sample([CHAT], adapter_uri="/etc/passwd"))


def _process(model_name: str) -> None:
    meta = DatasetMeta(data=QUESTIONS, data_slice=range(6))
    dataset = Dataset(meta)
    dataset.map("SelfCognitionProcessor", init_args={"model_name": "N", "model_author": "A"})
    seen["row_of_data"] = dataset[0]["messages"][-1]["content"]
    dataset.set_template("Template", model_id=model_name, max_length=256)
    dataset.encode()
    dataset.check()
    seen["rows"] = len(dataset)
    loader = DataLoader(dataset, batch_size=4, min_batch_size=2)
    loader.set_processor("InputProcessor")
    loader.skip_consumed_samples(0)
    seen["batches"] = [len(loader), len(list(loader))]
    seen["state"] = loader.get_state()
    loader.resume_from_checkpoint(4)
    _expect_refusal("dataset_path", lambda: Dataset(DatasetMeta("/etc/passwd")))
    _expect_refusal("preprocessor", lambda: dataset.map(NOBODY))


def _process_otherwise(model_name: str) -> None:
    """Data sets of every other class, mixed, filtered and packed, whole and as streams."""
    lazy = LazyDataset(DatasetMeta(data=QUESTIONS[:2]))
    lazy.add_dataset(DatasetMeta(data=QUESTIONS[2:]))
    lazy.mix_dataset(False)
    lazy.map("SelfCognitionProcessor", init_args={"model_name": "N", "model_author": "A"})
    lazy.set_template("Template", model_id=model_name, max_length=256)
    lazy.encode()
    lazy.check()
    seen["lazy"] = [len(lazy), len(lazy[5]["input_ids"]) > 0, sum(map(len, DataLoader(lazy, batch_size=2)))]
    packing = PackingDataset(DatasetMeta(data=QUESTIONS))
    packing.map("SelfCognitionProcessor", init_args={"model_name": "N", "model_author": "A"})
    packing.set_template("Template", model_id=model_name, max_length=1024)
    packing.encode()
    packing.pack_dataset()
    seen["packed"] = [len(packing), packing[0]["position_ids"].count(0)]
    stream = IterableDataset(DatasetMeta(data=QUESTIONS[:2]))
    stream.add_dataset(DatasetMeta(data=QUESTIONS[2:3]))
    rows = iter(IterableDataset(DatasetMeta(data=QUESTIONS)))
    # Not `list`: that asks for a length, which their stream has a method for and no answer.
    seen["streamed"] = [next(rows)["query"], sum(1 for _ in rows)]
    encoded = [{"input_ids": [n, n], "labels": [n, -100], "position_ids": [0, 1], "length": 2} for n in range(1, 7)]
    packed = IterablePackingDataset(DatasetMeta(data=encoded), packing_interval=4)
    packed.set_template("Template", model_id=model_name, max_length=4)
    packed.pack_dataset()
    seen["packed_stream"] = [row["input_ids"] for row in packed]
    seen["batch"] = InputProcessor(padding_side="left")(ROWS)["input_ids"]
    _expect_refusal("length_of_stream", lambda: len(stream))
    _expect_refusal("row_of_stream", lambda: stream[0])
    _expect_refusal("filter", lambda: lazy.filter(NOBODY))
    _expect_refusal("save_as", lambda: lazy.save_as("/tmp/rows.jsonl"))
    _expect_refusal("flush_save", lazy.flush_save)
    _expect_refusal("cast_column", lambda: lazy.cast_column("none"))


def _upload(model: Any, saved: str) -> None:
    """Begin one and ask for it once: no hub is near, and the server tries for minutes."""
    said: list[str] = []

    def note(*words: object) -> None:
        said.append(" ".join(map(str, words)))

    def enough(_: float) -> None:
        raise TimeoutError

    multi_lora_transformers.print = note
    multi_lora_transformers.time = SimpleNamespace(sleep=enough)
    try:
        model.upload_to_hub(saved, "somebody/something", hub_token="a-token-of-theirs")
    except TimeoutError:
        seen["upload"] = said[-1].removeprefix("[upload_to_hub] Status: ").rstrip(".")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
