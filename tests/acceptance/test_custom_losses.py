"""Losses of a client's own, by the official SDK: run by the service in one pass, as the client would in two."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tinker
import torch

from harness import traced_losses
from harness.served import Served

# The client rounds its gradient to float32 weights and sums in another order.
TOLERANCE = 1e-4
LENGTHS = (5, 17, 9)


@pytest.fixture(scope="module")
def client(served: Served) -> tinker.ServiceClient:
    return served.client("custom-losses")


def tensor(values: np.ndarray) -> tinker.TensorData:
    kind = "int64" if values.dtype == np.int64 else "float32"
    return tinker.TensorData(data=values.ravel().tolist(), dtype=kind, shape=list(values.shape))


def datum(rng: np.random.Generator, length: int, ranks: dict[str, int], columns: int = 2) -> tinker.Datum:
    shapes = {0: (), 1: (length,), 2: (length, columns)}
    inputs = {name: rng.random(shapes[rank], dtype=np.float32) for name, rank in ranks.items() if name != "logprobs"}
    if "old_logprobs" in inputs:
        inputs["old_logprobs"] = -6 - inputs["old_logprobs"]
    if "mask" in inputs:
        inputs["mask"] = (inputs["mask"] > 0.3).astype(np.float32)
    targets = rng.integers(10, 200, shapes[ranks["logprobs"]])
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(rng.integers(10, 200, length).tolist()),
        loss_fn_inputs={"target_tokens": tensor(targets)} | {name: tensor(values) for name, values in inputs.items()},
    )


def step(run: tinker.TrainingClient, data: list[tinker.Datum], handle: object) -> tinker.types.ForwardBackwardOutput:
    """A training step. Its eps keeps the update of a weight a smooth function of the gradient."""
    passed = run.forward_backward_custom(data, handle)  # type: ignore[arg-type]
    run.optim_step(tinker.AdamParams(learning_rate=1e-2, eps=1e-2)).result()
    return passed.result()


def logprobs_of(result: tinker.types.ForwardBackwardOutput) -> np.ndarray:
    return np.concatenate([np.array(out["logprobs"].data) for out in result.loss_fn_outputs])


LOSSES = {
    "a masked likelihood": (traced_losses.likelihood, {"logprobs": 1, "weights": 1}),
    "a clipped policy": (
        traced_losses.clipped_policy,
        {"logprobs": 1, "old_logprobs": 1, "advantages": 1, "mask": 1},
    ),
    "a preference": (traced_losses.preference, {"logprobs": 2, "reference_logprobs": 2, "beta": 0}),
    "a distribution": (traced_losses.distribution, {"logprobs": 2, "target_distribution": 2}),
    "pairs of positions": (traced_losses.ranked, {"logprobs": 1, "rewards": 1}),
}


@pytest.mark.parametrize("case", LOSSES)
def test_the_service_trains_as_the_client_would(client: tinker.ServiceClient, case: str) -> None:
    loss, ranks = LOSSES[case]
    rng = np.random.default_rng(len(case))
    steps = [[datum(rng, length, ranks) for length in LENGTHS] for _ in range(3)]
    handle = client.create_custom_loss(loss, ranks).result()  # type: ignore[arg-type]
    assert handle.loss_id is not None
    runs = [client.create_lora_training_client(base_model="tiny", rank=4, seed=7).result() for _ in range(2)]

    for data in steps:
        ours = step(runs[0], data, handle)
        theirs = step(runs[1], data, dataclasses.replace(handle, loss_id=None))

        assert ours.metrics.keys() == theirs.metrics.keys()
        assert ours.metrics == pytest.approx(theirs.metrics, rel=TOLERANCE, abs=TOLERANCE)
        np.testing.assert_allclose(logprobs_of(ours), logprobs_of(theirs), rtol=TOLERANCE)
    # A loss that trained nothing would agree with anything.
    assert np.abs(logprobs_of(ours) - logprobs_of(step(runs[0], steps[0], handle))).max() > TOLERANCE


def test_chunks_of_one_call_add_up(client: tinker.ServiceClient) -> None:
    loss, ranks = LOSSES["a clipped policy"]
    rng = np.random.default_rng(1)
    data = [datum(rng, 2, ranks) for _ in range(1030)]

    def named_otherwise(logprobs, old_logprobs, advantages, mask):  # type: ignore[no-untyped-def]
        value, metrics = loss(logprobs, old_logprobs, advantages, mask)
        return 2 * value, metrics

    handle = client.create_custom_loss(named_otherwise, ranks).result()  # type: ignore[arg-type]
    run = client.create_lora_training_client(base_model="tiny", rank=4, seed=7).result()

    ours = run.forward_backward_custom(data, handle).result()

    theirs = run.forward_backward_custom(data, dataclasses.replace(handle, loss_id=None)).result()
    assert len(ours.loss_fn_outputs) == len(data)
    assert ours.metrics == pytest.approx(theirs.metrics, rel=TOLERANCE)


def test_what_goes_wrong_in_a_loss_is_its_users_and_the_run_goes_on(client: tinker.ServiceClient) -> None:
    def large(logprobs: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return torch.outer(logprobs.repeat(100_000), logprobs).sum(), {}

    handle = client.create_custom_loss(large, {"logprobs": 1}).result()
    run = client.create_lora_training_client(base_model="tiny", rank=4, seed=7).result()
    data = [datum(np.random.default_rng(1), 30, {"logprobs": 1})]

    failing = run.forward_backward_custom(data, handle)
    step_after = run.optim_step(tinker.AdamParams(learning_rate=1e-2))
    probe = run.forward(data, "custom", {"loss_id": "somebody-elses:loss:0"})

    with pytest.raises(tinker.RequestFailedError, match=r"data\[0\]: custom loss 'large': node 'outer'.*limit") as told:
        failing.result()
    with pytest.raises(tinker.RequestFailedError, match=r"forward_backward|operation 1"):
        step_after.result()
    with pytest.raises(tinker.RequestFailedError, match="no custom loss"):
        probe.result()
    assert told.value.category == tinker.types.RequestErrorCategory.User


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_run_whose_engine_is_killed_ends_as_one_that_was_not(tmp_path: Path, tiny_model: Path) -> None:
    loss, ranks = LOSSES["a clipped policy"]
    rng = np.random.default_rng(3)
    steps = [[datum(rng, length, ranks) for length in LENGTHS] for _ in range(6)]
    settings = {"TWINKLE_CUSTOM_LOSS_SERVER_SIDE": "true"}

    with Served(tmp_path / "home", model=str(tiny_model), model_name="tiny", **settings) as served:
        client = served.client("killed")
        handle = client.create_custom_loss(loss, ranks).result()  # type: ignore[arg-type]

        def trained(disturb: Callable[[int], None]) -> list[np.ndarray]:
            run = client.create_lora_training_client(base_model="tiny", rank=4, seed=7).result()
            seen = []
            for number, data in enumerate(steps):
                disturb(number)
                seen.append(logprobs_of(step(run, data, handle)))
            return seen

        undisturbed = trained(lambda number: None)
        killed = trained(lambda number: served.kill_engine() if number == 3 else None)

    for ours, theirs in zip(killed, undisturbed, strict=True):
        np.testing.assert_array_equal(ours, theirs)
