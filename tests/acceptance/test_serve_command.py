"""``twinkle serve`` as an operator meets it: starts, tells, mends itself, ends, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
import tinker

from harness.hub_world import make_hub_world
from harness.models import make_text_model
from harness.polling import busyness, wait_for
from harness.served import PARTS, TWINKLE, Served
from twinkle.cli.embedded.broker import answers

BACK_WITHIN_S = 30.0
GONE_WITHIN_S = 15.0


class Stack:
    """A running service with its console and its processes in view."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self.home = served.home
        found = re.search(r"API key +(tml-\S+)", self.console())
        assert found is not None
        self.key = found[1]

    @property
    def supervisor(self) -> psutil.Process:
        return psutil.Process(int((self.home / "serve.lock").read_text()))

    def console(self) -> str:
        return (self.home.parent / f"{self.home.name}-serve.log").read_text()

    def processes(self) -> list[psutil.Process]:
        return [self.supervisor, *self.supervisor.children(recursive=True)]

    def is_healthy(self) -> bool:
        try:
            return httpx.get(f"{self.served.url}/api/v1/healthz", timeout=2).is_success
        except httpx.TransportError:
            return False


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """One service for all tests that leave it as they found it: it takes seconds to start."""
    flags = ("--engine", "null", "--flower", "--flower-port", "0")
    with Served(tmp_path_factory.mktemp("serve") / "home", model="null", flags=flags, makes_journal=True) as served:
        stack = Stack(served)
        yield stack
        everybody = stack.processes()
        served.stop()
        assert are_gone(everybody), "the end after SIGTERM"
        assert "stopped after" in stack.console()


def are_gone(processes: list[psutil.Process]) -> bool:
    return not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes)


def test_it_tells_where_everything_is_and_keeps_its_secrets_off_every_command_line(served: Stack) -> None:
    wait_for(lambda: "ready in" in served.console(), deadline_s=BACK_WITHIN_S * busyness(), what="the word ready")
    console = served.console()
    answer = httpx.get(f"{served.served.url}/api/v1/get_server_capabilities", headers={"X-API-Key": served.key})
    assert answer.is_success, answer.text
    assert f"password in {served.home / 'flower-password'}" in console
    secrets = [
        served.key,
        (served.home / "flower-password").read_text().strip(),
        re.split(r"[:@]", (served.home / "broker-url").read_text())[2],
    ]
    spoken = [" ".join(process.cmdline()) for process in served.processes()]
    logged = [path.read_text() for path in (served.home / "logs").glob("*.log")]
    assert len(spoken) >= 6
    for secret in secrets:
        assert not any(secret in text for text in spoken + logged)


def test_flower_shows_nothing_of_the_work_without_the_password(served: Stack) -> None:
    found = re.search(r"Flower +(http://\S+)", served.console())
    assert found is not None
    url, password = found[1], (served.home / "flower-password").read_text().strip()

    def status(path: str, auth: tuple[str, str] | None = None) -> int:
        try:
            return httpx.get(url + path, auth=auth).status_code
        except httpx.TransportError:
            return 0

    wait_for(lambda: status("/healthcheck") == 200, deadline_s=BACK_WITHIN_S * busyness(), what="Flower")
    for path in ("/", "/tasks", "/workers", "/broker", "/api/tasks", "/api/workers", "/tasks/datatable?draw=1"):
        assert status(path) == 401, path
        assert status(path, ("twinkle", "wrong")) == 401, path
    assert status("/tasks", ("twinkle", password)) == 200
    workers = wait_for(
        lambda: httpx.get(f"{url}/api/workers?refresh=1", auth=("twinkle", password)).json(),
        deadline_s=BACK_WITHIN_S * busyness(),
        what="workers in Flower",
    )
    assert any(name.startswith("default@") for name in workers)
    # What Flower 2.2 leaves open, as documented: no tenant, adapter or key may show up there.
    assert status("/metrics") == 200
    # Read-only: nobody sends tasks or stops workers from here.
    shutdown = httpx.post(f"{url}/api/worker/shutdown/{next(iter(workers))}", auth=("twinkle", password))
    assert shutdown.status_code in (403, 405)


