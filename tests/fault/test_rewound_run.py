"""A real run forked and rewound, with SIGKILLs to the device's owner in between: the same bits as straight through."""

from __future__ import annotations

import json
import subprocess

import httpx
import pytest
import tinker

from harness.served import TWINKLE, Served
from harness.struck import Struck
from twinkle.cli.exit_codes import EXIT_ERROR

NUM_STEPS = 8
# Not where a recovery point lies, which are five operations apart: steps are done again.
AT = 4
STRAY_STEPS = 2


@pytest.fixture
def served(struck_model: Struck) -> Served:
    return struck_model.served


def _datum(step: int) -> tinker.Datum:
    tokens = [(7 * step + 3 * position) % 50 + 10 for position in range(24)]
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)},
    )


def _train(client: tinker.TrainingClient, *steps: int) -> None:
    pending = []
    for step in steps:
        client.forward_backward([_datum(step)], "cross_entropy")
        pending.append(client.optim_step(tinker.AdamParams(learning_rate=1e-2)))
    for stepped in pending:
        stepped.result()


def _files(served: Served, client: tinker.TrainingClient, name: str) -> dict[str, str]:
    """Digests of weights, moments and step count."""
    path = client.save_state(name).result().path
    ((files,),) = served.query("SELECT files FROM checkpoint WHERE path = ?", path)
    return {file: entry["sha256"] for file, entry in json.loads(files).items()}


def _straight(served: Served) -> tuple[tinker.ServiceClient, tinker.TrainingClient, dict[str, str]]:
    service = served.client("calm")
    client = service.create_lora_training_client(base_model="tiny", rank=8, seed=7).result()
    _train(client, *range(NUM_STEPS))
    return service, client, _files(served, client, "straight")


def _run(served: Served, *arguments: str) -> str:
    command = [*TWINKLE, "runs", *arguments, "--home", str(served.home)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.soak
def test_a_fork_with_the_same_steps_has_the_same_bits_also_when_the_worker_is_killed(served: Served) -> None:
    service, client, expected = _straight(served)
    session_id = client.model_id.partition(":")[0]
    key = served.create_key("calm")
    ticket = httpx.post(
        f"{served.url}/api/native/v1/runs/{client.model_id}/fork",
        headers={"X-API-Key": key},
        json={"step": AT, "session_id": session_id, "model_seq_id": 5},
    ).json()
    served.kill_engine()
    fork = tinker.TrainingClient(service.holder, 5, ticket["run_id"], info=client.get_info())

    _train(fork, *range(AT, NUM_STEPS - 2))
    served.kill_engine()
    _train(fork, *range(NUM_STEPS - 2, NUM_STEPS))

    assert _files(served, fork, "fork") == expected


def test_a_rewound_run_has_the_bits_of_one_that_never_strayed_also_when_the_worker_is_killed(served: Served) -> None:
    _, _, expected = _straight(served)
    client = served.client("struck").create_lora_training_client(base_model="tiny", rank=8, seed=7).result()
    _train(client, *range(AT), *range(90, 90 + STRAY_STEPS))
    served.kill_engine()

    said = _run(served, "rewind", client.model_id, "--at", str(AT))
    _train(client, AT)
    served.kill_engine()
    _train(client, *range(AT + 1, NUM_STEPS))

    assert "done" in said
    assert _files(served, client, "rewound") == expected
    shown = _run(served, "show", client.model_id)
    assert f"went back to operation {2 * AT}" in shown
    assert f"{NUM_STEPS} steps" in shown


def test_the_command_line_lists_forks_and_says_what_cannot_be_had(served: Served) -> None:
    client = served.client("brief").create_lora_training_client(base_model="tiny", rank=8, seed=7).result()
    _train(client, 0)

    fork = _run(served, "fork", client.model_id, "--at", "1").split()[-1]
    listed = json.loads(_run(served, "list", "--json"))
    refused = subprocess.run(
        [*TWINKLE, "runs", "rewind", client.model_id, "--at", "9", "--home", str(served.home)],
        capture_output=True,
        text=True,
        check=False,
    )

    assert [(row["run"], row["tenant"]) for row in listed][:2] == [(fork, "brief"), (client.model_id, "brief")]
    assert (refused.returncode, "has made 1 steps, not 9" in refused.stderr) == (EXIT_ERROR, True)
