"""What a training leaves beside its checkpoints, and where else it is seen."""

import io
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from xml.etree import ElementTree

import peft
import pytest
from PIL import Image
from structlog.testing import capture_logs

from harness.training import make_rows
from twinkle.core.errors import InvalidInput
from twinkle.hub.model_card import ModelCard, card_text
from twinkle.metric.loss_picture import draw_loss
from twinkle.metric.records import EVAL, STEP, Records
from twinkle.model import MultiLoraTransformersModel, TransformersModel

MakeConfig = Callable[..., peft.LoraConfig]
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(params=["fused", "plain"])
def model(request: pytest.FixtureRequest, lora: MakeConfig) -> MultiLoraTransformersModel | TransformersModel:
    made = request.getfixturevalue(request.param)
    made.add_adapter_to_model("a", lora(), gradient_accumulation_steps=2)
    made.set_optimizer("AdamW", lr=1e-2)
    return made


def train(model: MultiLoraTransformersModel | TransformersModel, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        output = model.forward_backward(inputs=make_rows(step % 2))
        losses.append(output["loss"] / output["num_tokens"])
        model.clip_grad_and_step()
    return losses


class Seen:
    def __init__(self) -> None:
        self.lines: list[tuple[int, dict[str, float]]] = []

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.lines.append((step, dict(values)))

    def close(self) -> None:
        pass


class Broken(Seen):
    def log(self, values: Mapping[str, float], step: int) -> None:
        super().log(values, step)
        raise ConnectionError("no server")


def test_a_line_for_each_step_and_report_lies_beside_the_checkpoint(
    model: MultiLoraTransformersModel | TransformersModel, tmp_path: Path
) -> None:
    assert model.save("empty", output_dir=tmp_path) and not (tmp_path / "empty" / "metrics.jsonl").exists()
    losses = train(model, 0, 6)
    model.calculate_metric(is_training=True)
    model.forward_only(inputs=make_rows(9))
    model.calculate_loss()
    loss = model.calculate_metric(is_training=False)["loss"]
    model.save("three", output_dir=tmp_path, save_optimizer=True)
    lines = [json.loads(line) for line in (tmp_path / "three" / "metrics.jsonl").read_text().splitlines()]
    assert [(line["kind"], line["step"]) for line in lines] == [
        ("step", 1),
        ("step", 2),
        ("step", 3),
        ("train", 3),
        ("eval", 3),
    ]
    assert lines[0]["loss"] == pytest.approx(sum(losses[:2]) / 2)
    assert lines[0]["learning_rate"] == 1e-2 and lines[0]["grad_norm"] > 0
    assert lines[4]["loss"] == float(loss) and lines[0]["time"] <= lines[4]["time"]
    card = card_text(tmp_path / "three", "me/three", ModelCard())
    assert f"| loss | {float(loss):g} |" in card and "| step | 3 |" in card
    picture = ElementTree.fromstring((tmp_path / "three" / "loss.svg").read_bytes())
    curves = [line for line in picture.findall(f"{SVG}polyline") if line.get("stroke") == "#1f6fb2"]
    assert len(curves) == 1 and len(picture.findall(f"{SVG}circle")) == 2
    assert "a: loss by optimizer step" in "".join(picture.itertext())


def test_the_records_go_on_with_the_training(
    model: MultiLoraTransformersModel | TransformersModel, tmp_path: Path
) -> None:
    train(model, 0, 4)
    path = model.save("two", output_dir=tmp_path, save_optimizer=True)
    train(model, 4, 8)
    model.resume_from_checkpoint(path)
    train(model, 4, 6)
    assert [step for step, _ in model.group("").records.series(STEP, "loss")] == [1, 2, 3]
    model.resume_from_checkpoint(path, resume_only_model=True)
    assert len(model.group("").records.lines) == 3
    (Path(path) / "metrics.jsonl").write_text("{")
    with pytest.raises(InvalidInput, match=r"metrics\.jsonl"):
        model.resume_from_checkpoint(path)


def test_a_forwarder_that_fails_is_told_once_and_training_goes_on(
    model: MultiLoraTransformersModel | TransformersModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)
    seen, broken = Seen(), Broken()
    with capture_logs() as logs:
        model.report_to(seen, broken)
        model.report_to("trackio")
        train(model, 0, 4)
        model.calculate_metric()
    assert [step for step, _ in seen.lines] == [1, 2, 2] and len(broken.lines) == 1
    assert set(seen.lines[0][1]) == {"train/loss", "train/grad_norm", "train/learning_rate"}
    assert "train/iters" in seen.lines[2][1]
    told = str(logs)
    assert told.count("no server") == 1 and told.count("twinkle-queue[trackio]") == 1
    with pytest.raises(InvalidInput, match="tensorboard, wandb, swanlab, mlflow, trackio"):
        model.report_to("tensorbord")


def test_a_long_training_is_thinned_where_it_is_old() -> None:
    records = Records(clock=lambda: 0.0, limit=100)
    for step in range(1000):
        records.add(STEP, step, {"loss": float(step)})
        if step % 200 == 0:
            records.add(EVAL, step, {"loss": f"{step}.0", "total time elapse": "3 seconds"})
    assert len(records.lines) <= 100
    steps = records.series(STEP, "loss")
    assert steps[-1] == (999, 999.0) and steps[-20:] == [(step, float(step)) for step in range(980, 1000)]
    assert [step for step, _ in records.series(EVAL, "loss")] == [0, 200, 400, 600, 800]
    assert sorted(steps) == steps
    copy = Records()
    copy.go_on_from(records.to_file())
    assert copy.lines == records.lines


@pytest.mark.parametrize(
    "losses", [[2.0], [2.0, 2.0], [float("nan"), 1.0, 3e5], [5 / (step + 1) for step in range(400)]]
)
def test_any_training_can_be_drawn(losses: list[float]) -> None:
    records = Records(clock=lambda: 0.0)
    for step, loss in enumerate(losses, start=1):
        records.add(STEP, step, {"loss": loss})
    pictures = draw_loss(records, "a & b")
    assert ElementTree.fromstring(pictures["loss.svg"]).tag == f"{SVG}svg"
    with Image.open(io.BytesIO(pictures["loss.png"])) as drawn:
        colours = {colour for _, colour in drawn.convert("RGB").getcolors(maxcolors=100_000)}
        assert drawn.format == "PNG" and drawn.size == (720, 400) and len(colours) > 10
    assert draw_loss(Records(), "nothing") == {}


@pytest.mark.parametrize("damage", [b"[1]\n", b'{"kind": 1}\n', b"\xff\n"])
def test_damaged_records_are_refused(damage: bytes) -> None:
    with pytest.raises(InvalidInput, match="no file of records"):
        Records().go_on_from(damage)
