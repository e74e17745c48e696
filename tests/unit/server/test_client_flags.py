"""What an operator tells the clients of the official SDK to do, and that they still get everything done."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
import tinker
from tinker import types
from tinker.lib.internal_client_holder import BytesSemaphore

from twinkle.core.errors import ConfigError
from twinkle.core.settings import environment_of, load_settings
from twinkle.server.receiving import body
from twinkle.wire.compression import decompress

if TYPE_CHECKING:
    from conftest import Api, ServeApi

FLAGS = {
    "parallel_fwdbwd_chunks": False,
    "proto_compress_fwdbwd": True,
    "fwdbwd_max_chunk_len": 400,
    "fwdbwd_max_chunk_bytes_count": 100_000,
    "fwdbwd_dispatch_bytes_semaphore_size": 1000,
    "sample_dispatch_bytes_semaphore_size": 1000,
    "inflight_response_bytes_semaphore_size": 1,
    "sample_max_concurrent_requests": 3,
    "sample_no_retries": True,
    "sample_enable_stuck_detection": False,
    "use_pyqwest_transport": False,
    "billing_exception_max_pause_duration_sec": 1,
}
DYNAMIC_FLAGS = {"refresh_interval_sec": 10, "sample_cancel_enabled": False, "sample_cancel_max_batch_size": 2}
NUM_DATUMS = 1500
LENGTH = 8


@pytest.fixture(scope="module")
def flagged(serve_api: ServeApi, make_database_url: Callable[[str], str]) -> Iterator[Api]:
    """Every flag at something else than the SDK's default, and results large enough to be announced."""
    flags = FLAGS | DYNAMIC_FLAGS
    with serve_api(make_database_url("sqlite"), client_flags=flags, inline_payload_bytes=1024) as api:
        api.worker.start()
        yield api
        api.worker.stop()


@pytest.fixture
def service(flagged: Api) -> Iterator[tinker.ServiceClient]:
    with flagged.sdk(flagged.new_key()) as client:
        yield client


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the bodies that were opened from zstd frames."""
    sizes: list[int] = []

    def noted(raw: bytes, limit_bytes: int) -> bytes:
        data = decompress(raw, limit_bytes)
        sizes.append(len(data))
        return data

    monkeypatch.setattr(body, "decompress", noted)
    return sizes


class Reservations(BytesSemaphore):
    """The SDK's own budget for results on their way; it notes what is reserved, and how often at a time."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__(max_bytes)
        self.sizes: list[int] = []
        self.num_held = self.most_held = 0

    @asynccontextmanager
    async def acquire(self, num_bytes: int) -> AsyncIterator[None]:
        async with super().acquire(num_bytes):
            self.sizes.append(num_bytes)
            self.num_held += 1
            self.most_held = max(self.most_held, self.num_held)
            yield
            self.num_held -= 1


def _datum() -> types.Datum:
    tokens = list(range(1, LENGTH + 1))
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens),
        loss_fn_inputs={"target_tokens": tokens, "weights": [1.0] * LENGTH},
    )


def test_they_reach_the_sdk(service: tinker.ServiceClient) -> None:
    service.get_server_capabilities()
    told, told_again = service.holder._client_config, service.holder._client_dynamic_config

    assert {name: getattr(told, name) for name in FLAGS} == FLAGS
    assert {name: getattr(told_again, name) for name in DYNAMIC_FLAGS} == DYNAMIC_FLAGS
    defaults = types.ClientConfigResponse()
    assert [name for name, value in FLAGS.items() if getattr(defaults, name) == value] == []


def test_the_sdk_compresses_its_passes_and_cuts_them_as_told(
    flagged: Api, service: tinker.ServiceClient, opened: list[int]
) -> None:
    training = service.create_lora_training_client(base_model="tiny/one", rank=4)

    passed = training.forward_backward([_datum()] * NUM_DATUMS, "cross_entropy").result()
    training.optim_step(types.AdamParams()).result()

    assert [len(output["logprobs"].tolist()) for output in passed.loss_fn_outputs] == [LENGTH] * NUM_DATUMS
    claims = flagged.worker.executed_of(training.model_id)[1:-1]
    assert [claim.num_tokens for claim in claims] == [LENGTH * 400] * 3 + [LENGTH * 300]
    assert sorted(opened) == sorted(len(flagged.worker.payload(claim)) for claim in claims)


def test_the_sdk_makes_room_for_a_large_result_before_it_asks_for_it(
    flagged: Api, service: tinker.ServiceClient
) -> None:
    training = service.create_lora_training_client(base_model="tiny/one", rank=4)
    told = service.holder._client_config.inflight_response_bytes_semaphore_size
    reservations = service.holder._inflight_response_bytes_semaphore = Reservations(told)

    passes = [training.forward([_datum()] * 300, "cross_entropy") for _ in range(5)]
    outputs = [len(one.result().loss_fn_outputs) for one in passes]

    assert outputs == [300] * 5
    assert len(reservations.sizes) == 5
    assert min(reservations.sizes) > 300 * LENGTH * 4
    assert reservations.most_held == 1


def test_samples_come_back_within_the_limits_told(service: tinker.ServiceClient) -> None:
    sampling = service.create_sampling_client(base_model="tiny/one")
    prompt, params = types.ModelInput.from_ints([1, 2, 3]), types.SamplingParams(max_tokens=2)

    drawn = [sampling.sample(prompt, 1, params) for _ in range(20)]

    assert [one.result().sequences[0].tokens for one in drawn] == [[0, 1]] * 20


def test_a_flag_that_is_none_or_makes_no_sense_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for flags, name in (('{"proto_compres_fwdbwd": true}', "PROTO_COMPRES"), ('{"fwdbwd_max_chunk_len": 0}', "LEN")):
        monkeypatch.setenv("TWINKLE_CLIENT_FLAGS", flags)
        with pytest.raises(ConfigError, match=f"TWINKLE_CLIENT_FLAGS.*{name}"):
            load_settings()


def test_they_reach_a_child_process_as_they_were_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWINKLE_CLIENT_FLAGS", '{"proto_compress_fwdbwd": true, "sample_cancel_enabled": false}')
    given = load_settings()

    monkeypatch.setenv("TWINKLE_CLIENT_FLAGS", environment_of(given)["TWINKLE_CLIENT_FLAGS"])

    assert load_settings().client_flags == given.client_flags
    assert given.client_flags.sample_cancel_enabled is False
