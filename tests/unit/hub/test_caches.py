"""Ids of models, and where the hubs' own caches have them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from harness.hub_caches import MODEL, Caches
from twinkle.core.errors import ConfigError
from twinkle.hub import HubOperation, MSHub, resolve_model_id
from twinkle.hub.caches import published_id

SHARDED = {
    "config.json": '{"model_type": "qwen3"}',
    "model.safetensors.index.json": json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}),
    "one.safetensors": "weights",
}


@pytest.mark.parametrize("prefix", ["", "ms://", "hf://", "ms://ms://", "hf://ms://"])
def test_what_follows_the_last_scheme_is_looked_for_on_this_machine_first(tmp_path: Path, prefix: str) -> None:
    assert resolve_model_id(f"{prefix}{tmp_path}") == str(tmp_path)


def test_a_path_that_is_not_there_is_never_looked_for_on_a_hub(caches: Caches) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        resolve_model_id("ms:///no/such/folder")
    with pytest.raises(ConfigError, match="no hub for s3"):
        resolve_model_id("s3://bucket/model")
    for odd in ("../secrets", "a/../../b", "ms://a/b/c", "ms://", "org/name@../x"):
        with pytest.raises(ConfigError):
            resolve_model_id(odd)


@pytest.mark.parametrize(
    "folder",
    [
        "models/Qwen--Qwen3.5-4B/snapshots/master",
        "models/Qwen/Qwen3___5-4B",
        "hub/models/Qwen/Qwen3___5-4B",
        "hub/Qwen/Qwen3___5-4B",
        "models/Qwen/Qwen3.5-4B",
        "Qwen/Qwen3.5-4B",
    ],
)
def test_a_model_in_any_layout_of_modelscopes_cache_is_found_without_a_network(caches: Caches, folder: str) -> None:
    placed = caches.put(folder, MODEL)
    for form in ("ms://Qwen/Qwen3.5-4B", "ms://ms://Qwen/Qwen3.5-4B", "Qwen/Qwen3.5-4B"):
        assert resolve_model_id(form) == str(placed)
    assert published_id(str(placed)) == "Qwen/Qwen3.5-4B"
    with pytest.raises(ConfigError, match=r"Hugging Face's cache .* has no Qwen/Qwen3.5-4B"):
        resolve_model_id("hf://Qwen/Qwen3.5-4B")


def test_a_model_in_hugging_faces_cache_is_found_by_branch_and_by_commit(caches: Caches) -> None:
    newest = caches.put_hugging_face("Qwen/Qwen3.5-4B", MODEL, commit="c0ffee", ref="main")
    older = caches.put_hugging_face("Qwen/Qwen3.5-4B", MODEL, commit="decade", ref="v1.0")
    assert resolve_model_id("hf://Qwen/Qwen3.5-4B") == str(newest)
    assert resolve_model_id("hf://Qwen/Qwen3.5-4B@decade") == str(older)
    assert resolve_model_id("Qwen/Qwen3.5-4B@v1.0") == str(older)
    assert resolve_model_id("Qwen/Qwen3.5-4B", revision="v1.0") == str(older)
    assert published_id(str(older)) == "Qwen/Qwen3.5-4B"
    with pytest.raises(ConfigError, match=r"has no Qwen/Qwen3\.5-4B@v2"):
        resolve_model_id("Qwen/Qwen3.5-4B@v2")
    with pytest.raises(ConfigError, match="name one"):
        resolve_model_id("Qwen/Qwen3.5-4B@v2", revision="v1.0")


def test_hugging_faces_variables_say_where_its_cache_is(caches: Caches, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = caches.put_hugging_face("org/name", MODEL, ref="main")
    monkeypatch.setenv("HF_HOME", "/nowhere")
    monkeypatch.setenv("HF_HUB_CACHE", str(caches.hugging_face / "hub"))
    assert resolve_model_id("org/name") == str(snapshot)
    monkeypatch.delenv("HF_HUB_CACHE")
    monkeypatch.delenv("HF_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(caches.hugging_face.parent))
    assert resolve_model_id("org/name") == str(snapshot)


def test_a_pinned_revision_is_never_another(caches: Caches) -> None:
    old = caches.put("hub/models/org/name", MODEL | {".mv": "Revision:v1.0.0,CreatedAt:1700000000"})
    new = caches.put("models/org--name/snapshots/v2.0.0", MODEL)
    assert resolve_model_id("ms://org/name@v1.0.0") == str(old)
    assert resolve_model_id("ms://org/name@v2.0.0") == str(new)
    with pytest.raises(ConfigError, match="has no org/name@v3"):
        resolve_model_id("ms://org/name@v3.0.0")


def test_several_revisions_and_no_word_which_is_an_error_that_lists_them(caches: Caches) -> None:
    caches.put("models/org--name/snapshots/v1", MODEL)
    only = caches.modelscope / "models/org--name/snapshots/v1"
    assert resolve_model_id("ms://org/name") == str(only)
    caches.put("models/org--name/snapshots/v2", MODEL)
    with pytest.raises(ConfigError, match=r"several revisions \(v1, v2\)"):
        resolve_model_id("ms://org/name")


def test_a_bare_id_that_both_caches_have_is_taken_in_the_configured_order(
    caches: Caches, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_modelscope = caches.put("models/org--name/snapshots/master", MODEL)
    of_hugging_face = caches.put_hugging_face("org/name", MODEL, ref="main")
    with capture_logs() as said:
        assert resolve_model_id("org/name") == str(of_modelscope)
        monkeypatch.setenv("TWINKLE_HUBS", "hf,ms")
        assert resolve_model_id("org/name") == str(of_hugging_face)
    assert [line["hub"] for line in said if "hub" in line] == ["ModelScope", "Hugging Face"]
    assert MSHub.download_model("org/name") == str(of_modelscope)


def test_a_folder_that_lacks_weights_does_for_a_tokenizer_alone(caches: Caches) -> None:
    placed = caches.put("models/org--name/snapshots/master", SHARDED)
    with pytest.raises(ConfigError, match="lacks weights"):
        resolve_model_id("ms://org/name")
    assert resolve_model_id("ms://org/name", ignore_model=True) == str(placed)
    assert HubOperation.download_model("ms://org/name", ignore_model=True) == str(placed)
    caches.put("models/org--name/snapshots/master", {"two.safetensors": "more"})
    assert resolve_model_id("ms://org/name") == str(placed)


def test_an_alias_stands_for_a_folder_or_another_id(
    caches: Caches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    placed = caches.put("models/mirror--name/snapshots/master", MODEL)
    aliases = {"Qwen/Qwen3.5-4B": str(tmp_path), "hf://big/model": "ms://mirror/name"}
    monkeypatch.setenv("TWINKLE_MODEL_ID_ALIASES", json.dumps(aliases))
    for form in ("Qwen/Qwen3.5-4B", "ms://Qwen/Qwen3.5-4B", "ms://ms://Qwen/Qwen3.5-4B"):
        assert resolve_model_id(form) == str(tmp_path)
    assert resolve_model_id("hf://big/model") == str(placed)
    with pytest.raises(ConfigError, match="was not found"):
        resolve_model_id("ms://big/model")
    monkeypatch.setenv("TWINKLE_MODEL_ID_ALIASES", "Qwen=/x")
    with pytest.raises(ConfigError, match="TWINKLE_MODEL_ID_ALIASES: is not JSON"):
        resolve_model_id("org/name")


def test_hugging_face_can_be_forbidden(caches: Caches, monkeypatch: pytest.MonkeyPatch) -> None:
    caches.put_hugging_face("org/name", MODEL, ref="main")
    monkeypatch.setenv("TWINKLE_FORBID_HF", "1")
    with pytest.raises(ConfigError, match="Hugging Face is not among TWINKLE_HUBS"):
        resolve_model_id("hf://org/name")
    with pytest.raises(ConfigError, match="ModelScope's cache"):
        resolve_model_id("org/name")
    with pytest.raises(ConfigError, match="not among TWINKLE_HUBS"):
        HubOperation.source_type("hf://org/name")
    assert HubOperation.source_type("org/name") == "ms"


def test_ids_are_taken_apart() -> None:
    assert HubOperation.source_type("hf://org/name") == "hf"
    assert HubOperation.remove_source_type("ms://ms://org/name") == "org/name"


def test_one_file_of_a_cached_repository_needs_no_network(caches: Caches) -> None:
    placed = caches.put("models/org--name/snapshots/master", MODEL)
    assert HubOperation.download_file("ms://org/name", "config.json") == str(placed / "config.json")
    assert HubOperation.download_file(str(placed), "config.json") == str(placed / "config.json")
    with pytest.raises(ConfigError, match="the hub is not asked"):
        HubOperation.download_file("ms://org/name", "missing.json")
    with pytest.raises(ConfigError, match="is not below"):
        HubOperation.download_file(str(placed), "../../../etc/passwd")
