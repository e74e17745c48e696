"""A fine-tuning over a whole service, by OpenAI's client as it is: from a file to answers of the model that it made."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import openai
import pytest

from harness.polling import wait_for
from harness.served import TWINKLE, Served

ROOT = Path(__file__).parents[2]
DATA = ROOT / "examples" / "data" / "arithmetic.jsonl"
LINES = re.findall(r"^twinkle submit .*$", (ROOT / "examples" / "data" / "README.md").read_text(), re.MULTILINE)
FINAL = {"succeeded", "failed", "cancelled"}


def test_a_file_becomes_a_model_that_is_sampled_by_its_name(served: Served) -> None:
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key=served.create_key("tuning"), timeout=60)
    lines = DATA.read_bytes().splitlines(keepends=True)[:48]
    data = client.files.create(file=("train.jsonl", b"".join(lines)), purpose="fine-tune")
    held_out = client.files.create(file=("eval.jsonl", b"".join(lines[:6])), purpose="fine-tune")
    created = client.fine_tuning.jobs.create(
        model="tiny",
        training_file=data.id,
        validation_file=held_out.id,
        method={
            "type": "supervised",
            "supervised": {
                "hyperparameters": {"n_epochs": 2, "batch_size": 8, "learning_rate_multiplier": 50},
            },
        },
        suffix="sums",
        seed=1,
    )

    done = wait_for(lambda: ended(client, created.id), what="the end of the fine-tuning", deadline_s=180)

    assert done.error is None
    assert done.status == "succeeded"
    (table,) = [client.files.content(file).content.decode() for file in done.result_files]
    rows = list(csv.DictReader(io.StringIO(table)))
    assert [int(row["step"]) for row in rows] == list(range(13))
    assert float(rows[-1]["loss"]) < 0.8 * float(rows[1]["loss"])
    assert float(rows[-1]["eval_loss"]) < 0.8 * float(rows[0]["eval_loss"])
    assert 0.0 <= float(rows[0]["eval_accuracy"]) < float(rows[-1]["eval_accuracy"]) <= 1.0
    assert done.fine_tuned_model is not None
    question = json.loads(lines[0])["messages"][:1]
    answer = client.chat.completions.create(model=done.fine_tuned_model, messages=question, max_tokens=8, temperature=0)
    assert answer.choices[0].message.content


def test_a_wrong_line_is_told_by_its_number_before_anything_is_trained(served: Served) -> None:
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key=served.create_key("wrong"), timeout=60)
    lines = [*DATA.read_bytes().splitlines()[:3], b'{"messages": "none"}']
    data = client.files.create(file=("train.jsonl", b"\n".join(lines)), purpose="fine-tune")
    created = client.fine_tuning.jobs.create(model="tiny", training_file=data.id)

    done = wait_for(lambda: ended(client, created.id), what="the end of the fine-tuning", deadline_s=120)

    assert done.status == "failed"
    assert done.error is not None
    assert (done.error.code, done.error.param) == ("invalid_training_file", "training_file")
    assert [one["line"] for one in done.error.model_dump()["errors"]] == [4]
    assert client.fine_tuning.jobs.checkpoints.list(created.id).data == []


def test_the_lines_of_the_readme_are_those_of_the_data() -> None:
    of_readme = re.findall(r"^twinkle submit .*examples/data/.*$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert [shlex.split(line)[2] for line in LINES] == ["sft", "sft", "grpo"]
    assert of_readme == LINES


@pytest.mark.parametrize("line", LINES)
def test_the_lines_that_train_what_the_demo_trains_do(served: Served, line: str) -> None:
    environment = {**os.environ, "TINKER_BASE_URL": served.url, "TINKER_API_KEY": served.create_key("lines")}
    _, *arguments = shlex.split(line)
    shorter = ["--model", "tiny", "--steps", "3", "--json"]

    done = subprocess.run(
        [*TWINKLE, *arguments, *shorter], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=180
    )

    assert done.returncode == 0, done.stdout + done.stderr
    told = [json.loads(document) for document in done.stdout.splitlines()]
    assert (told[-1]["type"], told[-1]["state"], told[-1]["result"]["step"]) == ("job", "succeeded", 3)
    assert "sample" in [one["kind"] for one in told if one["type"] == "event"]


def ended(client: openai.OpenAI, job: str) -> openai.types.fine_tuning.FineTuningJob | None:
    found = client.fine_tuning.jobs.retrieve(job)
    return found if found.status in FINAL else None
