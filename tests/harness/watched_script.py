"""Runs a script unchanged: ``watched_script.py train.py ...``, and has each rank leave what it holds at every save.

`weights-RANK.json` then says for every trained tensor of this rank a hash of its bytes: of a tensor that is sharded, of
the whole, put together by this rank's own group.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import torch

from twinkle.model import TransformersModel


def main() -> None:
    script, *arguments = sys.argv[1:]
    saved = TransformersModel.save

    @functools.wraps(saved)
    def save(model: Any, *given: Any, **named: Any) -> Any:
        answer = saved(model, *given, **named)
        hashes = {name: hash_of(tensor) for name, tensor in model.get_state_dict().items()}
        Path(f"weights-{os.environ['RANK']}.json").write_text(json.dumps(hashes))
        return answer

    TransformersModel.save = save  # type: ignore[method-assign]
    sys.argv = [script, *arguments]
    sys.path[0] = os.getcwd()
    runpy.run_path(script, run_name="__main__")


def hash_of(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().to(torch.float32).cpu().contiguous().numpy().tobytes()).hexdigest()


if __name__ == "__main__":
    main()
