"""Routing of a mixture of experts: recorded in one pass, taken again in another, whatever the routers say by then."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from harness.training import Row, gradients, make_rows
from twinkle.core.errors import InvalidInput
from twinkle.hub.tiny import make_tiny_model
from twinkle.model import MultiLoraTransformersModel, TransformersModel
from twinkle.model.transformers.moe.router_replay import RouterReplayAction

MakeConfig = Callable[..., peft.LoraConfig]
TEXTS = ["the quick brown fox jumps over the lazy dog, and the dog looks at the fox. " * 8]
RECORD, REPLAY = RouterReplayAction.RECORD, RouterReplayAction.REPLAY_FORWARD
ROWS = make_rows(0)
LENGTHS = [len(row["input_ids"]) for row in ROWS]


@pytest.fixture(scope="module")
def moe_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "moe"
    return make_tiny_model(
        folder, texts=TEXTS, family="qwen3_moe", vocab_size=288, hidden_size=32, layers=2, context=128
    )


def make(folder: Path, **settings: Any) -> TransformersModel:
    return TransformersModel(model_id=str(folder), **settings)


def disturb(model: TransformersModel) -> None:
    """Routers that send tokens elsewhere."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.model.named_parameters():
            if name.endswith("gate.weight"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator))


def with_routes(rows: list[Row], routes: Any) -> list[Row]:
    return [{**row, "routed_experts": route} for row, route in zip(rows, routes, strict=True)]


def trained(model: TransformersModel, values: torch.Tensor) -> torch.Tensor:
    return values[model.group("").require_last("the test").inputs["labels"] != -100]


def test_a_pass_goes_the_way_that_was_recorded(moe_dir: Path) -> None:
    model = make(moe_dir)
    output = model.forward_only(inputs=ROWS, router_replay_action=RECORD)
    routes, logps = output.routed_experts, trained(model, output["logps"])
    assert routes.shape[0] == len(ROWS) and routes.shape[1] == max(LENGTHS) and routes.shape[3] == 2
    assert all((routes[i, :n] >= 0).all() and (routes[i, n:] == -1).all() for i, n in enumerate(LENGTHS))
    replayed = model.forward_only(inputs=with_routes(ROWS, routes), router_replay_action=REPLAY)
    torch.testing.assert_close(trained(model, replayed["logps"]), logps)
    # Other experts, other logprobs: the routing that is given counts, not the routers'.
    others = with_routes(ROWS, torch.where(routes < 0, routes, (routes + 1) % 8))
    elsewhere = trained(model, model.forward_only(inputs=others, router_replay_action="replay_forward")["logps"])
    assert not torch.allclose(elsewhere, logps, atol=1e-4)
    freely = model.forward_only(inputs=others)
    assert torch.equal(trained(model, freely["logps"]), logps) and "routed_experts" not in freely


@pytest.mark.parametrize("settings", [{}, {"padding_side": "left"}, {"padding_free": True}])
@pytest.mark.parametrize("size", [None, 3])
def test_rows_keep_their_routing_however_they_are_laid_out(
    moe_dir: Path, settings: dict[str, Any], size: int | None
) -> None:
    model = make(moe_dir)
    expected = model.forward_only(inputs=ROWS, router_replay_action=RECORD)["routed_experts"]
    model.set_processor("InputProcessor", **settings)
    model.set_loss("GRPOLoss")
    found = model.forward_only(inputs=ROWS, router_replay_action=RECORD, micro_batch_size=size)["routed_experts"]
    by_row = [row[(row >= 0).all(-1).all(-1)] for row in found]
    assert all(torch.equal(row, expected[i, :n]) for i, (row, n) in enumerate(zip(by_row, LENGTHS, strict=True)))
    disturb(model)
    kwargs = {"advantages": [1.0, -1.0, 0.5, 2.0], "router_replay_action": REPLAY}
    model.forward_backward(inputs=with_routes(ROWS, by_row), micro_batch_size=size, **kwargs)
    found_gradients = gradients_of_experts(model)
    plain = make(moe_dir, gradient_checkpointing=False)
    disturb(plain)
    plain.set_loss("GRPOLoss")
    plain.forward_backward(inputs=with_routes(ROWS, by_row), **kwargs)
    for name, gradient in gradients_of_experts(plain).items():
        torch.testing.assert_close(found_gradients[name], gradient, atol=1e-6, rtol=1e-3)


def gradients_of_experts(model: TransformersModel) -> dict[str, torch.Tensor]:
    """Of the experts and their routers; checkpointing runs the routers again in the backward pass."""
    return {
        name: parameter.grad.clone()
        for name, parameter in model.model.named_parameters()
        if ".mlp." in name and parameter.grad is not None
    }


def test_a_row_that_is_routed_in_part_goes_freely_for_the_rest(moe_dir: Path, lora: MakeConfig) -> None:
    model = make(moe_dir)
    model.add_adapter_to_model("a", lora())
    routes = model.forward_only(inputs=ROWS, router_replay_action=RECORD)["routed_experts"]
    logps = model.forward_only(inputs=ROWS)["logps"]
    # A sampler has not run the last token.
    short = [route[: n - 1].tolist() for route, n in zip(routes, LENGTHS, strict=True)]
    some = [*with_routes(ROWS[:2], short[:2]), *ROWS[2:]]
    output = model.forward_backward(inputs=some, router_replay_action=REPLAY)
    torch.testing.assert_close(trained(model, output["logps"]), trained(model, logps))
    assert gradients(model)


def test_what_cannot_be_replayed_is_said(
    moe_dir: Path, plain: TransformersModel, fused: MultiLoraTransformersModel, lora: MakeConfig
) -> None:
    model = make(moe_dir)
    for routes, message in (
        ([[[0, 1]]] * 4, "this model's is"),
        ([torch.full((3, model_layers(model), 2), 8)] * 4, "experts that are not there"),
    ):
        with pytest.raises(InvalidInput, match=message):
            model.forward_only(inputs=with_routes(ROWS, routes), router_replay_action=REPLAY)
    with pytest.raises(InvalidInput, match="record, replay_forward"):
        model.forward_only(inputs=ROWS, router_replay_action="R2")
    with pytest.raises(InvalidInput, match="has no experts"):
        plain.forward_only(inputs=ROWS, router_replay_action=RECORD)
    fused.add_adapter_to_model("a", lora())
    with pytest.raises(InvalidInput, match="use TransformersModel"):
        fused.forward_backward(inputs=ROWS, router_replay_action=REPLAY)
    disabled = make(moe_dir, enable_router_replay=False)
    assert "routed_experts" not in disabled.forward_only(inputs=ROWS, router_replay_action=RECORD)


def model_layers(model: TransformersModel) -> int:
    return sum("experts" in dict(module.named_children()) for module in model.model.modules())
