"""Faster parts in the place of a model's own."""

from __future__ import annotations

import math

import pytest
import torch
from structlog.testing import capture_logs

from twinkle.core.errors import ConfigError, InvalidInput
from twinkle.kernel import (
    DEFAULT_KERNEL_CONFIG,
    Bundle,
    KernelChoice,
    KernelImpl,
    bundles,
    choice,
    hub,
    kernelize,
    liger_builtin,
    npu_builtin,
    register_op,
    replacing,
)


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


@pytest.fixture
def doubling(monkeypatch: pytest.MonkeyPatch) -> str:
    """An operation that two libraries have, of which this machine can use the second."""
    monkeypatch.setattr(choice, "_OPS", dict(choice._OPS))
    absent = KernelImpl(lambda target: pytest.fail("it was loaded"), lambda: (False, "its device is not here"))
    register_op("doubling", implementations={"absent": absent, "plain": KernelImpl(lambda target: Doubling)})
    return "doubling"


def test_a_choice_takes_the_first_form_that_this_machine_can_use(model: torch.nn.Sequential, doubling: str) -> None:
    with capture_logs() as said:
        kernelize(model, {"torch.nn.Linear": KernelChoice(op=doubling, backends=("unknown", "absent", "plain"))})
    assert isinstance(model[0], Doubling) and type(model[1]) is OwnLinear
    assert torch.nn.Linear is not Doubling
    assert [line["by"] for line in said if line["event"] == "kernel.replaced"] == ["plain"]


def test_a_choice_that_nothing_here_fulfils_leaves_the_model_and_says_why(
    model: torch.nn.Sequential, doubling: str
) -> None:
    before = value(model)
    with capture_logs() as said:
        kernelize(model, {torch.nn.Linear: KernelChoice(doubling, ("absent", "unknown"))})
    (line,) = (line for line in said if line["event"] == "kernel.kept")
    assert line["reason"] == "absent: its device is not here; unknown has no doubling"
    assert value(model) == before


def test_an_installer_of_ones_own_puts_a_form_in_place(model: torch.nn.Sequential, doubling: str) -> None:
    seen: list[object] = []
    own = KernelChoice(doubling, ("plain",), installer=lambda whole, target, made: seen.extend((whole, target, made)))
    kernelize(model, {"anything": own})
    assert seen == [model, "anything", Doubling]


def test_an_operation_that_nobody_registered_is_refused_with_the_nearest(
    model: torch.nn.Sequential, doubling: str
) -> None:
    with pytest.raises(InvalidInput, match="did you mean 'doubling'"):
        kernelize(model, {torch.nn.Linear: KernelChoice("dubling", ("plain",))})
    with pytest.raises(InvalidInput, match="already"):
        register_op(doubling, implementations={"plain": KernelImpl(lambda target: Doubling)})


def test_every_target_of_the_default_names_something_that_transformers_has() -> None:
    if torch.accelerator.is_available():
        pytest.skip("this machine has a device, and Liger may be installed")
    for target in DEFAULT_KERNEL_CONFIG:
        replacing._owner_of(str(target))
    model = torch.nn.Sequential()
    with capture_logs() as said:
        assert kernelize(model, DEFAULT_KERNEL_CONFIG) is model
    assert {line["event"] for line in said} == {"kernel.kept"}
