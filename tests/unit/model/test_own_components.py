"""A script's own components, with no more than the calls that the documents name for each."""

from collections.abc import Callable, Mapping
from typing import Any

import peft
import pytest
import torch

from harness.training import Row
from twinkle.loss import Loss
from twinkle.metric import Metric
from twinkle.model import MultiLoraTransformersModel, TransformersModel, TwinkleModel

MakeConfig = Callable[..., peft.LoraConfig]


class Line(TwinkleModel):
    """Fits y = w x; knows nothing of this library but its base class."""

    def __init__(self) -> None:
        self.weight = torch.nn.Parameter(torch.tensor(0.0))
        self.optimizer = torch.optim.SGD([self.weight], lr=0.1)

    def forward(self, *, inputs: Any, **kwargs: Any) -> dict[str, Any]:
        x, y = (torch.tensor([row[key] for row in inputs]) for key in ("x", "y"))
        self.error = (self.weight * x - y).square().mean()
        return {"predictions": (self.weight * x).detach()}

    def calculate_loss(self, **kwargs: Any) -> float:
        return float(self.error.detach())

    def backward(self, **kwargs: Any) -> None:
        self.error.backward()

    def clip_grad_norm(self, max_grad_norm: float = 1.0, norm_type: float = 2, **kwargs: Any) -> float:
        return float(torch.nn.utils.clip_grad_norm_([self.weight], max_grad_norm))

    def step(self, **kwargs: Any) -> None:
        self.optimizer.step()

    def zero_grad(self, **kwargs: Any) -> None:
        self.optimizer.zero_grad()

    def lr_step(self, **kwargs: Any) -> None:
        pass


def test_a_model_of_ones_own_trains_with_the_calls_it_defines() -> None:
    model = Line()
    losses = []
    for _ in range(50):
        output = model.forward_backward(inputs=[{"x": 1.0, "y": 2.0}, {"x": 2.0, "y": 4.0}])
        losses.append(output.loss)
        model.clip_grad_and_step(max_grad_norm=10.0)
    assert isinstance(model, TwinkleModel) and output["predictions"].shape == (2,)
    assert losses[-1] < 1e-3 < losses[0]
    with pytest.raises(NotImplementedError, match="Line does not define save"):
        model.save("there")


class Squares(Loss):
    """Returns a bare mean, as the base class of the documents allows."""

    def __call__(self, inputs: Any, outputs: Any, **kwargs: Any) -> Any:
        mask = inputs["labels"] != -100
        return (outputs["logps"] * mask).square().sum() / mask.sum()


class Counted(Squares):
    """Says that its value is a mean by a count of 0."""

    def __call__(self, inputs: Any, outputs: Any, **kwargs: Any) -> Any:
        return {"loss": super().__call__(inputs, outputs, **kwargs), "num_tokens": 0}


class Rows(Metric):
    """Takes what the documents' constructor takes, or nothing at all."""

    def __init__(self, device_mesh: Any, process_group: Any, **kwargs: Any) -> None:
        super().__init__(device_mesh, process_group, **kwargs)

    def reset(self) -> None:
        self.num_rows = 0

    def accumulate(self, inputs: Mapping[str, torch.Tensor], outputs: Mapping[str, Any], **kwargs: Any) -> None:
        self.num_rows += len(inputs["labels"])

    def calculate(self) -> dict[str, Any]:
        num_rows = self.num_rows
        self.reset()
        return {"rows": num_rows}


class Passes(Metric):
    """Calls no constructor but its own."""

    def __init__(self) -> None:
        self.num_passes = 0

    def reset(self) -> None:
        self.num_passes = 0

    def accumulate(self, inputs: Any, outputs: Any, **kwargs: Any) -> None:
        self.num_passes += 1

    def calculate(self) -> dict[str, Any]:
        return {"passes": self.num_passes}


@pytest.mark.parametrize("kind", ["fused", "plain"])
@pytest.mark.parametrize("loss", [Squares, Counted])
def test_losses_and_metrics_of_ones_own_take_part(
    request: pytest.FixtureRequest, kind: str, loss: type[Loss], lora: MakeConfig, rows: list[Row]
) -> None:
    model: MultiLoraTransformersModel | TransformersModel = request.getfixturevalue(kind)
    model.add_adapter_to_model("a", lora())
    model.set_loss(loss)
    model.set_optimizer("AdamW", lr=1e-2)
    model.add_metric(Rows, is_training=True)
    model.add_metric(Passes, is_training=True)
    losses = []
    for _ in range(4):
        losses.append(model.forward_backward(inputs=rows)["loss"])
        model.clip_grad_and_step()
    results = model.calculate_metric(is_training=True)
    assert losses[-1] < losses[0]
    assert results["rows"] == 4 * len(rows) and results.result["passes"] == 4
