"""The lines of a job of raw operations: all are judged before the first is sent; and what came of each as a line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import orjson

from twinkle.client.datum import Datum
from twinkle.core.errors import InvalidInput
from twinkle.core.operation import OperationKind
from twinkle.jobs.estimate import Tokens, Work
from twinkle.wire.bodies.base import ResponseBody
from twinkle.wire.bodies.jobs_ops import (
    LoadLine,
    OpsDatum,
    OpsLine,
    OptimStepLine,
    PassLine,
    SampleLine,
    SaveLine,
    parse_line,
)
from twinkle.wire.jsonl import Line, LineCheck, LineProblem, read_object
from twinkle.wire.paths import SCHEME
from twinkle.wire.sample_result import SampleResult, TopkLogprobs
from twinkle.wire.training_result import ForwardBackwardResult

_FRACTIONS = frozenset({"weights", "logprobs", "advantages"})
"""Tensors that losses want as fractions also where whole numbers are written."""
_JSON = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_SORT_KEYS


class OpsCheck:
    """Looks at the lines one after the other: each by itself, and names of saves by what stands further up."""

    def __init__(self, *, has_base_model: bool) -> None:
        self.found = LineCheck()
        self._has_base_model = has_base_model
        self._saved: dict[str, set[str]] = {"save_weights": set(), "save_weights_for_sampler": set()}

    def look_at(self, number: int, data: bytes) -> OpsLine | None:
        """Judge a line that is not blank; the line, unless something is wrong with it."""
        self.found.num_lines += 1
        value = read_object(Line(number, 0, data))
        if isinstance(value, LineProblem):
            self.found.add(value)
            return None
        try:
            line = parse_line(data)
            self._judge(line)
        except InvalidInput as error:
            message = error.message.removeprefix(f"{error.field}: ")
            self.found.add(LineProblem(line=number, column=None, code=error.code, message=message, param=error.field))
            return None
        return line

    def finish(self) -> LineCheck:
        """What came of it."""
        if not self.found.num_lines:
            self.found.add(LineProblem(line=None, column=None, code="empty_file", message="the file has no operations"))
        return self.found

    def _judge(self, line: OpsLine) -> None:
        if isinstance(line, SaveLine):
            names = self._saved[line.op]
            if line.name in names:
                raise InvalidInput("name", f"{line.name!r} was saved further up already; choose another one")
            names.add(line.name)
        if isinstance(line, LoadLine):
            self._know(line.path, "save_weights", "path")
        if isinstance(line, SampleLine) and line.source is not None:
            self._know(line.source, "save_weights_for_sampler", "source")
        if isinstance(line, SampleLine) and line.source is None and not self._has_base_model:
            raise InvalidInput("source", "is missing: this job begins as a checkpoint, so name what to sample from")

    def _know(self, text: str, op: str, field: str) -> None:
        if not text.startswith(SCHEME) and text not in self._saved[op]:
            raise InvalidInput(field, f"{text!r} is no {SCHEME} path, and no {op} further up has this name")


class OpsCount:
    """Counts what lines would have a mesh do."""

    def __init__(self) -> None:
        self._most = {"trained": 0, "forwarded": 0, "prefilled": 0, "drawn": 0}
        self._num = {"steps": 0, "states": 0, "weights": 0, "loads": 0, "samples": 0, "unbounded": 0}

    def add(self, line: OpsLine) -> None:
        """Count one more."""
        match line:
            case PassLine():
                kind = "trained" if line.op == "forward_backward" else "forwarded"
                self._most[kind] += sum(len(datum.tokens) for datum in line.data)
            case OptimStepLine():
                self._num["steps"] += 1
            case SaveLine():
                self._num["states" if line.op == "save_weights" else "weights"] += 1
            case LoadLine():
                self._num["loads"] += 1
            case SampleLine():
                self._most["prefilled"] += len(line.prompt)
                self._most["drawn"] += line.num_samples * (line.sampling_params.max_tokens or 0)
                self._num["samples"] += line.num_samples
                self._num["unbounded"] += line.sampling_params.max_tokens is None

    @property
    def work(self) -> Work:
        """All of it, of a model that is yet to be named."""
        most, num = Tokens(**self._most), self._num
        details = {"samples": num["samples"]}
        if num["unbounded"]:
            details["samples_without_max_tokens"] = num["unbounded"]
        return Work(
            base_model="",
            num_trained=most.trained,
            num_forwarded=most.forwarded,
            num_prefilled=most.prefilled,
            num_drawn=most.drawn,
            least=replace(most, drawn=min(most.drawn, num["samples"])),
            num_steps=num["steps"],
            num_kept_with_optimizer=num["states"],
            num_kept=num["weights"],
            around={
                OperationKind.SAVE_WEIGHTS: num["states"],
                OperationKind.SAVE_WEIGHTS_FOR_SAMPLER: num["weights"],
                OperationKind.LOAD_WEIGHTS: num["loads"],
            },
            details=details,
        )


def datum_of(datum: OpsDatum) -> Datum:
    """An example as the client writes it."""
    return Datum(datum.tokens, {name: _tensor(name, values) for name, values in datum.inputs.items()})


def _tensor(name: str, values: list[Any]) -> Any:
    if name not in _FRACTIONS:
        return values
    try:
        return np.asarray(values, dtype=np.float32)
    except (ValueError, TypeError) as error:
        raise InvalidInput(f"data.inputs.{name}", f"is not a tensor of numbers: {error}") from error


def result_line(number: int, line: OpsLine, outcome: Mapping[str, Any]) -> bytes:
    """What came of a line: ``{"line": 7, "op": ..., "result": ...}``, or an ``error`` in its place."""
    return orjson.dumps({"line": number, "op": line.op, **outcome}, option=_JSON) + b"\n"


def outcome_of(result: object) -> dict[str, Any]:
    """A result as JSON. What depends on when it was computed is left out."""
    if isinstance(result, ForwardBackwardResult):
        values: dict[str, Any] = {"logprobs": [_flat(one) for one in result.logprobs], "metrics": result.metrics}
        if result.elementwise_loss:
            values["elementwise_loss"] = [_flat(one) for one in result.elementwise_loss]
        return {"result": values}
    if isinstance(result, SampleResult):
        return {"result": _samples(result)}
    assert isinstance(result, ResponseBody), "every other operation answers with a body"
    return {"result": result.model_dump(mode="json", exclude_none=True, exclude={"type"})}


def error_of(code: str, message: str) -> dict[str, Any]:
    """Why there is no result."""
    return {"error": {"code": code, "message": message}}


def _samples(result: SampleResult) -> dict[str, Any]:
    values: dict[str, Any] = {
        "sequences": [
            {
                "tokens": _flat(one.tokens),
                "logprobs": _flat(one.logprobs),
                "stop_reason": one.stop_reason,
                **({} if one.topk is None else {"topk": _topk(one.topk)}),
            }
            for one in result.sequences
        ]
    }
    if result.prompt_logprobs is not None:
        values["prompt_logprobs"] = _flat(result.prompt_logprobs)
    if result.topk_prompt_logprobs is not None:
        values["topk_prompt_logprobs"] = _topk(result.topk_prompt_logprobs)
    return values


def _topk(topk: TopkLogprobs) -> dict[str, Any]:
    return {"token_ids": _flat(topk.token_ids), "logprobs": _flat(topk.logprobs)}


def _flat(array: Any) -> Any:
    return np.ascontiguousarray(array)
