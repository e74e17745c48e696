"""Fetching from hubs and pushing to them: the hubs' own clients against a small real server."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from harness.hub_caches import MODEL, Caches, fill, lines
from harness.hub_server import TOKEN, Hubs, hub_server
from harness.models import make_text_model
from harness.servers import free_port
from twinkle.core.errors import ConfigError
from twinkle.hub import HFHub, HubOperation, ModelCard, MSHub, resolve_model_id
from twinkle.hub.hugging_face import HuggingFace
from twinkle.hub.model_path import locate
from twinkle.hub.modelscope import ModelScope
from twinkle.model import TransformersModel

HUBS = ("ms", "hf")


@pytest.fixture
def hubs(caches: Caches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hubs]:
    with hub_server() as served:
        monkeypatch.delenv("TWINKLE_OFFLINE")
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        monkeypatch.setenv("MODELSCOPE_ENDPOINT", served.url)
        monkeypatch.setenv("MODELSCOPE_HOME", str(tmp_path / "modelscope-home"))
        monkeypatch.setenv("HF_ENDPOINT", served.url)
        monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "no-token"))
        yield served


@pytest.fixture
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODELSCOPE_API_TOKEN", TOKEN)
    monkeypatch.setenv("HF_TOKEN", TOKEN)


@pytest.mark.parametrize("hub", HUBS)
def test_a_model_is_fetched_once_and_then_found_in_the_cache_without_a_word_to_the_hub(hubs: Hubs, hub: str) -> None:
    hubs.put("models/org/name", MODEL)
    folder = resolve_model_id(f"{hub}://org/name")
    assert {path.name for path in Path(folder).iterdir() if path.is_file()} >= set(MODEL)
    hubs.asked.clear()
    assert resolve_model_id(f"{hub}://org/name") == folder
    assert hubs.asked == []


@pytest.mark.parametrize("hub", HUBS)
def test_a_revision_is_fetched_as_named(hubs: Hubs, hub: str) -> None:
    hubs.put("models/org/name", MODEL)
    hubs.put("models/org/name", MODEL | {"config.json": '{"v": 1}'}, revisions=("v1",))
    assert (Path(resolve_model_id(f"{hub}://org/name@v1")) / "config.json").read_text() == '{"v": 1}'
    assert (Path(resolve_model_id(f"{hub}://org/name")) / "config.json").read_text() == MODEL["config.json"]
    with pytest.raises(ConfigError, match="org/name"):
        resolve_model_id(f"{hub}://org/name@v2")


@pytest.mark.parametrize("hub", HUBS)
def test_a_tokenizer_alone_fetches_no_weights(hubs: Hubs, hub: str) -> None:
    hubs.put("models/org/name", MODEL)
    folder = Path(HubOperation.download_model(f"{hub}://org/name", ignore_model=True))
    assert (folder / "tokenizer.json").exists() and not (folder / "model.safetensors").exists()
    assert (Path(resolve_model_id(f"{hub}://org/name")) / "model.safetensors").exists()


def test_a_bare_id_is_asked_of_the_hubs_in_order(hubs: Hubs, monkeypatch: pytest.MonkeyPatch) -> None:
    hubs.put("models/org/name", MODEL)
    with capture_logs() as said:
        resolve_model_id("org/name")
    assert "ModelScope" in [line.get("hub") for line in said]
    with pytest.raises(ConfigError, match=r"ModelScope has no org/none.*Hugging Face gives no org/none"):
        resolve_model_id("org/none")
    monkeypatch.setenv("MODELSCOPE_ENDPOINT", "http://127.0.0.1:9")
    hubs.put("models/org/only", MODEL)
    monkeypatch.setenv("TWINKLE_HUBS", "hf,ms")
    with capture_logs() as said:
        resolve_model_id("org/only")
    assert "Hugging Face" in [line.get("hub") for line in said]


@pytest.mark.parametrize("hub", HUBS)
def test_a_download_that_breaks_off_is_not_taken_for_a_whole_one(
    hubs: Hubs, hub: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Data have no index that would show what is missing.
    hubs.put("datasets/org/rows", {"a.jsonl": lines([{"n": 1}]), "b.jsonl": lines([{"n": 2}] * 50)})
    hubs.breaks_at = "b.jsonl"
    monkeypatch.setattr("modelscope_hub._download.DOWNLOAD_RETRY_TIMES", 1, raising=False)
    with pytest.raises(ConfigError, match="org/rows"):
        locate(f"{hub}://org/rows", kind="dataset")
    monkeypatch.setenv("TWINKLE_OFFLINE", "1")
    with pytest.raises(ConfigError, match=r"broke off|has no org/rows"):
        locate(f"{hub}://org/rows", kind="dataset")
    monkeypatch.delenv("TWINKLE_OFFLINE")
    hubs.breaks_at = ""
    assert (locate(f"{hub}://org/rows", kind="dataset").path / "b.jsonl").read_text() == lines([{"n": 2}] * 50)


def test_a_data_set_is_fetched_from_modelscope(hubs: Hubs) -> None:
    hubs.put("datasets/swift/self-cognition", {"README.md": "", "rows.jsonl": lines([{"query": "q"}])})
    assert HubOperation.load_dataset("ms://swift/self-cognition").to_list() == [{"query": "q"}]
    hubs.asked.clear()
    assert MSHub.load_dataset("swift/self-cognition").to_list() == [{"query": "q"}]
    assert hubs.asked == []


def test_of_hugging_face_one_subset_is_fetched_and_others_are_still_found_later(hubs: Hubs, tmp_path: Path) -> None:
    parts = [("one", "train"), ("one", "test"), ("two", "train")]
    configs = {subset: [split for name, split in parts if name == subset] for subset, _ in parts}
    card = "".join(
        f"- config_name: {subset}\n  data_files:\n"
        + "".join(f"  - {{split: {split}, path: {subset}/{split}.jsonl}}\n" for split in splits)
        for subset, splits in configs.items()
    )
    files = {f"{subset}/{split}.jsonl": lines([{"part": f"{subset}/{split}"}]) for subset, split in parts}
    hubs.put("datasets/org/rows", {"README.md": f"---\nconfigs:\n{card}---\n", **files})
    code = (
        "import sys; from twinkle.hub import HubOperation\n"
        "subset, split, how = sys.argv[1:]\n"
        "rows = HubOperation.load_dataset('hf://org/rows', subset, split, streaming=how == 'stream')\n"
        "print('rows:', list(rows))"
    )

    def load(subset: str, split: str, how: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", code, subset, split, how], capture_output=True, text=True, check=True
        )
        return done.stdout.rpartition("rows: ")[2].strip()

    assert load("one", "train", "whole") == "[{'part': 'one/train'}]"
    assert not any("two/train" in asked for asked in hubs.asked)
    hubs.asked.clear()
    assert load("one", "test", "whole") == "[{'part': 'one/test'}]" and hubs.asked == []
    assert load("two", "train", "stream") == "[{'part': 'two/train'}]"


@pytest.mark.parametrize("hub", HUBS)
def test_one_file_is_fetched_alone(hubs: Hubs, hub: str) -> None:
    hubs.put("models/org/name", MODEL)
    file = HubOperation.download_file(f"{hub}://org/name", "config.json")
    assert Path(file).read_text() == MODEL["config.json"]
    assert not any("safetensors" in asked for asked in hubs.asked)


@pytest.mark.parametrize("hub", HUBS)
def test_a_push_is_private_and_carries_a_card(hubs: Hubs, hub: str, token: None, tmp_path: Path) -> None:
    folder = fill(
        tmp_path / "step-10",
        {
            "adapter_config.json": json.dumps({"base_model_name_or_path": "Qwen/Qwen3-4B"}),
            "adapter_model.safetensors": "weights",
            "metrics.jsonl": lines([{"step": 1, "loss": 3.0}, {"step": 10, "loss": 0.5}]),
            ".env": "SECRET=1",
            "optimizer.pt": "state",
        },
    )
    card = ModelCard(data=["ms://swift/self-cognition"])
    url = HubOperation.push_to_hub(
        f"{hub}://me/mine", folder, commit_message="ten steps", ignore_patterns=["optimizer.pt"], card=card
    )
    repository = hubs.repositories["models/me/mine"]
    assert repository.private and hubs.url in url
    (files,) = repository.revisions.values()
    assert set(files) == {"README.md", "adapter_config.json", "adapter_model.safetensors", "metrics.jsonl"}
    assert repository.messages[-1].startswith("ten steps")
    text = files["README.md"].decode()
    for line in ('base_model: "Qwen/Qwen3-4B"', '- "swift/self-cognition"', "library_name: peft", "| loss | 0.5 |"):
        assert line in text


@pytest.mark.parametrize("is_async", [True, False])
def test_a_model_pushes_a_checkpoint(hubs: Hubs, token: None, tmp_path: Path, is_async: bool) -> None:
    model = TransformersModel(model_id=str(make_text_model(tmp_path / "model")))
    folder = model.save("last", output_dir=str(tmp_path))
    pushed = model.upload_to_hub(str(folder), "hf://me/mine", async_upload=is_async)
    url = pushed.result() if isinstance(pushed, Future) else pushed
    assert url is not None and url.startswith(hubs.url)
    files = hubs.repositories["models/me/mine"].revisions["main"]
    assert {"README.md", "config.json", "model.safetensors"} <= set(files)
    assert str(tmp_path) not in files["README.md"].decode()


@pytest.mark.parametrize("hub", HUBS)
def test_a_second_push_goes_to_the_same_repository(hubs: Hubs, hub: str, token: None, tmp_path: Path) -> None:
    for number in (1, 2):
        HubOperation.push_to_hub(f"{hub}://me/mine", fill(tmp_path, {"a.txt": str(number)}), private=False)
    assert not hubs.repositories["models/me/mine"].private
    (files,) = hubs.repositories["models/me/mine"].revisions.values()
    assert files["a.txt"] == b"2"


def test_pushes_beside_the_training_are_waited_for_and_their_failure_stops_nothing(
    hubs: Hubs, token: None, tmp_path: Path
) -> None:
    HubOperation.async_push_to_hub("hf://me/good", fill(tmp_path / "a", {"a.txt": ""}))
    HubOperation.async_push_to_hub("hf://me/bad", tmp_path / "none")
    ends = HubOperation.wait_for()
    assert ends["hf://me/good"].startswith(hubs.url) and "no such folder" in ends["hf://me/bad"]
    assert HubOperation.wait_for() == {}


@pytest.mark.parametrize("hub", HUBS)
def test_a_push_without_a_token_is_refused(
    hubs: Hubs, hub: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.delenv("MODELSCOPE_API_TOKEN", raising=False)
    with pytest.raises(ConfigError, match="me/mine"):
        HubOperation.push_to_hub(f"{hub}://me/mine", fill(tmp_path, {"a.txt": ""}))
    assert "models/me/mine" not in hubs.repositories


def test_a_login_is_a_token_that_the_hub_takes(hubs: Hubs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.delenv("MODELSCOPE_API_TOKEN", raising=False)
    for kind in (MSHub, HFHub):
        assert not kind.try_login()
        assert not kind.try_login("another")
        assert kind.try_login(TOKEN)
    assert HubOperation.try_login(f"hf://{TOKEN}")


def test_a_push_says_where_to_and_never_leaves_an_offline_machine(caches: Caches, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="name owner and repository"):
        HubOperation.push_to_hub("ms://mine", tmp_path)
    with pytest.raises(ConfigError, match="TWINKLE_OFFLINE"):
        HubOperation.push_to_hub("ms://me/mine", tmp_path)


def test_a_hub_that_is_not_there_is_not_waited_for(hubs: Hubs, monkeypatch: pytest.MonkeyPatch, caches: Caches) -> None:
    nowhere = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setenv("MODELSCOPE_ENDPOINT", nowhere)
    monkeypatch.setenv("HF_ENDPOINT", nowhere)
    # What their libraries would go through, at length.
    monkeypatch.setattr(ModelScope, "download", unexpected)
    monkeypatch.setattr(HuggingFace, "download", unexpected)
    with pytest.raises(ConfigError, match=r"ModelScope cannot be reached .*Hugging Face cannot be reached"):
        resolve_model_id("org/name")


def test_a_word_without_an_owner_is_no_id_of_modelscopes(hubs: Hubs) -> None:
    hubs.put("models/name", MODEL)
    with pytest.raises(ConfigError, match="ModelScope's ids are owner/name"):
        resolve_model_id("ms://name")
    assert hubs.asked == []


def unexpected(*arguments: object, **options: object) -> Path:
    raise AssertionError("the library was asked")
