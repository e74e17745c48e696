"""Learning from rewards and from a teacher over a whole service, on a real tiny model, graded by real processes."""

from __future__ import annotations

import json
from typing import Any

from harness.served import Served
from twinkle.client import Client

LETTER = {"type": "regexp", "name": "letter", "pattern": "[aeiou]{2}"}
PROMPTS = "".join(json.dumps({"messages": [{"role": "user", "content": text}]}) + "\n" for text in "abcdefgh")


def done(client: Client, kind: str, spec: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A job's result and its metrics."""
    job = client.jobs.submit(kind, spec)
    ended = job.wait(timeout_s=240)
    assert ended.failure is None, ended.failure
    assert ended.result is not None
    return ended.result, [event.data for event in job.events() if event.kind == "metrics"]


def test_what_is_rewarded_is_learnt_and_taught_on(served: Served, tmp_path: Any) -> None:
    (data := tmp_path / "prompts.jsonl").write_text(PROMPTS)
    with Client(served.url, api_key=served.create_key("rewarded")) as client:
        file = client.files.upload(data, purpose="fine-tune")
        spec = {
            "model": "tiny",
            "data": file.id,
            "grader": LETTER,
            "group_size": 8,
            "batch_size": 8,
            "max_tokens": 6,
            "steps": 12,
            "lr": 0.03,
            "schedule": "constant",
            "rank": 8,
            "seed": 1,
        }
        result, metrics = done(client, "grpo", spec)

        rewards = [one["reward"] for one in metrics[1:]]
        assert sum(rewards[-3:]) > sum(rewards[:3]) + 1
        assert max(abs(one["kl_sampler"]) for one in metrics[1:]) < 1e-3
        assert result["sampler_checkpoint"].endswith("/final")

        taught = {
            "model": "tiny",
            "teacher": result["sampler_checkpoint"],
            "data": file.id,
            "group_size": 4,
            "batch_size": 8,
            "lr": 0.03,
            "schedule": "constant",
            "rank": 8,
            "seed": 2,
        }
        _, told = done(client, "distill", {**taught, "max_tokens": 6, "steps": 10})
        gaps = [one["reverse_kl"] for one in told[1:]]
        assert 0 < gaps[-1] < 0.8 * gaps[0]
        # A model of random weights ends an answer seldom, and those that are cut are left out.
        cut = {"teacher": "tiny", "mode": "off_policy", "max_tokens": 200, "steps": 1}
        answered, _ = done(client, "distill", {**taught, **cut})
        assert answered["teacher_file"].startswith("file-")
        assert answered["trained_tokens"] > 0


def test_a_model_that_was_taught_to_judge_rewards_in_a_job(served: Served, tmp_path: Any) -> None:
    lessons = [{"role": "assistant", "content": "0.5"}]
    (rows := tmp_path / "judgements.jsonl").write_text(
        "".join(
            json.dumps({**json.loads(line), "messages": json.loads(line)["messages"] + lessons}) + "\n"
            for line in PROMPTS.splitlines()
        )
    )
    (data := tmp_path / "prompts.jsonl").write_text(PROMPTS)
    shared = {"model": "tiny", "rank": 8, "schedule": "constant", "seed": 3}
    with Client(served.url, api_key=served.create_key("judged")) as client:
        lessons_file, prompts = (client.files.upload(file, purpose="fine-tune").id for file in (rows, data))
        judge, _ = done(client, "sft", {**shared, "data": lessons_file, "batch_size": 8, "steps": 12, "lr": 0.03})
        grader = {
            "type": "score_model",
            "name": "judge",
            "model": judge["sampler_checkpoint"],
            "input": [{"role": "user", "content": "a"}],
            "sampling_params": {"max_completions_tokens": 6},
        }
        answers = {"group_size": 2, "batch_size": 2, "max_tokens": 4, "steps": 1}
        result, metrics = done(client, "grpo", {**shared, **answers, "data": prompts, "grader": grader})

    assert (metrics[-1]["reward"], result["reward"]) == (0.5, 0.5)
    assert metrics[-1]["judge_tokens"] > 0
