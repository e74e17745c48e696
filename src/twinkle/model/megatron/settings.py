"""What ``ddp_config`` means here: one of Megatron's settings of data parallelism has something to set."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any

from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig

from twinkle.core.errors import InvalidInput
from twinkle.core.process.events import event_log

OWN = "use_distributed_optimizer"

log = event_log()


def distributes_optimizer(config: Mapping[str, Any] | None, default: bool) -> bool:
    """Whether the optimizer's state is spread over data ranks.

    Raises:
        InvalidInput: A name is no setting of Megatron's.
    """
    taken = dict(config or {})
    known = {field.name for field in dataclasses.fields(DistributedDataParallelConfig)}
    for name in taken.keys() - known:
        near = difflib.get_close_matches(name, known, n=1)
        raise InvalidInput(
            f"ddp_config.{name}", f"is not known; {f'did you mean {near[0]}?' if near else 'leave it out'}"
        )
    idle = sorted(taken.keys() - {OWN})
    if idle:
        log.info("megatron.ddp.without_effect", names=", ".join(idle), next="gradients are summed once a window")
    return bool(taken.get(OWN, default))
