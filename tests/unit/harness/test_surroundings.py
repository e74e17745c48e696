"""Tests do not see what is set for other work."""

from __future__ import annotations

from harness.surroundings import forget_other_work


def test_only_what_is_set_for_other_work_is_forgotten() -> None:
    environment = {
        "TWINKLE_REDIS_URL": "redis://elsewhere",
        "TINKER_API_KEY": "tml-mine",
        "AWS_PROFILE": "mine",
        "PGHOST": "elsewhere",
        "FORCE_COLOR": "1",
        "COLUMNS": "40",
        "LC_ALL": "de_DE.ISO-8859-1",
        "PATH": "/bin",
        "HOME": "/home/me",
        "PYTHONPATH": "src",
        "OMP_NUM_THREADS": "1",
        "https_proxy": "http://proxy",
    }

    forget_other_work(environment)

    kept = {name: value for name, value in environment.items() if name not in {"NO_PROXY", "no_proxy"}}
    assert kept == {
        "LC_ALL": "C.UTF-8",
        "PATH": "/bin",
        "HOME": "/home/me",
        "PYTHONPATH": "src",
        "OMP_NUM_THREADS": "1",
        "https_proxy": "http://proxy",
        "AWS_CONFIG_FILE": "/dev/null",
        "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
    }
