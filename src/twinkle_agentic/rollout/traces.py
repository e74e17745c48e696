"""Conversations of a rollout written down for people to read, a file each."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from twinkle.core.errors import InvalidInput
from twinkle.core.process.events import event_log
from twinkle.data_format.conversation import user_data_get

Judge = Callable[[Mapping[str, Any]], bool]

_TOKENS = ("input_ids", "labels", "completion_mask", "attention_mask", "position_ids", "logprobs", "routed_experts")
_PICTURES = ("pixel_values", "image_grid_thw", "image_position_ids", "mm_token_type_ids", "images")
LEFT_OUT = frozenset((*_TOKENS, *_PICTURES))
"""What is long and says nothing to a reader that the messages do not."""
_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]+")
_MOST_CHARACTERS = 64

_log = event_log()


@dataclass(frozen=True)
class Traces:
    """Where conversations are written to, and which.

    A file is ``step000012-ok-ID.json``: the step only if the call names its ``global_step``, ``ok`` or ``fail`` as
    ``success`` says, the id of ``user_data`` (``id`` or ``prompt_id``) and letters that no other file has. It holds
    ``trajectory``, ``ground_truth``, ``stop_reason``, ``truncated``, ``turns``, ``success``, and ``error`` if there was
    one. A file that cannot be written, and a callback that fails, is told in the log and changes nothing.
    """

    folder: Path
    wanted: Judge | None = None
    """Which conversations; all if omitted."""
    success: Judge | None = None
    """Which of them went well; none if omitted."""

    @classmethod
    def into(cls, trace_dir: str | Path | None, wanted: Judge | None, success: Judge | None) -> Traces | None:
        """Those that a rollout's arguments ask for; None without a folder.

        Raises:
            InvalidInput: There are callbacks and no folder, or it cannot be made.
        """
        if trace_dir is None:
            if wanted is not None or success is not None:
                raise InvalidInput("trace_dir", "is missing; name a folder for what the callbacks choose")
            return None
        folder = Path(trace_dir)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidInput("trace_dir", f"cannot be made: {error.strerror}") from error
        return cls(folder, wanted, success)

    def write(self, rows: Sequence[Mapping[str, Any]], global_step: int | None = None) -> None:
        """Write what is wanted of the rows that a rollout returns."""
        step = "" if global_step is None else f"step{global_step:06d}-"
        for row in rows:
            try:
                if self.wanted is None or self.wanted(row):
                    self._write(row, step, self.success is not None and bool(self.success(row)))
            except Exception as error:  # noqa: BLE001 - a callback of a script's own may raise anything; training goes on
                _log.warning("rollout.not_traced", error=f"{type(error).__name__}: {error}", folder=str(self.folder))

    def _write(self, row: Mapping[str, Any], step: str, is_success: bool) -> None:
        data = row.get("user_data")
        name = user_data_get(data, "id") or user_data_get(data, "prompt_id") or ""
        named = _UNSAFE.sub("_", str(name))[:_MOST_CHARACTERS]
        verdict = "ok" if is_success else "fail"
        record = {
            "trajectory": {key: value for key, value in row.items() if key not in LEFT_OUT},
            "ground_truth": user_data_get(data, "ground_truth"),
            "success": is_success,
            **{key: row.get(key) for key in ("stop_reason", "truncated", "turns")},
            **({"error": row["error"]} if row.get("error") else {}),
        }
        file = self.folder / f"{step}{verdict}-{named}{'-' if named else ''}{uuid4().hex[:12]}.json"
        file.write_text(json.dumps(record, ensure_ascii=False, indent=2, default=str), encoding="utf-8")
