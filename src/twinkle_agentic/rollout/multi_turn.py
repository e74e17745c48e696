"""Conversations in which a model calls tools, reads what came of it and goes on, many at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from twinkle.core.errors import InvalidInput
from twinkle.data_format.sampling import SampledSequence, SamplingParams
from twinkle_agentic.rollout.base import Rollout, Row
from twinkle_agentic.rollout.bridge import IGNORED_LABEL, BridgeTemplate, extend_with_bridge, longer_positions
from twinkle_agentic.rollout.traces import Judge, Traces
from twinkle_agentic.tools.tool_manager import ToolManager

MAX_TURNS = 6
MAX_TOOL_THREADS = 16

Params = SamplingParams | Mapping[str, Any] | None


class SamplerLike(Protocol):
    """What a rollout needs of a sampler: the library's, the client's, or a script's own."""

    def sample(self, inputs: Any, sampling_params: Any = None, **call: Any) -> Any:
        """One response for each row."""
        ...


@dataclass(eq=False)
class Episode:
    """A conversation under way: its row, token by token what was read and what was sampled."""

    row: Row
    tools: ToolManager
    logprobs: list[Any] = field(default_factory=list)
    """Of the sampled tokens, in their order: those that ``labels`` name."""
    turns: int = 0
    stop_reason: str | None = None
    truncated: bool = False
    is_over: bool = False

    def result(self) -> Row:
        """What the rollout returns of it."""
        return {
            **self.row,
            "logprobs": self.logprobs,
            "turns": self.turns,
            "stop_reason": self.stop_reason,
            "truncated": self.truncated,
        }


