"""Whatever takes the id of a model takes all its forms, from the caches as the hubs' own clients leave them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from peft import LoraConfig

from harness.hub_world import HubWorld, make_hub_world
from twinkle.core.errors import InvalidInput
from twinkle.core.settings import Settings
from twinkle.data_format import SamplingParams
from twinkle.hub import HubOperation
from twinkle.hub.support import check_model
from twinkle.infra.process_group import leave_world
from twinkle.model import MultiLoraTransformersModel, TransformersModel
from twinkle.model.megatron import MegatronModel
from twinkle.model.megatron.layout import leave_layout
from twinkle.sampler import TorchSampler, vLLMSampler
from twinkle.sampler.scripts import local
from twinkle.template import Template
from twinkle.workers.engines.transformers_engine import TransformersEngine

MODEL = "Qwen/Qwen3-4B"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> HubWorld:
    return make_hub_world(tmp_path_factory.mktemp("hubs"), models=(MODEL,))


@pytest.fixture(autouse=True)
def _caches_alone(world: HubWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in world.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TWINKLE_OFFLINE", "1")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", world.hugging_face / "datasets")


@pytest.mark.parametrize("form", [MODEL, f"ms://{MODEL}", f"hf://{MODEL}", f"ms://ms://{MODEL}", "hf://{folder}"])
def test_models_and_templates_take_every_form(form: str, world: HubWorld) -> None:
    form = form.format(folder=world.model("qwen3"))
    assert Template(form).tokenizer.chat_template
    assert TransformersModel(model_id=form, trust_remote_code=True).model.config.model_type == "qwen3"
    assert MultiLoraTransformersModel(model_id=form).model.config.model_type == "qwen3"


def test_megatrons_model_takes_every_form(world: HubWorld) -> None:
    try:
        for form in (MODEL, f"ms://{MODEL}", f"hf://{MODEL}", f"hf://{world.model('qwen3')}"):
            assert MegatronModel(model_id=form).hf_config.model_type == "qwen3"
    finally:
        leave_layout()
        leave_world()


@pytest.mark.parametrize("kind", [TorchSampler, vLLMSampler])
@pytest.mark.parametrize("form", [MODEL, f"ms://{MODEL}", f"hf://{MODEL}", "ms://{folder}", "{folder}"])
def test_samplers_take_every_form(
    form: str, kind: type[TorchSampler], world: HubWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Where vLLM is installed its model is not loaded for this.
    monkeypatch.setattr(local, "find_spec", lambda name: None)
    sampler = kind(form.format(folder=world.model("qwen3")))

    (answer,) = sampler.sample([{"input_ids": [7, 8, 9]}], SamplingParams(max_tokens=1))
    assert len(answer.sequences[0].tokens) == 1


def test_a_model_of_a_worker_is_an_id_of_either_hub() -> None:
    check_model(f"ms://{MODEL}")
    engine = TransformersEngine.from_settings(Settings(model=f"ms://{MODEL}", threads=1))
    assert engine.capabilities.base_model == f"ms://{MODEL}"
    assert engine.capabilities.tokenizer_path is not None


def test_an_adapter_names_its_base_by_the_id_that_others_know(tmp_path: Path) -> None:
    fused = MultiLoraTransformersModel(model_id=f"ms://{MODEL}")
    fused.add_adapter_to_model("a", LoraConfig(r=2, target_modules="all-linear"))
    fused.save("one", output_dir=str(tmp_path), adapter_name="a")
    written = json.loads((tmp_path / "one" / "adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == MODEL


def test_a_checkpoint_on_a_hub_is_loaded_by_its_id(world: HubWorld, tmp_path: Path) -> None:
    trained = MultiLoraTransformersModel(model_id=MODEL)
    trained.add_adapter_to_model("a", LoraConfig(r=2, target_modules=["q_proj"]))
    trained.set_optimizer("AdamW", lr=1e-2)
    trained.forward_backward(inputs=[{"input_ids": [7, 8, 9], "labels": [8, 9, -100]}])
    trained.clip_grad_and_step()
    world.place_in_modelscope(Path(str(trained.save("one", output_dir=tmp_path))), "team/adapter")
    plain = TransformersModel(model_id=MODEL)

    for number, form in enumerate(("ms://team/adapter", "team/adapter@master")):
        plain.add_adapter_to_model(f"begun-{number}", LoraConfig(r=2, target_modules=["q_proj"]))
        plain.load(form, token="a-token", adapter_name=f"begun-{number}")
        plain.add_adapter_to_model(f"given-{number}", form)
        for name in (f"begun-{number}", f"given-{number}"):
            found = plain.get_state_dict(adapter_name=name)
            assert all(found[key].equal(value) for key, value in trained.get_state_dict().items())
    with pytest.raises(InvalidInput, match=r"name: there is no checkpoint directory team/none .*the hubs have none"):
        plain.load("team/none", adapter_name="begun-0")
    with pytest.raises(InvalidInput, match="config_or_dir: there is no checkpoint directory checkpoint-3"):
        plain.add_adapter_to_model("other", "checkpoint-3")


@pytest.mark.parametrize(
    ("data_id", "subset", "column"),
    [
        ("ms://swift/self-cognition", "default", "query"),
        ("ms://modelscope/gsm8k", "main", "question"),
        ("hf://openai/gsm8k", "main", "question"),
        ("ms://hjh0119/shareAI-Llama3-DPO-zh-en-emoji", "default", "prompt"),
        ("ms://zouxuhong/Countdown-Tasks-3to4", "default", "nums"),
    ],
)
def test_data_sets_of_the_documents_are_found_in_each_layout(data_id: str, subset: str, column: str) -> None:
    rows = HubOperation.load_dataset(data_id, subset, "train")
    assert column in rows.column_names and len(rows) > 0
