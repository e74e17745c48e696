"""Jobs whose loss compares datums: the same bits in company, their own failures, and what is refused."""

import inspect
from dataclasses import replace

import numpy as np
import pytest
import torch

from twinkle.core.batch_loss import BATCH_LOSSES, judge_batch, num_passes
from twinkle.core.errors import InvalidInput, UserError
from twinkle.loss import LOSSES, create_loss
from twinkle.model.fused import batch_jobs
from twinkle.model.fused import model as fused_model
from twinkle.model.fused.training import Datum, TrainJob
from twinkle.module.lora import LoraConfig, Segment
from twinkle.module.packed_attention import CausalSpans

CONFIG = LoraConfig(rank=4, seed=1)
LENGTHS = (9, 4, 17, 6)
OF_TOKENS = [name for name, rules in BATCH_LOSSES.items() if not rules.embeds]
SETTINGS = {
    "CrossEntropyLoss": {"dft": "true"},
    "GRPOLoss": {"beta": 0.04},
    "DRGRPOLoss": {"max_completion_length": 8.0},
    "DPOLoss": {"beta": 0.5, "sft_weight": 0.1},
}


def make_job(model, name, *, seed=0, lengths=LENGTHS, backward=True, **config):
    rng = np.random.default_rng(seed)
    adapter = model.create_adapter(CONFIG)
    adapter.params.copy_(torch.from_numpy(rng.normal(0, 0.05, adapter.params.numel())))
    data = tuple(make_row(rng, name, length) for length in lengths)
    return TrainJob(adapter, data, name, SETTINGS.get(name, {}) | config, backward)


