"""Rows of hubs come out of their caches, in every form an id may have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.hub_world import HubWorld, make_hub_world
from harness.rows import write_jsonl
from twinkle.core.errors import ConfigError
from twinkle.dataset import Dataset, DatasetMeta, IterableDataset, WrongRows


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> HubWorld:
    return make_hub_world(tmp_path_factory.mktemp("hubs"), models=())


@pytest.fixture(autouse=True)
def offline(world: HubWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in world.environment.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("dataset_id", ["ms://swift/self-cognition", "swift/self-cognition"])
@pytest.mark.parametrize("kind", [Dataset, IterableDataset])
def test_rows_of_a_hub_are_mapped_like_any(dataset_id: str, kind: Any) -> None:
    dataset = kind(DatasetMeta(dataset_id, data_slice=range(3)))

    dataset.map("SelfCognitionProcessor", init_args={"model_name": "Ada", "model_author": "Charles"})

    rows = list(dataset)
    assert len(rows) == 3
    assert not any("{{" in message["content"] for row in rows for message in row["messages"])


def test_a_subset_is_chosen() -> None:
    dataset = Dataset(DatasetMeta("ms://modelscope/gsm8k", subset_name="main", split="train"))

    dataset.map("GSM8KProcessor")

    assert dataset[0]["user_data"][0][0] == "ground_truth"


def test_a_wrong_row_of_a_hub_is_named_by_its_data_set_and_number() -> None:
    dataset = Dataset(DatasetMeta("ms://swift/self-cognition", data_slice=[5, 7]))

    with pytest.raises(WrongRows, match=r"ms://swift/self-cognition/train\[5\]"):
        dataset.map(lambda columns: {"n": [row["no"] for row in columns["query"]]})


def test_an_alias_puts_files_of_ones_own_in_a_hubs_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_jsonl(tmp_path / "own.jsonl", [{"query": "mine"}])
    monkeypatch.setenv("TWINKLE_MODEL_ID_ALIASES", json.dumps({"ms://swift/self-cognition": str(path)}))

    dataset = Dataset(DatasetMeta("ms://swift/self-cognition"))

    assert dataset[0] == {"query": "mine"}
    assert str(dataset.place_of(0)) == f"{path}:1"


def test_code_of_a_hub_maps_rows_only_if_the_operator_trusts_it(tmp_path: Path) -> None:
    (tmp_path / "__init__.py").write_text("raise SystemExit('ran')")

    with pytest.raises(ConfigError, match="TWINKLE_TRUST_REMOTE_CODE"):
        Dataset(DatasetMeta(data=[{"n": 1}])).map(f"ms://{tmp_path}")