def test_killed_parts_come_back_by_themselves_and_it_is_said(served: Stack) -> None:
    broker, api = served.served.part("the broker"), served.served.part("the API")
    api.send_signal(signal.SIGKILL)
    broker.send_signal(signal.SIGKILL)
    wait_for(lambda: are_gone([api, broker]), deadline_s=GONE_WITHIN_S * busyness(), what="their end")
    wait_for(served.is_healthy, deadline_s=BACK_WITHIN_S * busyness(), what="the API's return")
    url = (served.home / "broker-url").read_text().strip()
    wait_for(lambda: answers(url), deadline_s=BACK_WITHIN_S * busyness(), what="the broker's return")
    assert "api ended with SIGKILL" in served.console()
    assert "broker ended with SIGKILL" in served.console()


def test_a_second_serve_on_the_same_home_is_refused_with_the_pid_of_the_first(served: Stack) -> None:
    command = [*TWINKLE, "serve", "--model", "null", "--home", str(served.home), "--port", "0"]
    second = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert second.returncode == 2
    assert f"(pid {served.supervisor.pid})" in second.stderr
    assert served.is_healthy()


def test_a_killed_supervisor_leaves_no_process_behind_and_the_home_goes_on(served: Stack) -> None:
    everybody = served.processes()
    assert len(everybody) >= 6
    os.kill(served.supervisor.pid, signal.SIGKILL)
    wait_for(lambda: are_gone(everybody), deadline_s=GONE_WITHIN_S * busyness(), what="the end of all after SIGKILL")

    served.served.stop()
    served.served.start()
    assert "API key" not in served.console()
    answer = httpx.get(f"{served.served.url}/api/v1/get_server_capabilities", headers={"X-API-Key": served.key})
    assert answer.is_success


def test_a_model_that_only_its_worker_can_refuse_ends_the_service_and_nothing_is_started_again(tmp_path: Path) -> None:
    model = make_text_model(tmp_path / "model")
    (model / "model.safetensors").write_bytes(b"nothing")
    command = [*TWINKLE, "serve", "--model", str(model), "--home", str(tmp_path / "home"), "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)

    assert done.returncode == 2
    assert f"TWINKLE_MODEL: {model} cannot be loaded" in done.stderr
    assert "restarted in" not in done.stdout
    assert "it is not started again" in done.stdout


def test_a_mesh_whose_worker_refuses_later_falls_out_and_the_rest_goes_on(tmp_path: Path) -> None:
    model = make_text_model(tmp_path / "model")
    with Served(tmp_path / "home", model=str(model)) as service:
        stack = Stack(service)
        wait_for(lambda: "ready in" in stack.console(), deadline_s=BACK_WITHIN_S * busyness(), what="the word ready")
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps({**config, "use_bidirectional_attention": True}))
        stack.served.part("the worker").kill()

        wait_for(
            lambda: "start serve anew" in stack.console(), deadline_s=BACK_WITHIN_S * busyness(), what="the refusal"
        )
        assert "(use_bidirectional_attention)" in stack.console()
        assert "default is a mesh without a worker now" in stack.console()
        assert stack.is_healthy()
        assert stack.served.processes(PARTS["the worker"]) == []


def test_a_port_in_use_is_a_clear_error(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        command = [*TWINKLE, "serve", "--model", "null", "--home", str(tmp_path / "home"), "--port", port]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert f"cannot listen on 127.0.0.1:{port} (Address already in use); choose another --port" in done.stderr


# seeds/test_twinkle_scripts.py and seeds/test_twinkle_cookbook.py train against services of such models.
@pytest.mark.soak
def test_a_model_is_served_by_its_id_from_a_hubs_cache_while_no_hub_answers(tmp_path: Path) -> None:
    world = make_hub_world(tmp_path / "hubs", models=("Qwen/Qwen3-4B",))
    with Served(tmp_path / "home", model="ms://Qwen/Qwen3-4B", **world.environment) as service:
        training = service.client("tenant").create_lora_training_client(base_model="Qwen/Qwen3-4B", rank=2)
        datum = tinker.Datum(
            model_input=tinker.ModelInput.from_ints([7, 8, 9]), loss_fn_inputs={"target_tokens": [8, 9, 10]}
        )
        losses = []
        for _ in range(3):
            passed = training.forward_backward([datum], "cross_entropy")
            training.optim_step(tinker.AdamParams(learning_rate=1e-2)).result()
            losses.append(passed.result().metrics["loss:sum"])
    assert losses[2] < losses[1] < losses[0]
