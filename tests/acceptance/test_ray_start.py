"""Three `ray start` of the documents, then ``launch_server`` with a file of theirs, and a training by their client."""

from __future__ import annotations

import os
import re
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from harness.polling import wait_until
from harness.ray_start import RayStart
from harness.servers import free_port
from twinkle.core.process.parent_death import dies_with

pytest.importorskip("ray", reason="the extra twinkle-queue[ray] is not installed")
# Some minutes for a cluster and a service; what is mapped on what is held in tests/unit/server/launch.
pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]

CONFIG = """
proxy_location: EveryNode
http_options: {host: localhost, port: 8000}
applications:
  - name: server
    route_prefix: /api/v1
    import_path: server
    args:
      server_config: {per_token_model_limit: 3}
      supported_models: [Qwen/Qwen3.5-4B]
  - name: models-Qwen3.5-4B
    route_prefix: /api/v1/model/Qwen/Qwen3.5-4B
    import_path: model
    args:
      use_megatron: false
      model_id: ms://Qwen/Qwen3.5-4B
      max_length: 10240
      nproc_per_node: 2
      device_group: {name: model, ranks: 2, device_type: cuda}
      device_mesh: {device_type: cuda, dp_size: 2}
      queue_config: {rps_limit: 100, tps_limit: 100000}
      adapter_config: {adapter_timeout: 30, adapter_max_lifetime: 36000}
    deployments:
      - name: ModelManagement
        autoscaling_config: {min_replicas: 1, max_replicas: 1}
        ray_actor_options: {num_cpus: 0.1}
  - name: sampler-Qwen3.5-4B
    route_prefix: /api/v1/sampler/Qwen/Qwen3.5-4B
    import_path: sampler
    args:
      model_id: ms://Qwen/Qwen3.5-4B
      nproc_per_node: 1
      sampler_type: torch
      device_group: {name: sampler, ranks: [2], device_type: cuda}
  - name: processor
    route_prefix: /api/v1/processor
    import_path: processor
    args: {ncpu_proc_per_node: 1, device_group: {name: model, ranks: 2, device_type: CPU}}
"""
CLIENT = """
import sys
from twinkle_client import init_twinkle_client
from twinkle_client.model import MultiLoraTransformersModel
from twinkle_client.sampler import vLLMSampler

MODEL = "ms://Qwen/Qwen3.5-4B"
init_twinkle_client(sys.argv[1], "any-key-at-all")
model = MultiLoraTransformersModel(MODEL)
model.add_adapter_to_model("default", {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"})
model.set_loss("CrossEntropyLoss")
model.set_optimizer("AdamW", lr=1e-2)
rows = [{"input_ids": [5, 6, 7, 8], "labels": [6, 7, 8, -100]}, {"input_ids": [9, 10, 11], "labels": [10, 11, -100]}]
losses = []
for _ in range(3):
    losses.append(model.forward_backward(inputs=rows)["loss"])
    model.clip_grad_and_step()
assert losses[2] < losses[1] < losses[0], losses
sampler = vLLMSampler(MODEL)
prompt = [{"input_ids": [5, 6, 7], "labels": [-100] * 3}]
drawn = sampler.sample(prompt, {"max_tokens": 4, "temperature": 0}, adapter_uri=model.save("end", is_sampler=True))
assert len(drawn[0].sequences[0].tokens) > 0, drawn
print("trained")
"""
FOLLOWING = (
    CONFIG.replace("nproc_per_node: 2", "nproc_per_node: 1")
    .replace("per_token_model_limit: 3", "per_token_model_limit: 4")
    .replace("ranks: 2, device_type: cuda", "ranks: 1, device_type: cuda")
    .replace("dp_size: 2", "dp_size: 1")
    .replace(
        "{min_replicas: 1, max_replicas: 1}",
        "{min_replicas: 1, max_replicas: 3, target_ongoing_requests: 1, upscale_delay_s: 0, downscale_delay_s: 10}",
    )
)
BUSY = """
import sys, threading
from tinker import ServiceClient, types

service = ServiceClient(base_url=sys.argv[1], api_key="tml-any-key-at-all")
runs = [service.create_lora_training_client(base_model="Qwen/Qwen3.5-4B", rank=4).result() for _ in range(4)]
tokens = [5, 6, 7, 8]
loss_inputs = {"target_tokens": [6, 7, 8, 9], "weights": [1.0] * 4}
datum = types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=loss_inputs)
enough = threading.Event()
losses = {run.model_id: [] for run in runs}

def train(run):
    while not enough.is_set():
        passed = run.forward_backward([datum], "cross_entropy")
        run.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        losses[run.model_id].append(passed.result().metrics["loss:sum"])

threads = [threading.Thread(target=train, args=(run,)) for run in runs]
for thread in threads:
    thread.start()
sys.stdin.read()
enough.set()
for thread in threads:
    thread.join()
assert all(each[-1] < each[0] for each in losses.values()), losses
print("trained")
"""
SCRIPT = """
import twinkle
from twinkle import DeviceGroup

@twinkle.remote_class()
class Rank:
    @twinkle.remote_function(dispatch="all", lazy_collect=False)
    def node(self):
        import ray
        return ray.util.get_node_ip_address()

twinkle.initialize(mode="ray", groups=[DeviceGroup("two", 2, "cpu")])
print("ranks on", *sorted(Rank(remote_group="two").node()))
"""
LAUNCH = "from twinkle.server import launch_server; launch_server(config_path={path!r}, any_key=True)"
TOKEN_MODE = {"RAY_AUTH_MODE": "token"}


