"""The layers of a base model made fit for packed rows: apart to the bit on a CPU, few kernels on an accelerator."""

from __future__ import annotations

from typing import Any

import torch

from twinkle.module.compressed_attention import prepare_deepseek_v4
from twinkle.module.deepstack import prepare_deepstack
from twinkle.module.delta_net import pack_delta_nets
from twinkle.module.gated import fuse_gates
from twinkle.module.llama4 import prepare_llama4
from twinkle.module.mamba import pack_mamba_layers
from twinkle.module.norms import fuse_norms
from twinkle.module.packed_attention import ATTENTION_NAME, register_packed_attention
from twinkle.module.recurrence import LayerFunctions
from twinkle.module.rotary import fuse_rotary
from twinkle.module.row_product import RowProduct
from twinkle.module.rowwise import make_rowwise, rowwise_layer_functions


def prepare_layers(model: Any, served: Any, device: torch.device, product: RowProduct, max_positions: int) -> int:
    """Change the layers of ``served``, which is ``model`` or its language model, in place.

    Returns the bytes of what layers that carry a state along a sequence remember of one; 0 if there are no such layers.
    """
    for prepare in (prepare_llama4, prepare_deepseek_v4, prepare_deepstack):
        prepare(model)
    register_packed_attention()
    served.set_attn_implementation(ATTENTION_NAME)
    is_cpu = device.type == "cpu"
    functions = rowwise_layer_functions() if is_cpu else LayerFunctions()
    state_bytes = pack_delta_nets(served, functions) + pack_mamba_layers(served, functions)
    if is_cpu:
        make_rowwise(served, product, max_positions)
    else:
        fuse_norms(served)
        fuse_rotary(served)
        fuse_gates(served)
    return state_bytes
