"""Exports as jobs: what is given out and where, what is refused, what is kept secret, what a killed one comes to."""

import json
import os
import secrets
import time
from contextlib import contextmanager
from functools import partial

import pytest
import structlog
import transformers

from harness.exports import make_adapter, publish_mesh, save_checkpoint
from harness.hub_caches import Caches
from harness.hub_server import TOKEN, hub_server
from harness.jobs import job_rig
from harness.polling import wait_until
from twinkle.core.clock import SystemClock
from twinkle.core.job import JobKind, JobState
from twinkle.core.settings import Settings
from twinkle.jobs.export import ExportPlan
from twinkle.server.access.sealing import Sealer
from twinkle.server.access.signing import Signer, secret_of
from twinkle.storage.blobs import open_blob_store
from twinkle.storage.files.reading import stretches_of
from twinkle.storage.stores import Stores
from twinkle.tasks.pushing import CheckpointPusher
from twinkle.wire.bodies.jobs_specs import parse_spec
from twinkle.workers.jobs.export.work import ExportParts, ExportTools
from twinkle.workers.jobs.heavy import HeavyWork

BASE_MODEL = "tiny/qwen3"


class Exporting:
    """A runner that exports, and a tenant with a checkpoint."""

    def __init__(self, rig, settings, blobs, sealer, heavy):
        self.rig, self.settings, self.blobs, self.sealer, self.heavy = rig, settings, blobs, sealer, heavy
        self.stores = rig.stores
        self.adapter = None

    def new_tenant(self):
        key = self.stores.tenants.create_key(f"tenant-{secrets.token_hex(8)}", "test")
        return self.stores.tenants.key(key).tenant

    def checkpoint(self, tenant, **fields):
        return save_checkpoint(self.stores, self.blobs, tenant, BASE_MODEL, self.adapter, **fields)

    def spec(self, tenant, checkpoint, **fields):
        """As the door stores it."""
        spec = parse_spec("export", {"checkpoint": checkpoint, **fields})
        return self.sealer.sealed(spec.model_dump(mode="json", exclude_none=True), tenant)

    def do(self, tenant, checkpoint, **fields):
        return self.rig.do(tenant, JobKind.EXPORT, self.spec(tenant, checkpoint, **fields))

    def read(self, tenant, file_id):
        file = self.stores.files.find(file_id, tenant)
        return b"".join(stretches_of(self.blobs, self.stores.files.pieces(file)))

    def folder(self, job):
        return self.settings.home / "exports" / job.id


@pytest.fixture(scope="module")
def start_exporting(redis_url, make_database_url, tmp_path_factory, gguf_base):
    return partial(_exporting, redis_url, make_database_url, tmp_path_factory, gguf_base)


@pytest.fixture(scope="module")
def exporting(start_exporting):
    with start_exporting() as made:
        yield made


@pytest.fixture
def own_exporting(start_exporting):
    """For who kills its processes: others start in the midst of the test, and end with it."""
    with start_exporting() as made:
        yield made


@contextmanager
def _exporting(redis_url, make_database_url, tmp_path_factory, gguf_base):
    home = tmp_path_factory.mktemp("home")
    settings = Settings(
        home=home,
        database_url=make_database_url("sqlite"),
        redis_url=redis_url,
        export_targets=f"hf://,ms://,s3://,file://{home}/given/{{tenant}}",
    )
    stores = Stores.at(settings.resolved_database_url, SystemClock())
    base = gguf_base("qwen3")
    publish_mesh(stores, BASE_MODEL, base)
    blobs = open_blob_store(settings.resolved_object_store)
    sealer, heavy = Sealer(Signer(secret_of(settings))), HeavyWork()
    tools = ExportTools(
        ExportParts(settings=settings, stores=stores, blobs=blobs, clock=SystemClock(), sealer=sealer, heavy=heavy)
    )
    with job_rig(settings, plans={JobKind.EXPORT: ExportPlan}, tools=tools) as rig:
        made = Exporting(rig, settings, blobs, sealer, heavy)
        # It starts now, and not within the first test, which would be blamed for its threads.
        rig.ask(heavy.run(os.getpid))
        made.adapter = make_adapter(tmp_path_factory.mktemp("adapter"), base, train_unembed=False)
        yield made
    heavy.stop()
    stores.close()


@pytest.fixture
def tenant(exporting):
    return exporting.new_tenant()