@pytest.mark.parametrize("has_token", [False, True], ids=["open", "token"])
def test_three_nodes_then_a_server_then_a_training(tmp_path: Path, tiny_model: Path, has_token: bool) -> None:
    config = tmp_path / "server_config.yaml"
    config.write_text(CONFIG)
    port = free_port()
    with RayStart() as cluster:
        if has_token:
            cluster.make_token()
        # Ray's own: its head asks for a token where one lies, and nodes that are to join must be told.
        mode = TOKEN_MODE if has_token else {}
        cluster.start_node("--num-gpus=0", "--num-cpus=1")
        cluster.start_node("--num-gpus=0", "--num-cpus=1", environment=mode)
        cluster.start_node("--num-gpus=0", "--num-cpus=1", environment=mode)
        nodes = cluster.processes()
        # A script joins it where it is named.
        named = {**cluster.environment, "RAY_ADDRESS": cluster.address}
        script = tmp_path / "script.py"
        script.write_text(SCRIPT)
        ran = subprocess.run(
            [sys.executable, str(script)], env=named, capture_output=True, text=True, timeout=200, check=False
        )
        assert re.search(r"ranks on 127\.0\.0\.\d 127\.0\.0\.\d", ran.stdout), ran.stdout + ran.stderr
        environment = environment_of(cluster, tmp_path, port, tiny_model)

        command = [sys.executable, "-c", LAUNCH.format(path=str(config))]
        with serving(tmp_path, command, environment, port) as said:
            words = [sys.executable, "-c", CLIENT, f"http://127.0.0.1:{port}"]
            done = subprocess.run(
                words, env=elsewhere(environment), capture_output=True, text=True, timeout=300, check=False
            )
            assert done.returncode == 0, done.stderr + said()
            assert done.stdout == "trained\n"
        told = said()

    hosts = re.findall(r"rank\.started.*?host=(127\.0\.0\.\d)", told)
    assert len(hosts) == 2 and len(set(hosts)) == 2, told
    assert len(nodes) > 3
    _, left_over = psutil.wait_procs(nodes, timeout=20)
    assert left_over == []


def environment_of(cluster: RayStart, folder: Path, port: int, model: Path) -> dict[str, str]:
    """Of a service on the cluster, whose YAML names a model as it is published: here a tiny one of its class."""
    return {
        **cluster.environment,
        "TWINKLE_HOME": str(folder / "home"),
        "TWINKLE_PORT": str(port),
        "TWINKLE_MODEL_ID_ALIASES": f'{{"Qwen/Qwen3.5-4B": "{model}"}}',
        "TWINKLE_OFFLINE": "1",
    }


def test_meshes_on_a_cluster_follow_load_from_one_to_three_and_back(tmp_path: Path, tiny_model: Path) -> None:
    """Two nodes of one CPU each, and room for three ranks on them."""
    config = tmp_path / "server_config.yaml"
    config.write_text(FOLLOWING)
    port = free_port()
    journal = tmp_path / "home" / "journal.db"

    def names(column: str, table: str) -> set[str]:
        with sqlite3.connect(journal, timeout=10) as connection:
            return {name for (name,) in connection.execute(f"SELECT DISTINCT {column} FROM {table}")}

    with RayStart() as cluster:
        for _ in range(2):
            cluster.start_node("--num-gpus=0", "--num-cpus=1")
        environment = environment_of(cluster, tmp_path, port, tiny_model)
        command = [sys.executable, "-c", LAUNCH.format(path=str(config))]
        with serving(tmp_path, command, environment, port) as said:
            [first] = names("name", "mesh")
            client = subprocess.Popen(
                [sys.executable, "-c", BUSY, f"http://127.0.0.1:{port}"],
                env=elsewhere(environment),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                preexec_fn=dies_with(os.getpid()),
            )
            alive = {first, f"{first}-2", f"{first}-3"}
            try:
                wait_until(
                    lambda: names("mesh", "adapter") == alive or client.poll() is not None,
                    what="runs on three meshes",
                    deadline_s=300,
                )
                out, err = client.communicate(timeout=200)
            except BaseException:
                client.kill()
                print(said())
                raise
            assert (client.returncode, out) == (0, "trained\n"), err + said()
            wait_until(lambda: names("name", "mesh") == {first}, what="the least again", deadline_s=200)
            assert names("mesh", "adapter") == {first}


def elsewhere(environment: dict[str, str]) -> dict[str, str]:
    """Of a client, who knows nothing of the server's settings."""
    return {name: value for name, value in environment.items() if not name.startswith("TWINKLE_")}


@contextmanager
def serving(tmp_path: Path, command: list[str], environment: dict[str, str], port: int) -> Iterator[Callable[[], str]]:
    """A server while the block runs, which is given what it and its children said. None of them is left."""
    log = tmp_path / "server.log"
    with log.open("wb") as out:
        server = subprocess.Popen(command, env=environment, stdout=out, stderr=out, preexec_fn=dies_with(os.getpid()))

    def said() -> str:
        logs = sorted((tmp_path / "home" / "logs").glob("*.log"))
        return "\n".join(path.read_text(errors="replace") for path in [log, *logs])

    try:
        wait_until(lambda: "ready in" in log.read_text() or server.poll() is not None, what="a mesh", deadline_s=300)
        assert server.poll() is None, said()
        readyz = f"http://127.0.0.1:{port}/api/v1/readyz"
        # The API looks at its meshes once a second.
        wait_until(lambda: httpx.get(readyz, trust_env=False).status_code == 200, what="the API to know it")
        yield said
        processes = psutil.Process(server.pid).children(recursive=True)
    finally:
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0, said()
    _, left_over = psutil.wait_procs(processes, timeout=20)
    assert left_over == []
