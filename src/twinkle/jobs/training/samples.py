"""Answers to the prompts of a training, drawn from what it has learnt so far."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import httpx

from twinkle.core.job import JobEvent, JobFailed
from twinkle.jobs.context import JobContext
from twinkle.wire.bodies.jobs_training import SamplePrompt

_BUSY = (429, 503)
_PATIENCE_S = 600.0
_SESSION = "X-Session-Id"


async def answer_prompts(
    context: JobContext[Any], prompts: Sequence[SamplePrompt], *, run: int, step: int, model: str
) -> list[JobEvent]:
    """One event for each prompt, as whoever asks the OpenAI-compatible routes for that checkpoint is answered.

    Raises:
        JobFailed: The server refuses a prompt; transient where it is busy.
    """
    return [
        JobEvent(
            kind="sample",
            message=f"step {step}, prompt {index}",
            data={"step": step, "prompt": index, "text": await _answer(context, prompt, (run, step, index), model)},
        )
        for index, prompt in enumerate(prompts)
    ]


async def _answer(context: JobContext[Any], prompt: SamplePrompt, place: tuple[int, int, int], model: str) -> str:
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": prompt.max_tokens,
        "temperature": prompt.temperature,
        "seed": context.seed_of("sample", *place[1:]),
    }
    if prompt.messages is None:
        path, body["prompt"] = "/v1/completions", prompt.prompt
    else:
        path, body["messages"] = "/v1/chat/completions", [message.model_dump() for message in prompt.messages]
    # The same key, the same sample, whoever asks again; the job's own session keeps it as long as the job lasts.
    headers = {
        "Idempotency-Key": ":".join(str(part) for part in (context.job.id, *place)),
        _SESSION: await context.door.session(),
    }
    ends_at = context.now() + _PATIENCE_S
    while True:
        answer = await context.door.request("POST", path, json=body, headers=headers)
        if answer.status_code not in _BUSY or context.now() > ends_at:
            break
        # Its owner's interactive work goes first. What is being drawn goes on, and is asked for again by its key.
        await asyncio.sleep(float(answer.headers.get("Retry-After", 1)))
    if not answer.is_success:
        raise _refused(answer, place[-1])
    choice = answer.json()["choices"][0]
    text: str = choice["text"] if prompt.messages is None else choice["message"]["content"]
    return text


def _refused(answer: httpx.Response, index: int) -> JobFailed:
    return JobFailed(
        "sample_refused",
        f"samples[{index}]: {answer.json()['error']['message']}",
        is_transient=answer.status_code in _BUSY or answer.status_code >= 500,
        field=f"samples[{index}]",
    )
