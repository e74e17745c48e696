"""Conversations with tools in which a model behind an address speaks: no tokens, only messages."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from twinkle.core.errors import InvalidInput
from twinkle.core.process.events import event_log
from twinkle.data_format.sampling import SamplingParams
from twinkle_agentic.protocol.base import API
from twinkle_agentic.rollout.base import Rollout, Row
from twinkle_agentic.rollout.multi_turn import MAX_TURNS, Params, managers_of, one_sample, tool_messages
from twinkle_agentic.rollout.traces import Judge, Traces
from twinkle_agentic.tools.tool_manager import ToolManager

CONCURRENCY = 8
API_ERROR = "api_error"
CUT_OFF = ("length", "max_turns", API_ERROR)

_log = event_log()


class APIMultiTurnRollout(Rollout):
    """Takes conversations as far as they go, several at once.

    A conversation ends with a turn that calls no tool (``stop``), one that was cut off (``length``), after
    ``max_turns``, or with an answer that does not come (``api_error``, with the reason in ``error``): it ends alone,
    the others go on.

    Args:
        api: What answers.
        tool_manager: For all conversations; a call may bring others. One that conversations share carries out one
            call after the other.
        sampling_params: Of every turn; one sample each.
        max_turns: Of a conversation.
        concurrency: Conversations at once.
        extra_body: Further fields of every request.
        trace_dir: A folder for the conversations, a file each (:class:`~twinkle_agentic.rollout.traces.Traces`).
        trace_callback: Which conversations are written there; all if omitted.
        success_callback: Which of them went well, as the files' names say.
    """

    def __init__(
        self,
        api: API,
        tool_manager: ToolManager | None = None,
        sampling_params: Params = None,
        max_turns: int = MAX_TURNS,
        concurrency: int = CONCURRENCY,
        extra_body: Mapping[str, Any] | None = None,
        trace_dir: str | Path | None = None,
        trace_callback: Judge | None = None,
        success_callback: Judge | None = None,
    ) -> None:
        for name, value in (("max_turns", max_turns), ("concurrency", concurrency)):
            if value < 1:
                raise InvalidInput(name, f"is {value}; send 1 or more")
        self.api = api
        self.tool_manager = tool_manager
        self.sampling_params = one_sample(sampling_params)
        self.max_turns = max_turns
        self.concurrency = concurrency
        self.extra_body = dict(extra_body or {})
        self.traces = Traces.into(trace_dir, trace_callback, success_callback)

    def __call__(
        self,
        trajectories: Sequence[Mapping[str, Any]],
        *,
        sampling_params: Params = None,
        tool_manager: ToolManager | Sequence[ToolManager] | None = None,
        extra_body: Mapping[str, Any] | None = None,
        global_step: int | None = None,
        **kwargs: Any,
    ) -> list[Row]:
        """The trajectories with what was said: ``messages``, ``turns``, ``stop_reason``, ``truncated``.

        A trajectory without ``tools`` is told of those of its manager.

        Raises:
            InvalidInput: Not a list of trajectories; another number of tool managers; or several samples are asked for.
        """
        managers = managers_of(tool_manager if tool_manager is not None else self.tool_manager, trajectories)
        params = one_sample(sampling_params) if sampling_params is not None else self.sampling_params
        locks = {id(manager): threading.Lock() for manager in managers}
        extra = {**self.extra_body, **(extra_body or {})}

        def converse(trajectory: Mapping[str, Any], tools: ToolManager) -> Row:
            return self._converse(trajectory, tools, locks[id(tools)], params, extra)

        with ThreadPoolExecutor(max_workers=self.concurrency) as threads:
            rows = list(threads.map(converse, trajectories, managers))
        if self.traces is not None:
            self.traces.write(rows, global_step)
        return rows

    def _converse(
        self,
        trajectory: Mapping[str, Any],
        tools: ToolManager,
        lock: threading.Lock,
        params: SamplingParams,
        extra: Mapping[str, Any],
    ) -> Row:
        told = trajectory.get("tools") if trajectory.get("tools") is not None else tools.tool_infos()
        row: Row = {**trajectory, "messages": [dict(message) for message in trajectory.get("messages") or ()]}
        reason, turns = "max_turns", 0
        for turn in range(1, self.max_turns + 1):
            asked = {"messages": row["messages"], **({"tools": told} if told else {})}
            try:
                answer = self.api(asked, params, **({"extra_body": dict(extra)} if extra else {}))
            except Exception as error:  # noqa: BLE001 - whatever an API raises ends this conversation and no other
                row["error"] = f"{type(error).__name__}: {error}"
                reason = API_ERROR
                _log.warning("rollout.api_failed", error=row["error"], turn=turn, next="this conversation ends here")
                break
            turns = turn
            message = _named_calls(answer, turn)
            row["messages"].append(message)
            calls = message.get("tool_calls")
            if message.get("finish_reason") == "length" or not calls:
                reason = "length" if message.get("finish_reason") == "length" else "stop"
                break
            if turn < self.max_turns:
                with lock:
                    observations = tools.call_many(calls)
                row["messages"] += tool_messages(calls, observations)
        return {**row, "turns": turns, "stop_reason": reason, "truncated": reason in CUT_OFF}


def _named_calls(answer: Any, turn: int) -> Row:
    """The message with an id for every call: some servers leave it out, and the tool's answer is found by it."""
    if not isinstance(answer, Mapping):
        return {"role": "assistant", "content": str(answer)}
    message = {**answer, "role": "assistant"}
    calls = [
        {"type": "function", **call, "id": call.get("id") or f"call_{turn}_{number}"}
        for number, call in enumerate(answer.get("tool_calls") or ())
    ]
    return {**message, "tool_calls": calls} if calls else message
