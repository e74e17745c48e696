"""What the engine needs to run: torch and transformers, none of the queue's packages, and Pillow for pictures alone."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import sys

queue = "pydantic pydantic_settings structlog sqlalchemy sqlmodel fastapi celery redis obstore httpx PIL"
sys.modules.update(dict.fromkeys(queue.split()))
import twinkle.checkpoint_engine.snapshot
import twinkle.model.fused.model
import twinkle.model.multi_lora
import twinkle.sampler
from twinkle.core.process.events import PlainLog, event_log

assert isinstance(event_log(), PlainLog)
event_log().warning("engine.event", fact=1)
"""


def test_the_engine_runs_where_the_queues_packages_are_not_installed() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False, timeout=150)

    assert (done.returncode, done.stderr.strip()) == (0, "engine.event fact=1")
