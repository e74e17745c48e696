"""DeepSeek-V4 has a Linear whose weight is many: adapters leave it out, or say why it cannot be named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

from harness.families import FAMILIES, stir
from harness.training import make_rows
from twinkle.core.errors import InvalidInput
from twinkle.model import TransformersModel


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(FAMILIES["deepseek-v4"]())
    stir(model)
    path = tmp_path_factory.mktemp("model") / "deepseek"
    model.save_pretrained(path)
    return path


@pytest.mark.parametrize("excluded", [None, ["kv_proj"], r".*\.kv_proj"], ids=["nothing", "names", "a pattern"])
def test_all_linear_layers_are_those_that_an_update_fits(folder: Path, tmp_path: Path, excluded: Any) -> None:
    model = TransformersModel(model_id=str(folder), mixed_precision="no")
    config = peft.LoraConfig(r=4, target_modules="all-linear", exclude_modules=excluded)
    model.add_adapter_to_model("default", config)
    model.set_optimizer("AdamW", lr=1e-2)
    rows = make_rows(0, (7, 4))

    model.forward_backward(inputs=rows)
    model.clip_grad_and_step()
    saved = model.save("end", output_dir=tmp_path)

    names = set(model.get_state_dict())
    assert any("o_b_proj" in name for name in names)
    assert not any("o_a_proj" in name for name in names)
    assert any("kv_proj" in name for name in names) is (excluded is None)
    base = transformers.AutoModelForCausalLM.from_pretrained(folder)
    plain = peft.PeftModel.from_pretrained(base, saved).eval()
    ids = torch.tensor([rows[0]["input_ids"]])
    with torch.no_grad():
        expected = plain(ids).logits
    found = model.forward_only(inputs=[rows[0]], return_logits=True).logits
    torch.testing.assert_close(found[:, : ids.shape[1]], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("named", [["q_b_proj", "o_a_proj"], r".*self_attn\.o_[ab]_proj"], ids=["names", "a pattern"])
def test_an_adapter_that_names_it_is_refused_before_a_pass_fails(folder: Path, named: Any) -> None:
    model = TransformersModel(model_id=str(folder), mixed_precision="no")

    with pytest.raises(InvalidInput, match=r"target_modules: take in .*o_a_proj.*leave o_a_proj out"):
        model.add_adapter_to_model("default", peft.LoraConfig(r=4, target_modules=named))

    model.add_adapter_to_model("default", peft.LoraConfig(r=4, target_modules=["o_b_proj"]))
