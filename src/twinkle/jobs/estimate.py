"""What a job would take, before any of it is done: tokens and steps exactly, memory from the model, time from the mesh.

The time is a range. Its lower end is the job alone on a device that is as quick as it was for the quicker part of the
last operations; the upper end is one as slow as for the slower part, shared evenly with everybody who has work now.
Nothing is made up: where nothing was measured there is no time, and the estimate says why.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from twinkle.core.adapter_sizes import AdapterSizes
from twinkle.core.operation import OperationKind
from twinkle.storage.journal.speeds import Measured

FLOAT_BYTES = 4
BYTES_PER_GIGABYTE = 10**9
HOUR_S = 3600.0
_FEWEST_MEASURED = 3
"""Fewer operations say nothing about the next ones."""
_QUICK, _SLOW = 0.25, 0.75


@dataclass(frozen=True)
class AdapterShape:
    """What of a model an adapter trains, and its rank."""

    rank: int
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True


@dataclass(frozen=True, kw_only=True)
class Work:
    """All that a job will have a mesh do, as its plan reckons it.

    Args:
        base_model: On which model.
        num_trained: Tokens of forward and backward passes, all epochs together.
        num_forwarded: Tokens that go through the model forward alone: evaluations, a reference's log-probabilities.
        num_prefilled: Tokens of prompts.
        num_drawn: Tokens drawn; where they may end earlier, at most.
        is_drawn_exact: Whether all of them will be.
        num_steps: Of the optimizer.
        num_samples: Sequences drawn.
        adapter: What is trained; nothing where a job only samples.
        num_kept_with_optimizer: Checkpoints that stay with the optimizer's state.
        num_kept: Those that stay without.
        details: What else its owner wants to know of it.
    """

    base_model: str
    num_trained: int = 0
    num_forwarded: int = 0
    num_prefilled: int = 0
    num_drawn: int = 0
    is_drawn_exact: bool = False
    num_steps: int = 0
    num_samples: int = 0
    adapter: AdapterShape | None = None
    num_kept_with_optimizer: int = 0
    num_kept: int = 0
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Range:
    """From the least to the most that is to be expected."""

    low: float
    high: float

    def __add__(self, other: Range) -> Range:
        return Range(low=self.low + other.low, high=self.high + other.high)

    def times(self, factor: float) -> Range:
        """Both ends."""
        return Range(low=self.low * factor, high=self.high * factor)


NOTHING = Range(low=0.0, high=0.0)


def estimate_of(
    work: Work, *, sizes: AdapterSizes | None, measured: Sequence[Measured], num_others: int
) -> dict[str, Any]:
    """The estimate as the job's result tells it."""
    device_s, missing = device_seconds(work, measured)
    return {
        "tokens": {
            "trained": work.num_trained,
            "forwarded": work.num_forwarded,
            "prefilled": work.num_prefilled,
            "drawn": work.num_drawn,
            "drawn_is_exact": work.is_drawn_exact,
        },
        "steps": work.num_steps,
        **work.details,
        "memory": _memory(work.adapter, sizes),
        "storage": _storage(work, sizes),
        "time": _time(device_s, missing, num_measured=len(measured), num_others=num_others),
        "price": _price(work, device_s, sizes),
    }


