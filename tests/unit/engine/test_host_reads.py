"""How often a pass makes the host wait for the device: as often for many datums as for one, and in no layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from harness.host_reads import HostReads, ScalarReads
from twinkle.model.fused.model import FusedLoraModel
from twinkle.model.fused.training import AdamParams, Datum, TrainJob
from twinkle.module.lora import LoraAdapter, LoraConfig

LOSSES = ("cross_entropy", "importance_sampling", "ppo", "cispo")


@pytest.fixture(scope="module", params=["qwen3", "qwen3-moe"])
def grouped_model(request: pytest.FixtureRequest, base_dirs: Callable[[str], Path]) -> FusedLoraModel:
    """As an accelerator runs it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("twinkle.module.lora.supports_grouped_products", lambda device, dtype: True)
        return FusedLoraModel.from_pretrained(str(base_dirs(request.param)))


def reads_of(model: FusedLoraModel, adapter: LoraAdapter, data: list[Datum], loss: str) -> Counter[str]:
    with HostReads() as above, ScalarReads() as below:
        (outcome,) = model.forward_backward([TrainJob(adapter, tuple(data), loss)])
    assert not isinstance(outcome, Exception), outcome
    adapter.clear_gradients()
    return above.counts + Counter(scalars=below.count)


@pytest.mark.parametrize("loss", LOSSES)
def test_a_pass_reads_as_much_back_for_many_datums_as_for_one(
    grouped_model: FusedLoraModel, make_datum: Callable[..., Datum], loss: str
) -> None:
    rng = np.random.default_rng(0)
    adapter = grouped_model.create_adapter(LoraConfig(rank=4, seed=1))
    one = reads_of(grouped_model, adapter, [make_datum(rng, 9)], loss)
    many = reads_of(grouped_model, adapter, [make_datum(rng, length) for length in (9, 5, 20, 9, 11)], loss)
    assert many == one
    # What came out of the pass, and whether the job's gradient is finite.
    assert one["cpu"] == 1
    assert one["scalars"] <= 1


@pytest.mark.parametrize("have_gradients", [False, True])
def test_a_pass_reads_as_much_back_for_many_tenants_as_for_one(
    have_gradients: bool, grouped_model: FusedLoraModel, make_datum: Callable[..., Datum]
) -> None:
    """Whether gradients are finite is asked for all of them at once, also of those added to what is there already."""
    found = []
    for num_tenants in (1, 5):
        jobs = [
            TrainJob(
                grouped_model.create_adapter(LoraConfig(rank=4, seed=seed)),
                (make_datum(np.random.default_rng(seed), 9),),
                "cross_entropy",
            )
            for seed in range(num_tenants)
        ]
        if have_gradients:
            grouped_model.forward_backward(jobs)
        with HostReads() as above, ScalarReads() as below:
            grouped_model.forward_backward(jobs)
        found.append(above.counts + Counter(scalars=below.count))
    assert found[0] == found[1]


def test_layers_read_nothing_back(grouped_model: FusedLoraModel, make_datum: Callable[..., Datum]) -> None:
    adapter = grouped_model.create_adapter(LoraConfig(rank=4, seed=1))
    begun, ended = [], []
    above, below = HostReads(), ScalarReads()
    layers = grouped_model.base.model.layers
    first = layers[0].register_forward_pre_hook(lambda *args: begun.append((above.counts.total(), below.count)))
    last = layers[-1].register_forward_hook(lambda *args: ended.append((above.counts.total(), below.count)))
    try:
        with above, below:
            grouped_model.forward_backward(
                [TrainJob(adapter, (make_datum(np.random.default_rng(0), 9),), "cross_entropy")]
            )
    finally:
        first.remove()
        last.remove()
    adapter.clear_gradients()
    assert begun == ended


def test_an_optimizer_step_reads_the_norm_and_nothing_else(
    grouped_model: FusedLoraModel, make_datum: Callable[..., Datum]
) -> None:
    adapter = grouped_model.create_adapter(LoraConfig(rank=4, seed=1))
    data = (make_datum(np.random.default_rng(0), 9),)
    grouped_model.forward_backward([TrainJob(adapter, data, "cross_entropy")])
    with HostReads() as reads:
        grouped_model.optim_step(adapter, AdamParams(grad_clip_norm=0.1))
    assert reads.counts == {"tolist": 1, "__float__": 1}
