"""``server.py`` and ``server_config.yaml`` as the documents start them, on a machine without a GPU."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx

from harness.polling import wait_until
from harness.servers import free_port

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


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/api/v1/readyz", timeout=2).status_code == 200
    except httpx.TransportError:
        return False


def test_a_server_of_the_documents_form_trains_a_script_that_brings_any_key(tmp_path: Path, tiny_model: Path) -> None:
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
        server = subprocess.Popen([sys.executable, FOLDER / "server.py"], env=environment, stdout=out, stderr=out)
    try:
        wait_until(lambda: _is_ready(url) or server.poll() is not None, what="readiness", deadline_s=150)
        assert server.poll() is None, log.read_text()
        done = subprocess.run(
            [sys.executable, "-c", CLIENT, url], env=kept, capture_output=True, text=True, timeout=200, check=False
        )
        assert done.returncode == 0, done.stderr + log.read_text()
        assert done.stdout.startswith("tinker://")
    finally:
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
    said = log.read_text()
    assert "there is no GPU here, so it runs on the CPU" in said
    assert "needs no salt" in said
