"""What one more tenant and one more datum add to a fused pass on an accelerator: each is a launch, which the host pays.

Counted on a device without values, with nothing where our kernels are launched.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from harness.families import FAMILIES
from harness.lora_kernels import Kernel, LoraKernels
from harness.valueless import Crossings, valueless_model
from twinkle.model.fused.job_run import sums_of
from twinkle.model.fused.model import FusedLoraModel
from twinkle.model.fused.training import Datum, TrainJob, TrainOutcome
from twinkle.module.lora import LoraAdapter, LoraConfig

MakeDatum = Callable[..., Datum]
LOSSES = ("cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo", "stable_reinforce")
HEAD_FORWARD = Counter(mm=1, addmm_=1, t=2)
"""Of a tenant's own update of the logits: two products, and two views for them."""
HEAD = Counter(mm=2, addmm_=4, t=4)
"""There and back: its gradients of A, of B and of the hidden states."""


@pytest.fixture
def kernels() -> LoraKernels:
    """Launched, but nothing runs."""
    kernels = LoraKernels()
    for name in vars(kernels):
        setattr(kernels, name, Kernel(lambda *sides, **options: None))
    return kernels


@pytest.fixture
def model(kernels: LoraKernels, monkeypatch: pytest.MonkeyPatch) -> FusedLoraModel:
    monkeypatch.setattr("twinkle.module.lora.kernels_for", lambda device_type, dtype: kernels)
    made, _ = valueless_model(FAMILIES["qwen3"](), monkeypatch)
    return made


class Passes:
    """Counts what torch is asked for in a pass of so many tenants with so many datums each."""

    def __init__(self, model: FusedLoraModel, make_datum: MakeDatum, kernels: LoraKernels) -> None:
        self.model = model
        self.adapters: list[LoraAdapter] = []
        self.losses: Sequence[str] = ("cross_entropy",)
        self.loss_config: dict[str, float | str] = {}
        self.backward = True
        self.have_gradients = False
        self._kernels = kernels
        self._make_datum = make_datum

    def count(self, num_tenants: int, num_datums: int) -> tuple[Counter[str], int]:
        """Of torch's operations each, and all launches of our kernels."""
        self.adapters = [
            self.model.create_adapter(LoraConfig(rank=4 + number, seed=number)) for number in range(num_tenants)
        ]
        return self._run(num_datums)

    def _run(self, num_datums: int) -> tuple[Counter[str], int]:
        rng = np.random.default_rng(0)
        jobs = []
        for number, adapter in enumerate(self.adapters):
            adapter.has_gradients = self.have_gradients
            data = tuple(self._make_datum(rng, 5 + index) for index in range(num_datums))
            loss = self.losses[number % len(self.losses)]
            jobs.append(TrainJob(adapter, data, loss, self.loss_config, backward=self.backward))
        launched = -self._num_launches
        with Crossings() as crossings:
            outcomes = self.model.forward_backward(jobs)
        assert all(isinstance(outcome, TrainOutcome) for outcome in outcomes), outcomes
        return crossings.calls, launched + self._num_launches

    @property
    def _num_launches(self) -> int:
        return sum(kernel.num_calls for kernel in vars(self._kernels).values())

    def of_a_tenant(self) -> Counter[str]:
        """What the last of five adds, with one datum."""
        few, many = self.count(4, 1), self.count(5, 1)
        assert few[1] == many[1] > 0
        return _added(few[0], many[0])

    def of_a_datum(self) -> Counter[str]:
        """What a second datum of each of two tenants adds."""
        few, many = self.count(2, 1), self.count(2, 2)
        assert few[1] == many[1] > 0
        return _added(few[0], many[0])


def _added(few: Counter[str], many: Counter[str]) -> Counter[str]:
    added = Counter(many)
    added.subtract(few)
    return Counter({name: number for name, number in added.items() if number})


@pytest.fixture
def passes(model: FusedLoraModel, make_datum: MakeDatum, kernels: LoraKernels) -> Passes:
    return Passes(model, make_datum, kernels)


@pytest.mark.parametrize("loss", LOSSES)
def test_a_tenant_more_costs_its_products_in_the_head_and_a_datum_more_nothing(loss: str, passes: Passes) -> None:
    passes.losses = (loss,)
    assert passes.of_a_tenant() == HEAD
    assert passes.of_a_datum() == Counter()


def test_a_pass_that_only_scores_costs_a_tenant_its_products_there(passes: Passes) -> None:
    passes.backward = False
    assert passes.of_a_tenant() == HEAD_FORWARD
    assert passes.of_a_datum() == Counter()


def test_tokens_that_are_counted_as_correct_cost_no_more(passes: Passes) -> None:
    passes.loss_config = {"count_correct": 1}
    assert passes.of_a_tenant() == HEAD
    assert passes.of_a_datum() == Counter()


def test_a_datum_beside_one_with_another_loss_costs_nothing(passes: Passes) -> None:
    passes.losses = ("cross_entropy", "ppo")
    assert passes.of_a_datum() == Counter(), "the loss of each kind is computed once"


def test_a_tenant_that_has_gradients_already_costs_its_buffer_and_no_view_of_every_layer(passes: Passes) -> None:
    passes.have_gradients = True
    # Views of the first pair, by whose address kernels find all, and of the head's.
    assert passes.of_a_tenant() == HEAD + Counter(zeros_like=1, add_=1, copy_=1, slice=4, view=4)
    assert passes.of_a_datum() == Counter()


def test_whether_gradients_are_finite_is_found_for_all_of_them_with_one_call() -> None:
    with Crossings() as crossings:
        sums_of([torch.empty(100 + number, device="meta") for number in range(5)])
    assert crossings.calls["_foreach_norm"] == crossings.calls["stack"] == 1
    assert crossings.calls.keys() - {"empty"} == {"_foreach_norm", "stack"}


@pytest.mark.parametrize("sick", [torch.nan, torch.inf, -torch.inf])
def test_absolute_values_tell_of_a_buffer_that_is_not_finite_as_sums_do(sick: float) -> None:
    """What an accelerator is asked; on a CPU sums are quicker."""
    healthy, other = torch.linspace(-3, 3, 5000), torch.linspace(-3, 3, 5000)
    other[4321] = sick
    norms = torch.stack(torch._foreach_norm([healthy, other], 1))
    assert norms.isfinite().tolist() == [True, False]
