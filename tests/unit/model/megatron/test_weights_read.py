"""What a rank takes into memory of published weights: its share, never a tensor whole."""

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from twinkle.model.megatron.weights.convert import PublishedFolder
from twinkle.model.megatron.weights.rules import Columns, Rows, Vocabulary, WeightRule

ROWS, COLUMNS = 4096, 4096
WHOLE_BYTES = 4 * ROWS * COLUMNS
SLACK_BYTES = WHOLE_BYTES // 16
"""What else a process takes meanwhile."""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's count of a process's memory is read")
@pytest.mark.parametrize(
    "rule",
    [Rows("w", ("w",)), Columns("w", ("w",)), Vocabulary("w", ("w",), num_tokens=ROWS)],
    ids=lambda rule: type(rule).__name__,
)
def test_a_rank_takes_its_share_of_a_published_tensor_into_memory_alone(rule: WeightRule, tmp_path: Path) -> None:
    save_file({"w": torch.randn(ROWS, COLUMNS)}, tmp_path / "model.safetensors")
    folder = PublishedFolder(tmp_path)
    before = anonymous_bytes()

    published = folder("w")
    of_the_published = anonymous_bytes() - before
    share = rule.local([published], 1, 2).clone()
    of_the_share = anonymous_bytes() - before

    assert share.nbytes == WHOLE_BYTES // 2
    assert of_the_published < SLACK_BYTES
    assert WHOLE_BYTES // 2 - SLACK_BYTES < of_the_share <= WHOLE_BYTES // 2 + SLACK_BYTES


def anonymous_bytes() -> int:
    """What this process holds that is no part of a file."""
    [line] = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return 1024 * int(line.split()[1])
