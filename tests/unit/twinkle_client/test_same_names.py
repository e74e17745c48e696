"""Scripts that change their import paths only: the same objects, and nothing loaded before it is used."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import twinkle.data_format
import twinkle.reward.base
import twinkle_client.data_format
import twinkle_client.reward
import twinkle_client.reward.base
from twinkle_client import init_tinker_client
from twinkle_client.same_names import attributes_of

LENT = ("advantage", "data_format", "loss", "metric", "preprocessor", "preprocessor.llm", "reward", "template")


@pytest.mark.parametrize("name", LENT)
def test_a_module_of_the_client_lends_the_librarys_own_objects(name: str) -> None:
    ours, library = (importlib.import_module(f"{package}.{name}") for package in ("twinkle_client", "twinkle"))

    public = getattr(library, "__all__", None) or [n for n in vars(library) if n[0].isupper()]
    assert public and all(getattr(ours, each) is getattr(library, each) for each in public)


def test_names_come_by_star_and_by_module() -> None:
    lent: dict[str, object] = {}
    exec("from twinkle_client.reward import *", lent)

    assert lent["FormatReward"] is twinkle.reward.FormatReward
    assert twinkle_client.reward.base.Reward is twinkle.reward.base.Reward
    with pytest.raises(AttributeError):
        twinkle_client.reward.NoSuchReward  # noqa: B018


def test_nothing_of_the_training_library_loads_before_it_is_used() -> None:
    modules = ", ".join(f"twinkle_client.{name}" for name in (*LENT, "model", "sampler", "types"))
    script = (
        f"import sys, {modules}\nprint(*sorted({{'torch', 'peft', 'transformers', 'datasets'}} & set(sys.modules)))"
    )

    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == "\n"


def test_an_extra_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    for name in [name for name in sys.modules if name.startswith("twinkle.advantage")]:
        monkeypatch.delitem(sys.modules, name)

    with pytest.raises(ModuleNotFoundError, match=r"pip install 'twinkle-queue\[worker\]'"):
        attributes_of("twinkle.advantage")("GRPOAdvantage")


def test_keywords_that_others_clients_take_are_taken_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TINKER_BASE_URL", "TINKER_API_KEY"):
        monkeypatch.setenv(name, "unset")
    with pytest.warns(UserWarning, match="session_heartbeat_interval"):
        init_tinker_client("http://127.0.0.1:1", "tml-k", session_heartbeat_interval=3)
