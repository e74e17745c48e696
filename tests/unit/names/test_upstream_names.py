"""Names that scripts import: none is missing without being named."""

import importlib

import pytest

from harness.upstream_names import LEFT_OUT, NAMES


@pytest.mark.parametrize("module", NAMES)
def test_every_name_that_scripts_import_is_there(module):
    there = importlib.import_module(module)
    missing = [name for name in NAMES[module].split() if not hasattr(there, name)]
    assert missing == []


@pytest.mark.parametrize("module", LEFT_OUT)
def test_what_is_left_out_is_left_out_still(module):
    names, instead = LEFT_OUT[module]
    assert instead
    if names:
        there = importlib.import_module(module)
        assert [name for name in names.split() if hasattr(there, name)] == []
    else:
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(module)
