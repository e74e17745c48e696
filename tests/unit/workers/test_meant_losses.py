"""Pairs and the base model alone, as clients of Tinker's dialect ask for them, against plain transformers and PEFT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers

from twinkle.core.adapter import AdapterConfig
from twinkle.core.settings import Settings
from twinkle.hub.tiny import make_tiny_model
from twinkle.loss import DPOLoss
from twinkle.metric import DPOMetric
from twinkle.wire.bodies.training import AdamParams
from twinkle.wire.training import ForwardBackwardBody, WireDatum, decode_data, encode_forward_backward
from twinkle.wire.training_result import ForwardBackwardResult
from twinkle.workers.engine import Pass
from twinkle.workers.engines.transformers_engine import TransformersEngine

LENGTHS = (14, 9, 21, 17)
SETTINGS = {"dpo_beta": 0.4, "dpo_sft_weight": 0.5}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(
        tmp_path_factory.mktemp("models") / "tiny", texts=["a tiny text"] * 4, hidden_size=32, layers=1, vocab_size=288
    )


@pytest.fixture(scope="module")
def engine(model_dir: Path) -> TransformersEngine:
    return TransformersEngine.from_settings(
        Settings(model=str(model_dir), model_name="tiny", threads=1, tokens_per_pass=32)
    )


def datums(seed: int, **inputs: list[np.ndarray]) -> tuple[WireDatum, ...]:
    """Rows whose first tokens are a prompt, which is not trained; each may bring more."""
    rng = np.random.default_rng(seed)
    rows = []
    for index, length in enumerate(LENGTHS):
        weights = (np.arange(length) >= 4).astype(np.float32)
        own = {name: values[index] for name, values in inputs.items()}
        targets = rng.integers(0, 260, length)
        rows.append(WireDatum(rng.integers(0, 260, length), {"target_tokens": targets, "weights": weights, **own}))
    return tuple(rows)


def request(
    seed: int, loss: str = "cross_entropy", *, forward_only: bool = False, config: Any = None, **inputs: Any
) -> ForwardBackwardBody:
    """As it comes out of the wire."""
    sent = ForwardBackwardBody("adapter", 1, forward_only, loss, config or {}, datums(seed, **inputs))
    return decode_data(encode_forward_backward(sent))


def trained(engine: TransformersEngine, seed: int) -> Any:
    """An adapter that has made a step, so that it is not the base model."""
    state = engine.create(AdapterConfig(base_model="tiny", rank=4, seed=seed, train_unembed=False))
    run(engine, state, request(seed))
    engine.optim_step(state, AdamParams(learning_rate=3e-2))
    return state


def run(engine: TransformersEngine, state: Any, *bodies: ForwardBackwardBody) -> list[ForwardBackwardResult]:
    answers = engine.run_passes([Pass(state=state, body=body) for body in bodies])
    for answer in answers:
        assert isinstance(answer, ForwardBackwardResult), answer
    return answers  # type: ignore[return-value]


def reference_of(engine: TransformersEngine, state: Any, seed: int) -> list[np.ndarray]:
    asked = request(seed, forward_only=True, config={"disable_lora": 1.0})
    return [np.asarray(row, np.float32) for row in run(engine, state, asked)[0].logprobs]


def logps_of(model: Any, body: ForwardBackwardBody) -> torch.Tensor:
    """Of every row's targets by a model of transformers, padded (B, T)."""
    rows = []
    for datum in body.data:
        logits_NV = model(input_ids=torch.from_numpy(datum.tokens)[None]).logits[0].float()
        targets_N = torch.from_numpy(np.array(datum.inputs["target_tokens"], np.int64))
        rows.append(torch.log_softmax(logits_NV, -1).gather(-1, targets_N[:, None])[:, 0])
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def labels_of(body: ForwardBackwardBody) -> torch.Tensor:
    rows = [
        torch.from_numpy(np.where(datum.inputs["weights"] == 0, -100, datum.inputs["target_tokens"]))
        for datum in body.data
    ]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-100)


