"""Which loss a pass means, and whether of the base model alone: what its name, settings and datums say together.

``importance_sampling`` over datums that bring ``ref_logps`` is how Twinkle's own servers are asked for ``DPOLoss``; its
settings come as ``dpo_beta``, ``dpo_loss_type``, ... there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from twinkle.core.batch_loss import BATCH_LOSSES, Setting, judge_batch, read_flag
from twinkle.core.errors import InvalidInput
from twinkle.wire import protobuf as pb

WITHOUT_ADAPTER = "disable_lora"

_POLICY, _PREFERENCE = "importance_sampling", "DPOLoss"
_REFERENCE, _OF_POLICY = "ref_logps", frozenset({"advantages", "logprobs"})
_CONFIG, _PREFIX = "loss_fn_config.", "dpo_"
_SETTINGS = frozenset(BATCH_LOSSES[_PREFERENCE].settings) - {"reference_free"}


@dataclass(frozen=True)
class MeantLoss:
    """A loss by the name it has here, its settings, and whether the base model computes it without the adapter."""

    name: str
    config: dict[str, float | str]
    without_adapter: bool = False


def read_loss(message: pb.Message) -> MeantLoss:
    """What a ``ForwardBackwardRequest`` asks for.

    Raises:
        InvalidInput: A setting cannot be read, or the base model alone is to be trained.
    """
    config = _read_config(message)
    without_adapter = _take_without_adapter(config, forward_only=message.forward_only)
    if not _compares_pairs(message, config):
        return MeantLoss(message.loss_fn, config, without_adapter)
    return MeantLoss(_PREFERENCE, _of_preference(config), without_adapter)


def judge_loss(message: pb.Message) -> None:
    """Raise ``InvalidInput`` for what is wrong with a loss's settings and with what datums bring for it, by name."""
    loss = read_loss(message)
    if message.loss_fn == _POLICY:
        _refuse_both(message)
    if loss.name not in BATCH_LOSSES:
        return
    inputs = [datum.loss_fn_inputs.keys() for datum in message.data]
    if message.loss_fn == loss.name:
        judge_batch(loss.name, loss.config, inputs)
        return
    try:
        _judge_numbers(judge_batch(loss.name, loss.config, inputs))
    except InvalidInput as error:
        if not error.field.startswith(_CONFIG):
            raise
        told = error.message.removeprefix(f"{error.field}: ")
        raise InvalidInput(error.field.replace(_CONFIG, _CONFIG + _PREFIX), told) from error


def _compares_pairs(message: pb.Message, config: Iterable[str]) -> bool:
    """Datums that bring what the policy's own loss takes are that one's."""
    if message.loss_fn != _POLICY or any(_OF_POLICY & datum.loss_fn_inputs.keys() for datum in message.data):
        return False
    return any(key.startswith(_PREFIX) for key in config) or _has_reference(message)


def _has_reference(message: pb.Message) -> bool:
    return any(_REFERENCE in datum.loss_fn_inputs for datum in message.data)


def _refuse_both(message: pb.Message) -> None:
    if not _has_reference(message):
        return
    for index, datum in enumerate(message.data):
        for name in sorted(_OF_POLICY & datum.loss_fn_inputs.keys()):
            raise InvalidInput(
                f"data[{index}].loss_fn_inputs.{name}",
                f"comes beside {_REFERENCE}, with which {_POLICY} is {_PREFERENCE} over pairs and takes none; for a"
                " penalty against a reference send GRPOLoss with beta",
            )


def _of_preference(config: Mapping[str, float | str]) -> dict[str, float | str]:
    """The settings by the names that the class has for them."""
    for key in config:
        if not key.startswith(_PREFIX) or key.removeprefix(_PREFIX) not in _SETTINGS:
            known = ", ".join(_PREFIX + name for name in sorted(_SETTINGS))
            raise InvalidInput(
                f"{_CONFIG}{key}", f"is no setting of {_POLICY} over pairs, which is {_PREFERENCE}; it takes {known}"
            )
    return {key.removeprefix(_PREFIX): value for key, value in config.items()}


def _judge_numbers(settings: Mapping[str, Setting]) -> None:
    for name in ("beta", "sft_weight"):
        value = settings.get(name, 0.0)
        if isinstance(value, float) and value < 0:
            raise InvalidInput(f"{_CONFIG}{name}", f"is {value:g}, must be 0 or more")
    if settings.get("loss_type") == "ipo" and settings.get("beta") == 0:
        raise InvalidInput(f"{_CONFIG}beta", "is 0; ipo aims at the margin 1 / (2 beta) and needs a positive one")


def _take_without_adapter(config: dict[str, float | str], *, forward_only: bool) -> bool:
    field = f"{_CONFIG}{WITHOUT_ADAPTER}"
    is_set = WITHOUT_ADAPTER in config and read_flag(field, config.pop(WITHOUT_ADAPTER))
    if is_set and not forward_only:
        raise InvalidInput(field, "is for forward: the base model alone is not trained; ask forward for its logprobs")
    return is_set


def _read_config(message: pb.Message) -> dict[str, float | str]:
    """Reads both generations of the settings; the newer one wins."""
    config: dict[str, float | str] = dict(message.loss_fn_config)
    for key, value in message.loss_fn_config_v2.items():
        kind = value.WhichOneof("value")
        if kind is None:
            raise InvalidInput(f"{_CONFIG}{key}", "has no value")
        config[key] = value.text if kind == "text" else value.number
    for key, setting in config.items():
        if isinstance(setting, float) and not math.isfinite(setting):
            raise InvalidInput(f"{_CONFIG}{key}", f"must be a finite number, not {setting}")
    return config
