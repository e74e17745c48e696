"""Passes that are called, ready to share device passes with those of others, and their answers as JSON."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from twinkle.core.errors import CallFailed, InvalidInput, UserError
from twinkle.model.forward_pass import EMBEDDING, ForwardPass, PassOptions
from twinkle.model.fused.batch_jobs import Work
from twinkle.model.fused.embedding import EmbeddedRows
from twinkle.model.fused.gradient_buffers import is_out_of_memory
from twinkle.model.fused.job_run import FailureReport
from twinkle.model.fused.rows import refuse_options, with_teacher_indices
from twinkle.model.fused.script_pass import Aim, ScriptPass, keep
from twinkle.model.fused.training import TrainJob, TrainOutcome
from twinkle.model.script_settings import rows_of
from twinkle.model.script_state import Script
from twinkle.wire.calls import Call
from twinkle.workers.engine import CallAnswer
from twinkle.workers.scripts.scripts import Scripts, body_of, loss_keywords

_OPTIONS = ("temperature", "return_logits", "task", "micro_batch_size", "router_replay_action")
_AIMS: Mapping[str, Aim] = {"forward": "score", "forward_only": "score", "forward_backward": "train"}
_OF_PICTURES = frozenset({"image", "images", "image_url", "url", "path", "video", "videos", "audio", "audios"})

_DATUM = re.compile(r"data\[(\d+)\](\..+)?")
_ROW_FIELDS: Mapping[str | None, str] = {
    None: "",
    ".model_input": ".input_ids",
    ".loss_fn_inputs.target_tokens": ".labels",
    ".loss_fn_inputs.weights": ".labels",
}


class _ServedPass(ScriptPass):
    """A pass whose loss is called with what a client sent: what it cannot take is the client's to mend."""

    def work(self) -> Work:
        """See the base."""
        try:
            return super().work()
        except Exception as error:
            raise _told(error) from error

    def carrier_of(self, scores: TrainOutcome) -> TrainJob:
        """See the base."""
        try:
            return super().carrier_of(scores)
        except Exception as error:
            raise _told(error) from error

    def take(self, outcome: TrainOutcome) -> None:
        """See the base."""
        try:
            super().take(outcome)
        except Exception as error:
            raise _told(error) from error


@dataclass(eq=False, kw_only=True)
class CalledPass:
    """One called pass: what goes through the model, if that is not done yet, and what is answered."""

    script: Script
    opened: ForwardPass
    fused: ScriptPass | None
    answers: bool
    times: int
    window: int | None

    def finish(self, outcome: TrainOutcome | None) -> CallAnswer:
        """Keep what came of it."""
        if self.window is not None:
            self.script.group.set_accumulation(self.window)
        if self.fused is not None:
            assert outcome is not None
            self.fused.take(outcome)
        num_tokens = sum(len(tokens) for tokens in self.opened.tokens)
        body = body_of(_shown(self.opened)) if self.answers else b"null"
        return CallAnswer(body=body, num_tokens=num_tokens, passed_tokens=self.times * num_tokens)


def begin_pass(scripts: Scripts, script: Script, call: Call, cache_group: str) -> CalledPass:
    """Open a called pass. One that compares embeddings is run here, by itself; others share what follows.

    Raises:
        UserError: It cannot be run; the adapter is as it was.
    """
    with scripts.bound(script):
        if call.method == "backward":
            return _begin_backward(scripts, script)
        # What a metric cannot take is refused before anything is computed.
        script.group.show_metrics()
        return _begin(scripts, script, call, cache_group)


def _begin_backward(scripts: Scripts, script: Script) -> CalledPass:
    last = script.group.require_last("backward")
    if last.loss is None or not last.is_training:
        raise InvalidInput("inputs", "backward needs forward and calculate_loss before it")
    if last.parts is None:
        fused = _ServedPass(script.group, script.adapter, last, "gradient")
        return CalledPass(script=script, opened=last, fused=fused, answers=False, times=1, window=None)
    _add_embedding_gradient(scripts, script, last)
    keep(script.group, last, counts=True)
    return CalledPass(script=script, opened=last, fused=None, answers=False, times=1, window=None)


