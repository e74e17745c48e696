"""A device that runs out of memory above so many tokens: what fits is remembered, and nothing is hidden."""

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs

from twinkle.core.errors import OutOfMemory
from twinkle.model.fused.model import FusedLoraModel
from twinkle.model.fused.pass_size import GROW_AFTER_PASSES, PassSize
from twinkle.model.fused.training import TrainJob
from twinkle.module.lora import LoraConfig


class Device:
    """Refuses passes of more tokens than it holds."""

    def __init__(self, model, num_tokens):
        self.num_tokens = num_tokens
        self.times_full = 0
        self.passes = []
        model._decoder.register_forward_pre_hook(self.take, with_kwargs=True)

    def take(self, module, args, kwargs):
        num_tokens = kwargs["inputs_embeds"].shape[1]
        if num_tokens > self.num_tokens:
            self.times_full += 1
            raise torch.OutOfMemoryError("out of memory")
        self.passes.append(num_tokens)


@pytest.fixture
def model(base_dirs):
    return FusedLoraModel.from_pretrained(str(base_dirs("qwen3")), tokens_per_pass=160)


@pytest.fixture
def run(model, make_datum):
    def run(num_datums=16, *, backward=True):
        rng = np.random.default_rng(0)
        data = tuple(make_datum(rng, 10) for _ in range(num_datums))
        adapter = model.create_adapter(LoraConfig(rank=4, seed=1))
        [outcome] = model.forward_backward([TrainJob(adapter, data, "cross_entropy", {}, backward)])
        assert not isinstance(outcome, Exception)
        return outcome.loss, adapter.grad

    return run


def test_the_size_that_fits_is_remembered_from_call_to_call(model, run):
    expected_loss, expected_gradient = run()
    device = Device(model, 50)

    with capture_logs() as logs:
        loss, gradient = run()
    assert device.times_full == 2
    assert [entry["next_budget_tokens"] for entry in logs if entry["event"] == "model.pass.out_of_memory"] == [80, 40]
    assert loss == expected_loss
    assert torch.equal(gradient, expected_gradient)

    for _ in range(3):
        run()
    assert device.times_full == 2


def test_a_forward_pass_keeps_its_own_size(model, run):
    device = Device(model, 50)
    run()
    device.num_tokens = 1000
    device.passes.clear()

    run(backward=False)

    assert device.passes == [160]


def test_larger_passes_are_tried_again_after_enough_that_went_well(model, run):
    device = Device(model, 50)
    run()
    device.num_tokens = 1000

    for _ in range(2 * GROW_AFTER_PASSES):
        run(num_datums=1)
    device.passes.clear()
    run()

    assert device.passes == [160]


def test_a_larger_size_that_fails_again_is_tried_ever_more_rarely():
    size = PassSize(160)
    size.shrink(160)
    waits = []
    for _ in range(4):
        passes = 0
        while size.num_tokens == 80:
            size.went_well()
            passes += 1
        waits.append(passes)
        size.shrink(160)

    assert waits == [GROW_AFTER_PASSES * factor for factor in (1, 2, 4, 8)]


def test_jobs_that_go_alone_after_a_failure_are_told_of_once_with_their_number(model, make_datum, monkeypatch):
    rng = np.random.default_rng(0)
    jobs = [
        TrainJob(model.create_adapter(LoraConfig(rank=4, seed=seed)), (make_datum(rng, 9),), "cross_entropy")
        for seed in range(3)
    ]
    run_head = model._head.run

    def fail_for_the_first(hidden, targets, items, gradient):
        if any(item.adapter is jobs[0].adapter for item in items):
            raise ArithmeticError("a kernel failed")
        run_head(hidden, targets, items, gradient)

    monkeypatch.setattr(model._head, "run", fail_for_the_first)
    for times in (1, 2):
        with capture_logs() as logs:
            outcomes = model.forward_backward(jobs)

        assert [isinstance(outcome, ArithmeticError) for outcome in outcomes] == [True, False, False]
        [told] = [entry for entry in logs if entry["event"] == "model.pass.failed_fused"]
        assert told["log_level"] == "warning"
        assert told["num_jobs"] == 3
        assert told["error"] == "ArithmeticError: a kernel failed"
        assert told["times"] == times


def test_a_gradient_that_has_no_room_beside_one_that_is_open_fails_its_job_alone(model, make_datum):
    rng = np.random.default_rng(0)
    cache = Guest(1 << 30)
    model.memory.limit_bytes = 1 << 30
    model.memory.add_guest("cache", cache)
    adapters = [model.create_adapter(LoraConfig(rank=4, seed=seed)) for seed in range(2)]
    jobs = [TrainJob(adapter, (make_datum(rng, 10),), "cross_entropy") for adapter in adapters]
    model.forward_backward(jobs[:1])
    first = adapters[0].grad.clone()
    held = []
    layer = model.base.model.layers[0]
    layer.register_forward_pre_hook(lambda *args: held.append(model.memory.held["gradients of passes"]))
    before = cache.size_bytes

    (again,) = model.forward_backward(jobs[:1])

    assert not isinstance(again, Exception)
    assert held == [first.nbytes]
    assert cache.size_bytes <= before - first.nbytes
    assert model.memory.held["gradients of passes"] == 0
    assert torch.equal(adapters[0].grad, first + first)

    def full(gradient):
        raise torch.OutOfMemoryError("out of memory")

    model._gradients.zeros_like = full
    failed, trained = model.forward_backward(jobs)
    assert isinstance(failed, OutOfMemory)
    assert not isinstance(trained, Exception)
    assert torch.equal(adapters[0].grad, first + first)


class Guest:
    def __init__(self, size_bytes):
        self.size_bytes = size_bytes

    def give_back(self, num_bytes):
        self.size_bytes -= num_bytes
