"""What is refused is refused by its config alone, with the right reason, by everybody who might start it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

from harness.families import FAMILIES, RELEASED, SIZES
from harness.pictures import PICTURE_FAMILIES
from harness.refused import REFUSED
from twinkle.core.errors import ConfigError, OutOfMemory
from twinkle.core.settings import Settings
from twinkle.hub.support import check_model
from twinkle.model.fused.model import FusedLoraModel
from twinkle.workers.engines.transformers_engine import TransformersEngine


@pytest.mark.parametrize("family", REFUSED)
def test_what_cannot_be_served_is_refused_by_its_config_alone_and_by_the_engine_alike(
    family: str, tmp_path: Path
) -> None:
    make_config, reason = REFUSED[family]
    make_config().save_pretrained(tmp_path)

    with pytest.raises(ConfigError, match=reason) as first:
        check_model(str(tmp_path))
    with pytest.raises(ConfigError, match=reason):
        FusedLoraModel.from_pretrained(str(tmp_path))
    assert "\n" not in first.value.message


@pytest.mark.parametrize("family", FAMILIES)
def test_the_families_that_are_served_pass(family: str, tmp_path: Path) -> None:
    FAMILIES[family]().save_pretrained(tmp_path)

    check_model(str(tmp_path))


@pytest.mark.parametrize("family", {**RELEASED, **PICTURE_FAMILIES})
def test_a_class_with_a_tower_for_pictures_passes_where_they_are_taken_or_its_language_model_is_served(
    family: str, tmp_path: Path
) -> None:
    {**RELEASED, **PICTURE_FAMILIES}[family]().save_pretrained(tmp_path)

    check_model(str(tmp_path))


def test_the_config_of_a_model_of_today_passes_as_its_maker_wrote_it(tmp_path: Path) -> None:
    written = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "use_sliding_window": False,
    }
    (tmp_path / "config.json").write_text(json.dumps(written))

    check_model(str(tmp_path))


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_a_folder_without_a_model_is_said_to_be_none(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)

    with pytest.raises(ConfigError, match=r"no folder of a model"):
        check_model(str(tmp_path))


def test_a_model_whose_parts_do_not_fit_is_a_refusal_too_and_not_an_endless_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A type that the table does not know, and that breaks somewhere inside."""
    monkeypatch.setattr("twinkle.hub.support.OLDER", ())
    config = transformers.StableLmConfig(**SIZES)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)

    with pytest.raises(ConfigError, match=r"TWINKLE_MODEL: .* cannot be loaded: .*packed_attention"):
        TransformersEngine.from_settings(Settings(model=str(tmp_path), threads=1))


@pytest.mark.parametrize(
    ("model_type", "told"), [("vit", "AutoModelForCausalLM"), ("of-tomorrow", "does not recognize this architecture")]
)
def test_a_type_that_is_no_language_model_or_unknown_is_told_in_one_line_without_a_list_of_all_others(
    model_type: str, told: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))

    with pytest.raises(ConfigError, match=told) as refusal:
        TransformersEngine.from_settings(Settings(model=str(tmp_path), threads=1))
    assert str(tmp_path) in refusal.value.message
    assert "\n" not in refusal.value.message and "Qwen3Config" not in refusal.value.message


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (torch.OutOfMemoryError("no room"), OutOfMemory),
        (RuntimeError("can't allocate memory"), OutOfMemory),
        (torch.AcceleratorError("lost"), torch.AcceleratorError),
    ],
)
def test_a_device_that_fails_is_no_refusal(
    error: Exception, told: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(FusedLoraModel, "from_pretrained", fail)
    with pytest.raises(told):
        TransformersEngine.from_settings(Settings(model=str(tmp_path), threads=1))


def test_the_look_at_a_model_needs_no_torch_and_takes_the_config_of_a_hub_where_it_has_been_before(
    tmp_path: Path,
) -> None:
    revision = tmp_path / "models--someone--indexed" / "snapshots" / "abc"
    transformers.DeepseekV32Config().save_pretrained(revision)
    refs = tmp_path / "models--someone--indexed" / "refs"
    refs.mkdir()
    (refs / "main").write_text("abc")
    code = """
import sys
from twinkle.core.errors import ConfigError
from twinkle.hub.support import check_model
check_model("someone/unknown")
try:
    check_model("someone/indexed")
except ConfigError as error:
    print(error.message)
assert "torch" not in sys.modules
"""
    environment = {**os.environ, "HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1", "TWINKLE_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120, check=True
    )

    assert "someone/indexed (deepseek_v32) cannot be served: it has layers other than attention" in done.stdout