def test_logprobs_without_the_adapter_are_the_base_models_whatever_was_trained(
    engine: TransformersEngine, model_dir: Path
) -> None:
    state, fresh = trained(engine, 1), engine.create(AdapterConfig(base_model="tiny", rank=8, seed=9))
    kept = engine.snapshot(state)
    asked = request(5, forward_only=True, config={"disable_lora": 1.0})

    # One pass, beside the adapter's own and somebody else's.
    alone, own, other = engine.run_passes(
        [
            Pass(state=state, body=asked),
            Pass(state=state, body=request(5, forward_only=True)),
            Pass(state=fresh, body=request(5, forward_only=True)),
        ]
    )

    base = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    with torch.no_grad():
        expected = logps_of(base, asked)
    for index, row in enumerate(alone.logprobs):  # type: ignore[union-attr]
        assert row.tobytes() == other.logprobs[index].tobytes()  # type: ignore[union-attr]
        assert row == pytest.approx(expected[index, : len(row)].numpy(), abs=1e-4)
        assert row != pytest.approx(own.logprobs[index], abs=1e-3)  # type: ignore[union-attr]
    assert engine.snapshot(state) == kept


def test_pairs_are_ranked_as_the_librarys_loss_and_metric_rank_them_in_peft(
    engine: TransformersEngine, model_dir: Path, tmp_path: Path
) -> None:
    state, other = trained(engine, 1), trained(engine, 2)
    for name, content in engine.export(state, with_optimizer=False).items():
        (tmp_path / name).write_bytes(content)
    reference = reference_of(engine, state, 5)
    body = request(5, "importance_sampling", config=SETTINGS, ref_logps=reference)
    policy = [np.full(length, -3.0, np.float32) for length in LENGTHS]
    company = request(6, "ppo", logprobs=policy, advantages=policy)

    answer, beside = engine.run_passes([Pass(state=state, body=body), Pass(state=other, body=company)])
    parked = engine.restore(engine.snapshot(state))
    told = engine.optim_step(state, AdamParams(learning_rate=1e-2))

    base = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    tuned = peft.PeftModel.from_pretrained(base, str(tmp_path), is_trainable=True)
    padded = torch.nn.utils.rnn.pad_sequence([torch.from_numpy(row) for row in reference], batch_first=True)
    inputs, outputs = {"labels": labels_of(body)}, {"logps": logps_of(tuned, body)}
    loss = DPOLoss(beta=0.4, sft_weight=0.5)(inputs, outputs, ref_logps=padded)["loss"]
    loss.backward()
    metric = DPOMetric(beta=0.4)
    metric.accumulate(inputs, outputs, ref_logps=padded)
    assert isinstance(answer, ForwardBackwardResult) and isinstance(beside, ForwardBackwardResult)
    assert answer.metrics["loss:sum"] == pytest.approx(float(loss.detach()), rel=1e-5)
    norm = torch.cat([each.grad.flatten() for each in tuned.parameters() if each.grad is not None]).norm()
    assert told["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    expected = metric.calculate()
    assert len(expected) == 8
    assert {name: told[name] for name in expected} == pytest.approx(
        {name: float(text) for name, text in expected.items()}, abs=2e-4
    )
    # What the window holds goes with the adapter.
    assert engine.optim_step(parked, AdamParams(learning_rate=1e-2)) == told


def test_a_window_tells_of_all_its_pairs_and_pairs_done_again_alone_give_the_same_bits(
    engine: TransformersEngine,
) -> None:
    state = trained(engine, 1)
    kept = engine.snapshot(state)
    reference = reference_of(engine, state, 5)
    bodies = [request(seed, "importance_sampling", config=SETTINGS, ref_logps=reference) for seed in (5, 7)]
    spoilt = request(8, "importance_sampling", config=SETTINGS, ref_logps=[np.full_like(r, 3e38) for r in reference])

    answers = run(engine, state, *bodies)
    (failed,) = engine.run_passes([Pass(state=state, body=spoilt)])
    told = engine.optim_step(state, AdamParams(learning_rate=1e-2))

    assert isinstance(failed, Exception)
    means = []
    for body, answer in zip(bodies, answers, strict=True):
        alone = engine.restore(kept)
        [again] = run(engine, alone, body)
        assert again.metrics == answer.metrics
        means.append(engine.optim_step(alone, AdamParams(learning_rate=1e-2)))
    for name in ("rewards/margins", "logps/chosen", "rewards/accuracies"):
        assert told[name] == pytest.approx((means[0][name] + means[1][name]) / 2, rel=1e-6)
    again_whole = engine.restore(kept)
    for body in bodies:
        run(engine, again_whole, body)
    assert engine.optim_step(again_whole, AdamParams(learning_rate=1e-2)) == told
    assert engine.snapshot(again_whole) == engine.snapshot(state)
    assert "rewards/margins" not in engine.optim_step(state, AdamParams(learning_rate=1e-2))
