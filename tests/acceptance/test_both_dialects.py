"""What Twinkle's servers offer, on a whole service with a real model: preferences by the SDK, folders by the client."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import peft
import pytest
import tinker
import torch
import transformers

from harness.served import Served
from twinkle.server.model.tinker_datum import input_feature_to_datum
from twinkle_client.client import TwinkleClient
from twinkle_client.errors import InvalidInput

ROW = {"input_ids": [11, 12, 13, 14, 15], "labels": [12, 13, 14, 15, -100]}


def pairs() -> list[tinker.Datum]:
    """Two pairs, chosen before rejected."""
    rows = [[(7 * position + 11 * row) % 50 + 10 for position in range(8 + 3 * row)] for row in range(4)]
    return [input_feature_to_datum({"input_ids": tokens, "labels": [-100, -100, *tokens[3:], -100]}) for tokens in rows]


def test_preferences_are_learnt_against_the_base_model_as_a_script_of_upstream_asks(served: Served) -> None:
    run = served.client("preferences").create_lora_training_client(base_model="tiny", rank=4)
    told, references = [], []
    for _ in range(3):
        data = pairs()
        reference = run.forward(data, "cross_entropy", loss_fn_config={"disable_lora": True}).result()  # type: ignore[dict-item]
        for datum, row in zip(data, reference.loss_fn_outputs, strict=True):
            datum.loss_fn_inputs["ref_logps"] = row["logprobs"]
        references.append([row["logprobs"].data for row in reference.loss_fn_outputs])
        passed = run.forward_backward(data, "importance_sampling", loss_fn_config={"dpo_beta": 0.5})
        stepped = run.optim_step(tinker.AdamParams(learning_rate=1e-2)).result().metrics
        assert stepped is not None
        told.append((passed.result().metrics["loss:sum"], stepped["rewards/margins"]))

    assert references[0] == references[1] == references[2]
    assert told[0] == (pytest.approx(math.log(2), abs=1e-5), pytest.approx(0.0, abs=1e-5))
    assert told[0][0] > told[1][0] > told[2][0]
    assert told[0][1] < told[1][1] < told[2][1]
    with pytest.raises(tinker.TinkerError, match="has 3 datums; DPOLoss takes pairs"):
        run.forward_backward(data[:3], "importance_sampling", loss_fn_config={"dpo_beta": 0.5}).result()


def test_an_adapter_of_an_opened_folder_gives_the_logprobs_that_peft_gives_it(
    served: Served, tiny_model: Path, opened_folder: Path, tmp_path: Path
) -> None:
    torch.manual_seed(3)
    base = transformers.AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    tuned = peft.get_peft_model(base, config).eval()
    for folder in (opened_folder / "mine", tmp_path / "mine"):
        tuned.save_pretrained(folder)
    with torch.no_grad():
        logits_NV = tuned(input_ids=torch.tensor([ROW["input_ids"]])).logits[0]
    wanted = torch.log_softmax(logits_NV, -1)[:4].gather(-1, torch.tensor(ROW["labels"][:4])[:, None])[:, 0]

    with TwinkleClient(served.url, served.create_key("folders")) as client:
        model = client.model("tiny")
        model.add_adapter_to_model("a", {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]})
        before = np.asarray(model.forward_only(inputs=[ROW]).logps[0][:4])
        model.load(str(opened_folder / "mine"))
        found = np.asarray(model.forward_only(inputs=[ROW]).logps[0][:4])
        with pytest.raises(InvalidInput, match="lies outside of the folders that the operator has opened"):
            model.load(str(tmp_path / "mine"))
        model.remove_adapter()

    assert found == pytest.approx(wanted.numpy(), abs=1e-4)
    assert np.abs(before - found).max() > 1e-2
