"""Exports of a whole service: what is downloaded computes what is served, and is the same whatever was killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tinker
import torch
import transformers

from harness.crashes import BY_A_JOB, Crashes
from harness.served import Served
from harness.struck import Struck
from twinkle.client import Client

FORMS = ["peft", "merged", "gguf"]
POINTS = [
    ("export.step_taken:2",),
    ("export.step_taken:3", "export.file_published:3", "job.worked"),
]
TOKENS = list(range(5, 45))


class Exported:
    """The service, its crash points, and a checkpoint in it."""

    def __init__(self, served: Served, crashes: Crashes) -> None:
        self.served = served
        self.crashes = crashes
        self.key = served.create_key("exporter")
        self._sdk = served.client("exporter")
        self.checkpoint = self._train()

    def _train(self) -> str:
        training = self._sdk.create_lora_training_client(base_model="tiny", rank=4)
        tokens = [tinker.EncodedTextChunk(tokens=TOKENS[:-1])]
        inputs = {"target_tokens": TOKENS[1:], "weights": [1.0] * len(TOKENS[1:])}
        datum = tinker.Datum(model_input=tinker.ModelInput(chunks=tokens), loss_fn_inputs=inputs)
        for _ in range(3):
            training.forward_backward([datum], "cross_entropy")
            training.optim_step(tinker.AdamParams(learning_rate=3e-2)).result()
        return str(training.save_weights_for_sampler("best").result().path)

    def served_logprobs(self) -> torch.Tensor:
        """Of the tokens behind the first, by the mesh."""
        sampler = self._sdk.create_sampling_client(model_path=self.checkpoint)
        prompt = tinker.ModelInput(chunks=[tinker.EncodedTextChunk(tokens=TOKENS)])
        return torch.tensor(sampler.compute_logprobs(prompt).result()[1:])

    def export(self, *points: str) -> Any:
        """An export while somebody comes by the points; the job at its end."""
        for point in points:
            name, _, count = point.partition(":")
            self.crashes.arm(name, count=int(count or 1))
        with Client(self.served.url, api_key=self.key) as client:
            spec = {"checkpoint": self.checkpoint, "forms": FORMS}
            ended = client.jobs.submit("export", spec, max_attempts=20).wait(timeout_s=150)
        assert ended.state == "succeeded", ended.failure
        return ended


@pytest.fixture(scope="module")
def exported(struck_model: Struck) -> Exported:
    return Exported(struck_model.served, struck_model.crashes)


# Of every day is the killed process of tests/unit/export/test_export_jobs.py.
@pytest.mark.soak
@pytest.mark.parametrize("points", POINTS, ids="+".join)
def test_a_kill_in_the_middle_of_an_export_leaves_no_trace_in_its_files(
    exported: Exported, points: tuple[str, ...]
) -> None:
    calm = exported.export()

    struck = exported.export(*points)

    assert all(exported.crashes.has_fired(point.partition(":")[0]) for point in points)
    assert _files_of(struck) == _files_of(calm)
    assert struck.result["verification"] == calm.result["verification"]
    assert not list((exported.served.home / "exports").iterdir())


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(3))
def test_kills_at_points_drawn_by_chance_leave_no_trace_either(exported: Exported, seed: int) -> None:
    calm = exported.export()
    points = {point: most for point, most in BY_A_JOB.items() if point.startswith("job.")}

    with exported.crashes.drawn(seed, {**points, "export.step_taken": 4, "export.file_published": 6}) as told:
        struck = exported.export()

    assert _files_of(struck) == _files_of(calm), told
    assert struck.result["verification"] == calm.result["verification"], told


def _files_of(job: Any) -> list[tuple[str, str]]:
    return [(file["path"], file["sha256"]) for file in job.result["files"]]


def test_what_one_command_downloads_computes_what_is_served(exported: Exported, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "twinkle.cli", "export", exported.checkpoint, "--merged", "--to", str(tmp_path)]
    environment = {**os.environ, "TWINKLE_SERVER_URL": exported.served.url, "TWINKLE_SERVER_TOKEN": exported.key}

    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "downloaded:" in done.stdout
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    transformers.AutoTokenizer.from_pretrained(tmp_path)
    with torch.no_grad():
        logprobs = model(input_ids=torch.tensor([TOKENS])).logits[0].log_softmax(-1)
    found = logprobs[:-1].gather(1, torch.tensor(TOKENS[1:])[:, None])[:, 0]
    torch.testing.assert_close(found, exported.served_logprobs(), atol=1e-4, rtol=1e-4)


def test_a_flow_trains_and_gives_out_what_it_has_trained(exported: Exported, tmp_path: Path) -> None:
    rows = [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": f"b {n}"}]} for n in range(4)
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with Client(exported.served.url, api_key=exported.key) as client:
        data = client.files.upload(tmp_path / "rows.jsonl")
        train = {"model": "tiny", "data": data.id, "rank": 2, "epochs": 1, "batch_size": 2}
        give = {"checkpoint": "${train.result.sampler_checkpoint}", "forms": ["peft"]}
        jobs = {"train": {"kind": "sft", "spec": train}, "give": {"kind": "export", "spec": give}}
        flow = client.jobs.submit("flow", {"jobs": jobs})
        ended = flow.wait(timeout_s=150)
        members = {member.name: client.jobs.attach(member.id).show() for member in flow.members().members}

    assert ended.state == "succeeded", ended.failure
    trained, given = members["train"].result, members["give"].result
    assert trained is not None and given is not None
    assert given["checkpoint"] == trained["sampler_checkpoint"]
    assert {"adapter_model.safetensors", "adapter_config.json"} <= {file["path"] for file in given["files"]}
