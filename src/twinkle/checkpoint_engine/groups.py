"""A sync between two groups of devices, driven by the script that has neither's weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from twinkle.checkpoint_engine.base import CheckpointEngine
from twinkle.checkpoint_engine.ends import Part
from twinkle.checkpoint_engine.process_group import ProcessGroupCheckpointEngine
from twinkle.core.errors import InvalidInput, SyncFailed
from twinkle.core.process.events import event_log

log = event_log()

Waiting = Callable[[], Any]
"""Of a call that was begun on every rank of a group: waits for it."""


class GroupSync:
    """Calls the ends of a sync, each on all ranks of its group, and waits for both.

    Args:
        model: A ``CheckpointSender`` on a group.
        sampler: A ``CheckpointReceiver`` on a group.
        engine: Every rank gets a copy of it.
        adapter_name: Whose weights.

    Raises:
        InvalidInput: Both are in the same processes, which could not send and receive at once.
    """

    def __init__(self, model: Any, sampler: Any, *, engine: CheckpointEngine | None, adapter_name: str) -> None:
        self._model = model
        self._sampler = sampler
        self._engine = engine or ProcessGroupCheckpointEngine()
        self._adapter_name = adapter_name
        if {*model.checkpoint_process()} & {*sampler.checkpoint_process()}:
            raise InvalidInput(
                "sampler", "shares its processes with the model; make it with instance_id='sampler' or on another group"
            )

    def config(self) -> dict[str, Any]:
        """The adapter's config; empty where all parameters are trained."""
        config: dict[str, Any] = self._model.checkpoint_config(adapter_name=self._adapter_name)
        return config

    def states(self) -> list[tuple[int, bool]]:
        """Of every sampler the number of its last sync, and whether it takes whole weights."""
        states: list[tuple[int, bool]] = self._sampler.checkpoint_versions()
        return states

    def begin(self, version: int) -> None:
        """No sampler answers from here on until the end."""
        self._sampler.begin_sync(version)

    def end(self, version: int) -> None:
        """All samplers have all weights."""
        self._sampler.end_sync(version)

    def carry(self, part: Part, config: Mapping[str, Any]) -> None:
        """Send a part of the weights from the first rank that trains to all that sample.

        Raises:
            SyncFailed: A rank is gone, or was not there in time.
        """
        try:
            self._meet()
            sent = self._model.send_checkpoint(part, adapter_name=self._adapter_name)
            received = self._sampler.receive_checkpoint(part, config, adapter_name=self._adapter_name)
            _both(sent, received)
        except BaseException:
            self._part(is_broken=True)
            raise
        self._part()

    def _meet(self) -> None:
        trainers = self._model.prepare_checkpoint_engine(copy.deepcopy(self._engine), sends=True)
        samplers = self._sampler.prepare_checkpoint_engine(copy.deepcopy(self._engine))
        ours, theirs = self._engine.build_topology(len(trainers), len(samplers), [*trainers, *samplers])
        # Neither comes back before the other has come.
        _both(self._model.meet_checkpoint_ranks(ours), self._sampler.meet_checkpoint_ranks(theirs))

    def _part(self, *, is_broken: bool = False) -> None:
        for end in (self._model, self._sampler):
            if not is_broken:
                end.finalize_checkpoint_engine()
                continue
            # What broke the sync is raised by the next call as well, and has been told.
            for is_last in (False, True):
                try:
                    end.finalize_checkpoint_engine()
                    break
                except Exception as error:  # noqa: BLE001 - an end that is gone needs no end
                    if is_last:
                        log.warning("sync.end_is_gone", error=str(error))


def _both(sent: Waiting, received: Waiting) -> None:
    """Wait for both ends. Of two errors the one that is not about the other end's is raised."""
    errors = []
    for wait in (sent, received):
        try:
            wait()
        except Exception as error:  # noqa: BLE001 - raised below, once both have ended
            errors.append(error)
    if errors:
        raise min(errors, key=lambda error: isinstance(error, SyncFailed))
