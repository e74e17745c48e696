"""The official SDK, unmodified, against the served app."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING

import pytest
import tinker
from tinker import types

if TYPE_CHECKING:
    from conftest import Api


@pytest.fixture
def service(api: Api, key: str) -> Iterator[tinker.ServiceClient]:
    """A new tenant's client; it says goodbye at the end."""
    with api.sdk(key) as client:
        yield client


def _datum(length: int = 4) -> types.Datum:
    return types.Datum(
        model_input=types.ModelInput.from_ints(list(range(1, length + 1))),
        loss_fn_inputs={"target_tokens": list(range(2, length + 2)), "weights": [1.0] * length},
    )


def test_a_supervised_loop_with_saving_and_sampling(api: Api, service: tinker.ServiceClient) -> None:
    training = service.create_lora_training_client(base_model="tiny/one", rank=8)
    passes = [training.forward_backward([_datum()] * 1500, "cross_entropy") for _ in range(2)]
    step = training.optim_step(types.AdamParams(learning_rate=1e-3))
    saved = training.save_state("first").result()
    sampler_path = training.save_weights_for_sampler("first").result().path
    sampling = training.save_weights_and_get_sampling_client()

    drawn = sampling.sample(
        prompt=types.ModelInput.from_ints([1, 2, 3]),
        num_samples=2,
        sampling_params=types.SamplingParams(max_tokens=4),
    ).result()

    run_id = saved.path.split("/")[2]
    assert saved.path == f"tinker://{run_id}/weights/first"
    assert sampler_path == f"tinker://{run_id}/sampler_weights/first"
    assert [len(one.result().loss_fn_outputs) for one in passes] == [1500, 1500]
    assert step.result().metrics == {"seq": 5.0}
    assert [sequence.tokens for sequence in drawn.sequences] == [[0, 1, 2, 3]] * 2
    assert [claim.seq for claim in api.worker.executed_of(run_id)] == list(range(9))


def test_a_run_begins_again_from_its_checkpoint(api: Api, service: tinker.ServiceClient) -> None:
    training = service.create_lora_training_client(base_model="tiny/one", rank=16, train_unembed=False)
    path = training.save_state("half-way").result().path

    again = service.create_training_client_from_state_with_optimizer(path)
    again.optim_step(types.AdamParams()).result()

    info = again.get_info()
    assert info.lora_rank == 16
    assert info.model_data.model_name == "tiny/one"
    adapter = api.worker.stores.adapters.find(info.model_id)
    assert not adapter.config.train_unembed
    first, second = api.worker.executed_of(info.model_id)
    assert (first.kind, first.seq, second.seq) == ("load_weights", 0, 1)
    content = api.worker.stores.checkpoints.find(path).content
    expected = {"path": path, "optimizer": True, "content": content}
    assert json.loads(api.worker.payload(first)) == expected


def test_sampling_from_a_saved_path(service: tinker.ServiceClient) -> None:
    training = service.create_lora_training_client(base_model="tiny/one", rank=4)
    path = training.save_weights_for_sampler("s").result().path

    sampling = service.create_sampling_client(model_path=path)
    prompt = types.ModelInput.from_ints([1, 2])
    drawn = sampling.sample(prompt=prompt, num_samples=1, sampling_params=types.SamplingParams(max_tokens=2)).result()

    assert drawn.sequences[0].tokens == [0, 1]
    assert sampling.get_base_model() == "tiny/one"


