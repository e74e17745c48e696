"""Faster parts in the place of a model's own."""

from __future__ import annotations

import math

import pytest
import torch
from structlog.testing import capture_logs

from twinkle.core.errors import ConfigError, InvalidInput
from twinkle.kernel import Bundle, bundles, hub, kernelize, liger_builtin, npu_builtin


class Doubling(torch.nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


class Halving(torch.nn.Module):
    """A layer as hubs of kernels have them: a forward and no state of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / 2


class OwnLinear(torch.nn.Linear):
    pass


@pytest.fixture
def model() -> torch.nn.Sequential:
    layers = torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False), OwnLinear(1, 1, bias=False), torch.nn.SiLU())
    for layer in layers[:2]:
        torch.nn.init.ones_(layer.weight)
    return layers


def value(model: torch.nn.Module) -> float:
    with torch.no_grad():
        return float(model(torch.ones(1)))


def silu(x: float) -> float:
    return x / (1 + math.exp(-x))


def test_modules_of_exactly_a_class_are_replaced_and_keep_their_weights(model: torch.nn.Sequential) -> None:
    assert kernelize(model, {torch.nn.Linear: Doubling}) is model
    assert type(model[0]) is Doubling and type(model[1]) is OwnLinear
    assert value(model) == pytest.approx(silu(2.0))


def test_a_layer_without_state_stays_what_it_replaces_as_well(model: torch.nn.Sequential) -> None:
    kernelize(model, {torch.nn.SiLU: Halving})
    assert isinstance(model[2], torch.nn.SiLU) and value(model) == 0.5


def test_a_choice_by_device_leaves_out_what_this_machine_is_not(model: torch.nn.Sequential) -> None:
    kernelize(model, {torch.nn.Linear: {"a device that is not here": Doubling}})
    assert type(model[0]) is torch.nn.Linear


def test_a_function_is_replaced_by_its_path(model: torch.nn.Sequential, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("math.floor", math.floor)
    monkeypatch.setattr("fractions.Fraction.limit_denominator", None)
    kernelize(model, {"math.floor": math.ceil, "fractions.Fraction.limit_denominator": abs})
    assert math.floor(0.5) == 1
    for path in ("math.no_such", "no_such_package.thing", "math"):
        with pytest.raises(InvalidInput, match="no such name to replace"):
            kernelize(model, {path: abs})
    with pytest.raises(InvalidInput, match="has the key 3"):
        kernelize(model, {3: abs})  # type: ignore[dict-item]


def test_a_layer_of_a_hub_is_code_and_needs_trust(model: torch.nn.Sequential, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"TWINKLE_TRUST_REMOTE_CODE=hf://kernels/norm@v1"):
        kernelize(model, {torch.nn.Linear: hub("kernels/norm:Norm", version=1)})
    with pytest.raises(ConfigError, match="names no revision that stays"):
        kernelize(model, {torch.nn.Linear: hub("kernels/norm:Norm", revision="main")})
    for wrong in (
        {"ref": "kernels/norm", "version": 1},
        {"ref": "a/b:C"},
        {"ref": "a/b:C", "version": 1, "revision": "x"},
    ):
        with pytest.raises(InvalidInput):
            hub(**wrong)  # type: ignore[arg-type]


def test_where_nothing_is_installed_the_model_stays_and_the_log_says_so_once(
    model: torch.nn.Sequential,
) -> None:
    bundles._none.cache_clear()
    if torch.accelerator.is_available():
        pytest.skip("this machine has a device, and Liger may be installed")
    before = value(model)
    with capture_logs() as said:
        kernelize(kernelize(model))
        kernelize(model, liger_builtin(model))
    assert value(model) == before
    assert [line["event"] for line in said].count("kernel.none") == 1
    assert npu_builtin(model) == {}


def test_a_bundle_changes_the_whole_model(model: torch.nn.Sequential) -> None:
    kernelize(model, Bundle("zeros", lambda whole: [torch.nn.init.zeros_(weight) for weight in whole.parameters()]))
    assert value(model) == 0
