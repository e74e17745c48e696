"""Upstream's distribution has our import names."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from twinkle.core.process.same_names import other_distribution

IMPORT = "import sys; sys.path.append(sys.argv[1]); import twinkle; print(twinkle.__version__)"


def imported(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", IMPORT, str(folder)], capture_output=True, text=True, env=os.environ, check=True
    )


def test_a_twinkle_kit_in_the_same_environment_is_named_at_import(tmp_path: Path) -> None:
    packages = tmp_path / "site-packages"
    packages.mkdir()
    assert "twinkle-kit" not in imported(packages).stderr
    (packages / "twinkle_kit-0.5.1.dist-info").mkdir()
    assert "twinkle-kit 0.5.1 is installed beside twinkle-queue" in imported(packages).stderr


def test_what_is_no_folder_on_the_path_is_passed_over(tmp_path: Path) -> None:
    assert other_distribution([str(tmp_path / "none"), str(tmp_path)]) is None
