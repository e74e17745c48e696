"""What is saved is complete, read back, loads elsewhere, and goes on bit by bit."""

import json
from collections.abc import Callable
from pathlib import Path

import peft
import pytest
import safetensors.torch
import torch
import transformers

from harness.training import Row, make_rows, randomize, reference_logits, reference_logps
from twinkle.checkpoint_engine import directory
from twinkle.checkpoint_engine.peft import import_adapter
from twinkle.core.errors import InvalidInput, StorageUnavailable
from twinkle.model import MultiLoraTransformersModel, TransformersModel, TwinkleModel

MakeConfig = Callable[..., peft.LoraConfig]
STEPS = 7
OPTIMIZERS = [("AdamW", {"lr": 1e-2}), ("SGD", {"lr": 1e-2, "momentum": 0.9})]


def prepare(model: TwinkleModel, optimizer: str, settings: dict[str, float], *, windows: int) -> None:
    model.group("").set_accumulation(windows)
    model.set_loss("GRPOLoss")
    model.set_optimizer(optimizer, **settings)
    model.set_lr_scheduler("CosineWarmupScheduler", num_warmup_steps=1, num_training_steps=6)


def train(model: TwinkleModel, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        output = model.forward_backward(inputs=make_rows(step), advantages=[1.0, -1.0, 0.5, -0.2])
        losses.append(float(output["logps"].sum()))
        model.clip_grad_and_step()
    return losses


def fresh(model_dir: Path, kind: str, config: peft.LoraConfig | None) -> TwinkleModel:
    torch.manual_seed(3)
    model: TwinkleModel = (
        MultiLoraTransformersModel(model_id=str(model_dir), max_r=16)
        if kind == "fused"
        else TransformersModel(model_id=f"ms://{model_dir}")
    )
    if config is not None:
        model.add_adapter_to_model("a", config)
    return model


@pytest.mark.parametrize("stop", [4, 5], ids=["between windows", "within a window"])
@pytest.mark.parametrize(("optimizer", "settings"), OPTIMIZERS)
@pytest.mark.parametrize("kind", ["fused", "plain", "full"])
def test_training_goes_on_as_if_it_had_never_stopped(
    kind: str,
    optimizer: str,
    settings: dict[str, float],
    stop: int,
    model_dir: Path,
    tmp_path: Path,
    lora: MakeConfig,
) -> None:
    # Dropout makes the plain adapter's training depend on the random state too.
    config = None if kind == "full" else lora(lora_dropout=0.3 if kind == "plain" else 0.0)
    undisturbed = fresh(model_dir, kind, config)
    prepare(undisturbed, optimizer, settings, windows=2)
    train(undisturbed, 0, stop)
    path = undisturbed.save("half", output_dir=tmp_path, save_optimizer=True, consumed_train_samples=11)
    expected = train(undisturbed, stop, STEPS)

    resumed = fresh(model_dir, kind, config)
    prepare(resumed, optimizer, settings, windows=2)
    assert path is not None
    progress = resumed.resume_from_checkpoint(path)
    assert progress == {"cur_step": stop, "consumed_train_samples": 11, "gradient_accumulation_steps": 2}
    assert train(resumed, stop, STEPS) == expected
    final = undisturbed.get_state_dict()
    assert all(torch.equal(value, final[name]) for name, value in resumed.get_state_dict().items())


@pytest.mark.parametrize("kind", ["fused", "plain"])
def test_an_adapters_checkpoint_loads_in_plain_peft(
    kind: str, model_dir: Path, tmp_path: Path, lora: MakeConfig, rows: list[Row]
) -> None:
    model = fresh(model_dir, kind, lora())
    randomize(model, "a")
    path = model.save(output_dir=tmp_path, save_optimizer=False)
    assert path == str(tmp_path / "checkpoint-step-0")
    base = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    loaded = peft.PeftModel.from_pretrained(base, path)
    logps = reference_logps(*reference_logits(loaded, rows))
    ours = model.forward_only(inputs=rows)["logps"]
    mask = torch.nn.utils.rnn.pad_sequence([torch.tensor(row["labels"]) for row in rows], True, -100) != -100
    torch.testing.assert_close(ours[mask], logps[mask].detach(), atol=1e-4, rtol=1e-4)
    names = {file.name for file in Path(path).iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "trainer_state.json"} <= names
    assert "optimizer.safetensors" not in names
    assert not any(name.endswith((".pt", ".bin", ".pkl")) for name in names)
    state = json.loads((Path(path) / "trainer_state.json").read_text())
    assert state == {
        "checkpoint_version": 1,
        "cur_step": 0,
        "gradient_accumulation_steps": 1,
        "consumed_train_samples": 0,
    }


def test_either_model_loads_what_the_other_saved(
    fused: MultiLoraTransformersModel, plain: TransformersModel, tmp_path: Path, lora: MakeConfig, rows: list[Row]
) -> None:
    fused.add_adapter_to_model("a", lora())
    fused.set_optimizer("AdamW", lr=1e-2)
    fused.forward_backward(inputs=rows)
    fused.clip_grad_and_step()
    path = fused.save("one", output_dir=tmp_path, save_optimizer=True)
    assert path is not None
    plain.add_adapter_to_model("b", path)
    plain.set_optimizer("AdamW", lr=1e-2)
    plain.load("one", output_dir=tmp_path, load_optimizer=True)
    for model in (fused, plain):
        model.forward_backward(inputs=make_rows(4))
        model.clip_grad_and_step()
    for name, value in plain.get_state_dict().items():
        torch.testing.assert_close(value, fused.get_state_dict()[name], atol=1e-4, rtol=1e-2)
    back = plain.save("two", output_dir=tmp_path, save_optimizer=True)
    assert back is not None
    fused.add_adapter_to_model("c", back)
    assert all(
        torch.equal(value, plain.get_state_dict()[name])
        for name, value in fused.get_state_dict(adapter_name="c").items()
    )


def test_the_service_goes_on_from_a_scripts_adamw(
    fused: MultiLoraTransformersModel, tmp_path: Path, lora: MakeConfig, rows: list[Row]
) -> None:
    fused.add_adapter_to_model("a", lora())
    fused.set_optimizer("AdamW", lr=1e-2)
    for _ in range(2):
        fused.forward_backward(inputs=rows)
        fused.clip_grad_and_step()
    path = fused.save("one", output_dir=tmp_path, save_optimizer=True)
    assert path is not None
    adapter = import_adapter(fused.core.pool, directory.read_files(Path(path)), with_optimizer=True)
    assert adapter.step == 2
    assert float(adapter.exp_avg_sq.max()) > 0
    assert torch.equal(adapter.exp_avg, fused._adapters["a"].exp_avg)
    assert torch.equal(adapter.params, fused._adapters["a"].params)


def test_a_whole_model_is_a_directory_of_transformers(model_dir: Path, tmp_path: Path, rows: list[Row]) -> None:
    model = fresh(model_dir, "full", None)
    model.set_optimizer("AdamW", lr=1e-3)
    model.forward_backward(inputs=rows)
    model.clip_grad_and_step()
    path = model.save("full", output_dir=tmp_path)
    assert path is not None
    again = TransformersModel(model_id=path)
    first, second = model.forward_only(inputs=rows)["logps"], again.forward_only(inputs=rows)["logps"]
    assert torch.equal(first, second)


def test_only_every_so_many_steps_are_saved(model_dir: Path, tmp_path: Path, lora: MakeConfig) -> None:
    model = fresh(model_dir, "fused", lora())
    model.set_optimizer("SGD")
    saved = []
    for step in range(4):
        train(model, step, step + 1)
        saved.append(model.save(output_dir=tmp_path, interval=2))
    assert saved == [None, str(tmp_path / "checkpoint-step-2"), None, str(tmp_path / "checkpoint-step-4")]


def test_a_save_that_fails_leaves_the_old_checkpoint(
    fused: MultiLoraTransformersModel, tmp_path: Path, lora: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    fused.add_adapter_to_model("a", lora())
    path = fused.save("kept", output_dir=tmp_path)
    assert path is not None
    before = directory.read_files(Path(path))
    randomize(fused, "a")
    with monkeypatch.context() as patch:
        patch.setattr(directory.os, "fsync", _fail)
        with pytest.raises(OSError, match="no space"):
            fused.save("kept", output_dir=tmp_path)
    assert directory.read_files(Path(path)) == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["kept"]
    fused.save("kept", output_dir=tmp_path)
    assert directory.read_files(Path(path)) != before
    assert [entry.name for entry in tmp_path.iterdir()] == ["kept"]


def _fail(descriptor: int) -> None:
    raise OSError("no space left on device")


def test_a_damaged_weight_is_noticed(tmp_path: Path) -> None:
    safetensors.torch.save_file({"w": torch.ones(3)}, tmp_path / "model.safetensors")
    directory.verify_tensors(tmp_path, {"w": torch.ones(3)})
    with pytest.raises(StorageUnavailable, match="w does not read back"):
        directory.verify_tensors(tmp_path, {"w": torch.zeros(3)})


@pytest.mark.parametrize("kind", ["fused", "plain"])
def test_a_checkpoint_that_does_not_fit_is_refused(
    kind: str, model_dir: Path, tmp_path: Path, lora: MakeConfig, rows: list[Row]
) -> None:
    model = fresh(model_dir, kind, lora())
    model.set_optimizer("AdamW")
    with pytest.raises(InvalidInput, match="there is no checkpoint directory"):
        model.load("nothing", output_dir=tmp_path)
    path = model.save("plain", output_dir=tmp_path)
    assert path is not None
    with pytest.raises(InvalidInput, match=r"optimizer\.safetensors: is missing"):
        model.resume_from_checkpoint(path)
    assert model.resume_from_checkpoint(path, resume_only_model=True)["cur_step"] == 0
    other = fresh(model_dir, kind, lora(rank=8))
    with pytest.raises(InvalidInput, match=r"shape|ranks"):
        other.load(path)
    model.forward_backward(inputs=rows)
    model.clip_grad_and_step()
    saved = model.save("adam", output_dir=tmp_path, save_optimizer=True)
    assert saved is not None
    model.set_optimizer("SGD")
    with pytest.raises(InvalidInput, match="groups of AdamW"):
        model.resume_from_checkpoint(saved)