class MultiTurnRollout(Rollout):
    """Every turn samples all conversations under way in one call; those that have ended wait.

    What was sampled is never cut into tokens again: a row's ``labels`` are the very tokens that the sampler drew, with
    their ``logprobs``, and what tools and template put between them does not train. A row goes to ``forward_backward``
    as it is.

    A conversation ends with a turn that calls no tool, one that was cut off, after ``max_turns``, or where its tokens
    would be too many.

    Args:
        sampler: What samples.
        template: Of the same model, in this process.
        tool_manager: For all conversations; a call may bring others.
        sampling_params: Of every turn; one sample each, whose logprobs are asked for if nothing is said of them.
        max_turns: Of a conversation.
        max_trajectory_tokens: Of a whole conversation; the template's ``max_length`` if omitted.
        trace_dir: A folder for the conversations, a file each (:class:`~twinkle_agentic.rollout.traces.Traces`).
        trace_callback: Which conversations are written there; all if omitted.
        success_callback: Which of them went well, as the files' names say.
        adapter_path: Of an adapter to sample with.
    """

    def __init__(
        self,
        sampler: SamplerLike,
        template: BridgeTemplate,
        tool_manager: ToolManager | None = None,
        sampling_params: Params = None,
        max_turns: int = MAX_TURNS,
        max_trajectory_tokens: int | None = None,
        trace_dir: str | Path | None = None,
        trace_callback: Judge | None = None,
        success_callback: Judge | None = None,
        *,
        adapter_path: str | None = None,
    ) -> None:
        if max_turns < 1:
            raise InvalidInput("max_turns", f"is {max_turns}; send 1 or more")
        if max_trajectory_tokens is not None and max_trajectory_tokens < 1:
            raise InvalidInput("max_trajectory_tokens", f"is {max_trajectory_tokens}; send 1 or more, or None")
        if getattr(template, "truncation_strategy", None) == "split":
            raise InvalidInput("template", "splits long rows, which a conversation under way cannot be")
        self.sampler = sampler
        self.template = template
        self.tool_manager = tool_manager
        self.sampling_params = sampling_params
        self.max_turns = max_turns
        self.max_trajectory_tokens = max_trajectory_tokens
        self.adapter_path = adapter_path
        self.traces = Traces.into(trace_dir, trace_callback, success_callback)

    def __call__(
        self,
        trajectories: Sequence[Mapping[str, Any]],
        *,
        sampling_params: Params = None,
        tool_manager: ToolManager | Sequence[ToolManager] | None = None,
        adapter_path: str | None = None,
        global_step: int | None = None,
        **kwargs: Any,
    ) -> list[Row]:
        """Take conversations as far as they go.

        Args:
            trajectories: Each with ``messages`` up to where the model speaks, and ``tools`` it is told of.
            sampling_params: In place of the rollout's.
            tool_manager: In place of the rollout's, for all conversations or one for each.
            adapter_path: In place of the rollout's.
            global_step: For the names of the traces.
            kwargs: For the sampler's call.

        Returns:
            A row for each: the fields of the trajectory, ``input_ids`` and ``labels`` of the whole conversation,
            ``messages``, ``logprobs``, ``turns``, ``stop_reason`` of the last turn, and whether it was ``truncated``.

        Raises:
            InvalidInput: Not a list of trajectories; another number of tool managers; or several samples are asked for.
        """
        managers = managers_of(tool_manager if tool_manager is not None else self.tool_manager, trajectories)
        params = one_sample(sampling_params if sampling_params is not None else self.sampling_params)
        if params.logprobs is None:
            params = replace(params, logprobs=1)
        path = adapter_path or self.adapter_path
        call = {**kwargs, **({"adapter_path": path} if path else {})}
        episodes = [
            Episode(self._first_row(trajectory), tools)
            for trajectory, tools in self._begun(list(zip(trajectories, managers, strict=True)), kwargs)
        ]
        for turn in range(self.max_turns):
            under_way = [episode for episode in episodes if not episode.is_over]
            if not under_way:
                break
            calls = self._sample(under_way, params, call)
            self._call_tools(under_way, calls, is_last=turn + 1 == self.max_turns)
        rows = [episode.result() for episode in episodes]
        if self.traces is not None:
            self.traces.write(rows, global_step)
        return rows

    def _begun(
        self, conversations: Sequence[tuple[Mapping[str, Any], ToolManager]], kwargs: Mapping[str, Any]
    ) -> Sequence[tuple[Mapping[str, Any], ToolManager]]:
        """The conversations as they begin, each with its tools."""
        return conversations

    def _first_row(self, trajectory: Mapping[str, Any]) -> Row:
        encoded = self.template.encode(trajectory, add_generation_prompt=True)
        row = {name: _plain(value) for name, value in {**trajectory, **encoded}.items()}
        row["messages"] = [dict(message) for message in row.get("messages") or []]
        row["labels"] = [IGNORED_LABEL] * len(row["input_ids"])
        return row

    def _sample(self, under_way: Sequence[Episode], params: Any, call: Mapping[str, Any]) -> list[list[Any]]:
        """One turn of each conversation; the calls it makes."""
        responses = self.sampler.sample([episode.row for episode in under_way], params, **call)
        calls = []
        for episode, sequence in zip(under_way, _sequences(responses, len(under_way)), strict=True):
            tokens, logprobs = list(sequence["tokens"]), sequence.get("logprobs")
            if logprobs is not None and len(logprobs) != len(tokens):
                raise InvalidInput("sampler", f"gave {len(logprobs)} logprobs for {len(tokens)} tokens")
            message = self._message(sequence, tokens)
            episode.turns += 1
            episode.stop_reason = sequence["stop_reason"]
            episode.logprobs += logprobs or []
            episode.row = _with_turn(episode.row, tokens, message)
            calls.append(list(message.get("tool_calls") or []))
        return calls

    def _message(self, sequence: Any, tokens: Sequence[int]) -> Row:
        feature = sequence.get("new_input_feature") or {}
        said = (feature.get("messages") or [{}])[-1]
        if said.get("role") != "assistant":
            said = {"content": self.template.tokenizer.decode(list(tokens), skip_special_tokens=True)}
        message = {**said, "role": "assistant"}
        parse = getattr(self.template, "parse_tool_call", None)
        if "tool_calls" not in message and parse is not None:
            found = parse(message["content"])
            if found:
                message["tool_calls"] = found
        return message

    def _call_tools(self, under_way: Sequence[Episode], calls: Sequence[list[Any]], *, is_last: bool) -> None:
        """What comes of the turn's calls, as the beginning of the next turn."""
        going_on = []
        for episode, wanted in zip(under_way, calls, strict=True):
            # A call that was cut off in the middle may read like another one.
            episode.truncated = episode.stop_reason == "length" or (bool(wanted) and is_last)
            episode.is_over = episode.truncated or not wanted
            if not episode.is_over:
                going_on.append((episode, wanted))
        observations = _observe(going_on)
        for (episode, wanted), told in zip(going_on, observations, strict=True):
            extended = extend_with_bridge(episode.row, tool_messages(wanted, told), self.template)
            if extended is None or self._is_too_long(extended):
                episode.is_over = episode.truncated = True
            else:
                episode.row = extended

    def _is_too_long(self, row: Row) -> bool:
        return self.max_trajectory_tokens is not None and len(row["input_ids"]) > self.max_trajectory_tokens


