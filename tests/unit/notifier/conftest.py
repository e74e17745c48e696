from __future__ import annotations

import pytest

from twinkle.infra import runtime


@pytest.fixture(autouse=True)
def forget_what_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test tells ``initialize`` is of its own process, which other tests share."""
    monkeypatch.setattr(runtime._this_process, "_runtime", runtime.Runtime())
