from __future__ import annotations

import sys
from pathlib import Path

import pytest

from twinkle.plugin.registry import Registry


def test_a_class_that_a_distribution_declares_is_found_and_imported_only_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "their_templates.py").write_text("class TheirTemplate:\n    pass\n")
    declared = tmp_path / "their_templates-1.0.dist-info"
    declared.mkdir()
    (declared / "METADATA").write_text("Metadata-Version: 2.1\nName: their-templates\nVersion: 1.0\n")
    (declared / "entry_points.txt").write_text("[twinkle.templates]\nTheirTemplate = their_templates:TheirTemplate\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    templates = Registry("twinkle.templates")

    assert "TheirTemplate" in templates and "Template" in templates
    assert "their_templates" not in sys.modules
    assert templates["TheirTemplate"].__module__ == "their_templates"


def test_a_name_that_nobody_declares_is_not_in_it() -> None:
    templates = Registry("twinkle.templates")
    assert "NoSuchTemplate" not in templates
    with pytest.raises(KeyError):
        templates["NoSuchTemplate"]
