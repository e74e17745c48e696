"""The compose file, read as YAML: there is no daemon here, so what can be checked without one is checked."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from twinkle.cli.app import app
from twinkle.core.settings import Settings

DOCKER = Path(__file__).resolve().parents[3] / "docker"
OUR_SERVICES = ["api", "worker", "housekeeping", "jobs", "flower"]


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    loaded = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    assert isinstance(loaded, dict)
    return loaded


def test_every_part_is_there_and_says_how_it_is_doing(compose: dict[str, Any]) -> None:
    services = compose["services"]
    assert set(OUR_SERVICES) | {"redis", "postgres"} <= set(services)
    assert [name for name in services if "healthcheck" not in services[name]] == ["minio-bucket"]


def test_our_parts_run_real_commands_with_known_settings(compose: dict[str, Any]) -> None:
    commands = {command.callback.__name__.replace("_", "-") for command in app.registered_commands if command.callback}
    known = {f"TWINKLE_{name.upper()}" for name in Settings.model_fields}
    for name in OUR_SERVICES:
        service = compose["services"][name]
        assert service["command"][0] in commands
        ours = {variable for variable in service["environment"] if variable.startswith("TWINKLE_")}
        assert ours <= known
        assert {"TWINKLE_DATABASE_URL", "TWINKLE_REDIS_URL", "TWINKLE_OBJECT_STORE"} <= ours


def test_dependencies_and_volumes_exist(compose: dict[str, Any]) -> None:
    services, volumes = compose["services"], compose["volumes"]
    for service in services.values():
        assert set(service.get("depends_on", ())) <= set(services)
        named = {mount.split(":")[0] for mount in service.get("volumes", ()) if mount[0].isalpha()}
        assert named <= set(volumes)


def test_no_secret_has_a_default_and_no_port_leaves_loopback_by_itself() -> None:
    text = (DOCKER / "compose.yaml").read_text()
    assert re.findall(r"\$\{[A-Z_]*PASSWORD:[-=]", text) == []
    ports = [port for service in yaml.safe_load(text)["services"].values() for port in service.get("ports", [])]
    assert ports
    assert all(port.startswith(("127.0.0.1:", "${TWINKLE_BIND:-127.0.0.1}:")) for port in ports)


def test_every_variable_is_explained_in_the_example(compose: dict[str, Any]) -> None:
    example = (DOCKER / "env.example").read_text()
    used = set(re.findall(r"(?<!\$)\$\{([A-Z_]+)", (DOCKER / "compose.yaml").read_text()))
    used |= {name for name, value in compose["x-twinkle"]["environment"].items() if value is None}
    assert {name for name in used if not re.search(rf"^(# )?{name}=", example, re.MULTILINE)} == set()


def test_the_broker_never_evicts(compose: dict[str, Any]) -> None:
    assert "maxmemory-policy noeviction" in " ".join(compose["services"]["redis"]["command"])


def test_the_image_has_a_python_that_was_tested_and_a_torch_for_the_cpu_unless_cuda_is_asked_for(
    compose: dict[str, Any],
) -> None:
    defaults = dict(re.findall(r"^ARG (\w+)=(\S+)$", (DOCKER / "Dockerfile").read_text(), re.MULTILINE))
    tested = tomllib.loads((DOCKER.parent / "pyproject.toml").read_text())["project"]["classifiers"]
    with_gpu = yaml.safe_load((DOCKER / "compose.gpu.yaml").read_text())["services"]["worker"]

    assert f"Programming Language :: Python :: {defaults['PYTHON']}" in tested
    assert defaults["TORCH_INDEX_URL"].endswith("/cpu")
    arguments = compose["x-twinkle"]["build"]["args"]
    assert arguments["TORCH_INDEX_URL"] == f"${{TORCH_INDEX_URL:-{defaults['TORCH_INDEX_URL']}}}"
    assert "/cpu" not in with_gpu["build"]["args"]["TORCH_INDEX_URL"]
    assert with_gpu["image"] != compose["x-twinkle"]["image"]


def test_the_image_does_not_run_as_root() -> None:
    lines = (DOCKER / "Dockerfile").read_text().splitlines()
    final = lines[max(index for index, line in enumerate(lines) if line.startswith("FROM ")) :]
    assert "USER twinkle" in final