def test_an_export_is_kept_as_files_of_the_tenant_with_an_end_and_transformers_loads_them(exporting, tenant, tmp_path):
    checkpoint = exporting.checkpoint(tenant)

    job = exporting.do(tenant, checkpoint, forms=["merged"], keep_s=3600)

    assert job.state is JobState.SUCCEEDED, job.failure
    assert job.result["checkpoint"] == checkpoint and job.result["base_model"] == BASE_MODEL
    assert job.result["verification"]["merged"]["logits_difference"] < 1e-5
    for told in job.result["files"]:
        (tmp_path / told["path"]).write_bytes(exporting.read(tenant, told["file"]))
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    transformers.AutoTokenizer.from_pretrained(tmp_path)
    ends = [exporting.stores.files.find(told["file"], tenant).expires_at for told in job.result["files"]]
    assert all(3600 <= end - job.created_at < 3900 for end in ends)
    assert exporting.stores.files.taken_bytes(tenant) == job.result["size_bytes"]
    assert not exporting.folder(job).exists()
    kinds = [event.kind for event in exporting.stores.jobs.events(job.id, tenant)]
    assert "metrics" in kinds and job.progress["done"] == job.progress["total"]


def test_a_dry_run_tells_what_would_be_written_and_leaves_nothing(exporting, tenant):
    checkpoint = exporting.checkpoint(tenant)

    told = exporting.do(tenant, checkpoint, forms=["merged"], dry_run=True)
    real = exporting.do(tenant, checkpoint, forms=["merged"])
    refused = exporting.do(tenant, "tinker://nobody/weights/nothing", forms=["merged"], dry_run=True)

    assert told.result["architecture"] == real.result["architecture"]
    assert told.result["storage"]["size_bytes"] == pytest.approx(real.result["size_bytes"], rel=0.1)
    assert "asks nothing of a device" in told.result["time"]["reason"]
    assert not exporting.folder(told).exists()
    assert exporting.stores.files.taken_bytes(tenant) == real.result["size_bytes"]
    assert (refused.state, refused.failure.code) == (JobState.FAILED, "not_found")


def test_all_forms_at_once_lie_in_folders_of_their_own(exporting, tenant):
    checkpoint = exporting.checkpoint(tenant)

    job = exporting.do(tenant, checkpoint, forms=["peft", "merged", "gguf", "gguf-adapter", "ollama"])

    assert job.state is JobState.SUCCEEDED, job.failure
    assert {told["path"] for told in job.result["files"]} >= {
        "peft/adapter_config.json",
        "peft/adapter_model.safetensors",
        "merged/model.safetensors",
        "merged/config.json",
        "gguf/model.gguf",
        "gguf/Modelfile",
        "gguf-adapter/adapter.gguf",
    }
    assert set(job.result["verification"]) == {"peft", "merged", "gguf", "gguf-adapter", "ollama"}


def test_the_same_checkpoint_exported_twice_has_the_same_bytes_and_takes_room_once(exporting, tenant):
    checkpoint = exporting.checkpoint(tenant)

    first, second = (exporting.do(tenant, checkpoint, forms=["gguf"]) for _ in range(2))

    assert first.result["files"][0]["sha256"] == second.result["files"][0]["sha256"]
    assert first.result["files"][0]["file"] != second.result["files"][0]["file"]
    assert exporting.stores.files.taken_bytes(tenant) == first.result["size_bytes"]


def test_another_tenants_checkpoint_is_answered_like_none(exporting, tenant):
    theirs = exporting.checkpoint(exporting.new_tenant())

    job = exporting.do(tenant, theirs)
    nothing = exporting.do(tenant, "tinker://nobody/weights/none")

    assert job.state is nothing.state is JobState.FAILED
    assert job.failure.code == nothing.failure.code == "not_found" and job.failure.field == "checkpoint"
    assert job.failure.message.replace(theirs, "") == nothing.failure.message.replace(
        "tinker://nobody/weights/none", ""
    )
    assert job.attempt == 1 and not exporting.folder(job).exists()


def test_what_cannot_be_converted_fails_by_name_before_anything_is_written(exporting, tenant, family_base, tmp_path):
    base = family_base("gemma2")
    adapter = make_adapter(tmp_path / "adapter", base)
    path = save_checkpoint(exporting.stores, exporting.blobs, tenant, str(base), adapter)

    job = exporting.do(tenant, path, forms=["gguf"])

    assert job.state is JobState.FAILED and job.attempt == 1
    assert "Gemma2ForCausalLM" in job.failure.message and job.failure.field == "forms"
    assert job.progress == {}


