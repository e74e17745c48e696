"""From the loss id in a request to the graph that the journal keeps under it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, field, replace

from twinkle.core.errors import InvalidInput
from twinkle.core.loss_graph import LossGraph
from twinkle.storage.journal.journal import Journal
from twinkle.wire.loss_graph import parse_loss_graph
from twinkle.wire.paths import CustomLossId, parse_custom_loss_id, parse_model_id
from twinkle.wire.training import ForwardBackwardBody

CUSTOM_LOSS = "custom"
_FIELD = "loss_fn_config.loss_id"
_MAX_KEPT = 64


@dataclass
class LossGraphs:
    """Looks up the losses that requests name, on any thread. A loss never changes, so those used last are kept."""

    journal: Journal
    _kept: OrderedDict[str, LossGraph] = field(init=False, default_factory=OrderedDict)
    _lock: threading.Lock = field(init=False, default_factory=threading.Lock)

    def complete(self, adapter: str, body: ForwardBackwardBody) -> ForwardBackwardBody:
        """The request with the graph of its loss, where it has one of its client's own.

        Raises:
            InvalidInput: It names no loss of the adapter's session. A session is one tenant's, and so are its losses.
            StorageUnavailable: The journal did not answer.
        """
        if body.loss_fn != CUSTOM_LOSS:
            return body
        loss_id = body.loss_fn_config.get("loss_id")
        if not isinstance(loss_id, str):
            raise InvalidInput(_FIELD, "is missing; create a loss with create_custom_loss and send its loss_id")
        return replace(body, loss_graph=self._graph(adapter, loss_id))

    def _graph(self, adapter: str, loss_id: str) -> LossGraph:
        found = parse_custom_loss_id(loss_id, field=_FIELD)
        if found.session_id != parse_model_id(adapter).session_id:
            raise _unknown(loss_id)
        with self._lock:
            graph = self._kept.get(loss_id)
        if graph is None:
            graph = self._read(found)
        with self._lock:
            self._kept[loss_id] = graph
            self._kept.move_to_end(loss_id)
            if len(self._kept) > _MAX_KEPT:
                self._kept.popitem(last=False)
        return graph

    def _read(self, found: CustomLossId) -> LossGraph:
        definition = self.journal.loss_definition(found.lane, found.custom_loss_seq_id)
        if definition is None:
            raise _unknown(str(found))
        return parse_loss_graph(definition)


def _unknown(loss_id: str) -> InvalidInput:
    return InvalidInput(
        _FIELD, f"there is no custom loss {loss_id!r} in the adapter's session; create it there with create_custom_loss"
    )
