"""Distillation off policy: a teacher answers all prompts, then the student is trained on that as on any data."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

from twinkle.core.job import JobEvent, JobFailed, JsonObject, seed_of_text
from twinkle.jobs.context import JobContext
from twinkle.jobs.data import DataUse
from twinkle.jobs.reinforcement.asking import ask_model
from twinkle.jobs.training.data import Example, TrainingData, open_data
from twinkle.jobs.training.models import base_model_of
from twinkle.jobs.training.plan import SupervisedPlan
from twinkle.wire.bodies.jobs_rl import DistillSpec
from twinkle.wire.bodies.jobs_training import SupervisedSpec, TrainingSpec

_AT_ONCE = 16
_PURPOSE = "fine-tune"
_FILE = "teacher_file"


class SupervisedByTeacher:
    """Has the teacher answer, writes that down as a file of the tenant's, and trains on it."""

    async def run(self, context: JobContext[DistillSpec]) -> JsonObject:
        """The result is that of a training, with the file of the teacher's answers."""
        spec = context.spec
        base_model = await base_model_of(context, spec.model)
        await base_model_of(context, spec.teacher, field="teacher")
        file_id = context.job.progress.get(_FILE)
        if file_id is None:
            file_id = await _taught(context, base_model)
            await context.save(teacher_file=file_id)
        shared = {name: getattr(spec, name) for name in spec.model_fields_set & set(TrainingSpec.model_fields)}
        of_texts = {
            "data": file_id,
            "format": "auto",
            "max_rows": None,
            "preprocessor": None,
            "batch_size": spec.batch_size,
        }
        supervised = SupervisedSpec.model_validate({**shared, **of_texts})
        result = await SupervisedPlan().run(context.for_spec(supervised))
        return {**result, _FILE: file_id}


async def _taught(context: JobContext[DistillSpec], base_model: str) -> str:
    """The id of the file of all answers, one line each, in the order of the prompts."""
    spec = context.spec
    seed = context.job.seed if spec.seed is None else spec.seed
    await context.save(phase="preparing the data")
    # The student's template looks at every row, so that what is wrong is told before anything is sampled.
    data = await open_prompts(context, base_model, seed=seed)
    num_rows, num_cut, lines = len(data.train_numbers), 0, []
    await context.save(phase="asking the teacher", taught_prompts=0, prompts=num_rows)
    for start in range(0, num_rows, _AT_ONCE):
        places = range(start, min(start + _AT_ONCE, num_rows))
        examples = await data.examples(places)
        found = await asyncio.gather(*[_answers(context, example, seed) for example in examples])
        for example, answers in zip(examples, found, strict=True):
            whole = [text for text, was_cut in answers if not was_cut]
            num_cut += len(answers) - len(whole)
            lines += [_line(example.item or {}, text) for text in whole]
        await context.save(phase="asking the teacher", taught_prompts=places.stop, prompts=num_rows)
    if not lines:
        raise JobFailed(
            "nothing_taught", f"all answers of {spec.teacher} were cut at max_tokens; raise it", field="max_tokens"
        )
    if num_cut:
        message = f"{num_cut} answers of {num_cut + len(lines)} were cut at max_tokens, and are left out"
        await context.save(events=[JobEvent(kind="message", message=message, data={"cut": num_cut})])
    return await context.files.write("teacher.jsonl", ("\n".join(lines) + "\n").encode(), purpose=_PURPOSE)


async def open_prompts(context: JobContext[DistillSpec], base_model: str, *, seed: int) -> TrainingData:
    """All prompts at once: what is kept for an evaluation is drawn from the teacher's answers."""
    whole = context.for_spec(context.spec.model_copy(update={"eval_fraction": 0.0, "eval_data": None}))
    return await open_data(whole, base_model, seed=seed, use=DataUse.PROMPTS)


async def _answers(context: JobContext[DistillSpec], example: Example, seed: int) -> list[tuple[str, bool]]:
    """The teacher's answers to a prompt, and whether each was cut."""
    spec, row = context.spec, example.item or {}
    body: dict[str, Any] = {
        "model": spec.teacher,
        "n": spec.group_size,
        "max_tokens": spec.max_tokens,
        "temperature": spec.temperature,
        "seed": seed_of_text(f"{seed}:teacher:{example.place}"),
    }
    messages = _messages(row)
    if messages is None:
        path, body["prompt"] = "/v1/completions", row["prompt"]
    else:
        path, body["messages"] = "/v1/chat/completions", _with_system(messages, spec.system)
        body["chat_template_kwargs"] = {"enable_thinking": spec.enable_thinking}
    answer = await ask_model(context, path, body, key=("teacher", example.place))
    if not answer.is_success:
        message = answer.json()["error"]["message"]
        raise JobFailed("teacher_refused", f"{example}: {message}", field="teacher")
    return [
        (choice["text"] if messages is None else choice["message"]["content"], choice["finish_reason"] == "length")
        for choice in answer.json()["choices"]
    ]


def _line(row: Mapping[str, Any], text: str) -> str:
    messages = _messages(row)
    taught: dict[str, object] = (
        {"prompt": row["prompt"], "completion": text}
        if messages is None
        else {"messages": [*messages, {"role": "assistant", "content": text}]}
    )
    return json.dumps(taught, ensure_ascii=False)


def _messages(row: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """The conversation up to where the teacher's turn begins; ``None`` where the prompt is plain text."""
    given = row.get("messages", row.get("prompt"))
    given = _parsed(given)
    if not isinstance(given, list):
        return None
    messages = [{"role": one["role"], "content": one["content"]} for one in given]
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    return messages


def _parsed(value: object) -> object:
    """A list that a column of text holds as JSON, or what it is."""
    if isinstance(value, str) and value.startswith("[{"):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def _with_system(messages: Sequence[Mapping[str, Any]], system: str | None) -> list[Mapping[str, Any]]:
    has_one = bool(messages) and messages[0]["role"] == "system"
    return [*messages] if system is None or has_one else [{"role": "system", "content": system}, *messages]
