"""Kernels of our own: which are trusted, and what is said of those that are not."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from twinkle.module import tried

NAME = "twinkle_kernels_of_a_test"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module of kernels, on a machine that could run them."""
    made = ModuleType(NAME)
    monkeypatch.setitem(sys.modules, NAME, made)
    monkeypatch.setattr(tried, "find_spec", lambda name: object())
    monkeypatch.setattr(tried, "is_quick", lambda device_type, dtype: True)
    return made


def own(error_of: Any) -> tuple[Any | None, list[Any]]:
    """What is found, and what the log says of it."""
    with capture_logs() as said:
        found = tried.own_kernels(
            NAME, error_of, device_type="cpu", dtype=torch.bfloat16, event="device.none", instead="slower", layer="it"
        )
    return found, said


def no_compiler(kernels: ModuleType) -> float:
    raise RuntimeError("no ptxas\nand a stack of fifty lines")


def test_what_is_right_is_trusted_in_silence(module: ModuleType) -> None:
    looked_at = []

    def error_of(kernels: ModuleType) -> float:
        looked_at.append(kernels)
        return tried.TOLERANCE / 2

    assert own(error_of) == (module, [])
    assert looked_at == [module]


@pytest.mark.parametrize(
    ("error_of", "reason"),
    [
        (no_compiler, "no ptxas"),
        (lambda kernels: 0.5, "its values are off by 0.5"),
        (lambda kernels: float("nan"), "its values are off by nan"),
    ],
    ids=["not compiled", "wrong", "no number"],
)
def test_what_does_not_run_or_is_wrong_is_not_used_and_the_log_says_why(
    module: ModuleType, error_of: Any, reason: str
) -> None:
    found, (line,) = own(error_of)
    assert found is None
    assert line["event"] == "device.none"
    assert line["log_level"] == "warning"
    assert (line["reasons"], line["next"], line["layer"]) == ([reason], "slower", "it")


def test_a_machine_that_could_but_lacks_the_compiler_is_told_so(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tried, "find_spec", lambda name: None)
    tried._tell_of_no_compiler.cache_clear()
    found, (line,) = own(lambda kernels: pytest.fail("nothing can be compiled"))
    assert found is None
    assert (line["log_level"], line["reason"]) == ("warning", "triton is not installed")
    # One reason for all kernels, said once.
    assert own(lambda kernels: pytest.fail("nothing can be compiled")) == (None, [])


def test_where_there_are_no_kernels_at_all_nothing_is_loaded_or_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tried, "find_spec", lambda name: pytest.fail("nobody looks"))
    assert own(lambda kernels: pytest.fail("nobody tries")) == (None, [])


def test_a_forward_is_replaced_where_the_form_is_known_and_nobody_did_before() -> None:
    known, other, patched = torch.nn.Linear(2, 2), torch.nn.LayerNorm(2), torch.nn.Linear(2, 2)
    patched.forward = own_forward = lambda x: x  # type: ignore[method-assign]
    model = torch.nn.Sequential(known, other, patched, torch.nn.ReLU()).to(torch.bfloat16)
    asked: list[tuple[str, str, torch.dtype]] = []

    def forward_for(module: torch.nn.Module, device_type: str, dtype: torch.dtype) -> Any:
        asked.append((type(module).__name__, device_type, dtype))
        return (lambda self, x: (self, x)) if isinstance(module, torch.nn.Linear) else None

    assert tried.replace_forwards(model, forward_for) == 1
    assert known(1) == (known, 1) and patched.forward is own_forward
    assert asked == [(name, "cpu", torch.bfloat16) for name in ("Sequential", "Linear", "LayerNorm")]