def test_what_the_tenant_has_no_room_for_is_refused_before_it_is_made(exporting, tenant):
    checkpoint = exporting.checkpoint(tenant)
    exporting.stores.tenants.set(exporting.stores.tenants.name_of(tenant), limits={"max_files_bytes": 1000})

    job = exporting.do(tenant, checkpoint, forms=["merged"])

    assert job.state is JobState.FAILED and job.failure.code == "limit_reached"
    assert "max_files_bytes" in job.failure.message


def test_what_an_export_has_left_behind_goes_when_its_job_has_ended_elsewhere(exporting, tenant):
    checkpoint = exporting.checkpoint(tenant)
    waiting, ended = (
        exporting.rig.submit(tenant, JobKind.EXPORT, exporting.spec(tenant, checkpoint)) for _ in range(2)
    )
    exporting.stores.jobs.request_cancel(ended.id, tenant)
    for job in (waiting, ended):
        (exporting.folder(job) / "merged").mkdir(parents=True)

    done = exporting.do(tenant, checkpoint)

    assert done.state is JobState.SUCCEEDED, done.failure
    assert exporting.folder(waiting).exists() and not exporting.folder(ended).exists()


def test_a_folder_that_the_operator_allows_is_filled_and_no_other(exporting, tenant):
    checkpoint = exporting.checkpoint(tenant)
    root = exporting.settings.home / "given"

    job = exporting.do(tenant, checkpoint, forms=["peft"], to=f"file://{root}/{tenant}/mine")
    others = exporting.do(tenant, checkpoint, forms=["peft"], to=f"file://{root}/somebody/mine")
    near = exporting.do(tenant, checkpoint, forms=["peft"], to=f"file://{root}/{tenant}more/mine")

    assert job.state is JobState.SUCCEEDED, job.failure
    files = {path.name for path in (root / tenant / "mine").iterdir()}
    assert files == {"adapter_config.json", "adapter_model.safetensors"}
    assert others.failure.field == near.failure.field == "to"
    assert not (root / "somebody").exists() and not (root / f"{tenant}more").exists()


def test_a_bucket_gets_the_files_with_the_tenants_own_key(exporting, tenant, s3_url, caplog):
    checkpoint = exporting.checkpoint(tenant)
    canary = f"canary-{secrets.token_hex(8)}"
    credentials = {"access_key_id": "mine", "secret_access_key": canary, "region": "us-east-1"}

    job = exporting.do(tenant, checkpoint, forms=["peft", "gguf"], to=f"{s3_url}/models", credentials=credentials)

    assert job.state is JobState.SUCCEEDED, job.failure
    store = open_blob_store(f"{s3_url}/models")
    for told in job.result["files"]:
        assert store.size_bytes(told["path"]) == told["size_bytes"] and told["file"] is None
    assert job.result["url"] == f"{s3_url}/models"
    assert canary not in everything_kept(exporting) and canary not in caplog.text


def everything_kept(exporting):
    """All rows of all tables, as text."""
    database = exporting.stores.database
    tables = [row.name for row in database.read("SELECT name FROM sqlite_master WHERE type = 'table'", ())]
    return "\n".join(str(tuple(row)) for table in tables for row in database.read(f"SELECT * FROM {table}", ()))


@pytest.fixture
def hubs(tmp_path, monkeypatch):
    made = Caches(modelscope=tmp_path / "modelscope", hugging_face=tmp_path / "huggingface")
    for name in ("TWINKLE_OFFLINE", "HF_HUB_OFFLINE", "HF_TOKEN", "MODELSCOPE_API_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    with hub_server() as served:
        monkeypatch.setenv("MODELSCOPE_CACHE", str(made.modelscope))
        monkeypatch.setenv("HF_HOME", str(made.hugging_face))
        monkeypatch.setenv("MODELSCOPE_ENDPOINT", served.url)
        monkeypatch.setenv("MODELSCOPE_HOME", str(tmp_path / "modelscope-home"))
        monkeypatch.setenv("HF_ENDPOINT", served.url)
        monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "no-token"))
        yield served