def make_row(rng, name, length):
    rules = BATCH_LOSSES[name]
    shape = (length, 3) if rules.top_k_targets else (length,)
    values = {key: rng.normal(-5.0, 0.3, shape).astype(np.float32) for key in rules.known_inputs()}
    if "advantages" in values:
        values["advantages"] = rng.normal(size=1).astype(np.float32)
    trained = np.ones(length, np.float32)
    trained[: length // 3] = 0
    targets = {"target_tokens": rng.integers(0, 250, shape), "weights": trained}
    return Datum(rng.integers(0, 250, length), {**targets, **values})


def run_with_gradient(model, jobs):
    outcomes = model.forward_backward(jobs)
    for outcome in outcomes:
        assert not isinstance(outcome, Exception), outcome
    return outcomes, [job.adapter.grad.clone() for job in jobs]


def expected_loss(job, logprobs):
    """The loss of the library's class, called as a script calls it, row by row of ragged lists."""
    settings = judge_batch(job.loss, job.loss_config, [datum.inputs for datum in job.data])
    labels = torch.nn.utils.rnn.pad_sequence(
        [
            torch.where(torch.from_numpy(datum.inputs["weights"]) == 0, -100, torch.from_numpy(targets))
            for datum in job.data
            for targets in [datum.inputs["target_tokens"].reshape(datum.tokens.size, -1)[:, 0]]
        ],
        batch_first=True,
        padding_value=-100,
    )
    key = "topk_logps" if BATCH_LOSSES[job.loss].top_k_targets else "logps"
    padded = torch.nn.utils.rnn.pad_sequence([torch.from_numpy(row) for row in logprobs], batch_first=True)
    keywords = {
        name: torch.nn.utils.rnn.pad_sequence(
            [torch.from_numpy(datum.inputs[name]) for datum in job.data], batch_first=True
        )
        for name in BATCH_LOSSES[job.loss].known_inputs()
    }
    return float(create_loss(job.loss, **settings)({"labels": labels}, {key: padded}, **keywords)["loss"])


@pytest.mark.parametrize("name", BATCH_LOSSES)
def test_what_a_class_takes_is_what_an_operation_may_send(name):
    rules, kind = BATCH_LOSSES[name], {loss.__name__: loss for loss in LOSSES.values()}[name]
    parameters = inspect.signature(kind).parameters
    calls = inspect.signature(kind.__call__).parameters
    # What the service never computes, or decides itself.
    assert set(parameters) - set(rules.settings) <= {"ignore_index", "chunk_size", "process_group"}
    assert set(rules.settings) <= set(parameters)
    of_rows = {"GKDLoss": {"teacher_topk_logprobs"}, "InfonceLoss": {"labels"}}
    assert set(rules.known_inputs()) <= set(calls) | of_rows.get(name, set())


@pytest.mark.parametrize("name", OF_TOKENS)
def test_a_job_gives_the_loss_of_the_class_and_logprobs_in_the_shape_of_the_targets(name, load_model):
    model = load_model()
    job = make_job(model, name)

    [outcome], [gradient] = run_with_gradient(model, [job])

    assert outcome.loss == pytest.approx(expected_loss(job, outcome.logprobs), rel=1e-6)
    assert outcome.metrics["loss:sum"] == outcome.loss
    assert [row.shape for row in outcome.logprobs] == [datum.inputs["target_tokens"].shape for datum in job.data]
    assert gradient.any()


def test_bits_are_the_same_alone_and_among_others(load_model, make_datum):
    model = load_model(tokens_per_pass=24)
    names = ["DPOLoss", "GRPOLoss", "GKDLoss"]
    alone = [run_with_gradient(model, [make_job(model, name, seed=seed)]) for seed, name in enumerate(names)]
    neighbour = TrainJob(model.create_adapter(CONFIG), (make_datum(np.random.default_rng(9), 30),), "ppo")

    jobs = [make_job(model, name, seed=seed) for seed, name in enumerate(names)]
    outcomes, gradients = run_with_gradient(model, [jobs[0], neighbour, *jobs[1:]])

    assert outcomes[1].loss == run_with_gradient(model, [neighbour])[0][0].loss
    for ([single], [expected]), outcome, gradient in zip(
        alone, [outcomes[0], *outcomes[2:]], [gradients[0], *gradients[2:]], strict=True
    ):
        assert single.loss == outcome.loss
        assert torch.equal(gradient, expected)


def test_forward_alone_tells_the_loss_and_leaves_no_gradient(load_model):
    model = load_model()
    job = make_job(model, "DPOLoss", backward=False)

    [outcome] = model.forward_backward([job])

    assert outcome.loss == pytest.approx(expected_loss(job, outcome.logprobs), rel=1e-6)
    assert not job.adapter.has_gradients


def test_a_loss_that_cannot_be_computed_fails_its_job_alone(load_model):
    model = load_model()
    broken, healthy = make_job(model, "GRPOLoss"), make_job(model, "DPOLoss", seed=1)
    broken.data[0].inputs["advantages"][:] = 3e38
    broken.data[2].inputs["advantages"][:] = 3e38

    failed, outcome = model.forward_backward([broken, healthy])

    assert isinstance(failed, UserError) and "GRPOLoss" in str(failed) and "finite" in str(failed)
    assert not broken.adapter.has_gradients and not broken.adapter.grad.any()
    assert not isinstance(outcome, Exception) and healthy.adapter.has_gradients


WITH_ENTROPY = [name for name, rules in BATCH_LOSSES.items() if "entropy_coef" in rules.settings]


def test_as_many_candidates_for_a_token_are_in_every_datum(load_model):
    model = load_model()
    job = make_job(model, "GKDLoss")
    last = job.data[-1]
    wider = {name: np.repeat(values, 2, axis=1) if values.ndim == 2 else values for name, values in last.inputs.items()}

    [refusal] = model.forward_backward([replace(job, data=(*job.data[:-1], Datum(last.tokens, wider)))])

    assert isinstance(refusal, InvalidInput) and refusal.field == "data[3].loss_fn_inputs.target_tokens"
    assert "has 6 candidates for each token, data[0] has 3" in refusal.message


@pytest.mark.parametrize("step", ["of", "scoring"])
def test_whatever_one_jobs_datums_provoke_is_its_own_trouble(step, load_model, make_datum, monkeypatch):
    """Before anything of it goes through the model, too."""
    model = load_model()
    adapter, broken = model.create_adapter(CONFIG), make_job(model, "DPOLoss")
    neighbour = TrainJob(adapter, (make_datum(np.random.default_rng(9), 30),), "ppo")

    def fail(*arguments):
        raise RuntimeError("sizes must match")

    monkeypatch.setattr(batch_jobs._Batch, step, fail)
    outcomes = model.forward_backward([broken, neighbour, make_pairs(model)])

    assert isinstance(outcomes[0], RuntimeError) and "sizes must match" in str(outcomes[0])
    assert not any(isinstance(outcome, Exception) for outcome in outcomes[1:])
    assert adapter.has_gradients and not broken.adapter.has_gradients


@pytest.mark.parametrize("name", WITH_ENTROPY)
def test_the_entropy_of_every_trained_token_counts(name, load_model):
    model = load_model()
    plain, priced = (make_job(model, name, entropy_coef=coef) for coef in (0.0, 0.3))

    [without], _ = run_with_gradient(model, [plain])
    [outcome], _ = run_with_gradient(model, [priced])

    found = torch.nn.utils.rnn.pad_sequence(
        [row_entropies(model, priced, row) for row in priced.data], batch_first=True
    )
    labels = torch.nn.utils.rnn.pad_sequence(
        [torch.where(torch.from_numpy(row.inputs["weights"]) == 0, -100, 1) for row in priced.data],
        batch_first=True,
        padding_value=-100,
    )
    # What the class makes of entropies alone: all else is nought.
    alone = create_loss(name, entropy_coef=0.3)(
        {"labels": labels}, {"logps": torch.zeros_like(found), "entropies": found}, advantages=torch.zeros(len(labels))
    )
    assert outcome.loss - without.loss == pytest.approx(float(alone["loss"]), rel=1e-4)
    assert outcome.metrics["entropy:mean"] == pytest.approx(float(found[labels != -100].mean()), rel=1e-5)


def row_entropies(model, job, row):
    """Of a row by itself, from its whole logits in float64."""
    positions = torch.arange(row.tokens.size)
    segments = [Segment(job.adapter, 0, row.tokens.size)]
    hidden = model.run_packed(torch.from_numpy(row.tokens), positions, segments, CausalSpans([(0, row.tokens.size)]))
    logprobs = torch.log_softmax(model.logits(hidden, segments).double(), dim=-1)
    return -(logprobs.exp() * logprobs).sum(dim=-1)


def test_the_gradient_of_entropies_is_that_of_finite_differences(load_model):
    model = load_model()

    def make(backward):
        job = make_job(model, "GRPOLoss", backward=backward, entropy_coef=0.7, beta=0.0)
        for row in job.data:
            row.inputs["advantages"][:] = 0.0
        return job

    _, [gradient] = run_with_gradient(model, [make(backward=True)])

    direction = gradient / gradient.norm()
    around = []
    for step in (1e-2, -1e-2):
        moved = make(backward=False)
        moved.adapter.params.add_(step * direction)
        around.append(model.forward_backward([moved])[0].loss)
    assert (around[0] - around[1]) / 2e-2 == pytest.approx(float(gradient.norm()), rel=0.02)


def test_entropies_have_the_same_bits_alone_and_among_others(load_model, make_datum):
    model = load_model(tokens_per_pass=24)
    [alone], [expected] = run_with_gradient(model, [make_job(model, "GRPOLoss", entropy_coef=0.1)])
    neighbour = TrainJob(model.create_adapter(CONFIG), (make_datum(np.random.default_rng(9), 30),), "ppo")
    others = [make_job(model, "PPOLoss", seed=5, entropy_coef=0.2), make_job(model, "DPOLoss", seed=6)]

    outcomes, gradients = run_with_gradient(
        load_model(tokens_per_pass=64), [others[0], neighbour, make_job(model, "GRPOLoss", entropy_coef=0.1), others[1]]
    )

    assert (outcomes[2].loss, outcomes[2].metrics) == (alone.loss, alone.metrics)
    assert torch.equal(gradients[2], expected)


CHANGES = {
    "data": lambda job: job.data[:3],
    "data[1].loss_fn_inputs.ref_logps": lambda job: changed(job, 1, ref_logps=None),
    "data[0].loss_fn_inputs.advantage": lambda job: changed(job, 0, advantage=np.zeros(1, np.float32)),
    "data[2].loss_fn_inputs.weights": lambda job: changed(job, 2, weights=np.full(17, 0.5, np.float32)),
    "data[3].loss_fn_inputs.ref_logps": lambda job: changed(job, 3, ref_logps=np.zeros(5, np.float32)),
    "data[3].loss_fn_inputs.target_tokens": lambda job: changed(job, 3, target_tokens=np.full(6, 999)),
}


def changed(job, index, **inputs):
    data = list(job.data)
    merged = {**data[index].inputs, **inputs}
    data[index] = Datum(data[index].tokens, {name: values for name, values in merged.items() if values is not None})
    return tuple(data)


@pytest.mark.parametrize("field", CHANGES)
def test_a_wrong_batch_is_refused_by_field(field, load_model):
    model = load_model()
    job = make_job(model, "DPOLoss")

    [outcome] = model.forward_backward([TrainJob(job.adapter, CHANGES[field](job), job.loss, job.loss_config)])

    assert isinstance(outcome, InvalidInput)
    assert outcome.field == field


@pytest.mark.parametrize(
    ("name", "config", "field", "words"),
    [
        ("DPOLoss", {"betta": 0.1}, "loss_fn_config.betta", "did you mean beta?"),
        ("DPOLoss", {"loss_type": "sigmoit"}, "loss_fn_config.loss_type", "kto_pair"),
        ("DPOLoss", {"reference_free": "perhaps"}, "loss_fn_config.reference_free", "true or false"),
        ("DPOLoss", {"beta": "much"}, "loss_fn_config.beta", "finite number"),
        ("DRGRPOLoss", {"max_completion_length": 1.5}, "loss_fn_config.max_completion_length", "whole number"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(name, config, field, words):
    with pytest.raises(InvalidInput, match=words.replace("?", r"\?")) as refused:
        judge_batch(name, config, [])
    assert refused.value.field == field


def test_a_reference_is_needed_only_where_it_counts():
    bare = {"target_tokens", "weights"}
    assert judge_batch("DPOLoss", {"reference_free": 1.0}, [bare, bare]) == {"reference_free": True}
    judge_batch("GRPOLoss", {}, [bare | {"advantages"}])
    with pytest.raises(InvalidInput, match="ref_logps"):
        judge_batch("GRPOLoss", {"beta": 0.1}, [bare | {"advantages"}])


def test_what_some_datums_bring_all_must():
    bare = {"target_tokens", "advantages"}
    with pytest.raises(InvalidInput, match=r"old_logps.*other datums bring it"):
        judge_batch("GRPOLoss", {}, [bare | {"old_logps"}, bare])


def test_a_batch_counts_as_often_as_it_goes_through_the_model():
    assert num_passes("DPOLoss", {}, forward_only=False) == 2
    assert num_passes("DPOLoss", {}, forward_only=True) == num_passes("cross_entropy", {}, forward_only=False) == 1
    assert num_passes("CrossEntropyLoss", {"reduction": "sum", "dft": "false"}, forward_only=False) == 1
    assert num_passes("CrossEntropyLoss", {"dft": 1.0}, forward_only=False) == 2


@pytest.mark.parametrize(("dft", "times"), [("false", 1), ("true", 2)])
def test_a_gradient_that_needs_no_logprobs_takes_one_pass(load_model, monkeypatch, dft, times):
    model = load_model()
    job = make_job(model, "CrossEntropyLoss", dft=dft)
    by_hand = make_job(model, "CrossEntropyLoss")
    num_trained = sum(int(datum.inputs["weights"].sum()) for datum in by_hand.data)
    told = []
    run_passes = fused_model.run_with_batches

    def counted(jobs, run, judge, run_embedded):
        def noted(some):
            told.append(len(some))
            return run(some)

        return run_passes(jobs, noted, judge, run_embedded)

    monkeypatch.setattr(fused_model, "run_with_batches", counted)
    [outcome], [gradient] = run_with_gradient(model, [job])
    assert sum(told) == times

    carried = TrainJob(
        by_hand.adapter,
        tuple(Datum(row.tokens, row.inputs | {"weights": row.inputs["weights"] / num_trained}) for row in by_hand.data),
        "cross_entropy",
    )
    [plain], [expected] = run_with_gradient(model, [carried])
    assert outcome.loss == pytest.approx(expected_loss(job, outcome.logprobs), rel=1e-6)
    if times == 1:
        assert outcome.loss == pytest.approx(plain.loss, rel=1e-6)
        assert torch.equal(gradient, expected)
    else:
        assert not torch.allclose(gradient, expected)


def make_pairs(model, *, backward=True, marks=(1, 0, 1, 0, 0), seed=3, **config):
    rng = np.random.default_rng(seed)
    adapter = model.create_adapter(CONFIG)
    adapter.params.copy_(torch.from_numpy(rng.normal(0, 0.05, adapter.params.numel())))
    data = tuple(
        Datum(rng.integers(0, 250, 5 + 3 * index), {"labels": np.array([mark], np.float32)})
        for index, mark in enumerate(marks)
    )
    return TrainJob(adapter, data, "InfonceLoss", {"temperature": 0.2} | config, backward)


def test_embeddings_are_compared_and_their_gradient_is_that_of_finite_differences(load_model):
    model = load_model()
    job = make_pairs(model)

    [outcome], [gradient] = run_with_gradient(model, [job])

    assert [row.shape for row in outcome.embeddings] == [outcome.embeddings[0].shape] * 5
    assert outcome.logprobs == [] and outcome.metrics["loss:sum"] == outcome.loss > 0
    direction = gradient / gradient.norm()
    around = []
    for step in (1e-2, -1e-2):
        moved = make_pairs(model, backward=False)
        moved.adapter.params.add_(step * direction)
        around.append(model.forward_backward([moved])[0].loss)
    assert (around[0] - around[1]) / 2e-2 == pytest.approx(float(gradient.norm()), rel=0.02)


def test_embeddings_have_the_same_bits_beside_others_and_in_smaller_passes(load_model, make_datum):
    [alone], [gradient] = run_with_gradient(load_model(), [make_pairs(load_model())])
    model = load_model(tokens_per_pass=12)
    neighbour = TrainJob(model.create_adapter(CONFIG), (make_datum(np.random.default_rng(9), 30),), "ppo")

    outcomes, gradients = run_with_gradient(model, [neighbour, make_pairs(model)])

    assert outcomes[1].loss == alone.loss
    assert torch.equal(gradients[1], gradient)


@pytest.mark.parametrize(
    ("marks", "place"), [((0, 1, 0), r"data\[0\].*must be 1"), ((1, 0, 1), r"data\[2\].*without a document")]
)
def test_groups_without_a_query_or_a_document_are_refused_and_others_run(load_model, make_datum, marks, place):
    model = load_model()
    neighbour = TrainJob(model.create_adapter(CONFIG), (make_datum(np.random.default_rng(9), 30),), "ppo")
    wrong = make_pairs(model, marks=marks)

    refused, fine = model.forward_backward([wrong, neighbour])

    assert isinstance(refused, InvalidInput)
    with pytest.raises(InvalidInput, match=place):
        raise refused
    assert not wrong.adapter.has_gradients and not isinstance(fine, Exception)


def test_what_only_targets_need_is_nothing_for_a_loss_of_embeddings():
    with pytest.raises(InvalidInput, match=r"target_tokens.*is nothing that InfonceLoss takes"):
        judge_batch("InfonceLoss", {}, [{"labels", "target_tokens"}])
    with pytest.raises(InvalidInput, match=r"labels.*is missing"):
        judge_batch("InfonceLoss", {}, [{"labels"}, set()])
