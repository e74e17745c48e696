"""The lines of a batch: what each asks for, and what is written of its answer. Nothing here waits or keeps anything.

Whatever is written follows from the job, the line and the samples: no clock, no random number, no id of a process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import orjson

from twinkle.core.errors import InvalidInput
from twinkle.core.job import JsonObject
from twinkle.wire.bodies.base import parse_body
from twinkle.wire.bodies.jobs_batch import BatchSpec
from twinkle.wire.bodies.openai import ChatRequest, CompletionRequest, DrawRequest
from twinkle.wire.jsonl import BatchCheck, BatchLine, Line, LineCheck, LineProblem

CHAT = "/v1/chat/completions"
EXPIRED_CODE = "batch_expired"
EXPIRED_TEXT = "This request could not be executed before the completion window expired."
MAX_MODELS = 100

_OK = 200
_ID_PREFIXES = {CHAT: "chatcmpl", "/v1/completions": "cmpl"}


@dataclass(frozen=True, kw_only=True)
class BatchRequest:
    """A line, ready to be asked."""

    index: int
    """Its place among the lines, from 0."""
    custom_id: str
    body: JsonObject
    num_sequences: int
    """How many are drawn for it, which is what it takes up while it is under way."""


@dataclass(frozen=True, kw_only=True)
class BatchAnswer:
    """What a route said to a line."""

    status: int
    body: JsonObject

    @property
    def is_ok(self) -> bool:
        """Whether it is what was asked for."""
        return self.status == _OK

    def tokens(self, name: str) -> int:
        """A count of its usage; 0 where it has none."""
        usage = self.body.get("usage") if self.is_ok else None
        return int(usage.get(name) or 0) if isinstance(usage, dict) else 0


class BatchReader:
    """Looks at all lines before the first one is asked: every field, and whether the custom ids are unique."""

    def __init__(self, spec: BatchSpec) -> None:
        self._spec = spec
        self._check = BatchCheck(spec.endpoint)
        self.models: dict[str, int] = {}
        """Those that are asked for, each with the number of its first line."""
        self.num_sequences = 0
        """What all lines draw together."""

    def look_at(self, line: Line) -> None:
        """Judge a line."""
        read = self._check.look_at(line)
        if read is None:
            return
        try:
            body = parse_request(self._spec, read.body)
        except InvalidInput as error:
            message = error.message.removeprefix(f"{error.field}: ")
            self._refuse(line.number, "invalid_request", message, f"body.{error.field}")
            return
        self.models.setdefault(body.model, line.number)
        self.num_sequences += num_sequences_of(body)
        if len(self.models) > MAX_MODELS:
            self._refuse(line.number, "too_many_models", f"a batch may ask {MAX_MODELS} different ones", "body.model")

    def refuse_model(self, model: str, reason: str) -> None:
        """Note that a model is none of the caller's."""
        self._refuse(self.models[model], "model_not_found", reason, "body.model")

    def finish(self) -> LineCheck:
        """What came of it."""
        return self._check.finish()

    @property
    def found(self) -> LineCheck:
        """What came of it so far."""
        return self._check.found

    def _refuse(self, number: int, code: str, message: str, param: str) -> None:
        self.found.add(LineProblem(line=number, column=None, code=code, message=message, param=param))


def parse_request(spec: BatchSpec, body: Mapping[str, Any]) -> DrawRequest:
    """A line's body as its route will read it.

    Raises:
        InvalidInput: The route would refuse it, or it asks for a stream.
    """
    body_class = ChatRequest if spec.endpoint == CHAT else CompletionRequest
    read = parse_body(body_class, orjson.dumps(_with_model(spec, body)))
    if read.stream:
        raise InvalidInput("stream", "is not for batches: answers are written when they are whole")
    return read


def request_of(spec: BatchSpec, line: BatchLine, index: int, *, seed: int) -> BatchRequest:
    """A line that was judged before, as it is asked: one without a seed of its own gets the given one."""
    read = parse_request(spec, line.body)
    body = _with_model(spec, line.body)
    if read.seed is None:
        body["seed"] = seed
    return BatchRequest(index=index, custom_id=line.custom_id, body=body, num_sequences=num_sequences_of(read))


def num_sequences_of(read: DrawRequest) -> int:
    """How many a request draws."""
    num_prompts = len(read.prompt) if isinstance(read, CompletionRequest) else 1
    return num_prompts * (read.n or 1)


def answer_line(spec: BatchSpec, job_id: str, created: int, request: BatchRequest, answer: BatchAnswer) -> bytes:
    """What is written of an answer: to the file of answers or, if it is a refusal, to that of errors."""
    body = dict(answer.body)
    if answer.is_ok:
        body["id"] = f"{_ID_PREFIXES[spec.endpoint]}-{_name_of(job_id, request.index, 'answer')}"
        body["created"] = created
        body["usage"] = _usage_of(body)
    response = {
        "status_code": answer.status,
        "request_id": f"req_{_name_of(job_id, request.index, 'request')}",
        "body": body,
    }
    return _written(job_id, request.index, request.custom_id, response=response, error=None)


def expired_line(job_id: str, index: int, custom_id: str) -> bytes:
    """What is written of a line that was not answered in time."""
    error = {"code": EXPIRED_CODE, "message": EXPIRED_TEXT}
    return _written(job_id, index, custom_id, response=None, error=error)


def _with_model(spec: BatchSpec, body: Mapping[str, Any]) -> JsonObject:
    return {"model": spec.model, **body} if spec.model is not None else dict(body)


def _usage_of(body: Mapping[str, Any]) -> object:
    """The counts that follow from the samples; which prompts were found computed is a matter of chance."""
    usage = body.get("usage")
    if not isinstance(usage, dict):
        return usage
    return {name: count for name, count in usage.items() if name != "prompt_tokens_details"}


def _written(
    job_id: str, index: int, custom_id: str, *, response: Mapping[str, object] | None, error: Mapping[str, str] | None
) -> bytes:
    line = {
        "id": f"batch_req_{_name_of(job_id, index, 'line')}",
        "custom_id": custom_id,
        "response": response,
        "error": error,
    }
    return orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE)


def _name_of(job_id: str, index: int, what: str) -> str:
    return sha256(f"{job_id}\0{index}\0{what}".encode()).hexdigest()[:32]
