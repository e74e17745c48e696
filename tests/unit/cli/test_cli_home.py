"""The home folder: private, and one service's at a time."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from twinkle.cli.embedded.home import kept_password, make_home, sole_owner, write_secret
from twinkle.core.errors import ConfigError


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_only_its_owner_can_look_into_the_home(tmp_path: Path) -> None:
    home = make_home(tmp_path / "new" / "home")
    assert mode_of(home) == 0o700
    assert (home / "logs").is_dir()


def test_a_home_that_cannot_be_made_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be used"):
        make_home(tmp_path / "file" / "home")


def test_a_second_owner_is_refused_with_the_pid_of_the_first(tmp_path: Path) -> None:
    with sole_owner(tmp_path), pytest.raises(ConfigError, match=rf"pid {os.getpid()}\)"), sole_owner(tmp_path):
        pass
    with sole_owner(tmp_path):
        pass


def test_a_password_is_made_once_and_kept_private(tmp_path: Path) -> None:
    first = kept_password(tmp_path / "flower-password")
    assert len(first) >= 24
    assert kept_password(tmp_path / "flower-password") == first
    assert mode_of(tmp_path / "flower-password") == 0o600


def test_a_secret_replaces_an_older_readable_file(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("old")
    path.chmod(0o644)
    write_secret(path, "new")
    assert path.read_text() == "new"
    assert mode_of(path) == 0o600
