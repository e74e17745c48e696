"""Losses over a whole batch as an operation may name them: what is judged of a request before it is accepted.

They are the classes of ``twinkle.loss``, under their names. Each compares datums, or averages over them, so the datums
of one operation are one batch: what is sent in two operations is two batches.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, TypeAlias

from twinkle.core.errors import InvalidInput

Setting: TypeAlias = float | int | bool | str
Kind: TypeAlias = Literal["number", "integer", "flag"] | tuple[str, ...]
"""What a setting is; a tuple holds the words it may be."""

TARGETS = "target_tokens"
WEIGHTS = "weights"
"""1 for the tokens that are trained, 0 for the others; all are without it."""

CORRECT_TOKENS = "correct_tokens:sum"
"""The metric of ``cross_entropy`` with ``count_correct``: how many trained tokens have the likeliest one as target."""

GROUP_LABELS = "labels"
"""Of losses that compare embeddings: 1 for a query, which begins a group, 0 for the documents after it."""

_FLAGS = {"0": False, "1": True, "false": False, "true": True}


@dataclass(frozen=True, kw_only=True)
class BatchLossRules:
    """What one loss takes."""

    settings: Mapping[str, Kind] = field(default_factory=dict)
    """Of ``loss_fn_config``."""
    inputs: tuple[str, ...] = ()
    """What each datum must bring beside its target tokens: one value a target, or a single one for all of them."""
    optional_inputs: tuple[str, ...] = ()
    pairs: bool = False
    """Whether datums come as chosen, rejected, chosen, rejected, ..."""
    top_k_targets: bool = False
    """Whether target tokens are (N, K), and the inputs with them."""
    embeds: bool = False
    """Whether it compares embeddings: datums have no targets, and logprobs are not computed."""
    reference: str = ""
    """The input that a reference model gives, which may be needed; see :meth:`needs_reference`."""
    linear_without: str | None = None
    """The setting without which the gradient depends on no logprob, so that none need be found first."""

    def num_passes(self, settings: Mapping[str, Setting]) -> int:
        """How often a datum goes through the model: first for its logprobs, on which the gradients of all depend."""
        is_linear = self.linear_without is not None and not settings.get(self.linear_without, False)
        return 1 if is_linear else 2

    def needs_reference(self, settings: Mapping[str, Setting]) -> bool:
        """Whether the settings make a reference part of the loss."""
        if not self.reference:
            return False
        return (
            not settings.get("reference_free", False)
            if "reference_free" in self.settings
            else bool(settings.get("beta"))
        )

    @property
    def targets(self) -> tuple[str, ...]:
        """What each datum brings for its tokens: which ones are predicted."""
        return () if self.embeds else (TARGETS,)

    def known_inputs(self) -> tuple[str, ...]:
        """All that a datum may bring beside its target tokens and their weights."""
        return (*self.inputs, *self.optional_inputs, *([self.reference] if self.reference else []))


_RATIO: Mapping[str, Kind] = {"epsilon": "number", "beta": "number"}
_CLIPPED: Mapping[str, Kind] = {"epsilon_high": "number", "entropy_coef": "number"}


def _policy(**settings: Kind) -> BatchLossRules:
    return BatchLossRules(
        settings={**_RATIO, **settings}, inputs=("advantages",), optional_inputs=("old_logps",), reference="ref_logps"
    )


BATCH_LOSSES: Mapping[str, BatchLossRules] = MappingProxyType(
    {
        "CrossEntropyLoss": BatchLossRules(
            settings={"reduction": ("mean", "sum"), "dft": "flag"}, linear_without="dft"
        ),
        "GRPOLoss": _policy(**_CLIPPED),
        "PPOLoss": _policy(**_CLIPPED, loss_agg_mode=("token-mean", "seq-mean-token-mean")),
        "GSPOLoss": _policy(**_CLIPPED),
        "CISPOLoss": _policy(**_CLIPPED),
        "BNPOLoss": _policy(**_CLIPPED),
        "DRGRPOLoss": _policy(epsilon_high="number", max_completion_length="integer"),
        "SAPOLoss": _policy(tau_pos="number", tau_neg="number"),
        "DPOLoss": BatchLossRules(
            settings={
                "beta": "number",
                "label_smoothing": "number",
                "loss_type": ("sigmoid", "hinge", "ipo", "kto_pair"),
                "reference_free": "flag",
                "sft_weight": "number",
            },
            pairs=True,
            reference="ref_logps",
        ),
        "SimPOLoss": BatchLossRules(settings={"beta": "number", "gamma": "number"}, pairs=True),
        "CPOLoss": BatchLossRules(settings={"beta": "number", "bc_coef": "number"}, pairs=True),
        "ORPOLoss": BatchLossRules(settings={"lambda_orpo": "number"}, pairs=True),
        "GKDLoss": BatchLossRules(
            settings={"beta": "number", "temperature": "number"}, inputs=("teacher_topk_logprobs",), top_k_targets=True
        ),
        "InfonceLoss": BatchLossRules(
            settings={
                "temperature": "number",
                "use_batch": "flag",
                "hard_negatives": "integer",
                "mask_fake_negative": "flag",
                "fake_neg_margin": "number",
                "include_qq": "flag",
                "include_dd": "flag",
            },
            inputs=(GROUP_LABELS,),
            embeds=True,
        ),
    }
)


def num_passes(name: str, config: Mapping[str, float | str], *, forward_only: bool) -> int:
    """How often an operation with a loss of that name and its ``loss_fn_config`` goes through the model."""
    rules = BATCH_LOSSES.get(name)
    if rules is None or forward_only:
        return 1
    return rules.num_passes({key: _FLAGS.get(_word(value), True) for key, value in config.items()})


def judge_batch(
    name: str, config: Mapping[str, float | str], inputs_of_datums: Sequence[Collection[str]]
) -> dict[str, Setting]:
    """The settings of a loss of :data:`BATCH_LOSSES`, in the types its class takes.

    Args:
        name: The loss.
        config: The request's ``loss_fn_config``.
        inputs_of_datums: For each datum the names of its ``loss_fn_inputs``.

    Raises:
        InvalidInput: A setting is unknown or wrong, datums are no pairs, or one brings too little or too much.
    """
    rules = BATCH_LOSSES[name]
    settings = {key: _setting(name, rules, key, value) for key, value in config.items()}
    if rules.pairs and len(inputs_of_datums) % 2:
        raise InvalidInput(
            "data", f"has {len(inputs_of_datums)} datums; {name} takes pairs: chosen, rejected, chosen, rejected, ..."
        )
    required = (*rules.targets, *rules.inputs, *([rules.reference] if rules.needs_reference(settings) else []))
    known = {*rules.known_inputs(), *((TARGETS, WEIGHTS) if rules.targets else ())}
    whole = {key for key in rules.known_inputs() if any(key in inputs for inputs in inputs_of_datums)}
    for index, inputs in enumerate(inputs_of_datums):
        place = f"data[{index}].loss_fn_inputs"
        for key in (*required, *sorted(whole.difference(required))):
            if key not in inputs:
                why = (
                    f"{name} needs {', '.join(required)}"
                    if key in required
                    else "other datums bring it; send it for all"
                )
                raise InvalidInput(f"{place}.{key}", f"is missing; {why}")
        for key in inputs:
            if key not in known:
                raise InvalidInput(f"{place}.{key}", f"is nothing that {name} takes; {_hint(key, known)}")
    return settings


def read_flag(field: str, value: float | str) -> bool:
    """A setting that is on or off, as clients write such; raises ``InvalidInput`` for anything else."""
    word = _word(value)
    if word not in _FLAGS:
        raise InvalidInput(field, f"is {value!r}, must be 0 or 1, true or false")
    return _FLAGS[word]


def _setting(name: str, rules: BatchLossRules, key: str, value: float | str) -> Setting:
    place = f"loss_fn_config.{key}"
    kind = rules.settings.get(key)
    if kind is None:
        raise InvalidInput(place, f"is no setting of {name}; {_hint(key, rules.settings)}")
    if isinstance(kind, tuple):
        if value not in kind:
            raise InvalidInput(place, f"is {value!r}, must be one of {', '.join(kind)}")
        return value
    if kind == "flag":
        return read_flag(place, value)
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise InvalidInput(place, f"is {value!r}, must be a finite number")
    if kind == "integer":
        if not number.is_integer():
            raise InvalidInput(place, f"is {value!r}, must be a whole number")
        return int(number)
    return number


def _word(value: float | str) -> str:
    return str(value).lower().removesuffix(".0")


def _hint(key: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(key, known, n=1)
    return f"did you mean {near[0]}?" if near else f"it takes {', '.join(sorted(known)) or 'none'}"
