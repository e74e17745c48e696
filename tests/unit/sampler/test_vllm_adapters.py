"""Adapters on their way to vLLM: each version under a number of its own, none given up while a request runs on it."""

from importlib.util import find_spec

import pytest

from twinkle.core.errors import ConfigError, InvalidInput
from twinkle.module.lora import LoraConfig
from twinkle.sampler import AdapterFiles, SteppedVLLMSampler
from twinkle.sampler.vllm.adapters import AdapterFolders

LIMIT = 2


class Loader:
    """Loads what is there, as vLLM does: it reads the files and remembers the number."""

    def __init__(self):
        self.loaded = {}
        self.refuse = False

    def load(self, folder):
        if self.refuse:
            raise InvalidInput("adapter", "no")
        assert folder.number not in self.loaded
        self.loaded[folder.number] = (folder.path / "adapter_model.safetensors").read_bytes()

    def unload(self, folder):
        assert folder.path.exists()
        del self.loaded[folder.number]


@pytest.fixture
def loader():
    return Loader()


@pytest.fixture
def folders(tmp_path, loader):
    return AdapterFolders(tmp_path, limit=LIMIT, base_model="tiny", load=loader.load, unload=loader.unload)


def files(content):
    return AdapterFiles({"adapter_config.json": b"{}", "adapter_model.safetensors": content})


def test_equal_weights_share_a_version_and_changed_ones_get_their_own(folders, loader):
    first, again, other = (folders.acquire(files(content)) for content in (b"a", b"a", b"b"))
    assert first == again
    assert first.number != other.number and first.name != other.name
    assert loader.loaded == {first.number: b"a", other.number: b"b"}


def test_a_number_is_never_used_again_not_even_for_the_same_weights(folders, loader, tmp_path):
    numbers = []
    for content in [b"a", b"b", b"c", b"d"] * 2:
        folder = folders.acquire(files(content))
        assert loader.loaded[folder.number] == content
        folders.release(folder)
        numbers.append(folder.number)
    assert len(set(numbers)) == len(numbers)
    assert len(loader.loaded) == len(folders.loaded) == len(list(tmp_path.iterdir())) == LIMIT


def test_what_a_request_runs_on_is_kept_beyond_the_limit_and_given_up_after_it(folders, loader):
    used = [folders.acquire(files(bytes([content]))) for content in range(5)]
    assert len(loader.loaded) == 5
    folders.release(used[3])
    assert set(loader.loaded) == {folder.number for folder in used} - {used[3].number}
    for folder in (used[0], used[1], used[2], used[4]):
        folders.release(folder)
    assert len(loader.loaded) == LIMIT


def test_the_longest_unused_goes_first(folders, loader):
    for content in (b"a", b"b", b"a", b"c"):
        folders.release(folders.acquire(files(content)))
    assert sorted(loader.loaded.values()) == [b"a", b"c"]


def test_what_does_not_load_leaves_nothing_and_may_be_tried_again(folders, loader, tmp_path):
    loader.refuse = True
    with pytest.raises(InvalidInput):
        folders.acquire(files(b"a"))
    assert not folders.loaded and not list(tmp_path.iterdir())
    loader.refuse = False
    assert loader.loaded == {} and folders.acquire(files(b"a")).number in loader.loaded


def test_an_adapter_that_is_trained_on_has_another_version_each_time(folders, sampled_model):
    adapter = sampled_model.create_adapter(LoraConfig(rank=2), trainable=True)
    first = folders.acquire(adapter)
    assert folders.acquire(adapter) == first
    adapter.params.add_(1.0)
    second = folders.acquire(adapter)
    assert second.name != first.name
    assert {folder.number for folder in folders.loaded} == {first.number, second.number}


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed")
def test_without_vllm_the_error_says_what_to_install(model_folder):
    with pytest.raises(ConfigError, match=r"twinkle-queue\[vllm\]"):
        SteppedVLLMSampler(str(model_folder))
