"""Data sets of files, folders and the hubs' caches, without any network."""

from __future__ import annotations

from pathlib import Path

import datasets
import pytest

from harness.hub_caches import Caches, fill, lines
from twinkle.core.errors import ConfigError
from twinkle.hub import HFHub, HubOperation

ROWS = [{"query": "who are you", "response": "a model"}, {"query": "and who made you", "response": "people"}]
CARD = """---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train.jsonl}
  - {split: test, path: main/test.jsonl}
- config_name: socratic
  data_files:
  - {split: train, path: socratic/train.jsonl}
---
"""
GSM8K = {
    "README.md": CARD,
    "main/train.jsonl": lines(ROWS),
    "main/test.jsonl": lines(ROWS[:1]),
    "socratic/train.jsonl": lines(ROWS * 2),
}


@pytest.mark.parametrize("prefix", ["", "ms://", "hf://"])
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.csv", "rows.tsv", "rows.parquet", "rows.arrow"])
def test_a_file_of_this_machine_is_read_by_its_ending(tmp_path: Path, caches: Caches, prefix: str, name: str) -> None:
    file = tmp_path / name
    rows = datasets.Dataset.from_list(ROWS)
    match file.suffix:
        case ".csv":
            rows.to_csv(file)
        case ".tsv":
            rows.to_csv(file, sep="\t")
        case ".parquet":
            rows.to_parquet(file)
        case ".arrow":
            rows.save_to_disk(tmp_path / "saved")
            (tmp_path / "saved" / "data-00000-of-00001.arrow").rename(file)
        case _:
            file.write_text(lines(ROWS))
    assert HubOperation.load_dataset(f"{prefix}{file}").to_list() == ROWS


def test_a_file_that_cannot_be_read_is_named_with_what_could(tmp_path: Path) -> None:
    file = fill(tmp_path, {"rows.xlsx": "?"}) / "rows.xlsx"
    with pytest.raises(ConfigError, match=r"rows.xlsx is none of .json, .jsonl, .csv"):
        HubOperation.load_dataset(str(file))


def test_a_file_whose_lines_are_broken_is_named(tmp_path: Path, caches: Caches) -> None:
    file = fill(tmp_path, {"rows.jsonl": '{"a": 1}\n{"a": \n'}) / "rows.jsonl"
    with pytest.raises(ConfigError, match=r"rows\.jsonl"):
        HubOperation.load_dataset(str(file))


def test_a_saved_data_set_is_read_by_split(tmp_path: Path, caches: Caches) -> None:
    rows = datasets.Dataset.from_list(ROWS)
    rows.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": rows, "test": rows.select([1])}).save_to_disk(tmp_path / "two")
    assert HubOperation.load_dataset(str(tmp_path / "one")).to_list() == ROWS
    assert HubOperation.load_dataset(str(tmp_path / "two"), split="test").to_list() == ROWS[1:]
    with pytest.raises(ConfigError, match="no split 'validation'; it has train, test"):
        HubOperation.load_dataset(str(tmp_path / "two"), split="validation")


@pytest.mark.parametrize(
    "folder",
    [
        "datasets/swift--self-cognition/snapshots/master",
        "datasets/swift/self-cognition",
        "hub/datasets/swift/self-cognition",
    ],
)
def test_a_data_set_in_modelscopes_cache_is_read(caches: Caches, folder: str) -> None:
    caches.put(folder, {"README.md": "no card", "self_cognition.jsonl": lines(ROWS)})
    for form in ("ms://swift/self-cognition", "ms://ms://swift/self-cognition", "swift/self-cognition"):
        assert HubOperation.load_dataset(form).to_list() == ROWS
    streamed = HubOperation.load_dataset("ms://swift/self-cognition", streaming=True)
    assert isinstance(streamed, datasets.IterableDataset) and list(streamed) == ROWS


def test_two_repositories_whose_folders_have_one_name_keep_their_own_rows(caches: Caches) -> None:
    for number, name in enumerate(("one", "two")):
        caches.put(f"datasets/org--{name}/snapshots/master", {"data.jsonl": lines([{"number": number}])})
    assert HubOperation.load_dataset("ms://org/one").to_list() == [{"number": 0}]
    assert HubOperation.load_dataset("ms://org/two").to_list() == [{"number": 1}]


