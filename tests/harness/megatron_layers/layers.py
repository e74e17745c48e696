"""Megatron's layers in plain torch against transformers' on the same weights, on two ranks (``harness.forked_ranks``).

Writes for each layout, layer and value how far the two are apart, and how large the value is.
"""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import distributed

import twinkle.model.megatron  # noqa: F401  (before Megatron's core, which asks for CUDA)

# isort: split
from megatron.core import parallel_state

from harness.megatron_layers.latent import check_latent_attention
from harness.megatron_layers.mixing import check_attention, check_delta_net
from harness.megatron_layers.mixtures import check_deepseek_experts, check_qwen2_experts, check_qwen3_experts
from harness.megatron_layers.ranks import Found, Layout

LAYOUTS: dict[str, Layout] = {
    "alone": {},
    "tp 2": {"tensor_model_parallel_size": 2},
    "tp 2, sequence parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "cp 2": {"context_parallel_size": 2},
    "ep 2": {"expert_model_parallel_size": 2},
    "tp 2, ep 2": {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "expert_model_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
    },
}
MIXING = ("alone", "tp 2", "tp 2, sequence parallel", "cp 2")
EXPERTS = ("alone", "tp 2, sequence parallel", "cp 2", "ep 2", "tp 2, ep 2")
CHECKS: dict[str, tuple[Callable[[Layout], Found], tuple[str, ...]]] = {
    "attention": (check_attention, MIXING),
    "delta net": (check_delta_net, MIXING),
    "latent attention": (check_latent_attention, MIXING),
    "experts of Qwen2": (check_qwen2_experts, EXPERTS),
    "experts of Qwen3": (check_qwen3_experts, EXPERTS),
    "experts of DeepSeek": (check_deepseek_experts, EXPERTS),
}


def checks() -> Iterator[tuple[str, str, Found]]:
    for name, layout in LAYOUTS.items():
        sizes = {key: value for key, value in layout.items() if key.endswith("_size")}
        parallel_state.initialize_model_parallel(**sizes)
        for layer, (check, layouts) in CHECKS.items():
            if name not in layouts:
                continue
            torch.manual_seed(7)
            yield name, layer, check(layout)
        parallel_state.destroy_model_parallel()


def main() -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    found: dict[str, dict[str, Found]] = {}
    for layout, layer, values in checks():
        found.setdefault(layout, {})[layer] = values
    of_ranks: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(of_ranks, found)
    if distributed.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(of_ranks))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
