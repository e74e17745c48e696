"""A ``server_config.yaml`` key by key: read, refused by name, mapped on our settings, or said to mean nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from math import prod
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from twinkle.cli.embedded.stack import flag_of, parse_meshes, worker_spec
from twinkle.cli.embedded.twinkle_server import app
from twinkle.core.errors import ConfigError
from twinkle.core.process.cluster_room import Node
from twinkle.core.settings import load_settings
from twinkle.server.launch.cluster import Cluster, running_cluster
from twinkle.server.launch.launcher import ServerLauncher, config_from
from twinkle.server.launch.mapping import plan_of
from twinkle.server.launch.schema import parse_config

LIKE_THE_DOCUMENTS = """
proxy_location: EveryNode
http_options: {host: localhost, port: 8000}
persistence: {mode: file, file_path: /tmp/somewhere/state.json}
applications:
  - name: server
    route_prefix: /api/v1
    import_path: server
    args:
      server_config: {per_token_model_limit: 3, expiration_timeout: 86400, cleanup_interval: 3600}
      supported_models: [Qwen/Qwen3.5-4B]
    deployments:
      - name: TinkerCompatServer
        max_ongoing_requests: 50
        autoscaling_config: {min_replicas: 1, max_replicas: 1, target_ongoing_requests: 128}
        ray_actor_options: {num_cpus: 0.1}
  - name: models-Qwen3.5-4B
    route_prefix: /api/v1/model/Qwen/Qwen3.5-4B
    import_path: model
    args:
      use_megatron: true
      model_id: ms://Qwen/Qwen3.5-4B
      max_length: 10240
      nproc_per_node: 2
      device_group: {name: model, ranks: 2, device_type: cuda}
      device_mesh: {device_type: cuda, dp_size: 2}
      queue_config: {rps_limit: 100, tps_limit: 1000}
      adapter_config: {adapter_timeout: 30, adapter_max_lifetime: 36000}
    deployments:
      - name: ModelManagement
        autoscaling_config: {min_replicas: 2, max_replicas: 4}
        ray_actor_options: {num_cpus: 0.1, runtime_env: {env_vars: {TWINKLE_FAIL_FAST: "0"}}}
  - name: sampler-Qwen3.5-4B
    route_prefix: /api/v1/sampler/Qwen/Qwen3.5-4B
    import_path: sampler
    args:
      model_id: ms://Qwen/Qwen3.5-4B
      nproc_per_node: 1
      sampler_type: vllm
      engine_args: {gpu_memory_utilization: 0.5, max_model_len: 4096, enable_lora: true}
      device_group: {name: sampler, ranks: [2], device_type: cuda}
      device_mesh: {device_type: cuda, dp_size: 1}
  - name: processor
    route_prefix: /api/v1/processor
    import_path: processor
    args: {ncpu_proc_per_node: 4, device_group: {name: model, ranks: 2, device_type: CPU}}
