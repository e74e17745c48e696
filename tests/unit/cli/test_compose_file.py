"""The compose file, read as YAML: there is no daemon here, so what can be checked without one is checked."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from twinkle.cli.app import app
from twinkle.cli.embedded.stack import GIVES_MEMORY_BACK
from twinkle.core.settings import Settings

DOCKER = Path(__file__).resolve().parents[3] / "docker"
OUR_SERVICES = ["api", "worker", "housekeeping", "jobs", "processors", "flower"]
SECRETS = {
    "TWINKLE_DATABASE_URL": {"api", "worker", "housekeeping", "jobs", "processors"},
    "AWS_SECRET_ACCESS_KEY": {"api", "worker", "housekeeping", "jobs", "processors", "minio-bucket"},
    "TWINKLE_REDIS_URL": set(OUR_SERVICES),
    "TWINKLE_DOWNLOAD_URL_SECRET": {"api", "jobs"},
    "TWINKLE_ADMIN_KEY": {"api"},
    "TWINKLE_FLOWER_PASSWORD": {"flower"},
    "POSTGRES_PASSWORD": {"postgres"},
    "REDIS_PASSWORD": {"redis"},
    "MINIO_ROOT_PASSWORD": {"minio"},
}
PINNED = re.compile(r"\S+@\$\{[A-Z_]+_DIGEST:\?[^}]+\}")


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
        assert ours <= known and "TWINKLE_REDIS_URL" in ours


def test_each_container_has_the_secrets_that_it_needs_and_no_others(compose: dict[str, Any]) -> None:
    held = {
        secret: {name for name, service in compose["services"].items() if secret in service.get("environment", {})}
        for secret in SECRETS
    }

    assert held == SECRETS
    assert "state:/var/lib/twinkle" not in compose["services"]["flower"].get("volumes", [])


def test_no_container_can_change_its_image_take_rights_or_take_all_memory(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        assert service["read_only"] is True and service["cap_drop"] == ["ALL"], name
        assert "cap_add" not in service and service["security_opt"] == ["no-new-privileges:true"], name
        assert service["mem_limit"] and service["pids_limit"] > 0, name
        writable = [*service.get("tmpfs", []), *service.get("volumes", [])]
        assert any("/tmp" in place for place in writable) or name == "redis", name


def test_the_api_gives_memory_back_as_in_the_embedded_stack(compose: dict[str, Any]) -> None:
    environment = compose["services"]["api"]["environment"]

    assert {name: environment[name] for name in GIVES_MEMORY_BACK} == GIVES_MEMORY_BACK


def test_a_gpu_takes_no_guard_away_and_adds_no_secret() -> None:
    services = yaml.safe_load((DOCKER / "compose.gpu.yaml").read_text())["services"]

    assert set(services) == {"worker"} and set(services["worker"]) == {"image", "build", "environment", "deploy"}
    assert set(services["worker"]["environment"]) == {"TWINKLE_DEVICE"}
    assert set(services["worker"]["build"]["args"]) == {"TORCH_INDEX_URL"}


def test_no_image_is_named_by_a_tag_alone(compose: dict[str, Any]) -> None:
    foreign = [service["image"] for service in compose["services"].values() if service["image"] != "twinkle-queue"]
    dockerfile = (DOCKER / "Dockerfile").read_text()
    bases = re.findall(r"^FROM (\S+)", dockerfile, re.MULTILINE)

    assert len(foreign) == 4 and [image for image in foreign if PINNED.fullmatch(image) is None] == []
    # Without a digest the name of the base is none: nothing is built of a tag.
    assert set(bases) == {"python:${PYTHON}-slim@${BASE_DIGEST}"} and "\nARG BASE_DIGEST\n" in dockerfile
    assert compose["x-twinkle"]["build"]["args"]["BASE_DIGEST"].startswith("${BASE_DIGEST:?")
    written = set(re.findall(r"^pin ([A-Z_]+) ", (DOCKER / "pin.sh").read_text(), re.MULTILINE))
    asked = set(re.findall(r"\$\{([A-Z_]+_DIGEST):", (DOCKER / "compose.yaml").read_text()))
    assert written == asked


def test_the_image_installs_what_the_lock_says_with_hashes_and_torch_apart() -> None:
    project = tomllib.loads((DOCKER.parent / "pyproject.toml").read_text())
    locked = versions_of(DOCKER / "requirements.lock")
    extras = project["project"]["optional-dependencies"]
    needed = [Requirement(text) for text in (*project["project"]["dependencies"], *flat(extras, "worker", "export"))]
    of_linux = [need for need in needed if need.marker is None or need.marker.evaluate({"sys_platform": "linux"})]

    wrong = [
        str(need)
        for need in of_linux
        if need.name != "torch" and not need.specifier.contains(locked.get(canonicalize_name(need.name), "0"))
    ]

    assert wrong == [], "run `make lock`"
    assert not {"torch", "triton"} & set(locked) and not any(name.startswith("nvidia-") for name in locked)
    build = Requirement(project["build-system"]["requires"][0])
    assert build.specifier.contains(versions_of(DOCKER / "build.lock")[build.name]), "run `make lock`"
    steps = (DOCKER / "Dockerfile").read_text()
    installs = re.findall(r"pip install (.+)", steps)
    assert len(installs) == 4
    assert [step for step in installs if "--require-hashes" not in step and "--no-index" not in step] == [
        """--index-url "$TORCH_INDEX_URL" "$(grep '^torch==' constraints.txt)\""""
    ]


def flat(extras: dict[str, list[str]], *names: str) -> list[str]:
    """What extras need, those of theirs included."""
    found = []
    for name in names:
        for text in extras[name]:
            need = Requirement(text)
            found += flat(extras, *need.extras) if need.name == "twinkle-queue" else [text]
    return found


def versions_of(lock: Path) -> dict[str, str]:
    """By the names of packages; each has hashes, and nothing but a version."""
    found = {}
    for package in re.split(r"^(?=[A-Za-z0-9])", lock.read_text(), flags=re.MULTILINE)[1:]:
        name, version = package.split()[0].split("==")
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", package), name
        found[canonicalize_name(name)] = version
    return found


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
    used |= {name for name, value in compose["x-stores"].items() if value is None}
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