def sum_of_estimates(estimates: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Several estimates together, as if one job came after the other; on a mesh that fuses them it is less."""
    counts = ("trained", "forwarded", "prefilled", "drawn")
    times = [one["time"] for one in estimates]
    reasons = [time["reason"] for time in times if "reason" in time]
    stored = [one["storage"]["size_bytes"] for one in estimates if one["storage"] is not None]
    return {
        "jobs": len(estimates),
        "tokens": {name: sum(one["tokens"][name] for one in estimates) for name in counts},
        "steps": sum(one["steps"] for one in estimates),
        "storage": {"size_bytes": sum(stored)},
        "time": {"reason": reasons[0]}
        if reasons
        else {name: round(sum(time[name] for time in times), 3) for name in ("low_s", "high_s")},
    }


def device_seconds(work: Work, measured: Sequence[Measured]) -> tuple[Range | None, list[str]]:
    """What the device will take for all of it, and the kinds of work of which nothing was measured."""
    missing: list[str] = []
    total = NOTHING
    for label, amount, found in (
        ("training", work.num_trained, _per_token(measured, {OperationKind.FORWARD_BACKWARD})),
        ("forward passes", work.num_forwarded, _per_forwarded_token(measured)),
        ("sampling", work.num_prefilled + work.num_drawn, _per_token(measured, {OperationKind.SAMPLE})),
        ("optimizer steps", work.num_steps, _per_operation(measured, OperationKind.OPTIM_STEP)),
    ):
        if not amount:
            continue
        if found is None:
            missing.append(label)
        else:
            total = total + found.times(amount)
    return (None if missing else total), missing


def _per_forwarded_token(measured: Sequence[Measured]) -> Range | None:
    """A pass forward alone: as measured, else from a third of a training pass (it has no backward) to all of it."""
    found = _per_token(measured, {OperationKind.FORWARD})
    trained = _per_token(measured, {OperationKind.FORWARD_BACKWARD})
    return found or (None if trained is None else Range(low=trained.low / 3, high=trained.high))


def _per_token(measured: Iterable[Measured], kinds: set[OperationKind]) -> Range | None:
    """Seconds of the device for a token, each operation weighing as much as it has tokens."""
    rates = sorted(
        (one.device_s / one.num_tokens, one.num_tokens) for one in measured if one.kind in kinds and one.num_tokens > 0
    )
    return _quartiles(rates)


def _per_operation(measured: Iterable[Measured], kind: OperationKind) -> Range | None:
    return _quartiles(sorted((one.device_s, 1) for one in measured if one.kind is kind))


def _quartiles(weighed: Sequence[tuple[float, int]]) -> Range | None:
    if len(weighed) < _FEWEST_MEASURED:
        return None
    return Range(low=_quantile(weighed, _QUICK), high=_quantile(weighed, _SLOW))


def _quantile(weighed: Sequence[tuple[float, int]], share: float) -> float:
    wanted = share * sum(weight for _, weight in weighed)
    reached = 0
    for value, weight in weighed:
        reached += weight
        if reached >= wanted:
            return value
    return weighed[-1][0]


def _memory(adapter: AdapterShape | None, sizes: AdapterSizes | None) -> dict[str, Any] | None:
    """On the device while it trains; the base model is shared with everybody and counts for nobody."""
    if adapter is None:
        return None
    if sizes is None:
        return {"reason": "the mesh does not say how large adapters on its model are"}
    num_parameters = num_parameters_of(adapter, sizes)
    weights, copy = num_parameters * FLOAT_BYTES, num_parameters * sizes.copy_bytes
    return {
        "adapter_parameters": num_parameters,
        "weights_bytes": weights + copy,
        "gradients_bytes": weights,
        "optimizer_bytes": 2 * weights,
        "total_bytes": 4 * weights + copy,
    }


def num_parameters_of(adapter: AdapterShape, sizes: AdapterSizes) -> int:
    """Of an adapter on the model whose sizes these are."""
    return sizes.num_parameters(
        adapter.rank,
        train_attn=adapter.train_attn,
        train_mlp=adapter.train_mlp,
        train_unembed=adapter.train_unembed,
    )


def _storage(work: Work, sizes: AdapterSizes | None) -> dict[str, Any] | None:
    """In the object store when it has ended; files' headers come on top, some kilobytes each."""
    size_bytes = _stored_bytes(work, sizes)
    if size_bytes is None:
        return None
    return {"checkpoints": work.num_kept + work.num_kept_with_optimizer, "size_bytes": size_bytes}


def _stored_bytes(work: Work, sizes: AdapterSizes | None) -> int | None:
    if work.adapter is None or sizes is None:
        return None
    weights = num_parameters_of(work.adapter, sizes) * FLOAT_BYTES
    return weights * work.num_kept + 3 * weights * work.num_kept_with_optimizer


def _time(device_s: Range | None, missing: Sequence[str], *, num_measured: int, num_others: int) -> dict[str, Any]:
    if device_s is None:
        return {
            "reason": f"no measurement of {' and '.join(missing)} on this mesh yet; it is there after"
            f" {_FEWEST_MEASURED} operations of the kind"
        }
    return {
        "low_s": round(device_s.low, 3),
        "high_s": round(device_s.high * (1 + num_others), 3),
        "measured_operations": num_measured,
        "tenants_beside": num_others,
    }


def _price(work: Work, device_s: Range | None, sizes: AdapterSizes | None) -> dict[str, Any]:
    """In what the tenant's account counts: tokens, device seconds, gigabyte-hours for each hour that it stays."""
    size_bytes = _stored_bytes(work, sizes)
    return {
        "training_tokens": work.num_trained + work.num_forwarded,
        "prefill_tokens": work.num_prefilled,
        "sample_tokens": work.num_drawn,
        "device_seconds": None if device_s is None else [round(device_s.low, 3), round(device_s.high, 3)],
        "gigabyte_hours_per_hour": None if size_bytes is None else size_bytes / BYTES_PER_GIGABYTE,
    }