def test_a_clone_of_a_sampling_client_has_numbers_of_its_own(
    api: Api, key: str, service: tinker.ServiceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", key)
    monkeypatch.setenv("TINKER_BASE_URL", api.url)
    sampling = service.create_sampling_client(base_model="tiny/one")
    clone = pickle.loads(pickle.dumps(sampling))
    prompt, params = types.ModelInput.from_ints([1, 2]), types.SamplingParams(max_tokens=2)

    with closing(clone.holder):  # it keeps the session alive by itself
        drawn = [one.sample(prompt, 1, params).result().sequences[0].tokens for one in (sampling, clone) * 2]

    assert drawn == [[0, 1]] * 4
    lane = api.worker.executed[-1].lane
    own, clones = [0, 1], [claim.seq for claim in api.worker.executed_of(lane) if claim.seq >= 1_000_000_000]
    assert [claim.seq for claim in api.worker.executed_of(lane) if claim.seq not in clones] == own
    assert [seq % 1_000_000_000 for seq in clones] == own


def test_checkpoints_are_listed_published_timed_and_deleted(api: Api, service: tinker.ServiceClient) -> None:
    training = service.create_lora_training_client(base_model="tiny/one", rank=4, user_metadata={"who": "me"})
    paths = [training.save_state(name).result().path for name in ("a", "b")]
    training.save_weights_and_get_sampling_client()
    rest = service.create_rest_client()
    run_id = training.model_id

    rest.publish_checkpoint_from_tinker_path(paths[0]).result()
    rest.publish_checkpoint_from_tinker_path(paths[0]).result()
    rest.set_checkpoint_ttl_from_tinker_path(paths[0], 3600).result()
    listed = rest.list_checkpoints(run_id).result().checkpoints
    stranger = api.sdk(api.new_key()).create_rest_client()
    seen_by_others = stranger.get_weights_info_by_tinker_path(paths[0]).result()
    rest.unpublish_checkpoint_from_tinker_path(paths[0]).result()
    rest.delete_checkpoint_from_tinker_path(paths[1]).result()

    assert [checkpoint.tinker_path for checkpoint in listed] == [paths[1], paths[0]]
    assert (listed[1].public, listed[0].public) == (True, False)
    assert listed[1].expires_at is not None and listed[0].expires_at is None
    assert (seen_by_others.base_model, seen_by_others.lora_rank) == ("tiny/one", 4)
    remaining = rest.list_user_checkpoints().result()
    assert [checkpoint.tinker_path for checkpoint in remaining.checkpoints] == [paths[0]]
    assert remaining.cursor is not None and remaining.cursor.total_count == 1
    with pytest.raises(tinker.NotFoundError):
        stranger.get_weights_info_by_tinker_path(paths[0]).result()
    run = rest.get_training_run(run_id).result()
    assert (run.lora_rank, run.user_metadata) == (4, {"who": "me"})
    assert run.last_checkpoint is not None and run.last_checkpoint.tinker_path == paths[0]
    runs = rest.list_training_runs().result()
    assert [one.training_run_id for one in runs.training_runs] == [run_id]
    sessions = rest.list_sessions().result().sessions
    assert rest.get_session(sessions[0]).result().training_run_ids == [run_id]


def test_capabilities_name_the_base_models(service: tinker.ServiceClient) -> None:
    (model,) = service.get_server_capabilities().supported_models

    assert (model.model_name, model.max_context_length) == ("tiny/one", 2048)


def test_a_bad_operation_fails_its_future_and_the_run_goes_on(service: tinker.ServiceClient) -> None:
    training = service.create_lora_training_client(base_model="tiny/one", rank=4)
    bad = training.save_state("no/slashes")

    with pytest.raises(tinker.RequestFailedError, match="a checkpoint's name"):
        bad.result()
    assert training.save_state("fine").result().path.endswith("/weights/fine")


def test_a_wrong_key_is_told_at_once(api: Api) -> None:
    with pytest.raises(tinker.AuthenticationError):
        api.sdk("tml-wrong").get_server_capabilities()


def test_many_operations_in_flight_at_once(api: Api, service: tinker.ServiceClient) -> None:
    training = [service.create_lora_training_client(base_model="tiny/one", rank=4) for _ in range(4)]

    steps = [one.optim_step(types.AdamParams()) for _ in range(20) for one in training]

    assert sorted(int(step.result().metrics["seq"]) for step in steps) == sorted([*range(1, 21)] * 4)
    for one in training:
        assert [claim.seq for claim in api.worker.executed_of(one.model_id)] == list(range(21))