def _observe(going_on: Sequence[tuple[Episode, list[Any]]]) -> list[list[str]]:
    """The observations of each conversation's calls: one after the other within what shares tools, else at once."""
    by_manager: dict[int, list[int]] = {}
    for index, (episode, _) in enumerate(going_on):
        by_manager.setdefault(id(episode.tools), []).append(index)
    observations: list[list[str]] = [[] for _ in going_on]

    def carry_out(indices: Sequence[int]) -> None:
        for index in indices:
            episode, wanted = going_on[index]
            observations[index] = episode.tools.call_many(wanted)

    if len(by_manager) <= 1:
        carry_out(range(len(going_on)))
        return observations
    with ThreadPoolExecutor(max_workers=min(MAX_TOOL_THREADS, len(by_manager))) as threads:
        list(threads.map(carry_out, by_manager.values()))
    return observations


def _with_turn(row: Row, tokens: Sequence[int], message: Row) -> Row:
    ids = list(row["input_ids"])
    return {
        **row,
        "input_ids": [*ids, *tokens],
        # Shifted: the last place of what was read has the first token as its target.
        "labels": [*row["labels"][:-1], *tokens, IGNORED_LABEL],
        "attention_mask": [1] * (len(ids) + len(tokens)),
        "position_ids": longer_positions(row.get("position_ids"), len(ids), len(tokens)),
        "length": len(ids) + len(tokens),
        "messages": [*row["messages"], message],
    }


def tool_messages(calls: Sequence[Mapping[str, Any]], observations: Sequence[str]) -> list[Row]:
    """What the model reads of its calls."""
    messages = []
    for tool_call, observation in zip(calls, observations, strict=True):
        function = tool_call.get("function") or {}
        message = {"role": "tool", "content": observation}
        if tool_call.get("id"):
            message["tool_call_id"] = tool_call["id"]
        if function.get("name"):
            message["name"] = function["name"]
        messages.append(message)
    return messages


def managers_of(
    given: ToolManager | Sequence[ToolManager] | None, trajectories: Sequence[Mapping[str, Any]]
) -> list[ToolManager]:
    """A tool manager for each of some conversations.

    Raises:
        InvalidInput: Not a list of trajectories; or there are several managers, and not one for each.
    """
    if isinstance(trajectories, Mapping):
        raise InvalidInput("trajectories", "is one trajectory; send a list of them")
    number = len(trajectories)
    chosen = given if given is not None else ToolManager()
    managers = [chosen] * number if isinstance(chosen, ToolManager) else list(chosen)
    if len(managers) != number:
        raise InvalidInput("tool_manager", f"are {len(managers)} for {number} trajectories; send one for each")
    return managers


def one_sample(given: Params) -> SamplingParams:
    """The params, of one sample a turn.

    Raises:
        InvalidInput: They ask for several.
    """
    params = given if isinstance(given, SamplingParams) else SamplingParams.from_dict(given or {})
    if params.num_samples != 1:
        raise InvalidInput("num_samples", f"is {params.num_samples}; a conversation goes on with one, so repeat it")
    return params


def _sequences(responses: Any, number: int) -> list[SampledSequence | Mapping[str, Any]]:
    """The one sequence of each response, whichever generation the sampler is of."""
    if isinstance(responses, list):
        flat = [sequence for response in responses for sequence in response["sequences"]]
    else:
        flat = list(responses["sequences"])
    if len(flat) != number:
        raise InvalidInput("sampler", f"gave {len(flat)} sequences for {number} rows")
    return flat


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value
