"""One service with three meshes: two of one base model, one of another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import tinker

from harness.leftovers import sdk_client
from harness.models import make_text_model
from harness.polling import wait_until
from harness.served import Served

PROMPT = tinker.ModelInput.from_ints([5, 6, 7, 8])
PARAMS = tinker.SamplingParams(max_tokens=4, temperature=0.0, stop=[])
LEARNING = tinker.AdamParams(learning_rate=5e-3)
MESHES_OF = {"tiny": {"first", "second"}, "other/model": {"third"}}


@pytest.fixture(scope="module", params=["null", pytest.param("transformers", marks=pytest.mark.soak)])
def service(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_model: Path
) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("meshes")
    other = make_text_model(folder / "other")
    meshes = ("first=cpu", "second=cpu", f"third=cpu,model={other},model-name=other/model")
    flags = ("--engine", request.param, *(word for mesh in meshes for word in ("--mesh", mesh)))
    # As many threads on each mesh, so that both of a model compute the same bits.
    with Served(folder / "home", model=str(tiny_model), model_name="tiny", flags=flags, TWINKLE_THREADS="1") as it:
        # It is ready when all of them are.
        assert it.query("SELECT COUNT(*) FROM mesh WHERE capabilities IS NOT NULL") == [(len(meshes),)]
        yield it


@pytest.fixture(scope="module")
def key(service: Served) -> str:
    return service.create_key("several")


@pytest.fixture(scope="module")
def client(service: Served, key: str) -> tinker.ServiceClient:
    return sdk_client(service.url, key)


def mesh_of(service: Served, run: tinker.TrainingClient) -> str:
    ((mesh,),) = service.query("SELECT mesh FROM adapter WHERE id = ?", run.model_id)
    return str(mesh)


def one_on_each(service: Served, begin: Callable[[], tinker.TrainingClient]) -> list[tinker.TrainingClient]:
    """Runs of the small model, one on each of its meshes: a new one goes where less is expected."""
    found: dict[str, tinker.TrainingClient] = {}
    for _ in range(8):
        run = begin()
        found.setdefault(mesh_of(service, run), run)
        if set(found) == MESHES_OF["tiny"]:
            return list(found.values())
    raise AssertionError(f"eight runs, and all of them on {sorted(found)}")


def steps(run: tinker.TrainingClient, count: int) -> list[tuple[float, dict[str, float] | None]]:
    """The loss before and the metrics of each of so many steps, over two datums."""
    data = [
        tinker.Datum(
            model_input=tinker.ModelInput.from_ints(tokens[:-1]),
            loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)},
        )
        for tokens in ([5, 6, 7, 8, 9], [11, 12, 13])
    ]
    done = []
    for _ in range(count):
        passed, stepped = run.forward_backward(data, "cross_entropy"), run.optim_step(LEARNING)
        done.append((passed.result().metrics["loss:sum"], stepped.result().metrics))
    return done


def test_every_model_is_offered_once(service: Served, client: tinker.ServiceClient, key: str) -> None:
    def told() -> list[str]:
        return sorted(one.model_name for one in client.get_server_capabilities().supported_models)

    # What the API knows of meshes is at most a second old: it may have looked just before the last of them spoke.
    wait_until(lambda: len(told()) >= len(MESHES_OF), what="the API offers what every mesh serves")
    asked = httpx.get(f"{service.url}/v1/models", headers={"Authorization": f"Bearer {key}"}, timeout=60)
    listed = asked.raise_for_status().json()["data"]

    assert told() == sorted(MESHES_OF)
    assert sorted(model["id"] for model in listed if "://" not in model["id"]) == sorted(MESHES_OF)


@pytest.mark.parametrize("model", sorted(MESHES_OF))
def test_a_run_and_its_samples_are_computed_on_a_mesh_of_its_model(
    service: Served, client: tinker.ServiceClient, key: str, model: str
) -> None:
    run = client.create_lora_training_client(base_model=model, rank=4, seed=1).result()
    steps(run, 2)
    path = run.save_weights_for_sampler("two-steps").result().path
    samplers = [
        client.create_sampling_client(base_model=model).result(),
        client.create_sampling_client(model_path=path).result(),
        run.save_weights_and_get_sampling_client(),
    ]

    drawn = [sampler.sample(PROMPT, 1, PARAMS).result().sequences[0].tokens for sampler in samplers]

    assert [len(tokens) for tokens in drawn] == [4, 4, 4]
    assert drawn[1] == drawn[2]
    assert [sampler.get_base_model() for sampler in samplers] == [model] * 3
    asked = {"model": path, "prompt": [5, 6, 7, 8], "max_tokens": 4, "temperature": 0}
    headers = {"Authorization": f"Bearer {key}"}
    assert httpx.post(f"{service.url}/v1/completions", json=asked, headers=headers, timeout=60).is_success
    session = run.model_id.partition(":train:")[0]
    rows = service.query(
        "SELECT DISTINCT operation.mesh FROM operation LEFT JOIN adapter ON adapter.id = lane"
        " LEFT JOIN sampling_session ON sampling_session.id = lane"
        " WHERE lane LIKE ? AND COALESCE(json_extract(adapter.config, '$.base_model'), base_model) = ?",
        f"{session}:%",
        model,
    )
    assert {mesh for (mesh,) in rows} <= MESHES_OF[model]


def test_an_unknown_model_is_refused_with_all_there_are(client: tinker.ServiceClient) -> None:
    with pytest.raises(tinker.BadRequestError, match="serves: other/model, tiny"):
        client.create_lora_training_client(base_model="third/model", rank=4).result()


def test_a_checkpoint_goes_on_on_another_mesh_with_its_optimizer_to_the_same_bits_and_without_it_does_not(
    service: Served, client: tinker.ServiceClient
) -> None:
    run = client.create_lora_training_client(base_model="tiny", rank=4, seed=6).result()
    steps(run, 3)
    path = run.save_state("three").result().path
    uninterrupted = steps(run, 3)

    warm = one_on_each(service, lambda: client.create_training_client_from_state_with_optimizer(path).result())
    cold = one_on_each(service, lambda: client.create_training_client_from_state(path).result())

    assert [steps(one, 3) for one in warm] == [uninterrupted] * 2
    colder = [steps(one, 3) for one in cold]
    assert colder[0] == colder[1] != uninterrupted
    assert colder[0][0][0] == uninterrupted[0][0]
    assert [metrics["step"] for _, metrics in colder[0] if metrics] == [1.0, 2.0, 3.0]


def test_a_checkpoint_does_not_become_a_run_of_another_model(client: tinker.ServiceClient, service: Served) -> None:
    run = client.create_lora_training_client(base_model="tiny", rank=4).result()
    path = run.save_state("tiny").result().path
    other = client.create_lora_training_client(base_model="other/model", rank=4).result()

    with pytest.raises(tinker.RequestFailedError, match="tiny"):
        other.load_state(path).result()
    with pytest.raises(tinker.BadRequestError, match="belongs to 'tiny'"):
        client.create_sampling_client(base_model="other/model", model_path=path).result()
