"""Passes of every family on a device without values: nothing of it is read but what must be, once, and all that goes
there goes by the one way that nobody waits for.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import transformers

from harness import traced_losses, valueless
from harness.families import FAMILIES
from harness.traced_losses import graph_of
from harness.valueless import Crossings, valueless_model
from twinkle.checkpoint_engine.peft import export_adapter, import_adapter
from twinkle.model.fused.loss_head import rows_per_group
from twinkle.model.fused.model import FusedLoraModel
from twinkle.model.fused.training import AdamParams, Datum, TrainJob, TrainOutcome
from twinkle.module.lora import LoraConfig

MakeDatum = Callable[..., Datum]
LOSSES = ("cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo", "stable_reinforce")


def jobs_of(model, make_datum: MakeDatum, losses: tuple[str, ...] = ("cross_entropy", "ppo")) -> list[TrainJob]:
    rng = np.random.default_rng(0)
    return [
        TrainJob(
            model.create_adapter(LoraConfig(rank=3 + number, seed=number)),
            tuple(make_datum(rng, length) for length in (9, 70, 1)),
            loss,
        )
        for number, loss in enumerate(losses)
    ]


COMPUTED_TWICE = ("qwen3", "qwen3-moe", "qwen3_5-moe", "nemotron-h", "deepseek-v4")


@pytest.mark.parametrize(
    ("family", "activation_bytes"),
    [*((family, None) for family in FAMILIES), *((family, 1) for family in COMPUTED_TWICE)],
)
def test_a_pass_reads_its_results_at_once_and_all_gradients_at_once_and_is_sent_by_one_way(
    family: str, activation_bytes: int | None, make_datum: MakeDatum, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, reads = valueless_model(FAMILIES[family](), monkeypatch, activation_bytes=activation_bytes)
    jobs = jobs_of(model, make_datum)
    with Crossings() as crossings:
        outcomes = model.forward_backward(jobs)
    assert all(isinstance(outcome, TrainOutcome) for outcome in outcomes), outcomes
    assert crossings.counts == {}
    assert reads == {"fetch": 1, "all_finite": 1}


def test_no_loss_of_one_datum_reads_anything(make_datum: MakeDatum, monkeypatch: pytest.MonkeyPatch) -> None:
    model, reads = valueless_model(FAMILIES["qwen3"](), monkeypatch)
    jobs = jobs_of(model, make_datum, LOSSES)
    with Crossings() as crossings:
        outcomes = model.forward_backward(jobs)
    assert all(isinstance(outcome, TrainOutcome) for outcome in outcomes), outcomes
    assert crossings.counts == {}
    assert reads["fetch"] == 1


def test_a_pass_is_sent_and_attended_as_often_for_many_datums_as_for_one(
    make_datum: MakeDatum, monkeypatch: pytest.MonkeyPatch
) -> None:
    attended: list[int] = []
    kernel = valueless.packed

    def counted(query: torch.Tensor, *rest: object, **options: object) -> torch.Tensor:
        attended.append(len(query))
        return kernel(query, *rest, **options)

    monkeypatch.setattr(valueless, "packed", counted)
    model, _ = valueless_model(FAMILIES["qwen3"](), monkeypatch)
    adapter = model.create_adapter(LoraConfig(rank=4, seed=1))
    rng = np.random.default_rng(0)
    numbers, of_the_head = [], []
    attended.clear()
    for lengths in ((9,), (9, 5, 20, 9, 11)):
        with Crossings() as crossings:
            model.forward_backward([TrainJob(adapter, tuple(make_datum(rng, each) for each in lengths), "ppo")])
        adapter.clear_gradients()
        numbers.append(crossings.num_sent)
        of_the_head.append([crossings.calls[name] for name in ("gather", "scatter_add_", "mul_", "addmm_", "copy_")])
    # In all layers: tokens, positions, ends of sequences, ends and lengths of groups, scales, targets, losses' numbers.
    assert numbers == [8, 8]
    assert attended == [9, 9, 54, 54], "all sequences of a layer at once"
    assert of_the_head[0] == of_the_head[1], "but for the losses themselves"


def test_clients_own_losses_are_waited_for_once_in_a_pass(
    make_datum: MakeDatum, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, reads = valueless_model(FAMILIES["qwen3"](), monkeypatch)
    graph = graph_of(traced_losses.clipped_policy, {"logprobs": 1, "old_logprobs": 1, "advantages": 1, "mask": 1})
    rng = np.random.default_rng(0)
    data = []
    for length in (9, 20, 5):
        datum = make_datum(rng, length)
        own = {"old_logprobs": datum.inputs["logprobs"], "mask": datum.inputs["sequence_ratio_mask"]}
        data.append(Datum(datum.tokens, {**datum.inputs, **own}))
    job = TrainJob(model.create_adapter(LoraConfig(rank=4, seed=1)), tuple(data), "custom", graph=graph)
    jobs = [job, *jobs_of(model, make_datum)]
    with Crossings() as crossings:
        outcome, *_ = model.forward_backward(jobs)
    assert isinstance(outcome, TrainOutcome), outcome
    assert crossings.counts == {}
    # Their logprobs, and at the end of the pass what came of it.
    assert reads["fetch"] == 2


def test_a_fresh_adapter_goes_there_in_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = valueless_model(FAMILIES["qwen3-moe"](), monkeypatch)
    with Crossings() as crossings:
        model.create_adapter(LoraConfig(rank=4, seed=1))
    assert crossings.counts.total() == 1, crossings.counts


@pytest.mark.parametrize("family", ["qwen3", "qwen3-moe"])
def test_an_adapter_from_files_goes_there_in_one_copy(
    family: str, load_model: Callable[..., FusedLoraModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    files = export_adapter(load_model(family).create_adapter(LoraConfig(rank=4, seed=1)), "tiny")
    model, _ = valueless_model(FAMILIES[family](), monkeypatch)
    with Crossings() as crossings:
        import_adapter(model.pool, files, with_optimizer=False)
    assert crossings.counts.total() == 1, crossings.counts


def test_an_optimizer_step_reads_the_norm_alone(make_datum: MakeDatum, monkeypatch: pytest.MonkeyPatch) -> None:
    model, reads = valueless_model(FAMILIES["qwen3"](), monkeypatch)
    (job,) = jobs_of(model, make_datum, ("cross_entropy",))
    model.forward_backward([job])
    reads.clear()
    with Crossings() as crossings:
        model.optim_step(job.adapter, AdamParams(grad_clip_norm=0.1))
    assert crossings.counts == {}
    assert reads == {"l2_norm": 1}
    assert crossings.calls["_fused_adamw_"] == 1
    assert crossings.calls["lerp_"] == 0


def test_on_paper_one_datum_of_32768_tokens_trains_on_8b_within_80_gb_and_would_not_with_all_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The table of docs/engine.md; a pass keeps what is measured at start, here of the model as it is."""
    config = transformers.Qwen3Config(
        vocab_size=151_936,
        hidden_size=4096,
        intermediate_size=12_288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=False,
    )
    model, _ = valueless_model(config, monkeypatch)
    sizes = model.activation_sizes
    assert sizes is not None
    assert sizes.kept / 36 == pytest.approx(189_181, rel=0.001)
    num_tokens = 32_768
    weights = sum(each.nbytes for each in model.module.parameters())
    adapter = model.create_adapter(LoraConfig(rank=32, train_unembed=False))
    stack = 2 * adapter.params.numel()
    logits = 4 * config.vocab_size * rows_per_group(torch.device("cuda"), config.vocab_size)
    hidden = 2 * config.hidden_size * num_tokens
    beside = weights + adapter.size_bytes + stack + 3 * logits + 4 * hidden
    assert beside + sizes.pass_bytes(num_tokens, recomputed=True) < 45e9
    assert beside + sizes.pass_bytes(num_tokens, recomputed=False) > 200e9


def test_the_stand_in_tells_reads_and_crossings() -> None:
    device = torch.device("meta")
    there = torch.ones(3, device=device)
    with pytest.raises(RuntimeError):
        there.sum().item()
    with pytest.raises(NotImplementedError):
        there[there > 0]
    with Crossings() as crossings:
        torch.tensor([1, 2], device=device)
        torch.ones(2).to(device)
        there[[0, 1]]
    assert len(crossings.counts) == 3, crossings.counts
