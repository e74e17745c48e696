"""Where a device cannot do something the weights are plainer, and it is said once."""

import pytest
import torch
from structlog.testing import capture_logs

from twinkle.infra import Platform
from twinkle.model.device_traits import plain_dtype


@pytest.fixture(autouse=True)
def _asked_anew():
    plain_dtype.cache_clear()
    yield
    plain_dtype.cache_clear()


def test_a_device_without_bfloat16_gets_float32_and_says_so_once():
    # A device that torch knows and that computes nothing, not even what bfloat16 gives.
    with capture_logs() as said:
        found = [plain_dtype("meta") for _ in range(2)]

    assert found == [torch.float32, torch.float32]
    assert [line["event"] for line in said] == ["device.no_bfloat16"]


def test_a_cpu_computes_in_float32_without_a_word():
    with capture_logs() as said:
        assert plain_dtype("cpu") == torch.float32
    assert said == []


def test_every_accelerator_has_a_way_between_its_ranks():
    for name, backend in (("cuda", "nccl"), ("npu", "hccl"), ("xpu", "xccl")):
        platform = Platform.named(name)
        assert platform.backend == f"cpu:gloo,{name}:{backend}"
        assert platform.device_of(3) == f"{name}:3"
        assert platform.num_devices() >= 0