"""


def held(**changes: Any) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load(LIKE_THE_DOCUMENTS)
    return {**document, **changes}


def keys_of(value: Any, place: str = "") -> set[str]:
    """Every leaf of a document by its place."""
    if isinstance(value, dict):
        return {key for name, inner in value.items() for key in keys_of(inner, f"{place}.{name}" if place else name)}
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return {key for index, inner in enumerate(value) for key in keys_of(inner, f"{place}.{index}")}
    return {place}


@pytest.mark.parametrize("cuda", [False, True])
def test_every_key_of_the_documents_file_is_accounted_for_and_what_comes_of_it_is_a_setting(
    cuda: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(parse_config(held()), cuda=cuda)

    told = {finding.key for finding in plan.findings}
    unsaid = {key for key in keys_of(held()) if not any(f"{key}.".startswith(f"{one}.") for one in told)}
    assert {key for key in unsaid if not key.endswith(".import_path")} == set()
    for name, value in plan.settings.items():
        monkeypatch.setenv(name, value)
    settings = load_settings()
    assert [mesh.model_name for mesh in parse_meshes(plan.meshes, settings)] == ["Qwen/Qwen3.5-4B"] * (1 if cuda else 2)
    assert (settings.port, settings.host, settings.tenant_max_adapters) == (8000, "127.0.0.1", 3)
    assert (settings.tenant_tokens_per_minute, settings.session_timeout_s) == (60_000, 30.0)
    assert settings.sampler == ("vllm" if cuda else "torch")
    assert settings.ranks == (2 if cuda else 1)
    fates = {finding.key.partition("autoscaling_config.")[2]: finding.note for finding in plan.findings}
    assert fates["max_replicas"].startswith("one mesh: on this machine's GPUs" if cuda else "so many at most")


@pytest.mark.parametrize(("num_gpus", "device", "cpus"), [(4, "cuda", 1.0), (0, "cpu", 0.37)])
def test_on_a_ray_cluster_every_mesh_has_its_ranks_there(
    num_gpus: int, device: str, cpus: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster(address="10.0.0.1:6379", nodes=(Node(num_cpus=8 if num_gpus else 3, devices={"GPU": num_gpus}),))

    plan = plan_of(parse_config(held()), cluster=cluster)

    for name, value in plan.settings.items():
        monkeypatch.setenv(name, value)
    settings = load_settings()
    assert [(mesh.device, mesh.ranks) for mesh in parse_meshes(plan.meshes, settings)] == [(device, "ray:2")] * 2
    assert (settings.ray_address, settings.rank_cpus, settings.sampler) == ("10.0.0.1:6379", cpus, "torch")
    assert settings.ranks_on == "machine"
    [flag] = plan.meshes
    assert ",replicas=2-4," in flag


@pytest.mark.parametrize(
    ("nodes", "num_ranks", "num_on_gpus", "cpus"),
    [
        pytest.param([(0, 1), (0, 1)], 3, 0, 0.5, id="two thirds of a CPU fit once on each of two nodes"),
        pytest.param([(0, 4), (0, 1)], 3, 0, 1.0, id="enough on one"),
        pytest.param([(0, 64), (8, 4)], 8, 8, 0.5, id="those of the node without GPUs are of no use to a GPU"),
        pytest.param([(2, 4), (2, 4)], 12, 12, 1.0, id="ranks wait for GPUs, not for CPUs"),
        pytest.param([(2, 2), (0, 1)], 5, 2, 0.5, id="some on GPUs, some not"),
    ],
)
def test_ranks_take_as_many_cpus_as_leave_room_for_all_of_them_each_on_one_node(
    nodes: list[tuple[int, int]], num_ranks: int, num_on_gpus: int, cpus: float
) -> None:
    having = tuple(Node(num_cpus=num_cpus, devices={"GPU": num_gpus}) for num_gpus, num_cpus in nodes)

    share = Cluster(address="10.0.0.1:6379", nodes=having).cpus_of_a_rank(num_ranks, num_on_gpus=num_on_gpus)

    assert share == cpus


def test_a_cluster_that_is_named_and_is_not_there_is_refused_and_one_that_was_stopped_is_not_joined(
    tmp_path: Path,
) -> None:
    note = tmp_path / "ray_current_cluster"
    note.write_text("127.0.0.1:1")

    assert running_cluster({}, note=note) is None
    assert running_cluster({}, note=tmp_path / "none") is None
    with pytest.raises(ConfigError, match="RAY_ADDRESS"):
        running_cluster({"RAY_ADDRESS": "127.0.0.9:1"}, note=note)


def test_on_a_cpu_it_says_what_runs_otherwise() -> None:
    plan = plan_of(parse_config(held()), cuda=False)

    changed = {
        finding.key.removeprefix("applications."): finding.note
        for finding in plan.findings
        if finding.fate == "changed"
    }
    assert "on the CPU" in changed["1.args.device_group"]
    assert "our own sampler" in changed["2.args.sampler_type"]
    assert "transformers engine" in changed["1.args.use_megatron"]
    assert all(mesh.partition("=")[2].startswith("cpu,") for mesh in plan.meshes)


@pytest.mark.parametrize(
    ("asked", "changes", "replicas", "says"),
    [
        ("cuda", {}, None, "one mesh: on this machine's GPUs"),
        ("cpu", {}, (2, 4), "so many at most"),
        ("cpu", {"train_mode": "full"}, None, "one mesh: runs of whole models share none"),
    ],
)
def test_on_a_machine_with_gpus_as_many_meshes_start_as_is_said(
    asked: str, changes: dict[str, Any], replicas: tuple[int, int] | None, says: str
) -> None:
    document = held()
    args = document["applications"][1]["args"]
    args |= {"device_group": {"device_type": asked}, "device_mesh": {"device_type": asked}, **changes}

    plan = plan_of(parse_config(document), cuda=True)

    first, *others = parse_meshes(plan.meshes, load_settings())
    like_it = [mesh.name for mesh in others if mesh.name.startswith(f"{first.name}-") and mesh.name[-1].isdigit()]
    assert (first.replicas, len(like_it)) == (replicas, 0 if replicas is None else replicas[0] - 1)
    [note] = [one.note for one in plan.findings if one.key.endswith(".max_replicas") and ".1.deployments" in one.key]
    assert note.startswith(says)


def test_a_sampler_without_a_mesh_of_its_own_is_not_told_that_it_has_several() -> None:
    document = held()
    document["applications"][2]["deployments"] = [{"name": "s", "autoscaling_config": {"max_replicas": 3}}]

    plan = plan_of(parse_config(document), cuda=False)

    assert len(plan.meshes) == 1
    [note] = [one for one in plan.findings if one.key.endswith(".max_replicas") and ".2.deployments" in one.key]
    assert (note.fate, note.note) == ("changed", "no mesh: that of its model samples")


def by_megatron(monkeypatch: pytest.MonkeyPatch, **mesh: Any) -> dict[str, Any]:
    """The file with another layout of its model, Megatron being installed."""
    monkeypatch.setattr("twinkle.server.launch.layout._has_megatron", lambda: True)
    document = held()
    document["applications"][1]["args"]["device_mesh"] = {"device_type": "cuda", **mesh}
    return document


@pytest.mark.parametrize(
    ("mesh", "ranks"),
    [
        ({"tp_size": 2}, {"tensor": "2", "pipeline": "1"}),
        ({"tp_size": 2, "pp_size": 2, "dp_size": 1}, {"tensor": "2", "pipeline": "2"}),
        ({"mesh": [[0], [1]], "mesh_dim_names": ["pp", "tp"]}, {"tensor": "1", "pipeline": "2"}),
        ({"tp_size": 2, "dp_size": 2, "ep_size": 2}, {"tensor": "2", "pipeline": "1", "expert": "2"}),
        ({"tp_size": 2, "pp_size": 2, "ep_size": 2}, {"tensor": "2", "pipeline": "2"}),
    ],
)
@pytest.mark.parametrize("place", ["machine", "cluster"])
def test_megatron_trains_on_meshes_of_its_layout_and_the_sampler_has_one_of_its_own(
    mesh: dict[str, Any], ranks: dict[str, str], place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = (
        Cluster(address="10.0.0.1:6379", nodes=(Node(num_cpus=16, devices={"GPU": 8}),)) if place == "cluster" else None
    )

    plan = plan_of(parse_config(by_megatron(monkeypatch, **mesh)), cuda=True, cluster=cluster)

    on = "ray:" if cluster else ""
    for name, value in plan.settings.items():
        monkeypatch.setenv(name, value)
    settings = load_settings()
    *trainers, sampler = plans = parse_meshes(plan.meshes, settings)
    number = prod(map(int, ranks.values()))
    # Those of one machine would be on the same GPUs.
    assert [(one.ranks, one.device) for one in trainers] == [(f"{on}{number}", "cuda")] * (2 if cluster else 1)
    assert all(one.own == {"engine": "megatron", "sampler": "torch", **ranks} for one in trainers)
    assert (sampler.ranks, sampler.device) == (f"{on}1", "cuda" if cluster else "cuda:2")
    assert sampler.own == {"engine": "transformers", "serves": "samples"}
    assert parse_meshes([flag_of(plans[0]), flag_of(sampler)], settings) == plans
    workers = [worker_spec(settings, one).env for one in plans]
    assert [env["TWINKLE_ENGINE"] for env in workers] == ["megatron"] * len(trainers) + ["transformers"]
    assert workers[0]["TWINKLE_PIPELINE_PARALLEL"] == ranks["pipeline"]
    [fate] = [one.fate for one in plan.findings if one.key == "applications.1.args.use_megatron"]
    assert fate == "mapped"


def test_a_model_in_full_mode_has_a_mesh_for_one_run_and_the_sampler_one_of_its_own() -> None:
    document = held()
    document["applications"][1]["args"] |= {"train_mode": "full", "nproc_per_node": 2}

    plan = plan_of(parse_config(document), cuda=False)

    whole, sampler = plans = parse_meshes(plan.meshes, load_settings())
    assert (whole.own["serves"], whole.ranks, whole.replicas, sampler.own["serves"]) == (
        "whole-model",
        "1",
        None,
        "samples",
    )
    assert worker_spec(load_settings(), whole).env["TWINKLE_SERVES"] == "whole-model"
    assert parse_meshes([flag_of(one) for one in plans], load_settings()) == plans
    fates = {one.key.rpartition(".")[2]: one.fate for one in plan.findings if one.key.startswith("applications.1.args")}
    assert (fates["train_mode"], fates["nproc_per_node"], fates["use_megatron"]) == ("mapped", "changed", "changed")
    with pytest.raises(ConfigError, match="train_mode: full trains on a device of this machine"):
        plan_of(
            parse_config(document),
            cluster=Cluster(address="10.0.0.1:6379", nodes=(Node(num_cpus=16, devices={"GPU": 8}),)),
        )


@pytest.mark.parametrize(
    ("mesh", "says"),
    [
        ({"dp_size": 2}, "has no dp_size 2"),
        ({"tp_size": 2, "ep_size": 2, "dp_size": 4}, "has no dp_size 4"),
        ({"pp_size": 2, "ep_size": 2}, "ep_size 2 needs as many data ranks"),
        ({}, "set device_mesh.tp_size, pp_size or ep_size"),
    ],
)
def test_a_layout_that_a_mesh_by_megatron_has_not_is_served_otherwise_and_said(
    mesh: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(parse_config(by_megatron(monkeypatch, **mesh)), cuda=True)

    [told] = [one for one in plan.findings if one.key == "applications.1.args.use_megatron"]
    assert told.fate == "changed"
    assert says in told.note
    assert not any("megatron" in flag for flag in plan.meshes)


def test_a_size_that_is_none_is_refused_by_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"applications\.1\.args\.device_mesh\.tp_size: is 'two'"):
        plan_of(parse_config(by_megatron(monkeypatch, tp_size="two")), cuda=True)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"http_option": {}}, r"http_option: is no key of this place; did you mean http_options\?"),
        ({"applications": []}, "applications"),
        ({"http_options": {"port": "many"}}, r"http_options\.port"),
    ],
)
def test_what_is_no_config_is_refused_by_its_place(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_config(held(**changes))


def test_a_wrong_key_deep_inside_is_named_with_the_nearest() -> None:
    document = held()
    document["applications"][1]["args"]["modle_id"] = "x"

    with pytest.raises(ConfigError, match=r"applications\.1\.args\.modle_id: is no key.*did you mean model_id"):
        parse_config(document)


def test_a_model_that_no_application_serves_is_refused() -> None:
    document = held()
    document["applications"][0]["args"]["supported_models"] = ["Qwen/Other"]

    with pytest.raises(ConfigError, match=r"no application serves Qwen/Other; the file's models are Qwen/Qwen3\.5-4B"):
        plan_of(parse_config(document))


def test_variables_win_over_the_file_and_the_servers_own_are_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWINKLE_PORT", "9001")
    monkeypatch.setenv("TWINKLE_TOKEN_SALT", "pepper")
    launcher = ServerLauncher(held(), any_key=True)

    assert launcher.environment["TWINKLE_PORT"] == "9001"
    assert launcher.command[-1] == "--any-key"
    assert load_settings().port == 9001


def test_there_is_one_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TWINKLE_SERVER_CONFIG", raising=False)
    with pytest.raises(ConfigError, match="TWINKLE_SERVER_CONFIG"):
        config_from(None, None)
    with pytest.raises(ConfigError, match="cannot be read"):
        config_from(None, tmp_path / "missing.yaml")
    path = tmp_path / "server_config.yaml"
    path.write_text(LIKE_THE_DOCUMENTS)
    monkeypatch.setenv("TWINKLE_SERVER_CONFIG", str(path))
    assert config_from(None, None) == parse_config(held())


def test_the_command_says_key_by_key_what_becomes_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWINKLE_TOKEN_SALT", "pepper")
    path = tmp_path / "server_config.yaml"
    path.write_text(LIKE_THE_DOCUMENTS)

    checked = CliRunner().invoke(app, ["check-config", "-c", str(path), "--json"])
    printed = CliRunner().invoke(app, ["print-config", "-c", str(path)])

    fates = {row["key"]: (row["fate"], row["note"]) for row in json.loads(checked.stdout)}
    assert fates["proxy_location"][0] == "meaningless"
    assert fates["http_options.port"] == ("used", "TWINKLE_PORT=8000")
    assert "needs no salt" in fates["TWINKLE_TOKEN_SALT"][1]
    assert "TWINKLE_TENANT_MAX_ADAPTERS=3" in printed.stdout.splitlines()
    assert printed.stdout.splitlines()[-1].startswith("twinkle serve --mesh ")


def test_clearing_persistence_deletes_nothing_and_says_how_to_begin_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "twinkle"
    home.mkdir()
    (home / "journal.db").write_text("everything")
    path = tmp_path / "server_config.yaml"
    path.write_text(LIKE_THE_DOCUMENTS.replace("/tmp/somewhere/state.json", str(tmp_path / "state.json")))

    refused = CliRunner().invoke(app, ["clear", "persistence", "-c", str(path)])
    monkeypatch.setenv("TWINKLE_DATABASE_URL", "postgresql://twinkle:secret@db/twinkle")
    elsewhere = CliRunner().invoke(app, ["clear", "persistence", "-c", str(path)])
    unknown = CliRunner().invoke(app, ["clear", "everything"])

    assert refused.exit_code == elsewhere.exit_code == unknown.exit_code == 1
    assert "persistence: nothing was deleted. Records are the runs" in str(refused.exception)
    assert f"in {home}; no command deletes them" in str(refused.exception)
    assert "start the service with another TWINKLE_HOME;" in str(refused.exception)
    assert f"in {home} and what TWINKLE_DATABASE_URL names;" in str(elsewhere.exception)
    assert "secret" not in str(elsewhere.exception)
    assert str(unknown.exception) == "clear: knows persistence alone, not 'everything'"
    assert (home / "journal.db").read_text() == "everything"


def test_importing_it_loads_neither_the_server_nor_the_library() -> None:
    script = (
        "import sys; from twinkle.server import launch_server, ServerLauncher, ServerConfig\n"
        "assert not {'fastapi', 'sqlalchemy', 'torch', 'celery'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
