"""The documents' scripts, each in a process of its own against caches that lie as the hubs' clients leave them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from harness.hub_world import HubWorld, make_hub_world
from harness.seeds import DEFAULT_FOLDER, FOLDER_VARIABLE, Script, scripts_of, seeds_folder
from harness.served import Served

SERVED_AS = "Qwen/Qwen3.5-4B"
BY_ID, TEXT_BY_ID = f"ms://{SERVED_AS}", "ms://Qwen/Qwen3-4B"


@pytest.fixture(scope="session")
def scripts() -> list[Script]:
    """All that the documents show, in their order."""
    folder = seeds_folder()
    if folder is None:
        pytest.skip(
            f"the documents are not on this machine: neither at {DEFAULT_FOLDER} nor where {FOLDER_VARIABLE} says"
        )
    return scripts_of(folder)


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> HubWorld:
    """Caches with everything that the scripts here ask for."""
    return make_hub_world(tmp_path_factory.mktemp("hubs"))


@pytest.fixture(scope="package")
def service(world: HubWorld, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Its model is one of a hub, by id; the cache has it, and there is no network."""
    home = tmp_path_factory.mktemp("documents") / "home"
    with Served(home, model=BY_ID, model_name=SERVED_AS, flags=("--any-key",), **world.environment) as it:
        yield it


@pytest.fixture(scope="package")
def text_service(world: HubWorld, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The same with a model of text: one with random weights draws the tokens that stand for pictures, too."""
    home = tmp_path_factory.mktemp("text") / "home"
    with Served(home, model=TEXT_BY_ID, model_name=SERVED_AS, flags=("--any-key",), **world.environment) as it:
        yield it
