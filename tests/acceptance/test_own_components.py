"""A reinforcement loop in which all thirteen components that the documents let people derive are a script's own.

Each has only the methods that the documents name for its base class.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch

from harness.hub_models import save_hub_model
from twinkle.advantage import Advantage
from twinkle.checkpoint_engine import CheckpointEngine, CheckpointEngineManager
from twinkle.data_format import LossOutput, SampledSequence, SampleResponse, SamplingParams
from twinkle.dataloader import DataLoader
from twinkle.dataset import Dataset, DatasetMeta
from twinkle.loss import Loss
from twinkle.metric import Metric
from twinkle.model import TransformersModel, TwinkleModel
from twinkle.patch import Patch
from twinkle.preprocessor import Filter, Preprocessor
from twinkle.processor import InputProcessor
from twinkle.reward import Reward
from twinkle.sampler import Sampler
from twinkle.template import Template

ROWS = [{"question": f"{one} + {other}", "answer": one + other} for one in range(4) for other in range(4)]
NUM_GENERATIONS = 2
BATCH_SIZE = 4


class Questions(Preprocessor):
    def __call__(self, rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
        return {
            "messages": [[{"role": "user", "content": question}] for question in rows["question"]],
            "user_data": [[{"answer": answer}] for answer in rows["answer"]],
        }


class NotZero(Filter):
    def __call__(self, row: dict[str, Any]) -> bool:
        return bool(row["answer"] != 0)


class Numbered(Template):
    """Changes what is written, and counts."""

    def encode(self, trajectory: Any, add_generation_prompt: bool = False, **settings: Any) -> Any:
        asked = {**trajectory, "messages": [{"role": "system", "content": "Add."}, *trajectory["messages"]]}
        return {**super().encode(asked, add_generation_prompt=add_generation_prompt, **settings), "is_ours": True}


class Sorted(InputProcessor):
    """Sees every batch before the model."""

    seen = 0

    def __call__(self, *arguments: Any, **settings: Any) -> Any:
        type(self).seen += 1
        return super().__call__(*arguments, **settings)


class Surrogate(Loss):
    def __call__(self, inputs: Any, outputs: Any, *, advantages: Any = None, **settings: Any) -> LossOutput:
        mask = inputs["labels"] != -100
        weights = torch.as_tensor(advantages, dtype=torch.float32)[:, None]
        return LossOutput(loss=-(outputs["logps"] * mask * weights).sum() / mask.sum(), num_tokens=0)


class Trained(Metric):
    def __init__(self, device_mesh: Any = None, process_group: Any = None, **settings: Any) -> None:
        super().__init__(device_mesh, process_group, **settings)

    def accumulate(self, inputs: Any, outputs: Any, **settings: Any) -> None:
        self.tokens += int((inputs["labels"] != -100).sum())

    def calculate(self) -> dict[str, Any]:
        tokens, self.tokens = self.tokens, 0
        return {"tokens": tokens}

    def reset(self) -> None:
        self.tokens = 0


class Descent(torch.optim.SGD):
    steps = 0

    def step(self, closure: Any = None) -> Any:
        type(self).steps += 1
        return super().step(closure)


class Halving(torch.optim.lr_scheduler.LRScheduler):
    def get_lr(self) -> list[float]:
        return [rate * 0.5**self.last_epoch for rate in self.base_lrs]


class Scaled(Patch):
    """Adds a buffer that shows it was there."""

    def __call__(self, module: Any, *arguments: Any, **settings: Any) -> Any:
        module.was_patched = True
        return module

    def unpatch(self, module: Any, *arguments: Any, **settings: Any) -> Any:
        del module.was_patched


class Short(Reward):
    def __call__(self, trajectories: list[Any], ground_truths: Any = None, **settings: Any) -> list[float]:
        return [-float(len(trajectory["messages"][-1]["content"])) for trajectory in trajectories]


class Centred(Advantage):
    def __call__(self, rewards: Any, num_generations: int = 1, scale: str = "group", **settings: Any) -> torch.Tensor:
        groups = torch.tensor(rewards).view(-1, num_generations)
        return (groups - groups.mean(-1, keepdim=True)).flatten()


class Dice(Sampler):
    """Draws with numpy; takes weights so that a sync has somebody to bring them to."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)
        self.received: dict[str, torch.Tensor] = {}

    def sample(
        self, inputs: Any, sampling_params: Any = None, *arguments: Any, **settings: Any
    ) -> list[SampleResponse]:
        return [self._response(self.encode_trajectory(row, True) if "input_ids" not in row else row) for row in inputs]

    def receive_weights(self, weights: Any) -> None:
        self.received = {name: tensor.clone() for name, tensor in weights}

    def _response(self, row: Any) -> SampleResponse:
        tokens = self.rng.integers(10, 60, self.rng.integers(1, 5)).tolist()
        prompt = list(row["input_ids"])
        labels = [-100] * (len(prompt) - 1) + tokens + [-100]
        feature = {
            **row,
            "input_ids": prompt + tokens,
            "labels": labels,
            "messages": [*row["messages"], {"role": "assistant", "content": self.decode_response(tokens)}],
        }
        for name in ("attention_mask", "position_ids", "length"):
            feature.pop(name, None)
        logprobs = [[(token, -4.0)] for token in tokens]
        return SampleResponse([SampledSequence("stop", tokens, logprobs=logprobs, new_input_feature=feature)])


