"""The documents' scripts, each in a process of its own against caches that lie as the hubs' clients leave them."""

from __future__ import annotations

import pytest

from harness.hub_world import HubWorld, make_hub_world
from harness.seeds import DEFAULT_FOLDER, FOLDER_VARIABLE, Script, scripts_of, seeds_folder


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