@pytest.mark.parametrize("hub", ["hf", "ms"])
def test_a_push_is_private_tells_the_lineage_and_leaves_the_token_nowhere(exporting, tenant, hubs, hub):
    checkpoint = exporting.checkpoint(tenant)

    with structlog.testing.capture_logs() as logs:
        job = exporting.do(tenant, checkpoint, forms=["merged"], to=f"{hub}://me/mine", hub_token=TOKEN)

    assert job.state is JobState.SUCCEEDED, job.failure
    repository = hubs.repositories["models/me/mine"]
    assert repository.private and hubs.url in job.result["url"]
    (files,) = repository.revisions.values()
    card = files["README.md"].decode()
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= files.keys()
    assert checkpoint in card and "rank 4" in card and "logits difference" in card
    assert str(exporting.settings.home) not in card
    assert TOKEN not in everything_kept(exporting) and TOKEN not in json.dumps(logs, default=str)


@pytest.mark.parametrize("hub", ["hf", "ms"])
def test_a_checkpoint_pushes_itself_where_its_tenant_wants_it_privately_and_again_after_a_hub_that_failed(
    exporting, tenant, hubs, hub
):
    spec = {"forms": ["peft"], "to": f"{hub}://me/{{checkpoint}}", "private": True, "hub_token": TOKEN}
    wanted = exporting.sealer.sealed(spec, tenant)
    exporting.stores.pushes.want(tenant, None, {**wanted, "to": spec["to"]})
    checkpoint = exporting.checkpoint(tenant, created_at=time.time())
    pusher = CheckpointPusher(exporting.stores.pushes, exporting.stores.jobs)
    hubs.refuses_writes = 1

    pusher.push()
    (push,) = exporting.stores.pushes.all(tenant)
    exporting.rig.run(push.last_job)
    failed = exporting.stores.jobs.find(push.last_job, tenant)
    exporting.rig.run(push.last_job)
    job = exporting.stores.jobs.find(push.last_job, tenant)
    pusher.push()

    assert failed.state is JobState.RETRYING
    assert job.state is JobState.SUCCEEDED, job.failure
    assert job.result["checkpoint"] == checkpoint
    repository = hubs.repositories["models/me/best"]
    (files,) = repository.revisions.values()
    assert repository.private and files["adapter_model.safetensors"]
    assert [event.kind for event in exporting.stores.jobs.events(job.id, tenant)].count("attempt") >= 2
    assert exporting.stores.pushes.all(tenant)[0].last_job == push.last_job, "it has had its turn"
    assert TOKEN not in everything_kept(exporting)


def test_a_checkpoint_of_a_whole_model_is_not_exported_and_the_job_says_why(exporting, tenant):
    job = exporting.do(tenant, exporting.checkpoint(tenant, rank=0), forms=["peft"])

    assert (job.state, job.failure.code) == (JobState.FAILED, "cannot_be_exported")
    assert "its files are those of transformers already" in job.failure.message


def test_a_token_that_the_hub_refuses_is_not_in_what_is_told(exporting, tenant, hubs):
    checkpoint = exporting.checkpoint(tenant)
    canary = f"canary-{secrets.token_hex(8)}"

    job = exporting.do(tenant, checkpoint, forms=["peft"], to="hf://me/mine", hub_token=canary)

    assert job.state is not JobState.SUCCEEDED
    assert canary not in everything_kept(exporting)


def test_a_process_that_is_killed_in_the_middle_leaves_what_is_whole_and_the_next_attempt_gives_the_same_bytes(
    own_exporting,
):
    exporting, tenant = own_exporting, own_exporting.new_tenant()
    checkpoint = exporting.checkpoint(tenant)
    calm = exporting.do(tenant, checkpoint, forms=["peft", "merged", "gguf"])
    spec = exporting.spec(tenant, checkpoint, forms=["peft", "merged", "gguf"])
    job = exporting.rig.submit(tenant, JobKind.EXPORT, spec)

    attempt = exporting.rig.start(job.id)
    shard = exporting.folder(job) / "merged" / "model.safetensors"
    wait_until(shard.exists, what="the first shard is written", deadline_s=60)
    written = shard.stat().st_ino
    for process in exporting.heavy._pool._processes.values():
        process.kill()
    attempt.join(60)
    lost = exporting.stores.jobs.find(job.id, tenant)
    exporting.rig.run(job.id)

    after = exporting.stores.jobs.find(job.id, tenant)
    assert lost.state in (JobState.RETRYING, JobState.SUCCEEDED)
    assert after.state is JobState.SUCCEEDED, after.failure
    assert [told["sha256"] for told in after.result["files"]] == [told["sha256"] for told in calm.result["files"]]
    assert written is not None