class Parcel(CheckpointEngine):
    """Hands weights over as bytes."""

    calls: list[str]

    def __init__(self) -> None:
        self.calls, self.sent = [], []

    def prepare(self) -> None:
        self.calls.append("prepare")

    @classmethod
    def build_topology(cls, trainer_world_size: int, rollout_world_size: int, metadata: Any) -> Any:
        return {"side": ["trainer"]}, {"side": []}

    def init_process_group(self, **settings: Any) -> None:
        self.calls.append(f"init {settings['side']}")

    async def send_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        self.sent = [(name, tensor.detach().numpy().tobytes(), tensor.shape) for name, tensor in weights]

    async def receive_weights(self) -> Any:
        for name, data, shape in self.sent:
            yield name, torch.frombuffer(bytearray(data), dtype=torch.float32).view(shape)

    def finalize(self) -> None:
        self.calls.append("finalize")


class Halves(TwinkleModel):
    """A model of one's own, around one of ours: it defines the calls of the loop below."""

    def __init__(self, model: TransformersModel) -> None:
        self.model = model
        self.losses: list[float] = []

    def forward(self, *, inputs: Any, **settings: Any) -> Any:
        return self.model.forward(inputs=inputs, **settings)

    def calculate_loss(self, **settings: Any) -> float:
        self.losses.append(self.model.calculate_loss(**settings))
        return self.losses[-1]

    def backward(self, **settings: Any) -> None:
        self.model.backward(**settings)

    def clip_grad_norm(self, max_grad_norm: float = 1.0, norm_type: float = 2, **settings: Any) -> Any:
        return self.model.clip_grad_norm(max_grad_norm, norm_type)

    def step(self, *arguments: Any, **settings: Any) -> None:
        self.model.step()

    def zero_grad(self, **settings: Any) -> None:
        self.model.zero_grad()

    def lr_step(self, **settings: Any) -> None:
        self.model.lr_step()

    def calculate_metric(self, is_training: bool = True, **settings: Any) -> Any:
        return self.model.calculate_metric(is_training)

    def get_state_dict(self, **settings: Any) -> Any:
        return self.model.get_state_dict()

    def get_peft_config_dict(self, **settings: Any) -> Any:
        return {}

    def send_weights(self, **settings: Any) -> Any:
        return iter(self.get_state_dict().items())


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_hub_model(tmp_path_factory.mktemp("model") / "tiny", "qwen3"))


def test_a_loop_runs_whose_every_component_is_the_scripts_own(base: str, tmp_path: Path) -> None:
    dataset = Dataset(DatasetMeta(data=ROWS))
    dataset.filter(NotZero())
    dataset.map(Questions())
    dataset.set_template(Numbered, model_id=base, max_length=128)
    dataset.encode(add_generation_prompt=True)
    inner = TransformersModel(model_id=base, mixed_precision="no")
    inner.add_adapter_to_model("default", peft.LoraConfig(r=4, target_modules="all-linear"))
    inner.apply_patch(Scaled())
    inner.set_processor(Sorted)
    inner.set_loss(Surrogate())
    inner.set_optimizer(Descent, lr=1e-2)
    inner.set_lr_scheduler(Halving)
    inner.add_metric(Trained, is_training=True)
    model = Halves(inner)
    sampler = Dice()
    sampler.set_template(Numbered, model_id=base)
    engine = Parcel()
    manager = CheckpointEngineManager(model=model, sampler=sampler, engine=engine)

    norms = []
    for batch in DataLoader(dataset=dataset, batch_size=BATCH_SIZE):
        manager.sync_weights()
        prompts = [row for row in batch for _ in range(NUM_GENERATIONS)]
        responses = sampler.sample(prompts, SamplingParams(max_tokens=4))
        rows = [sequence.new_input_feature for response in responses for sequence in response.sequences]
        advantages = Centred()(Short()(rows), num_generations=NUM_GENERATIONS)
        model.forward_backward(inputs=rows, advantages=advantages.tolist())
        norms.append(model.clip_grad_and_step())
    metrics = model.calculate_metric(is_training=True)

    assert len(dataset) == len(ROWS) - 1 and all(row["is_ours"] for row in dataset)
    assert inner.model.was_patched
    assert len(norms) == 4 == Descent.steps == len(model.losses)
    assert any(norm > 0 for norm in norms)
    assert metrics["tokens"] >= 15 * NUM_GENERATIONS
    assert Sorted.seen == 4
    assert inner.optimizer_group["default"].learning_rates()[0] == pytest.approx(1e-2 * 0.5**4)
    assert engine.calls == ["prepare", "init trainer", "finalize"] * 4
    assert set(sampler.received) == set(model.get_state_dict())
