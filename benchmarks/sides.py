"""The clients under measurement: each opens adapters whose operations are submitted and awaited in the same words."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import tinker

from twinkle.client import Client, Datum
from workload import BASE_MODEL, LEARNING_RATE, NUM_DATUMS, RANK, TOKENS_PER_DATUM, VOCAB_SIZE, adam_params, make_batch


class Future(Protocol):
    """An operation's outcome, to be waited for."""

    def result(self, timeout: float | None = None) -> object: ...


class Adapter(Protocol):
    """A training run in a client's hands."""

    def forward_backward(self, data: Any, loss_fn: str) -> Future: ...

    def optim_step(self, settings: Any) -> Future: ...


@dataclass(frozen=True, kw_only=True)
class Side:
    """A client's adapters, and what it is to send."""

    adapters: Sequence[Adapter]
    batch: list[Any]
    optimizer: Any


def sdk_side(url: str, api_key: str, num_adapters: int) -> Side:
    """The official SDK."""
    logging.getLogger("tinker").setLevel(logging.ERROR)
    os.environ["TINKER_TELEMETRY"] = "0"
    service = tinker.ServiceClient(base_url=url, api_key=api_key)
    adapters = [
        service.create_lora_training_client(base_model=BASE_MODEL, rank=RANK, seed=index).result()
        for index in range(num_adapters)
    ]
    return Side(adapters=adapters, batch=_sdk_batch(), optimizer=adam_params())


def native_side(url: str, api_key: str, num_adapters: int) -> Side:
    """The client of this project, with the same numbers in its own types."""
    client = Client(url, api_key)
    adapters = [client.create_run(BASE_MODEL, rank=RANK, seed=index) for index in range(num_adapters)]
    batch = [
        Datum(
            np.array(datum.model_input.to_ints()),
            {
                "target_tokens": np.array(datum.loss_fn_inputs["target_tokens"].data, np.int64),
                "weights": np.ones(TOKENS_PER_DATUM, np.float32),
            },
        )
        for datum in _sdk_batch()
    ]
    return Side(adapters=adapters, batch=batch, optimizer=LEARNING_RATE)


def _sdk_batch() -> list[tinker.Datum]:
    return make_batch(num_datums=NUM_DATUMS, tokens_per_datum=TOKENS_PER_DATUM, vocab_size=VOCAB_SIZE, seed=0)
