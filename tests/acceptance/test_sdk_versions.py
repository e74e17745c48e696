"""Every version of the SDK that speaks this protocol, unmodified, against one service."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import tinker

from harness.sdk_command_line import run_tinker
from harness.sdk_surface import differences_of
from harness.sdk_versions import run_sdk_script, sdk_python
from harness.served import Served
from twinkle.client import Client

# The one that PyPI's twinkle-kit asks for; the oldest that sends protobuf by itself, two between, and the one that all
# other tests use.
IN_JSON = "0.16.1"
WITH_ARCHIVES = (IN_JSON, "0.25.0", "0.30.4")
VERSIONS = (*WITH_ARCHIVES, "0.36.0", tinker.__version__)
SOURCE = Path(__file__).resolve().parents[2] / "src"
ANY_KEY_SCRIPT = """
import json, sys
from tinker import ServiceClient, types
from twinkle.server.common import input_feature_to_datum
import tinker

service = ServiceClient(base_url=sys.argv[1], **json.loads(sys.argv[2]))
training = service.create_lora_training_client(base_model="ms://tiny", rank=4)
datum = input_feature_to_datum({"input_ids": [5, 6, 7], "labels": [6, 7, -100]})
training.forward_backward([datum], "cross_entropy").result()
training.optim_step(types.AdamParams(learning_rate=1e-2)).result()
path = training.save_state("one").result().path
training.load_state(path.replace("tinker://", "twinkle://")).result()
drawn_from = training.save_weights_for_sampler("drawn").result().path.replace("tinker://", "twinkle://")
sampler = service.create_sampling_client(model_path=drawn_from, base_model="tiny")
assert sampler.sample(types.ModelInput.from_ints([5]), 1, types.SamplingParams(max_tokens=2)).result().sequences
print(json.dumps([tinker.__version__, path.partition("/weights/")[2]]))
"""
FILES = {
    "null": ["state.json"],
    "transformers": ["adapter_config.json", "adapter_model.safetensors"],
}
"""What each engine writes for whoever uses an adapter."""

pytestmark = [pytest.mark.soak, pytest.mark.timeout(300)]


@pytest.fixture(scope="module", params=["null", "transformers"])
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def served_by(engine: str, tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Served]:
    home = tmp_path_factory.mktemp("versions") / "home"
    flags = ("--engine", engine)
    # So small that results of a pass are announced before they are sent.
    settings = {"TWINKLE_INLINE_PAYLOAD_BYTES": "4096"}
    with Served(home, model=str(tiny_model), model_name="tiny", flags=flags, **settings) as it:
        yield it


@pytest.fixture(scope="module")
def granted(served_by: Served) -> tuple[str, str]:
    """A checkpoint of somebody who does not publish it, and a token for it."""
    with Client(served_by.url, served_by.create_key("owner")) as owner:
        path = owner.create_run("tiny", rank=4).save_state("lent").result(timeout=60).path
        return path, owner.create_access_token(path=path).token


@pytest.mark.parametrize("version", VERSIONS)
def test_an_sdk_trains_saves_loads_and_samples(
    served_by: Served, engine: str, granted: tuple[str, str], tmp_path: Path, version: str
) -> None:
    key = served_by.create_key(f"sdk-{version.replace('.', '-')}")

    seen = run_sdk_script(version, "tiny", *granted, base_url=served_by.url, api_key=key, cwd=tmp_path)

    announced = "SELECT COUNT(*) FROM operation JOIN tenant ON tenant.id = tenant WHERE name = ? AND result_blob != ''"
    assert served_by.query(announced, f"sdk-{version.replace('.', '-')}")[0][0] >= 2
    assert seen.pop("loss") >= 0
    assert seen.pop("bad_checkpoint")
    assert seen == {
        "version": version,
        "serves_model": True,
        "outputs": [1100, 1100],
        "logprobs": 3,
        "samples": [[4, 4]] * 3,
        "prompt_logprobs": 4,
        "checkpoints": ["weights/half-way"],
        "run_model": "tiny",
        "archive": [*FILES[engine], "checkpoint_complete"] if version in WITH_ARCHIVES else None,
        "granted": None if version == IN_JSON else 1,
        "not_granted": "NotFoundError",
        "after_refusal": 1,
    }


@pytest.mark.parametrize("version", VERSIONS)
def test_an_sdk_calls_nothing_that_is_not_served(version: str) -> None:
    told = differences_of(version).splitlines()

    assert told[0].startswith(f"tinker {version}: ")
    routes = {line for line in told if line.partition(" ")[0] in {"GET", "POST", "PUT", "DELETE", "ANY"}}
    assert {line for line in routes if not line.endswith("?access_scope")} == set()


@pytest.mark.parametrize("version", WITH_ARCHIVES)
def test_an_old_command_line_downloads_what_was_saved(
    served_by: Served, engine: str, tmp_path: Path, version: str
) -> None:
    key = served_by.create_key(f"cli-{version.replace('.', '-')}")
    with Client(served_by.url, key) as client:
        path = client.create_run("tiny", rank=4).save_state("out").result(timeout=60).path

    arguments = ("checkpoint", "download", path, "--force", "--output", str(tmp_path / "got"))
    run_tinker(*arguments, base_url=served_by.url, api_key=key, home=tmp_path, python=sdk_python(version))

    (folder,) = (tmp_path / "got").iterdir()
    assert folder.name == path.removeprefix("tinker://").replace("/", "_")
    assert sorted(file.name for file in folder.iterdir()) == sorted([*FILES[engine], "checkpoint_complete"])
    assert all((folder / name).stat().st_size > 0 for name in FILES[engine])


@pytest.fixture(scope="module")
def takes_any_key(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Served]:
    home = tmp_path_factory.mktemp("any-key") / "home"
    with Served(home, model=str(tiny_model), model_name="tiny", flags=("--engine", "null", "--any-key")) as it:
        yield it


@pytest.mark.parametrize("given", ["argument", "environment"])
@pytest.mark.parametrize("version", VERSIONS)
def test_a_development_server_takes_the_documents_keys_of_every_sdk(
    takes_any_key: Served, version: str, given: str
) -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TWINKLE_", "TINKER_"))}
    key = "your-api-key" if given == "argument" else "EMPTY_TOKEN"
    environment = kept | {"PYTHONPATH": str(SOURCE)} | ({"TINKER_API_KEY": key} if given == "environment" else {})
    options = json.dumps({"api_key": key} if given == "argument" else {})

    done = subprocess.run(
        [sdk_python(version), "-c", ANY_KEY_SCRIPT, takes_any_key.url, options],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads(done.stdout.splitlines()[-1]) == [version, "one"]
