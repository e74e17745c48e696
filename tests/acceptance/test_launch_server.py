"""``server.py`` and ``server_config.yaml`` as the documents start them, on a machine without a GPU."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from harness.polling import wait_until
from harness.servers import free_port
from twinkle.hub.tiny import make_tiny_model

FOLDER = Path(__file__).parents[2] / "cookbook" / "client" / "server" / "transformer"
CLIENT = """
import sys
from tinker import ServiceClient, types
from twinkle.server.common import input_feature_to_datum

service = ServiceClient(base_url=sys.argv[1], api_key="your-api-key")
training = service.create_lora_training_client(base_model="ms://Qwen/Qwen3.5-4B", rank=4)
datum = input_feature_to_datum({"input_ids": [5, 6, 7], "labels": [6, 7, -100]})
before = training.forward_backward([datum], "cross_entropy").result().metrics["loss:sum"]
training.optim_step(types.AdamParams(learning_rate=1e-2)).result()
after = training.forward_backward([datum], "cross_entropy").result().metrics["loss:sum"]
assert after < before, (before, after)
print(training.save_state("one").result().path)
"""

MEGATRON_CLIENT = CLIENT.replace(
    'print(training.save_state("one").result().path)',
    """
path = training.save_weights_for_sampler("one").result().path
sampling = service.create_sampling_client(model_path=path)
drawn = sampling.sample(types.ModelInput.from_ints([5, 6, 7]), 1, types.SamplingParams(max_tokens=4, seed=1)).result()
assert len(drawn.sequences[0].tokens) > 0, drawn
print(path)
""",
)
MEGATRON = """
applications:
  - {name: server, route_prefix: /api/v1, import_path: server}
  - name: model
    route_prefix: /api/v1/model/Qwen/Qwen3.5-4B
    import_path: model
    args:
      use_megatron: true
      model_id: ms://Qwen/Qwen3.5-4B
      nproc_per_node: 2
      device_group: {name: model, ranks: 2, device_type: cpu}
      device_mesh: {device_type: cpu, tp_size: 2}
  - name: sampler
    route_prefix: /api/v1/sampler/Qwen/Qwen3.5-4B
    import_path: sampler
    args:
      model_id: ms://Qwen/Qwen3.5-4B
      sampler_type: torch
      device_group: {name: sampler, ranks: [2], device_type: cpu}
"""


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/api/v1/readyz", timeout=2).status_code == 200
    except httpx.TransportError:
        return False


def test_a_server_of_the_documents_form_trains_a_script_that_brings_any_key(tmp_path: Path, tiny_model: Path) -> None:
    said = serve_one_client(tmp_path, tiny_model, [str(FOLDER / "server.py")], CLIENT)

    assert "there is no GPU here, so it runs on the CPU" in said
    assert "needs no salt" in said


@pytest.mark.soak
def test_megatron_trains_what_a_mesh_of_its_own_samples(tmp_path: Path) -> None:
    """Sampling needs the weights that the other mesh has trained and stored."""
    folder = tmp_path / "some" / "model"
    model = make_tiny_model(folder, texts=["a tiny text"] * 4, hidden_size=128, layers=2, vocab_size=300)
    config = tmp_path / "server_config.yaml"
    config.write_text(MEGATRON)

    launch = f"from twinkle.server import launch_server; launch_server(config_path={str(config)!r})"

    said = serve_one_client(tmp_path, model, ["-c", launch], MEGATRON_CLIENT)

    assert len(re.findall(r"mesh \S+ serves Qwen/Qwen3.5-4B", said)) == 2


def serve_one_client(tmp_path: Path, tiny_model: Path, server_words: list[str], client: str) -> str:
    """Start a server, run a script against it, stop; what the server said."""
    port = free_port()
    url = f"http://localhost:{port}"
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TWINKLE_", "TINKER_"))}
    environment = kept | {
        "TWINKLE_HOME": str(tmp_path / "home"),
        "TWINKLE_PORT": str(port),
        "TWINKLE_ANY_KEY": "1",
        "TWINKLE_TOKEN_SALT": "of another server",
        "TWINKLE_MODEL_ID_ALIASES": f'{{"Qwen/Qwen3.5-4B": "{tiny_model}"}}',
        "TWINKLE_OFFLINE": "1",
    }
    log = tmp_path / "server.log"
    with log.open("wb") as out:
        server = subprocess.Popen([sys.executable, *server_words], env=environment, stdout=out, stderr=out)
    try:
        wait_until(
            lambda: (_is_ready(url) and "ready in" in log.read_text()) or server.poll() is not None,
            what="readiness of every mesh",
            deadline_s=240,
        )
        assert server.poll() is None, log.read_text()
        done = subprocess.run(
            [sys.executable, "-c", client, url], env=kept, capture_output=True, text=True, timeout=200, check=False
        )
        assert done.returncode == 0, done.stderr + log.read_text()
        assert done.stdout.startswith("tinker://")
    finally:
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
    return log.read_text()
