"""A loop of reinforcement learning on a real model: what its nameless weights leave behind, and SIGKILL in between."""

from __future__ import annotations

from pathlib import Path

import pytest
import tinker

from harness.crashes import Crashes
from harness.served import Served
from harness.struck import MAX_OPEN, Struck
from twinkle.core.clock import SystemClock
from twinkle.storage.sampling.sampling_sessions import Patience
from twinkle.storage.stores import Stores

NUM_STEPS = 50
PROMPT = tinker.ModelInput.from_ints([11, 12, 13])
PARAMS = tinker.SamplingParams(max_tokens=8, temperature=1.0, seed=5)


class Loop:
    """Save, sample, train on what was sampled."""

    def __init__(self, served: Served, tenant: str) -> None:
        self.service = served.client(tenant)
        self.run = self.service.create_lora_training_client(base_model="tiny", rank=8, seed=7).result()

    def step(self) -> tuple[tinker.SamplingClient, list[int]]:
        sampler = self.run.save_weights_and_get_sampling_client().result()
        tokens = drawn(sampler)
        text = [11, 12, 13, *tokens]
        datum = tinker.Datum(
            model_input=tinker.ModelInput.from_ints(text[:-1]),
            loss_fn_inputs={"target_tokens": text[1:], "weights": [1.0] * (len(text) - 1)},
        )
        passed = self.run.forward_backward([datum], "cross_entropy")
        self.run.optim_step(tinker.AdamParams(learning_rate=3e-2)).result()
        passed.result()
        return sampler, tokens


def drawn(sampler: tinker.SamplingClient) -> list[int]:
    return list(sampler.sample(PROMPT, 1, PARAMS).result().sequences[0].tokens)


def checkpoint_files(served: Served) -> set[Path]:
    return {path for path in (served.home / "objects").glob("checkpoints/**/*") if path.is_file()}


@pytest.fixture
def crashes(struck_model: Struck) -> Crashes:
    return struck_model.crashes


@pytest.fixture
def served(struck_model: Struck) -> Served:
    return struck_model.served


def test_fifty_steps_leave_a_bounded_number_of_weights_that_count_as_stored_and_end_with_the_session(
    served: Served,
) -> None:
    before = checkpoint_files(served)
    loop = Loop(served, "looping")
    tenant = served.query("SELECT id FROM tenant WHERE name = 'looping'")[0][0]
    samplers = [loop.step()[0] for _ in range(NUM_STEPS)]

    stores = Stores.at(f"sqlite:///{served.home}/journal.db", SystemClock())
    ((size_bytes,),) = served.query("SELECT DISTINCT size_bytes FROM ephemeral_weights WHERE tenant = ?", tenant)
    meanwhile = stores.accounting.stored(tenant)
    files = checkpoint_files(served) - before
    checkpoints = served.query("SELECT path FROM checkpoint WHERE tenant = ?", tenant)
    with pytest.raises(tinker.RequestFailedError, match="under a name are kept"):
        drawn(samplers[0])
    loop.service.close("success").result()
    stores.sampling_sessions.end_unreachable(Patience(idle_s=1e9, silent_s=1e9))
    after = stores.accounting.stored(tenant)
    stores.close()

    assert (files, checkpoints) == (set(), [])
    assert [(one.num_ephemeral, one.ephemeral_bytes) for one in meanwhile] == [(MAX_OPEN, MAX_OPEN * size_bytes)]
    assert after == []


def test_a_kill_between_a_save_and_its_samples_changes_no_token(served: Served, crashes: Crashes) -> None:
    loop = Loop(served, "struck")
    steps = [loop.step() for _ in range(4)]
    present = loop.run.save_weights_and_get_sampling_client().result()
    crashes.arm("sampler.claimed")
    first = drawn(present)
    crashes.wait("sampler.claimed")
    past = [(drawn(sampler), tokens) for sampler, tokens in steps]
    served.kill_engine()
    again = drawn(present)

    assert all(now == then for now, then in past)
    assert len({tuple(tokens) for _, tokens in past} | {tuple(first)}) > 1
    assert again == first
