"""OpenAI's fine-tuning API, through the official client, over a worker that computes nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import openai
import pytest

from harness.byte_tokenizer import write_tokenizer
from harness.fake_worker import BASE_MODEL, CAPABILITIES, FakeWorker
from harness.jobs import JobRig, MemoryFiles, job_rig
from harness.policy_jobs import EXACT, PolicyTools
from harness.training_jobs import MemoryTools, spec_of
from twinkle.core.job import JobFailed, JobKind

if TYPE_CHECKING:
    from conftest import Api, ServeApi

USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def tools() -> MemoryTools:
    return PolicyTools()


@pytest.fixture(scope="module")
def api(
    serve_api: ServeApi, make_database_url: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Api]:
    """An app whose mesh has a tokenizer the API can read."""
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    with serve_api(make_database_url("sqlite")) as served:
        worker = FakeWorker(
            served.settings, capabilities=CAPABILITIES.model_copy(update={"tokenizer_path": str(folder)})
        )
        worker.start()
        yield served
        worker.stop()


@pytest.fixture(scope="module")
def files() -> MemoryFiles:
    return MemoryFiles()


@pytest.fixture(scope="module")
def rig(api: Api, tools: MemoryTools, files: MemoryFiles) -> Iterator[JobRig]:
    with job_rig(api.settings, tools=tools, open_files=lambda job, door: files) as rig:
        yield rig


@pytest.fixture
def client(api: Api) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{api.url}/v1", api_key=api.new_key(), max_retries=0, timeout=30) as made:
        yield made


def test_a_fine_tuned_model_is_made_followed_and_sampled_by_the_name_it_is_given(
    client: openai.OpenAI, rig: JobRig
) -> None:
    created = client.fine_tuning.jobs.create(
        model=BASE_MODEL,
        training_file=new_file(client),
        validation_file=new_file(client),
        method={"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 2, "batch_size": "auto"}}},
        suffix="mine",
        seed=7,
        metadata={"team": "red"},
    )
    assert (created.status, created.fine_tuned_model, created.seed) == ("queued", None, 7)
    rig.run(created.id)

    done = client.fine_tuning.jobs.retrieve(created.id)

    assert done.error is None
    assert (done.status, done.trained_tokens, done.metadata) == ("succeeded", 80, {"team": "red"})
    assert (done.hyperparameters.n_epochs, done.hyperparameters.batch_size) == (2, 1)
    assert done.fine_tuned_model is not None and done.fine_tuned_model.startswith(f"ft:{BASE_MODEL}:")
    assert done.fine_tuned_model.endswith(f":mine:{created.id}")
    answer = client.chat.completions.create(model=done.fine_tuned_model, messages=USER, max_tokens=4)
    assert answer.model == done.fine_tuned_model
    assert done.fine_tuned_model in [model.id for model in client.models.list()]
    assert client.models.retrieve(done.fine_tuned_model).id == done.fine_tuned_model
    (on_the_way,) = client.fine_tuning.jobs.checkpoints.list(created.id).data
    assert (on_the_way.step_number, on_the_way.metrics.step) == (10, 10)
    assert client.chat.completions.create(
        model=on_the_way.fine_tuned_model_checkpoint, messages=USER, max_tokens=4
    ).choices


def test_a_model_learns_what_a_grader_rewards_and_code_is_no_grader(client: openai.OpenAI, rig: JobRig) -> None:
    created = client.fine_tuning.jobs.create(
        model=BASE_MODEL,
        training_file=new_file(client),
        method={
            "type": "reinforcement",
            "reinforcement": {
                "grader": EXACT,  # type: ignore[typeddict-item]
                "hyperparameters": {
                    "n_epochs": 1,
                    "batch_size": 2,
                    "compute_multiplier": 0.3,
                    "eval_interval": "auto",
                    "eval_samples": 2,
                },
            },
        },
    )
    job = rig.stores.jobs.find(created.id, created.organization_id)
    assert (job.kind, job.spec["group_size"], job.spec["eval_answers"]) == (JobKind.REINFORCEMENT, 2, 2)
    rig.run(created.id)

    done = client.fine_tuning.jobs.retrieve(created.id)

    assert (done.error, done.status) == (None, "succeeded")
    assert done.method is not None and done.method.reinforcement is not None
    assert done.method.reinforcement.grader.name == "exact"
    metrics = [one.data for one in client.fine_tuning.jobs.list_events(created.id) if one.type == "metrics"]
    assert [one["step"] for one in metrics] == [5, 4, 3, 2, 1, 0] and metrics[0]["reward"] > 0
    with pytest.raises(openai.BadRequestError, match="never code"):
        client.fine_tuning.jobs.create(
            model=BASE_MODEL,
            training_file=new_file(client),
            method={
                "type": "reinforcement",
                "reinforcement": {"grader": {"type": "python", "name": "p", "source": "1"}},
            },
        )


def test_events_come_newest_first_and_in_pages(client: openai.OpenAI, rig: JobRig) -> None:
    job = client.fine_tuning.jobs.create(
        model=BASE_MODEL, training_file=new_file(client), hyperparameters={"n_epochs": 1}
    )
    rig.run(job.id)

    events = list(client.fine_tuning.jobs.list_events(job.id, limit=3))

    assert events[0].message == "succeeded"
    assert events[-1].message == "submitted"
    metrics = [event.data for event in events if event.type == "metrics"]
    assert [one["step"] for one in metrics] == list(range(10, -1, -1))
    assert metrics[0]["train_loss"] > 0


def test_wrong_data_are_told_with_all_that_is_wrong_and_by_the_parameter(
    client: openai.OpenAI, rig: JobRig, tools: MemoryTools
) -> None:
    job = client.fine_tuning.jobs.create(model=BASE_MODEL, training_file=new_file(client))
    errors = [{"line": 3, "column": "messages", "reason": "is missing"}]
    tools.refusal = JobFailed("invalid_data", "1 of 10 rows is wrong", details={"errors": errors})
    try:
        rig.run(job.id)
    finally:
        tools.refusal = None

    failed = client.fine_tuning.jobs.retrieve(job.id)

    assert failed.status == "failed"
    assert failed.error is not None
    assert (failed.error.code, failed.error.param) == ("invalid_training_file", "training_file")
    assert failed.error.model_dump()["errors"] == errors


def test_preferences_are_trained_by_the_method_of_that_name(client: openai.OpenAI, rig: JobRig) -> None:
    job = client.fine_tuning.jobs.create(
        model=BASE_MODEL,
        training_file=new_file(client),
        method={"type": "dpo", "dpo": {"hyperparameters": {"beta": 0.2, "n_epochs": 1}}},
    )
    rig.run(job.id)

    done = client.fine_tuning.jobs.retrieve(job.id)

    assert done.error is None
    assert done.method is not None and done.method.type == "dpo"
    assert done.method.dpo is not None and done.method.dpo.hyperparameters is not None
    assert (done.method.dpo.hyperparameters.beta, done.status) == (0.2, "succeeded")


def test_jobs_are_paused_resumed_cancelled_and_listed(client: openai.OpenAI) -> None:
    jobs = [client.fine_tuning.jobs.create(model=BASE_MODEL, training_file=new_file(client)) for _ in range(3)]

    assert client.fine_tuning.jobs.pause(jobs[0].id).status == "paused"
    assert client.fine_tuning.jobs.resume(jobs[0].id).status == "queued"
    assert client.fine_tuning.jobs.cancel(jobs[1].id).status == "cancelled"
    assert [job.id for job in client.fine_tuning.jobs.list(limit=2)] == [job.id for job in reversed(jobs)]


def test_a_deleted_model_is_gone_in_words(client: openai.OpenAI, rig: JobRig, api: Api) -> None:
    job = client.fine_tuning.jobs.create(
        model=BASE_MODEL, training_file=new_file(client), hyperparameters={"n_epochs": 1}
    )
    rig.run(job.id)
    name = client.fine_tuning.jobs.retrieve(job.id).fine_tuned_model
    assert name is not None
    assert client.models.delete(name).deleted

    with pytest.raises(openai.NotFoundError, match=r"is gone: its checkpoint .* was deleted"):
        client.chat.completions.create(model=name, messages=USER)
    with pytest.raises(openai.NotFoundError):
        client.models.delete(name)
    assert name not in [model.id for model in client.models.list()]
    found, _ = api.stores.checkpoints.page(tenant_of(api, client), limit=10, offset=0)
    assert [one.name for one in found] == []


def test_prompts_are_answered_during_a_training_by_what_was_learnt_so_far(
    client: openai.OpenAI, rig: JobRig, api: Api
) -> None:
    tenant = tenant_of(api, client)
    prompts = ["hi", {"prompt": "two and", "max_tokens": 2}]
    job = rig.do(tenant, JobKind.SUPERVISED, spec_of(steps=4, samples=prompts, sample_every=2))

    assert job.failure is None
    events = api.stores.jobs.events(job.id, tenant, limit=1000)
    told = [event.data for event in events if event.kind == "sample"]
    assert [(one["step"], one["prompt"]) for one in told] == [(0, 0), (0, 1), (2, 0), (2, 1), (4, 0), (4, 1)]
    assert all(one["text"] for one in told)
    assert job.result is not None
    found, _ = api.stores.checkpoints.page(tenant, limit=10, offset=0, adapter_id=job.result["run"])
    assert {one.name for one in found} == {"final"}, "what was saved to draw from alone is gone"


@pytest.mark.parametrize("name", ["ft:x", "ft:tiny/one:nobody::job-1", "ft:tiny/one:nobody::job-1:ckpt-step-3"])
def test_a_name_of_nobodys_is_no_model(client: openai.OpenAI, name: str) -> None:
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model=name, messages=USER)


def test_a_fine_tuned_model_is_its_tenants_alone(client: openai.OpenAI, rig: JobRig, api: Api) -> None:
    job = client.fine_tuning.jobs.create(
        model=BASE_MODEL, training_file=new_file(client), hyperparameters={"n_epochs": 1}
    )
    rig.run(job.id)
    name = client.fine_tuning.jobs.retrieve(job.id).fine_tuned_model
    assert name is not None
    with openai.OpenAI(base_url=f"{api.url}/v1", api_key=api.new_key(), max_retries=0) as stranger:
        with pytest.raises(openai.NotFoundError):
            stranger.chat.completions.create(model=name, messages=USER)
        with pytest.raises(openai.NotFoundError):
            stranger.fine_tuning.jobs.retrieve(job.id)


def test_what_is_trained_can_be_trained_on(client: openai.OpenAI, rig: JobRig) -> None:
    first = client.fine_tuning.jobs.create(
        model=BASE_MODEL, training_file=new_file(client), hyperparameters={"n_epochs": 1}
    )
    rig.run(first.id)
    name = client.fine_tuning.jobs.retrieve(first.id).fine_tuned_model
    assert name is not None
    second = client.fine_tuning.jobs.create(model=name, training_file=new_file(client), hyperparameters={"n_epochs": 1})
    rig.run(second.id)

    done = client.fine_tuning.jobs.retrieve(second.id)

    assert (done.error, done.status) == (None, "succeeded")
    assert done.model.startswith("tinker://")


def test_what_is_trained_answers_batches_by_either_of_its_names(
    client: openai.OpenAI, rig: JobRig, files: MemoryFiles
) -> None:
    trained = client.fine_tuning.jobs.create(
        model=BASE_MODEL, training_file=new_file(client), hyperparameters={"n_epochs": 1}
    )
    rig.run(trained.id)
    found = client.fine_tuning.jobs.retrieve(trained.id)
    job = rig.stores.jobs.find(trained.id, trained.organization_id)
    assert job.result is not None

    for number, name in enumerate([found.fine_tuned_model, job.result["sampler_checkpoint"]]):
        assert name is not None
        body = {"model": name, "messages": USER, "max_tokens": 2}
        line = {"custom_id": "one", "method": "POST", "url": "/v1/chat/completions", "body": body}
        files.contents[f"file-{trained.id}-{number}"] = json.dumps(line).encode()
        made = client.batches.create(
            input_file_id=f"file-{trained.id}-{number}", endpoint="/v1/chat/completions", completion_window="24h"
        )
        rig.run(made.id)

        batch = client.batches.retrieve(made.id)
        assert (batch.status, batch.model) == ("completed", name), batch.errors
        assert batch.output_file_id is not None
        answer = json.loads(files.contents[batch.output_file_id])["response"]["body"]
        assert (answer["model"], len(answer["choices"])) == (name, 1)


@pytest.mark.parametrize(
    ("values", "param", "message"),
    [
        ({"model": "nothing"}, None, "is not served here"),
        ({"training_file": "file-nobody"}, "training_file", "there is no file 'file-nobody'"),
        ({"validation_file": "file-nobody"}, "validation_file", "there is no file 'file-nobody'"),
        ({"method": {"type": "supervised", "dpo": {}}}, "method", "settings for dpo"),
        ({"suffix": "a:b"}, "suffix", "pattern"),
        ({"hyperparameters": {"n_epochs": 0}}, "hyperparameters.n_epochs", "greater than or equal to 1"),
        ({"integrations": [{"type": "wandb", "wandb": {"project": "x"}}]}, "integrations", "not supported"),
    ],
)
def test_what_makes_no_sense_is_refused_by_its_parameter(
    client: openai.OpenAI, values: dict[str, object], param: str | None, message: str
) -> None:
    with pytest.raises(openai.APIStatusError, match=message) as refused:
        client.fine_tuning.jobs.create(**{"model": BASE_MODEL, "training_file": new_file(client), **values})

    assert refused.value.param == param


def new_file(client: openai.OpenAI) -> str:
    line = b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}'
    return client.files.create(file=("data.jsonl", line), purpose="fine-tune").id


def tenant_of(api: Api, client: openai.OpenAI) -> str:
    found = api.stores.tenants.key(client.api_key)
    assert found is not None
    return found.tenant
