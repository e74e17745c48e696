"""A checkpoint of ours in the hands of plain transformers and PEFT."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import peft
import safetensors.torch
import torch
import transformers

from twinkle.model import TransformersModel


def assert_same_in_peft(base: Path, checkpoint: Path) -> None:
    """Plain PEFT gives each token the log-probability that our model gives it with this adapter, and not the base's."""
    trained = safetensors.torch.load_file(checkpoint / "adapter_model.safetensors")
    assert any(tensor.abs().max() > 0 for name, tensor in trained.items() if "lora_B" in name)
    rng = np.random.default_rng(0)
    tokens = rng.integers(5, 300, 24)
    ids = torch.tensor(tokens)[None]
    architecture = transformers.AutoConfig.from_pretrained(base).architectures[0]
    plain = getattr(transformers, architecture).from_pretrained(base, dtype=torch.float32).eval()
    with torch.no_grad():
        untrained = plain(input_ids=ids).logits.log_softmax(-1)
        opened = peft.PeftModel.from_pretrained(plain, checkpoint).eval()
        expected = opened(input_ids=ids).logits.log_softmax(-1)
    ours = TransformersModel(model_id=str(base), mixed_precision="no")
    ours.add_adapter_to_model("default", peft.LoraConfig.from_pretrained(checkpoint))
    ours.load(str(checkpoint))
    row = {"input_ids": tokens.tolist(), "labels": [*tokens[1:].tolist(), -100]}
    answer = ours.forward_only(inputs=[row])

    logps = torch.as_tensor(answer["logps"])[0, :-1]
    assert torch.allclose(logps, expected[0, :-1].gather(-1, ids[0, 1:, None])[:, 0], atol=1e-4)
    assert not torch.allclose(expected, untrained, atol=1e-3)
