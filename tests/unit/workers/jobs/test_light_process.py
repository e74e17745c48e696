"""The jobs process itself is small: what computes is loaded by the processes that it starts when a job needs them."""

from __future__ import annotations

import subprocess
import sys


def test_it_starts_without_the_training_library() -> None:
    script = (
        "import sys, twinkle.workers.jobs.process\n"
        "print(sorted({'torch', 'transformers', 'peft', 'datasets'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)

    assert done.stdout.strip() == "[]"
