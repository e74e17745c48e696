"""Conversations whose long passages are shortened first, and can be asked for as they were."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from twinkle.core.errors import InvalidInput
from twinkle_agentic.chunker.base import Chunker
from twinkle_agentic.condenser.base import Condenser
from twinkle_agentic.data_format.chunks import Chunks
from twinkle_agentic.rollout.bridge import BridgeTemplate
from twinkle_agentic.rollout.multi_turn import MAX_TURNS, MultiTurnRollout, Params, SamplerLike
from twinkle_agentic.rollout.traces import Judge
from twinkle_agentic.tools.extract_condensed import ExtractCondensed
from twinkle_agentic.tools.tool_manager import ToolManager

TakeApart = Chunker | Callable[[Mapping[str, Any]], Chunks]
AfterCondensing = Callable[..., Mapping[str, Any]]


class MultiTurnCondenseRollout(MultiTurnRollout):
    """Condenses all conversations of a batch together, then goes on as :class:`MultiTurnRollout`.

    Equal conversations, as groups of GRPO are, are condensed once. A conversation that came out shorter gets the tool
    ``extract_condensed`` beside its own, which tells the original of a numbered block; nobody else's is told to it.
    ``messages`` of the rows that come back are the condensed ones.

    Args:
        sampler: What samples.
        template: Of the same model, in this process.
        tool_manager: For all conversations; a call may bring others.
        chunker: Takes a conversation apart, as ``NativeChunker``.
        condenser: Says its passages in fewer words, as ``ModelCondenser``.
        sampling_params: See :class:`MultiTurnRollout`.
        max_turns: See :class:`MultiTurnRollout`.
        max_trajectory_tokens: See :class:`MultiTurnRollout`.
        condenser_kwargs: Keywords of every call of the condenser.
        post_compress_callback: Called with a condensed trajectory, its passages and the call's keywords; gives the
            trajectory to take.
        trace_dir: See :class:`MultiTurnRollout`.
        trace_callback: See :class:`MultiTurnRollout`.
        success_callback: See :class:`MultiTurnRollout`.
        adapter_path: See :class:`MultiTurnRollout`.
    """

    def __init__(
        self,
        sampler: SamplerLike,
        template: BridgeTemplate,
        tool_manager: ToolManager | None = None,
        chunker: TakeApart | None = None,
        condenser: Condenser | None = None,
        sampling_params: Params = None,
        max_turns: int = MAX_TURNS,
        max_trajectory_tokens: int | None = None,
        condenser_kwargs: Mapping[str, Any] | None = None,
        post_compress_callback: AfterCondensing | None = None,
        trace_dir: str | Path | None = None,
        trace_callback: Judge | None = None,
        success_callback: Judge | None = None,
        *,
        adapter_path: str | None = None,
    ) -> None:
        super().__init__(
            sampler,
            template,
            tool_manager,
            sampling_params,
            max_turns,
            max_trajectory_tokens,
            trace_dir,
            trace_callback,
            success_callback,
            adapter_path=adapter_path,
        )
        if chunker is None or condenser is None:
            missing = "chunker" if chunker is None else "condenser"
            raise InvalidInput(missing, "is missing; send one, or take MultiTurnRollout")
        self.chunker = chunker
        self.condenser = condenser
        self.condenser_kwargs = dict(condenser_kwargs or {})
        self.post_compress_callback = post_compress_callback

    def _begun(
        self, conversations: Sequence[tuple[Mapping[str, Any], ToolManager]], kwargs: Mapping[str, Any]
    ) -> Sequence[tuple[Mapping[str, Any], ToolManager]]:
        """The conversations condensed, each with its tools and perhaps that which tells the originals.

        Raises:
            InvalidInput: A manager has a tool named ``extract_condensed`` already.
        """
        shortened = self._condensed([trajectory for trajectory, _ in conversations])
        begun: list[tuple[Mapping[str, Any], ToolManager]] = []
        for (trajectory, manager), chunks in zip(conversations, shortened, strict=True):
            shorter: dict[str, Any] = {**trajectory, **chunks.to_trajectory()}
            own = _with_originals(manager, chunks)
            if own is not manager:
                told: Any = trajectory.get("tools")
                shorter["tools"] = [
                    *(manager.tool_infos() if told is None else told),
                    ExtractCondensed([]).tool_info(),
                ]
            if self.post_compress_callback is not None:
                shorter = dict(self.post_compress_callback(shorter, chunks, **kwargs))
            begun.append((shorter, own))
        return begun

    def _condensed(self, trajectories: Sequence[Mapping[str, Any]]) -> list[Chunks]:
        keys = [_key(trajectory) for trajectory in trajectories]
        first = {key: index for index, key in reversed(list(enumerate(keys)))}
        order = sorted(first.values())
        taken_apart = [self.chunker(trajectories[index]) for index in order]
        shorter = self.condenser.condense_many(taken_apart, **self.condenser_kwargs)
        by_key = {keys[index]: chunks for index, chunks in zip(order, shorter, strict=True)}
        return [by_key[key] for key in keys]


def _key(trajectory: Mapping[str, Any]) -> str:
    """Equal for equal conversations; what is no text, a picture say, counts as itself."""
    return json.dumps(list(trajectory.get("messages") or ()), sort_keys=True, default=lambda value: f"{id(value)}")


def _with_originals(manager: ToolManager, chunks: Chunks) -> ToolManager:
    """The manager, or where there are blocks a copy of it that can tell what they were."""
    if ExtractCondensed.NAME in manager.names():
        raise InvalidInput(
            "tool_manager",
            f"has a tool {ExtractCondensed.NAME} already; leave it out, each conversation gets its own",
        )
    originals = chunks.originals()
    if not originals:
        return manager
    own = manager.copy()
    own.register(ExtractCondensed(originals))
    return own
