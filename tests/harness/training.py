"""Rows to train on, and plain PEFT on plain transformers to compare with."""

from pathlib import Path
from typing import Any

import peft
import torch
import transformers

from twinkle.model import TwinkleModel

LENGTHS = (7, 4, 9, 5)

Row = dict[str, Any]


def make_rows(seed: int, lengths: tuple[int, ...] = LENGTHS, vocab_size: int = 280) -> list[Row]:
    """Rows of random tokens; the first two positions of each are not trained."""
    generator = torch.Generator().manual_seed(seed)
    made: list[Row] = []
    for length in lengths:
        tokens = torch.randint(10, vocab_size, (length + 1,), generator=generator).tolist()
        made.append({"input_ids": tokens[:-1], "labels": [-100, -100, *tokens[3:]], "messages": ["ignored"]})
    return made


def randomize(model: TwinkleModel, adapter_name: str, seed: int = 5) -> None:
    """Give B values too: fresh adapters change nothing, and A has no gradient."""
    generator = torch.Generator().manual_seed(seed)
    group = model.group(adapter_name)
    with torch.no_grad():
        for parameter in group.parameters.values():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    model._publish(group)


def reference_model(model_dir: Path, config: peft.LoraConfig, state: dict[str, torch.Tensor]) -> Any:
    """Plain PEFT on plain transformers, with the given adapter weights."""
    base = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    model = peft.get_peft_model(base, config, adapter_name="ref")
    peft.set_peft_model_state_dict(model, state, adapter_name="ref")
    return model.train()


def reference_logits(model: Any, rows: list[Row]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits (B, T, V) and labels (B, T), by padding by hand."""
    width = max(len(row["input_ids"]) for row in rows)
    ids = torch.tensor([row["input_ids"] + [0] * (width - len(row["input_ids"])) for row in rows])
    mask = torch.tensor([[1] * len(row["input_ids"]) + [0] * (width - len(row["input_ids"])) for row in rows])
    labels = torch.tensor([row["labels"] + [-100] * (width - len(row["labels"])) for row in rows])
    return model(input_ids=ids, attention_mask=mask).logits, labels


def reference_logps(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(logits, dim=-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]


def reference_gradients(model: Any) -> dict[str, torch.Tensor]:
    return {
        name.replace(".ref.", "."): parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def gradients(model: TwinkleModel, adapter_name: str = "") -> dict[str, torch.Tensor]:
    """The gradients of an adapter that has had a backward pass."""
    found: dict[str, torch.Tensor] = {}
    for name, parameter in model.group(adapter_name).parameters.items():
        assert parameter.grad is not None
        found[name] = parameter.grad.clone()
    return found
