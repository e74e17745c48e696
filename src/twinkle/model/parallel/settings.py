"""What ``strategy``, ``ddp_config`` and ``fsdp_config`` mean here: few settings have something to set."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from twinkle.core.errors import InvalidInput
from twinkle.core.process.events import event_log

log = event_log()

STRATEGIES = ("accelerate", "native_fsdp")

DDP_WITHOUT_EFFECT = frozenset(
    {
        "broadcast_buffers",
        "bucket_cap_mb",
        "check_reduction",
        "comm_hook",
        "comm_state_option",
        "comm_wrapper",
        "dim",
        "find_unused_parameters",
        "gradient_as_bucket_view",
        "static_graph",
    }
)
"""Gradients are summed once a window in buckets of our own, whatever parameters took part."""

FSDP_WITHOUT_EFFECT = frozenset(
    {
        "activation_checkpointing",
        "auto_wrap_policy",
        "backward_prefetch",
        "cpu_ram_efficient_loading",
        "forward_prefetch",
        "fsdp_config",
        "fsdp_version",
        "ignored_modules",
        "limit_all_gathers",
        "manual_prefetch",
        "min_num_params",
        "mixed_precision_policy",
        "sharding_strategy",
        "state_dict_type",
        "sync_module_states",
        "transformer_cls_names_to_wrap",
        "use_orig_params",
    }
)
"""The mesh says what is sharded, the model which of its modules are layers, other arguments the rest."""


@dataclass(frozen=True)
class FsdpSettings:
    """How weights are sharded.

    ``reshard_after_forward`` frees a layer's gathered weights after its forward pass; ``cpu_offload`` keeps shards,
    gradients and the optimizer's state in the host's memory; ``expert_parallel`` are the settings of the ``ep`` axis.
    """

    reshard_after_forward: bool = True
    cpu_offload: bool = False
    expert_parallel: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, config: Mapping[str, Any] | None) -> FsdpSettings:
        """The settings of ``fsdp_config``.

        Raises:
            InvalidInput: A name is unknown.
        """
        own = ("reshard_after_forward", "cpu_offload", "expert_parallel")
        taken = _known("fsdp_config", config, own, FSDP_WITHOUT_EFFECT)
        expert_parallel = taken.pop("expert_parallel", None) or {}
        return cls(**{name: bool(value) for name, value in taken.items()}, expert_parallel=expert_parallel)


def check_strategy(strategy: str) -> None:
    """Raise ``InvalidInput`` for a strategy that upstream does not have either."""
    if strategy not in STRATEGIES:
        raise InvalidInput("strategy", f"is {strategy!r}; send one of {', '.join(STRATEGIES)}")


def check_ddp(config: Mapping[str, Any] | None) -> None:
    """Raise ``InvalidInput`` for a name that accelerate's settings of data parallelism do not have."""
    _known("ddp_config", config, (), DDP_WITHOUT_EFFECT)


def _known(
    field_name: str, config: Mapping[str, Any] | None, own: tuple[str, ...], without_effect: frozenset[str]
) -> dict[str, Any]:
    taken = dict(config or {})
    idle = sorted(taken.keys() & without_effect)
    for name in taken.keys() - without_effect - set(own):
        near = difflib.get_close_matches(name, [*own, *without_effect], n=1)
        raise InvalidInput(
            f"{field_name}.{name}", f"is not known; {f'did you mean {near[0]}?' if near else 'leave it out'}"
        )
    if idle:
        log.info("model.parallel.without_effect", config=field_name, names=", ".join(idle), next="they are left out")
    return {name: value for name, value in taken.items() if name in own}
