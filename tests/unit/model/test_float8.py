"""Products in eight bits, emulated where there is no GPU that makes them: needs torchao."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest

from harness.training import make_rows
from twinkle.model import TransformersModel, float8, transformers_model

pytest.importorskip("torchao.float8", reason="torchao is not installed: pip install 'twinkle-queue[fp8]'")


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU rounds to eight bits and multiplies in more."""

    def use(model: Any) -> None:
        float8.use_float8(model, emulate=True)

    monkeypatch.setattr(transformers_model, "check_float8", lambda device: None)
    monkeypatch.setattr(transformers_model, "use_float8", use)


@pytest.mark.parametrize("adapter", [False, True])
def test_linear_layers_compute_in_float8_and_train_what_more_bits_train(
    model_dir: Path, emulated: None, adapter: bool
) -> None:
    losses: dict[str, list[float]] = {}
    for precision in ("fp8", "no"):
        model = TransformersModel(model_id=str(model_dir), mixed_precision=precision)  # type: ignore[arg-type]
        if adapter:
            model.add_adapter_to_model("a", peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=True))
        model.set_optimizer("AdamW", lr=1e-2)
        losses[precision] = []
        for _ in range(6):
            losses[precision].append(model.forward_backward(inputs=make_rows(0))["loss"])
            model.clip_grad_and_step()
        kinds = {type(module).__name__ for module in model.model.modules()}
        assert ("Float8Linear" in kinds) == (precision == "fp8")
        assert not any("scale" in name for name in model.get_state_dict())

    assert losses["fp8"] != losses["no"]
    assert losses["fp8"] == pytest.approx(losses["no"], rel=0.05)
    assert losses["fp8"][-1] < losses["fp8"][0]
