"""Every version of the SDK that speaks this protocol, unmodified, against one service."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import tinker

from harness.sdk_versions import run_sdk_script
from harness.served import Served

# The oldest that sends protobuf by itself, two between, and the one that all other tests use.
VERSIONS = ("0.25.0", "0.30.4", "0.36.0", tinker.__version__)

pytestmark = [pytest.mark.soak, pytest.mark.timeout(300)]


@pytest.fixture(scope="module", params=["null", "transformers"])
def served_by(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_model: Path
) -> Iterator[Served]:
    home = tmp_path_factory.mktemp("versions") / "home"
    flags = ("--engine", request.param)
    # So small that results of a pass are announced before they are sent.
    settings = {"TWINKLE_INLINE_PAYLOAD_BYTES": "4096"}
    with Served(home, model=str(tiny_model), model_name="tiny", flags=flags, **settings) as it:
        yield it


@pytest.mark.parametrize("version", VERSIONS)
def test_an_sdk_trains_saves_loads_and_samples(served_by: Served, tmp_path: Path, version: str) -> None:
    key = served_by.create_key(f"sdk-{version.replace('.', '-')}")

    seen = run_sdk_script(version, base_url=served_by.url, api_key=key, model="tiny", cwd=tmp_path)

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
        "after_refusal": 1,
    }
