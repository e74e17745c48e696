"""Each child of ``twinkle serve`` gets the secrets that it needs, and no others."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import SecretStr

from twinkle.cli.embedded.broker import Broker
from twinkle.cli.embedded.stack import GIVES_MEMORY_BACK, MeshPlan, plan_stack
from twinkle.core.settings import Settings

SETTINGS = {"database", "broker", "signing", "admin", "flower"}
NEEDED = {
    "api": {"database", "broker", "signing", "admin", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "PGPASSWORD"},
    "worker-first": {"database", "broker", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "PGPASSWORD", "RAY_AUTH_TOKEN"},
    "jobs": {"database", "broker", "signing", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "PGPASSWORD"},
    "housekeeping": {"database", "broker", "AWS_SECRET_ACCESS_KEY", "PGPASSWORD"},
    "flower": {"broker", "flower"},
    "broker": set(),
}


def test_each_child_gets_its_own_secrets_and_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = ("AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "PGPASSWORD", "RAY_AUTH_TOKEN")
    outside = (*theirs, "GITHUB_TOKEN", "OPENAI_API_KEY", "MY_PASSWORD")
    for name in outside:
        monkeypatch.setenv(name, name)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    settings = Settings(
        home=tmp_path,
        database_url="postgresql://u:database@h/d",
        redis_url=SecretStr("redis://:broker@h"),
        download_url_secret=SecretStr("signing"),
        admin_key=SecretStr("admin"),
        flower_password=SecretStr("flower"),
    )
    mesh = MeshPlan(name="first", device="cpu", model="m", model_name="m")
    broker = Broker(kind="redis", argv=("redis-server", "file"), port=1, password="never in an environment")

    stack = plan_stack(settings, [mesh], broker, with_flower=True)

    assert stack.broker is not None
    children = (stack.api, *stack.workers, stack.broker)
    held = {
        child.name: {
            secret
            for secret in {*SETTINGS, *outside}
            for name, value in child.env.items()
            if secret in value and name != "TWINKLE_FLOWER_USER"
        }
        for child in children
    }
    assert held == NEEDED
    assert {child.env["TOKENIZERS_PARALLELISM"] for child in children} == {"false"}
    assert all("PATH" in child.env for child in children)
    # Workers have an allocator's settings of their own.
    assert [child.name for child in children if GIVES_MEMORY_BACK.items() <= child.env.items()] == ["api"]
