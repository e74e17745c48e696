"""Names that scripts import: none is missing without being named."""

import importlib

import pytest

from harness.upstream_names import LEFT_OUT, NAMES


@pytest.mark.parametrize("module", NAMES)
def test_every_name_that_scripts_import_is_there(module):
    there = importlib.import_module(module)
    missing = [name for name in NAMES[module].split() if not hasattr(there, name)]
    assert missing == []


@pytest.mark.parametrize("place", LEFT_OUT)
def test_what_is_left_out_is_left_out_still(place):
    module, _, name = place.partition(":")
    if name:
        assert not hasattr(importlib.import_module(module), name)
    else:
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(module)
