"""Two ranks behind one engine: the same results as one, whatever the company, and the same state on both."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor

from harness.called_engine import Called, twinkle_config
from harness.traced_losses import clipped_policy, graph_of
from harness.training import make_rows
from twinkle.core.adapter import AdapterConfig
from twinkle.core.errors import ConfigError, InvalidInput, UserError
from twinkle.core.settings import Settings
from twinkle.core.slices import finished
from twinkle.hub.tiny import make_tiny_model
from twinkle.wire.bodies.training import AdamParams
from twinkle.wire.sample_result import decode_sample_response
from twinkle.wire.sampling import SampleRequest, parse_sample
from twinkle.wire.training import ForwardBackwardBody, WireDatum
from twinkle.wire.training_result import ForwardBackwardResult
from twinkle.workers.engine import Pass, WrittenState
from twinkle.workers.engines.transformers_engine import TransformersEngine
from twinkle.workers.process import build_engine
from twinkle.workers.ranks.engine import RankedEngine

LENGTHS = ([30, 5, 17], [9], [4, 40, 8, 3, 12])
ROWS = [{name: row[name] for name in ("input_ids", "labels")} for row in make_rows(0, vocab_size=250)]
TOLERANCE = 2e-5
"""Relative to the largest value: sums over datums are made in another order."""

Make = Callable[..., ForwardBackwardBody]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(
        tmp_path_factory.mktemp("models") / "tiny", texts=["a tiny text"] * 4, hidden_size=64, layers=2, vocab_size=300
    )


def settings_of(model_dir: Path, **more: object) -> Settings:
    return Settings(model=str(model_dir), model_name="tiny", threads=1, tokens_per_pass=48, **more)


@pytest.fixture(scope="module")
def one(model_dir: Path) -> TransformersEngine:
    return TransformersEngine.from_settings(settings_of(model_dir))


@pytest.fixture(scope="module", params=["replicate", "fsdp"])
def two(model_dir: Path, request: pytest.FixtureRequest) -> Iterator[RankedEngine]:
    engine = build_engine(settings_of(model_dir, ranks=2, shard=request.param, rank_timeout_s=300.0))
    assert isinstance(engine, RankedEngine)
    yield engine
    engine.close()


def config(number: int = 0) -> AdapterConfig:
    return AdapterConfig(base_model="tiny", rank=4 + number, seed=number)


def body(lengths: Sequence[int], seed: int, *, loss: str = "cross_entropy", **change: object) -> ForwardBackwardBody:
    rng = np.random.default_rng(seed)
    data = []
    for length in lengths:
        inputs = {
            "target_tokens": rng.integers(0, 250, length),
            "weights": rng.normal(size=length).astype(np.float32),
            "logprobs": rng.normal(-5, 0.5, size=length).astype(np.float32),
            "advantages": rng.normal(size=length).astype(np.float32),
        }
        data.append(WireDatum(rng.integers(0, 250, length), inputs))
    return ForwardBackwardBody("adapter", 0, bool(change.get("forward_only")), loss, {}, tuple(data))


def train(engine, adapters, steps: int = 3, *, fused: bool = True) -> list[ForwardBackwardResult]:
    """Steps of several adapters with passes of different sizes and losses; all results."""
    losses = ("cross_entropy", "importance_sampling", "ppo")
    results = []
    for step in range(steps):
        passes = [
            Pass(state=adapter, body=body(LENGTHS[(number + step) % 3], 10 * step + number, loss=losses[number]))
            for number, adapter in enumerate(adapters)
        ]
        answers = engine.run_passes(passes) if fused else [engine.run_passes([one])[0] for one in passes]
        for adapter, answer in zip(adapters, answers, strict=True):
            assert not isinstance(answer, Exception), answer
            results.append(answer)
            engine.optim_step(adapter, AdamParams(learning_rate=1e-2))
    return results


def logprobs_of(results: Sequence[ForwardBackwardResult]) -> list[np.ndarray]:
    """Of each pass the logprobs of all its datums, in a row."""
    return [np.concatenate(result.logprobs) for result in results]


def close(ours: np.ndarray, theirs: np.ndarray) -> bool:
    return bool(np.abs(ours - theirs).max() <= TOLERANCE * max(1.0, float(np.abs(theirs).max())))


def test_two_ranks_compute_what_one_computes(one: TransformersEngine, two: RankedEngine) -> None:
    ours = train(two, [two.create(config(number)) for number in range(3)])
    theirs = train(one, [one.create(config(number)) for number in range(3)])

    for mine, other in zip(ours, theirs, strict=True):
        assert all(close(a, b) for a, b in zip(mine.logprobs, other.logprobs, strict=True))
        assert mine.metrics["loss:sum"] == pytest.approx(other.metrics["loss:sum"], rel=1e-4, abs=1e-3)
        assert mine.metrics["num_tokens:sum"] == other.metrics["num_tokens:sum"]


def test_company_changes_no_bit_and_both_ranks_hold_the_same(two: RankedEngine) -> None:
    together = [two.create(config(number)) for number in range(3)]
    apart = [two.create(config(number)) for number in range(3)]

    fused, alone = train(two, together), train(two, apart, fused=False)

    assert [one.metrics for one in fused] == [one.metrics for one in alone]
    # A snapshot compares the ranks' copies, or ends the process.
    assert [two.snapshot(adapter) for adapter in together] == [two.snapshot(adapter) for adapter in apart]


def test_a_restored_adapter_goes_on_bit_by_bit(two: RankedEngine) -> None:
    adapter = two.create(config())
    train(two, [adapter])
    restored = two.restore(two.snapshot(adapter))

    train(two, [adapter])
    train(two, [restored])

    assert two.snapshot(restored) == two.snapshot(adapter)


def test_a_recovery_point_is_written_while_the_ranks_go_on(two: RankedEngine) -> None:
    adapter = two.create(config())
    train(two, [adapter])
    expected = two.snapshot(adapter)
    copy = two.copy_state(adapter)
    assert not isinstance(copy, WrittenState), "yet to be written"

    train(two, [adapter], steps=1)

    assert pickle.loads(pickle.dumps(copy)).data() == copy.data() == expected


def traced_body(lengths: Sequence[int], seed: int) -> ForwardBackwardBody:
    made = body(lengths, seed, loss="custom")
    data = tuple(
        WireDatum(
            datum.tokens,
            {
                "target_tokens": datum.inputs["target_tokens"],
                "old_logprobs": datum.inputs["logprobs"],
                "advantages": datum.inputs["advantages"],
                "mask": np.ones(len(datum.tokens), dtype=np.float32),
            },
        )
        for datum in made.data
    )
    ranks = {"logprobs": 1, "old_logprobs": 1, "advantages": 1, "mask": 1}
    return replace(made, data=data, loss_graph=graph_of(clipped_policy, ranks))


def test_a_traced_loss_computes_on_two_ranks_what_it_does_on_one(one: TransformersEngine, two: RankedEngine) -> None:
    states = []
    for engine in (one, two):
        adapter, answers = engine.create(config()), []
        for seed in range(2):
            answers += engine.run_passes([Pass(state=adapter, body=traced_body(LENGTHS[2], seed))])
            engine.optim_step(adapter, AdamParams(learning_rate=1e-2))
        states.append(answers)

    for theirs, ours in zip(*states, strict=True):
        assert close(np.concatenate(ours.logprobs), np.concatenate(theirs.logprobs))
        assert ours.metrics == pytest.approx(theirs.metrics, rel=1e-4, abs=1e-4)
        assert "custom/clipped:mean" in ours.metrics


def test_a_traced_loss_that_fails_on_one_rank_fails_alone_and_on_all(two: RankedEngine) -> None:
    adapter, neighbour, untouched = (two.create(config()) for _ in range(3))
    broken = traced_body(LENGTHS[2], 0)
    wrong = {**broken.data[1].inputs, "advantages": np.full(len(broken.data[1].tokens), np.inf, dtype=np.float32)}
    broken = replace(broken, data=(broken.data[0], WireDatum(broken.data[1].tokens, wrong), *broken.data[2:]))

    failed, done = two.run_passes([Pass(state=adapter, body=broken), Pass(state=neighbour, body=body([8], 1))])

    assert isinstance(failed, UserError)
    assert "data[1]" in str(failed)
    assert not isinstance(done, Exception)
    assert two.snapshot(adapter) == two.snapshot(untouched)


def test_embeddings_are_compared_on_two_ranks_as_on_one(one: TransformersEngine, two: RankedEngine) -> None:
    compared = body((9, 5, 12, 7), 4, loss="InfonceLoss")
    marks = (np.array([mark], np.float32) for mark in (1, 0, 1, 0))
    data = tuple(WireDatum(datum.tokens, {"labels": mark}) for datum, mark in zip(compared.data, marks, strict=True))
    compared = replace(compared, data=data, loss_fn_config={"temperature": 0.2})
    results = []
    for engine in (one, two):
        adapter = engine.create(config())
        told = []
        for _ in range(3):
            [result] = engine.run_passes([Pass(state=adapter, body=compared)])
            assert not isinstance(result, Exception), result
            engine.optim_step(adapter, AdamParams(learning_rate=1e-2))
            told.append((result.metrics["loss:sum"], np.concatenate(result.embeddings)))
        results.append(told)

    for (ours, mine), (theirs, others) in zip(*results, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)
        assert close(mine, others)
    assert results[1][2][0] < results[1][0][0]


def test_files_are_the_same_as_with_one_rank_and_load_on_all(one: TransformersEngine, two: RankedEngine) -> None:
    files = two.export(two.create(config()), with_optimizer=True)

    assert files == one.export(one.create(config()), with_optimizer=True)
    loaded = two.load(config(), files, with_optimizer=True, trainable=True)
    train(two, [loaded])
    assert two.export(loaded, with_optimizer=True) != files


@pytest.mark.parametrize("saved_by", ["one rank", "two ranks"])
def test_a_checkpoint_goes_on_on_the_other_layout_with_its_optimizer_or_without(
    one: TransformersEngine, two: RankedEngine, saved_by: str
) -> None:
    old, new = (one, two) if saved_by == "one rank" else (two, one)
    run = old.create(config())
    train(old, [run])
    files = old.export(run, with_optimizer=True)
    weights = old.export(run, with_optimizer=False)
    uninterrupted = train(old, [run])

    warm = new.load(config(), files, with_optimizer=True, trainable=True)
    cold = [new.load(config(), content, with_optimizer=False, trainable=True) for content in (files, weights)]
    taken_up = new.export(warm, with_optimizer=True)
    onward, colder, coldest = (train(new, [adapter]) for adapter in (warm, *cold))

    assert taken_up == files
    # Sums are made in another order on another number of ranks: equal to rounding, not to the bit.
    assert all(
        close(ours, theirs) for ours, theirs in zip(logprobs_of(onward), logprobs_of(uninterrupted), strict=True)
    )
    assert new.export(cold[0], with_optimizer=True) == new.export(cold[1], with_optimizer=True)
    assert [one.metrics for one in colder] == [one.metrics for one in coldest]
    first, *later = zip(logprobs_of(colder), logprobs_of(onward), strict=True)
    assert np.array_equal(*first)
    assert not any(close(ours, theirs) for ours, theirs in later)


@pytest.mark.parametrize("seed", range(4))
def test_bad_input_fails_as_with_one_rank_and_harms_nobody(
    one: TransformersEngine, two: RankedEngine, seed: int
) -> None:
    too_large = body([5, 6], seed)
    too_large.data[1].tokens[0] = 10_000
    endless = body([5, 6, 7, 8], seed)
    endless.data[seed].inputs["weights"][:] = 3e38
    outcomes = []
    for engine in (one, two):
        adapters = [engine.create(config(number)) for number in range(3)]
        outcomes.append(
            [
                str(answer) if isinstance(answer, Exception) else answer.metrics["num_tokens:sum"]
                for answer in engine.run_passes(
                    [
                        Pass(state=adapter, body=each)
                        for adapter, each in zip(adapters, (too_large, endless, body([9, 3], seed)), strict=True)
                    ]
                )
            ]
        )
        assert [engine.has_gradients(adapter) for adapter in adapters] == [False, False, True]

    assert outcomes[0] == outcomes[1]
    assert "10000" in outcomes[1][0] and f"not finite in data[{seed}]" in outcomes[1][1]


def test_a_failed_job_leaves_the_window_as_it_was_on_all_ranks(two: RankedEngine) -> None:
    adapters = [two.create(config()) for _ in range(2)]
    endless = body([5, 6, 7], 1)
    endless.data[2].inputs["weights"][:] = 3e38

    two.run_passes([Pass(state=adapters[0], body=body([8, 9], 2))])
    failed = two.run_passes([Pass(state=adapters[0], body=endless), Pass(state=adapters[1], body=body([8, 9], 2))])

    assert isinstance(failed[0], UserError)
    metrics = [two.optim_step(adapter, AdamParams(learning_rate=1e-2)) for adapter in adapters]
    assert metrics[0] == metrics[1]
    assert two.snapshot(adapters[0]) == two.snapshot(adapters[1])


def test_a_refused_step_leaves_the_ranks_in_step(two: RankedEngine) -> None:
    adapter = two.create(config())

    with pytest.raises(InvalidInput, match="beta1"):
        two.optim_step(adapter, AdamParams(learning_rate=1e-2, beta1=2.0))

    train(two, [adapter], 1)


def test_forward_only_leaves_no_gradient(two: RankedEngine) -> None:
    adapter = two.create(config())

    [answer] = two.run_passes([Pass(state=adapter, body=body([8, 50, 3], 1, forward_only=True))])

    assert not isinstance(answer, Exception)
    assert [logprobs.size for logprobs in answer.logprobs] == [8, 50, 3]
    assert not two.has_gradients(adapter)


def test_the_base_model_alone_and_what_a_window_measured_are_those_of_one_rank(
    one: TransformersEngine, two: RankedEngine
) -> None:
    told = []
    for engine in (one, two):
        adapter = engine.create(config())
        train(engine, [adapter], steps=1)
        asked = replace(body([30, 5, 17, 8], 1, forward_only=True), without_adapter=True)
        alone, untrained = engine.run_passes(
            [
                Pass(state=adapter, body=asked),
                Pass(state=engine.create(config(1)), body=replace(asked, without_adapter=False)),
            ]
        )
        assert [row.tobytes() for row in alone.logprobs] == [row.tobytes() for row in untrained.logprobs]
        data = tuple(
            WireDatum(datum.tokens, {"target_tokens": datum.inputs["target_tokens"], "ref_logps": reference})
            for datum, reference in zip(asked.data, alone.logprobs, strict=True)
        )
        [answer] = engine.run_passes(
            [
                Pass(
                    state=adapter,
                    body=replace(asked, forward_only=False, without_adapter=False, loss_fn="DPOLoss", data=data),
                )
            ]
        )
        assert not isinstance(answer, Exception), answer
        told.append(engine.optim_step(adapter, AdamParams(learning_rate=1e-2)))

    assert len(told[0]) == 3 + 8
    assert told[1] == pytest.approx(told[0], rel=1e-3, abs=1e-3)


def test_cleared_gradients_are_gone_on_all_ranks(two: RankedEngine) -> None:
    adapter, untouched = two.create(config()), two.create(config())
    two.run_passes([Pass(state=adapter, body=body([8], 1))])

    two.clear_gradients(adapter)

    assert two.snapshot(adapter) == two.snapshot(untouched)


def test_samples_are_those_of_one_rank_between_training_steps(one: TransformersEngine, two: RankedEngine) -> None:
    results = []
    for engine in (one, two):
        trained = engine.create(config())
        files = engine.export(trained, with_optimizer=False)
        weights = engine.load(config(), files, with_optimizer=False, trainable=False)
        for request_id, state in (("adapter", weights), ("base", None)):
            engine.add_sample(request_id, state, sample_request(), cache_group="tenant:t")
        engine.add_sample("dropped", None, sample_request(), cache_group="tenant:t")
        engine.drop_sample("dropped")
        ended = []
        while engine.num_samples_under_way:
            ended += engine.step_samples()
            train(engine, [trained], 1)
        results.append({output.request_id: output.num_tokens for output in ended})

    assert results[0] == results[1] == {"adapter": 12, "base": 12}


def test_a_frozen_copy_is_sampled_from_as_the_adapter_was(one: TransformersEngine, two: RankedEngine) -> None:
    for engine in (one, two):
        trained = engine.create(config())
        train(engine, [trained], 2)
        frozen = engine.freeze(trained)
        files = engine.export(trained, with_optimizer=False)
        loaded = engine.load(config(), files, with_optimizer=False, trainable=False)
        train(engine, [trained], 2)
        for request_id, state in (("frozen", frozen), ("loaded", loaded)):
            engine.add_sample(request_id, state, sample_request(), cache_group="tenant:t")
        ended = {}
        while engine.num_samples_under_way:
            ended |= {output.request_id: output.result for output in engine.step_samples()}

        assert ended["frozen"] == ended["loaded"] is not None
        assert engine.weights_bytes(frozen) == engine.weights_bytes(trained) < sum(len(data) for data in files.values())


def test_what_is_told_of_a_sample_under_way_is_the_beginning_of_its_result(two: RankedEngine) -> None:
    two.add_sample("r", None, sample_request(), cache_group="tenant:t")
    told: list[list[int]] = [[], []]
    ended = []
    while two.num_samples_under_way:
        ended += two.step_samples()
        for piece in two.drawn_so_far("r", [len(tokens) for tokens in told]):
            told[piece.sample][piece.start :] = piece.tokens

    (output,) = ended
    assert output.result is not None
    drawn = [sequence.tokens.tolist() for sequence in decode_sample_response(output.result).sequences]
    assert [len(tokens) for tokens in told] == [5, 5]
    assert told == [tokens[:5] for tokens in drawn]


def sample_request() -> SampleRequest:
    return parse_sample(
        b'{"num_samples": 2, "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7, 8]}]},'
        b' "sampling_params": {"max_tokens": 6, "seed": 1, "stop": []}, "seq_id": 0, "sampling_session_id": "s"}'
    )


def test_what_the_mesh_is_shows_in_its_capabilities(two: RankedEngine) -> None:
    assert two.capabilities.ranks == 2
    assert two.capabilities.determinism != "none"
    held = two.memory_held()
    assert 0 < held["base model"] < two.capabilities.memory_bytes
    adapter = two.create(config())
    assert two.memory_held()["adapters"] > held["adapters"]
    del adapter


def test_adapters_nobody_refers_to_are_dropped_everywhere(two: RankedEngine) -> None:
    adapters = [two.create(config()) for _ in range(3)]
    held = len(two._world._member.adapters)
    adapters.clear()

    kept = two.create(config())

    assert len(two._world._member.adapters) <= held - 2
    train(two, [kept], 1)


def test_a_rank_holds_its_part_of_sharded_layers_and_no_more(two: RankedEngine) -> None:
    model = two._world._member.engine.model
    layers = dict(model._decoder.layers.named_parameters())
    if two.capabilities.shard == "replicate":
        assert not any(isinstance(weight, DTensor) for weight in layers.values())
        return

    assert all(weight.to_local().numel() <= (weight.numel() + 1) // 2 + weight.shape[-1] for weight in layers.values())
    assert all(target.weight.is_meta for target in model.pool.targets if target.kind != "unembed")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"ranks": 1, "shard": "fsdp"}, "TWINKLE_SHARD: fsdp spreads"),
        ({"ranks": 2, "engine": "null"}, "TWINKLE_RANKS: the null engine has one rank"),
        ({"ranks": 2, "sampler": "vllm"}, "TWINKLE_SAMPLER: vllm samples on a mesh of one rank only"),
        ({"ranks": 2, "device": "cuda:0"}, "device_type: 'cuda:0' is not supported"),
        ({"ranks": 64, "device": "cuda"}, "TWINKLE_RANKS: 64 ranks need as many devices"),
    ],
)
def test_ranks_that_cannot_be_are_refused(model_dir: Path, wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_engine(Settings(**{"model": str(model_dir), **wrong}))


def test_passes_under_way_on_two_ranks_let_others_go_between(one: TransformersEngine, two: RankedEngine) -> None:
    large, small, dropped = ([40, 8, 30, 12, 44, 20, 31, 25], [9, 5], [40, 30, 40, 30, 44])
    answers = []
    for engine in (one, two):
        mine, theirs, nobodys = (engine.create(config(number)) for number in range(3))
        slices = engine.start_passes([Pass(state=mine, body=body(large, 1))])
        unwanted = engine.start_passes([Pass(state=nobodys, body=body(dropped, 3))])
        next(slices)
        next(unwanted)
        [between] = engine.run_passes([Pass(state=theirs, body=body(small, 2))])
        engine.optim_step(theirs, AdamParams(learning_rate=1e-2))
        unwanted.close()
        answers.append([*finished(slices), between])
        engine.optim_step(mine, AdamParams(learning_rate=1e-2))
        engine.snapshot(mine)

    for alone, ours in zip(*answers, strict=True):
        assert isinstance(ours, ForwardBackwardResult)
        assert all(close(a, b) for a, b in zip(ours.logprobs, alone.logprobs, strict=True))


def train_by_calls(called: Called) -> list[float]:
    called("set_loss", loss_cls="GRPOLoss")
    called("set_optimizer", optimizer_cls="SGD", lr=0.05, momentum=0.9)
    losses = []
    for _ in range(2):
        called("forward", inputs=ROWS, advantages=[0.5, -1.0, 2.0, 0.25])
        losses.append(called("calculate_loss"))
        called("backward")
        called("clip_grad_and_step")
    reference = called("forward_only", inputs=ROWS, disable_lora=True)["logps"]
    called("set_loss", loss_cls="InfonceLoss")
    pairs = [{**row, "labels": [(index + 1) % 2]} for index, row in enumerate(ROWS)]
    embedded = called("forward_backward", inputs=pairs, task="embedding")
    called("clip_grad_and_step")
    return [*losses, *reference[0], embedded["loss"]]


def test_two_ranks_train_by_calls_as_one_does(one: TransformersEngine, two: RankedEngine) -> None:
    alone, together, parked = Called(one), Called(two), Called(two, parks=True)

    assert train_by_calls(together) == pytest.approx(train_by_calls(alone), rel=1e-4)

    assert train_by_calls(parked) == pytest.approx(train_by_calls(Called(two)), rel=0)
    there = one.restore(two.snapshot(together.state))
    wanted, found = alone.params, there.adapter.params  # type: ignore[union-attr]
    assert torch.allclose(found, wanted, atol=TOLERANCE * float(wanted.abs().max()), rtol=0)


def test_a_call_that_is_refused_on_two_ranks_leaves_them_in_step(two: RankedEngine) -> None:
    called = Called(two, twinkle_config(seed=3))
    with pytest.raises(InvalidInput, match="GRPOLoss"):
        called("set_loss", loss_cls="GRPOLos")
    with pytest.raises(InvalidInput, match="inputs"):
        called("forward_backward", inputs=[])
    two.note_failure(called.state)
    called("forward_backward", inputs=ROWS)

    assert two.has_gradients(called.state)
    two.snapshot(called.state)