def test_subsets_and_splits_of_a_card_are_kept_apart(caches: Caches) -> None:
    caches.put_hugging_face("openai/gsm8k", GSM8K, kind="dataset", ref="main")
    load = HubOperation.load_dataset
    assert load("hf://openai/gsm8k", subset_name="main", split="train").to_list() == ROWS
    assert load("hf://openai/gsm8k", subset_name="main", split="test").to_list() == ROWS[:1]
    assert load("openai/gsm8k", subset_name="socratic", split="train[:3]").to_list() == (ROWS * 2)[:3]
    assert HFHub.load_dataset("openai/gsm8k", "main", "test", num_proc=1).to_list() == ROWS[:1]
    with pytest.raises(ConfigError, match="has no subset 'default'; it has main, socratic"):
        load("hf://openai/gsm8k")
    with pytest.raises(ConfigError, match=r"Unknown split .*'train', 'test'"):
        load("hf://openai/gsm8k", subset_name="main", split="validation")
    with pytest.raises(ConfigError, match="no subset 'socrates'"):
        load("hf://openai/gsm8k", subset_name="socrates")


def test_a_subset_may_be_a_folder_of_a_repository_without_a_card(caches: Caches) -> None:
    files = {name: text for name, text in GSM8K.items() if name != "README.md"}
    caches.put("hub/datasets/modelscope/gsm8k", files)
    assert HubOperation.load_dataset("ms://modelscope/gsm8k", "main", "test").to_list() == ROWS[:1]
    assert HubOperation.load_dataset("ms://modelscope/gsm8k", "socratic").num_rows == 4


def test_what_a_library_has_prepared_before_is_taken_as_it_lies(caches: Caches, tmp_path: Path) -> None:
    source = fill(tmp_path / "source", GSM8K)
    for cache in (caches.hugging_face / "datasets", caches.modelscope / "hub" / "datasets"):
        builder = datasets.load_dataset_builder(str(source), name="main")
        place = cache / "openai___gsm8k" / "main" / "0.0.0" / "c0ffee"
        builder.download_and_prepare(str(place))
        (place / "dataset_info.json").write_text(
            (place / "dataset_info.json").read_text().replace('"dataset_name": "source"', '"dataset_name": "gsm8k"')
        )
        for file in place.glob("source-*.arrow"):
            file.rename(place / file.name.replace("source-", "gsm8k-"))
    for form in ("hf://openai/gsm8k", "ms://openai/gsm8k", "hf://openai/gsm8k@c0ffee"):
        assert HubOperation.load_dataset(form, "main", "test").to_list() == ROWS[:1]
        assert list(HubOperation.load_dataset(form, "main", "train", streaming=True)) == ROWS
    with pytest.raises(ConfigError, match="was not found"):
        HubOperation.load_dataset("hf://openai/gsm8k@decade", "main", "test")


def test_a_folder_that_lacks_some_of_its_shards_is_not_taken_for_the_whole(caches: Caches) -> None:
    shards = {f"data/train-0000{number}-of-00003.jsonl": lines(ROWS) for number in (0, 2)}
    caches.put_hugging_face("org/data", shards, kind="dataset", ref="main")
    with pytest.raises(ConfigError, match=r"is not whole: it lacks 1 of the 3 files train-\*-of-\*\.jsonl"):
        HubOperation.load_dataset("hf://org/data")
    caches.put("datasets/org--data/snapshots/master", shards | {"data/train-00001-of-00003.jsonl": lines(ROWS)})
    assert len(HubOperation.load_dataset("ms://org/data")) == 6


def test_code_beside_the_data_never_runs(caches: Caches, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    script = f"open({str(ran)!r}, 'w').write('ran')\n"
    caches.put("datasets/org--data/snapshots/master", {"data.py": script, "rows.jsonl": lines(ROWS)})
    assert HubOperation.load_dataset("ms://org/data").to_list() == ROWS
    caches.put("datasets/org--code/snapshots/master", {"code.py": script})
    with pytest.raises(ConfigError, match=r"holds no data .* does not run \(code\.py\)"):
        HubOperation.load_dataset("ms://org/code")
    assert not ran.exists()


def test_a_data_set_that_is_nowhere_says_where_it_was_looked_for(caches: Caches) -> None:
    with pytest.raises(ConfigError, match=r"dataset_id: org/none .*ModelScope's cache .*Hugging Face's cache"):
        HubOperation.load_dataset("org/none")
