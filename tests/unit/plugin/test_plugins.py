"""Code of others: never without the operator's word, by id and revision."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from harness.hub_caches import Caches, fill
from twinkle import Plugin
from twinkle.core.errors import ConfigError, InvalidInput
from twinkle.hub.trust import check_model_code
from twinkle.loss import LOSSES, Loss
from twinkle.plugin.construct import construct_class

TRUST = "TWINKLE_TRUST_REMOTE_CODE"
PLUGIN = {
    "__init__.py": "from pathlib import Path\nfrom twinkle.loss import Loss\nfrom .half import Half\n"
    "Path(__file__).with_name('ran').write_text('')\n",
    "half.py": "from twinkle.loss import Loss\nclass Half(Loss):\n"
    "    def __init__(self, scale=0.5):\n        self.scale = scale\n"
    "    def __call__(self, inputs, outputs, **settings):\n        return None\n",
}


@pytest.fixture
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Caches:
    made = Caches(modelscope=tmp_path / "modelscope", hugging_face=tmp_path / "huggingface")
    monkeypatch.setenv("MODELSCOPE_CACHE", str(made.modelscope))
    monkeypatch.setenv("HF_HOME", str(made.hugging_face))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("TWINKLE_OFFLINE", "1")
    monkeypatch.delenv(TRUST, raising=False)
    return made


def refusal(plugin_id: str) -> str:
    with pytest.raises(ConfigError) as caught:
        Plugin.load_plugin(plugin_id, Loss)
    return caught.value.message


def test_a_plugin_that_nobody_trusts_is_refused_with_what_to_set(caches: Caches) -> None:
    placed = caches.put("models/org--half/snapshots/v1.0", PLUGIN)
    assert f"{TRUST}=ms://org/half@v1.0" in refusal("ms://org/half@v1.0")
    assert not (placed / "ran").exists()


@pytest.mark.parametrize(
    "trusted",
    ["0", "1", "ms://org/half", "ms://org/half@v1.1", "ms://org/other@v1.0", "hf://org/half@v1.0", "org/half@v1"],
)
def test_trust_in_anything_else_is_no_trust(caches: Caches, monkeypatch: pytest.MonkeyPatch, trusted: str) -> None:
    placed = caches.put("models/org--half/snapshots/v1.0", PLUGIN)
    monkeypatch.setenv(TRUST, trusted)
    assert "runs only when the operator says so" in refusal("ms://org/half@v1.0")
    assert not (placed / "ran").exists()


@pytest.mark.parametrize("trusted", ["ms://org/half@v1.0", "hf://a/b@c, ms://org/half@v1.0", "org/half@v1.0"])
def test_a_plugin_that_the_operator_names_by_id_and_revision_is_loaded(
    caches: Caches, monkeypatch: pytest.MonkeyPatch, trusted: str
) -> None:
    caches.put("models/org--half/snapshots/v1.0", PLUGIN)
    monkeypatch.setenv(TRUST, trusted)
    loaded = Plugin.load_plugin("ms://org/half@v1.0", Loss)
    assert issubclass(loaded, Loss) and loaded.__name__ == "Half"
    assert Plugin.load_plugin("ms://org/half", Loss, revision="v1.0") is loaded
    assert Plugin.load_plugin("ms://org/half@v1.0#Half", Loss) is loaded


@pytest.mark.parametrize("revision", ["", "@main", "@master", "@HEAD"])
def test_a_revision_that_moves_is_refused_even_where_it_is_trusted(
    caches: Caches, monkeypatch: pytest.MonkeyPatch, revision: str
) -> None:
    caches.put("models/org--half/snapshots/master", PLUGIN)
    monkeypatch.setenv(TRUST, f"ms://org/half{revision}")
    assert "names no revision that stays what it is" in refusal(f"ms://org/half{revision}")


def test_a_component_may_be_the_id_of_a_plugin(caches: Caches, monkeypatch: pytest.MonkeyPatch) -> None:
    caches.put("models/org--half/snapshots/v1.0", PLUGIN)
    with pytest.raises(InvalidInput, match=r"loss_cls: .*operator says so"):
        construct_class("loss_cls", "ms://org/half@v1.0", Loss, LOSSES)  # type: ignore[type-abstract]
    monkeypatch.setenv(TRUST, "ms://org/half@v1.0")
    made = construct_class("loss_cls", "ms://org/half@v1.0", Loss, LOSSES, scale=0.25)  # type: ignore[type-abstract]
    assert made.scale == 0.25  # type: ignore[attr-defined]


def test_a_folder_is_trusted_by_its_path(caches: Caches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = fill(tmp_path / "plugin", PLUGIN)
    assert f"{TRUST}={folder}" in refusal(f"ms://{folder}")
    monkeypatch.setenv(TRUST, str(folder))
    assert Plugin.load_plugin(f"ms://{folder}", Loss).__name__ == "Half"


def test_a_plugin_says_what_it_lacks(caches: Caches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two = "from twinkle.loss import Loss\nclass A(Loss): pass\nclass B(Loss): pass\n"
    folders = {
        "two": fill(tmp_path / "two", {"__init__.py": two}),
        "none": fill(tmp_path / "none", {"__init__.py": ""}),
        "empty": fill(tmp_path / "empty", {"README.md": ""}),
        "broken": fill(tmp_path / "broken", {"__init__.py": "import no_such_package\n"}),
    }
    monkeypatch.setenv(TRUST, ",".join(map(str, folders.values())))
    assert "it has A, B; name one, like" in refusal(str(folders["two"]))
    assert Plugin.load_plugin(f"{folders['two']}#B", Loss).__name__ == "B"
    assert "must define one Loss; it has none" in refusal(str(folders["none"]))
    assert "has no __init__.py" in refusal(str(folders["empty"]))
    assert "No module named 'no_such_package'" in refusal(str(folders["broken"]))
    assert not any("no_such_package" in name for name in sys.modules)


def test_code_of_a_model_runs_only_where_the_operator_names_it(caches: Caches, monkeypatch: pytest.MonkeyPatch) -> None:
    config = '{"model_type": "odd", "auto_map": {"AutoModelForCausalLM": "%s"}}'
    plain = caches.put("models/org--plain/snapshots/v1", {"config.json": "{}"})
    own = caches.put("models/org--own/snapshots/v1", {"config.json": config % "modeling_odd.Odd"})
    others = caches.put("models/org--others/snapshots/v1", {"config.json": config % "evil/code--modeling_odd.Odd"})
    assert not check_model_code("ms://org/plain@v1", plain)
    assert not check_model_code("ms://org/own@v1", own)
    monkeypatch.setenv(TRUST, "ms://org/own@v1,ms://org/others@v1")
    assert check_model_code("ms://org/own@v1", own)
    with pytest.raises(ConfigError, match="evil/code names no revision"):
        check_model_code("ms://org/others@v1", others)