def _begin(scripts: Scripts, script: Script, call: Call, cache_group: str) -> CalledPass:
    arguments = dict(call.arguments)
    inputs = arguments.pop("inputs", None)
    options = PassOptions(**{name: arguments.pop(name) for name in _OPTIONS if name in arguments})
    window = arguments.pop("gradient_accumulation_steps", None)
    disables = bool(arguments.pop("disable_lora", False))
    refuse_options(options, may_return_logits=False)
    if window is not None and (not isinstance(window, int) or window < 1):
        raise InvalidInput("gradient_accumulation_steps", f"is {window!r}, must be at least 1")
    if disables and call.method != "forward_only":
        raise InvalidInput("disable_lora", "is for forward_only: the base model alone is not trained")
    rows = rows_of(script.group, _judged(inputs))
    aim = _AIMS[call.method]
    adapter = scripts.base_adapter if disables else script.adapter
    is_training = call.method != "forward_only"
    if options.task == EMBEDDING:
        opened = _embed(scripts, script, rows, loss_keywords(arguments), aim, is_training=is_training, base=disables)
        times = 2 if aim == "train" else 1
        return CalledPass(script=script, opened=opened, fused=None, answers=True, times=times, window=window)
    keywords = with_teacher_indices(loss_keywords(arguments))
    opened = scripts.open(script.group, rows, keywords, is_training=is_training)
    opened.pictures = [tuple(replace(each, group=cache_group) for each in of_row) for of_row in opened.pictures]
    times = 2 if aim == "train" and not script.group.loss.is_linear else 1
    fused = _ServedPass(script.group, adapter, opened, aim)
    return CalledPass(script=script, opened=opened, fused=fused, answers=True, times=times, window=window)


def _embed(
    scripts: Scripts,
    script: Script,
    rows: Sequence[Mapping[str, Any]],
    keywords: Mapping[str, Any],
    aim: Aim,
    *,
    is_training: bool,
    base: bool,
) -> ForwardPass:
    adapter = scripts.base_adapter if base else script.adapter

    def run() -> ForwardPass:
        opened = scripts.embed(script.group, rows, keywords, adapter, is_training=is_training)
        if aim == "train":
            opened.calculate_loss(script.group.loss)
            opened.settle_loss()
        return opened

    opened: ForwardPass = _agreed(scripts, run)
    if aim == "train":
        _add_embedding_gradient(scripts, script, opened)
    keep(script.group, opened, counts=aim == "train")
    return opened


def _add_embedding_gradient(scripts: Scripts, script: Script, opened: ForwardPass) -> None:
    assert isinstance(opened.parts, EmbeddedRows)
    parts = opened.parts
    parts.add(_agreed(scripts, lambda: parts.gradient_of(opened)))


def _agreed(scripts: Scripts, run: Any) -> Any:
    """What ``run`` gives; what fails on any rank fails on all."""
    result: Any = None
    failure: Exception | None = None
    try:
        result = run()
    except Exception as error:  # noqa: BLE001 - whatever it was, the other ranks have to hear of it
        failure = _told(error)
    ranks = scripts.core.ranks
    if ranks.size > 1:
        reports = ranks.gather(None if failure is None else FailureReport.of(failure))
        failure = next((report.to_error() for report in reports if report is not None), None)
    if failure is not None:
        raise failure
    return result


def _judged(inputs: Any) -> list[Mapping[str, Any]]:
    rows = [inputs] if isinstance(inputs, Mapping) else inputs
    if not isinstance(rows, list) or not rows or not all(isinstance(row, Mapping) for row in rows):
        raise InvalidInput("inputs", "must be a list of rows or of conversations, at least one")
    for index, row in enumerate(rows):
        if "input_ids" not in row:
            _refuse_sources(f"inputs[{index}]", row)
    return rows


def _refuse_sources(field: str, value: Any, *, of_picture: bool = False) -> None:
    """Nothing is read from this machine or fetched for a client: its pictures come with the conversation."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            _refuse_sources(f"{field}.{name}", item, of_picture=of_picture or name in _OF_PICTURES)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _refuse_sources(f"{field}[{index}]", item, of_picture=of_picture)
    elif of_picture and isinstance(value, str) and not value.startswith("data:"):
        raise InvalidInput(field, "must be a data URL (data:image/png;base64,...): nothing is fetched, no path is read")


def _shown(opened: ForwardPass) -> dict[str, Any]:
    shown = {
        name: value.detach().cpu().contiguous().numpy() if isinstance(value, torch.Tensor) else value
        for name, value in opened.output().items()
    }
    return {"logps": None, "loss": None, **shown}


def _told(error: Exception) -> Exception:
    """An error of a loss as its client can read it; one of the device, or of ours, as it is."""
    if isinstance(error, UserError) or is_out_of_memory(error):
        return error
    of_client = (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, AssertionError, RuntimeError)
    if not isinstance(error, of_client):
        return error
    return InvalidInput("inputs", f"the loss cannot be computed of these rows and keywords: {error}")


def broken_off(error: Exception) -> Exception:
    """An error that came when the gradient was there already: the adapter is brought back, whoever is to blame."""
    return CallFailed(error.message) if isinstance(error, UserError) else error


def in_callers_words(error: Exception) -> Exception:
    """An error about a datum of a device's pass, with the names that rows have for it; packed ones count by member."""
    if not isinstance(error, InvalidInput):
        return error
    found = _DATUM.fullmatch(error.field)
    if found is None:
        return error
    row, part = found.groups()
    told = error.message.removeprefix(f"{error.field}: ")
    return InvalidInput(f"inputs[{row}]{_ROW_FIELDS.get(part, part or '')}", told)
