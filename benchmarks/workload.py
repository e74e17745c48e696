"""What the clients of the queue benchmark send: small, always the same, so that only the queue is measured."""

from __future__ import annotations

import random

import tinker

BASE_MODEL = "null"
RANK = 8
NUM_DATUMS = 4
TOKENS_PER_DATUM = 64
VOCAB_SIZE = 32_000
LEARNING_RATE = 1e-4


def make_batch(*, num_datums: int, tokens_per_datum: int, vocab_size: int, seed: int) -> list[tinker.Datum]:
    """Returns datums of one length with random tokens, every target weighted 1."""
    rng = random.Random(seed)
    batch = []
    for _ in range(num_datums):
        tokens = [rng.randrange(vocab_size) for _ in range(tokens_per_datum + 1)]
        shape = [tokens_per_datum]
        batch.append(
            tinker.Datum(
                model_input=tinker.ModelInput.from_ints(tokens[:-1]),
                loss_fn_inputs={
                    "target_tokens": tinker.TensorData(data=tokens[1:], dtype="int64", shape=shape),
                    "weights": tinker.TensorData(data=[1.0] * tokens_per_datum, dtype="float32", shape=shape),
                },
            )
        )
    return batch


def adam_params() -> tinker.AdamParams:
    """Returns the optimizer's settings, the same for everybody."""
    return tinker.AdamParams(learning_rate=LEARNING_RATE, eps=1e-8)
