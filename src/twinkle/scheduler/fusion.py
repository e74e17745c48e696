"""Which waiting operations the next device step takes together. Pure decisions; the journal asks, the worker obeys."""

from __future__ import annotations

from twinkle.core.operation import OperationKind
from twinkle.storage.journal import Head

_FUSED = {OperationKind.FORWARD, OperationKind.FORWARD_BACKWARD}


def choose_batch(heads: list[Head], *, max_adapters: int, max_tokens: int, previous_was_light: bool) -> list[Head]:
    """Pick the heads of the next batch from ``heads``, which stand in the order of fairness.

    An operation whose worker died runs alone, so that nobody else is blamed for it. Light operations (optimizer steps,
    saves, loads) go before forward passes, because each one frees a pass that can then be fused; but never twice in a
    row while passes wait, so a stream of saves cannot starve training. Passes are fused up to ``max_adapters`` and
    ``max_tokens``, and always at least one.
    """
    suspects = [head for head in heads if head.attempts > 0]
    if suspects:
        return suspects[:1]
    light = [head for head in heads if head.kind not in _FUSED]
    passes = [head for head in heads if head.kind in _FUSED]
    if light and not (previous_was_light and passes):
        return light[:max_adapters]
    batch: list[Head] = []
    num_tokens = 0
    for head in passes[:max_adapters]:
        if batch and num_tokens + head.num_tokens > max_tokens:
            break
        batch.append(head)
        num_tokens += head.num_tokens
    return batch
