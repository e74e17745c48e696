"""Operations by name, of which several libraries have a fast form: the first that this machine can use is taken."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch

from twinkle.core.errors import InvalidInput
from twinkle.infra.platform import Platform

LIGER = "liger_kernel"

Target = type[torch.nn.Module] | str
"""A class of modules, or the path of a class, a method or a function."""
Installer = Callable[[torch.nn.Module, Target, Any], object]


@dataclass(frozen=True)
class KernelImpl:
    """An operation as one library has it.

    Args:
        load: Gives the class or function for a target; imports the library only now.
        available: Whether it can be used here, and if not, why.
    """

    load: Callable[[Target], Any]
    available: Callable[[], tuple[bool, str | None]] = lambda: (True, None)


@dataclass(frozen=True)
class KernelChoice:
    """Which operation a target is, and whose forms of it are wanted, the best first.

    Args:
        op: A name of :func:`register_op`.
        backends: Libraries by their names there.
        installer: Puts the form in place; if omitted the operation's own, else what every mapping does.
    """

    op: str
    backends: Sequence[str]
    installer: Installer | None = None


@dataclass(frozen=True)
class OpDefinition:
    """An operation with all its forms."""

    implementations: Mapping[str, KernelImpl]
    installer: Installer | None = None


_OPS: dict[str, OpDefinition] = {}


def register_op(name: str, *, implementations: Mapping[str, KernelImpl], installer: Installer | None = None) -> None:
    """Make an operation known by name.

    Raises:
        InvalidInput: There is one of that name, or no implementation.
    """
    if name in _OPS:
        raise InvalidInput("name", f"{name!r} is an operation already; take another name")
    if not implementations:
        raise InvalidInput("implementations", f"of {name!r} are none; send one or more")
    _OPS[name] = OpDefinition(dict(implementations), installer)


def chosen_form(choice: KernelChoice, target: Target) -> tuple[Any, str | None, str]:
    """The first form of an operation that can be used here, whose it is, or nothing and why.

    Raises:
        InvalidInput: No such operation was registered.
    """
    reasons = []
    for backend in choice.backends:
        known = op_of(choice).implementations.get(backend)
        if known is None:
            reasons.append(f"{backend} has no {choice.op}")
            continue
        is_there, reason = known.available()
        if is_there:
            return known.load(target), backend, ""
        reasons.append(f"{backend}: {reason or 'cannot be used here'}")
    return None, None, "; ".join(reasons) or "no backend is named"


def op_of(choice: KernelChoice) -> OpDefinition:
    """The operation that a choice names.

    Raises:
        InvalidInput: None was registered under that name.
    """
    if choice.op not in _OPS:
        near = difflib.get_close_matches(choice.op, _OPS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(sorted(_OPS))}"
        raise InvalidInput("op", f"{choice.op!r} is no operation that was registered; {hint}")
    return _OPS[choice.op]


def liger_is_there() -> tuple[bool, str | None]:
    """Whether Liger's kernels can run here, and if not, why."""
    if Platform.current().device_type == "cpu":
        return False, "Liger's kernels need a GPU"
    if find_spec(LIGER) is None:
        return False, "liger-kernel is not installed (pip install liger-kernel)"
    return True, None


def _liger_norm(target: Target) -> Any:
    # Imports Triton; only where it is chosen.
    from liger_kernel.transformers.rms_norm import LigerRMSNorm  # noqa: PLC0415

    # What its constructor would set: modules change class after they were made.
    settings = {"offset": 0.0, "casting_mode": "llama", "in_place": True, "row_mode": None, "impl": None, "mode": None}
    return type("LigerRMSNorm", (LigerRMSNorm,), settings)


def _liger_product(target: Target) -> Any:
    from liger_kernel.transformers.swiglu import LigerSwiGLUMLP  # noqa: PLC0415

    return LigerSwiGLUMLP.forward


def _liger_rotary(target: Target) -> Any:
    from liger_kernel.transformers.rope import liger_rotary_pos_emb  # noqa: PLC0415

    return liger_rotary_pos_emb


register_op("rms_norm", implementations={"liger": KernelImpl(_liger_norm, liger_is_there)})
register_op("swiglu", implementations={"liger": KernelImpl(_liger_product, liger_is_there)})
register_op("rotary", implementations={"liger": KernelImpl(_liger_rotary, liger_is_there)})

_FAMILIES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe"}


def _default_config() -> dict[Target, KernelChoice]:
    config: dict[Target, KernelChoice] = {}
    for family, name in _FAMILIES.items():
        module = f"transformers.models.{family}.modeling_{family}"
        config[f"{module}.{name}RMSNorm"] = KernelChoice("rms_norm", ("liger",))
        config[f"{module}.{name}MLP.forward"] = KernelChoice("swiglu", ("liger",))
        config[f"{module}.apply_rotary_pos_emb"] = KernelChoice("rotary", ("liger",))
    return config


DEFAULT_KERNEL_CONFIG: Mapping[Target, KernelChoice] = _default_config()
"""To copy and change: ``kernelize(model, {**DEFAULT_KERNEL_CONFIG, target: choice})``."""
