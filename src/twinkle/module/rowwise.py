"""Elementwise functions whose results do not depend on where in a tensor a value lies.

A vectorised kernel computes an exponential with vector instructions, but what is left over at the end of a tensor (or
of one thread's share of it) with the scalar function of the C library, which may round otherwise. So a row's bits would
depend on how many rows stand around it. Here every call gets whole vectors only.

Shapes: T tokens, N features, D head size; A axes of positions, B batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Attention
from transformers.models.deepseek_v4.modeling_deepseek_v4 import (
    DeepseekV4GroupedLinear,
    DeepseekV4HyperConnection,
    DeepseekV4HyperHead,
)
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm
from transformers.models.llama4.modeling_llama4 import Llama4TextAttention
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5Attention
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeAttention
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextAttention

from twinkle.module.packed_products import NoUpdates
from twinkle.module.recurrence import LayerFunctions
from twinkle.module.row_product import RowProduct
from twinkle.module.segmented import SegmentedLinear
from twinkle.module.targets import is_router, kind_of

VECTOR_STRIDE = 32
"""Elements a kernel takes at once: two vectors of at most 16 float32."""
PARALLEL_GRAIN = 32768
"""From this many elements a thread on, torch splits an elementwise operation over threads."""
ACTIVATION_NAMES = frozenset({"act", "act_fn", "activation_fn"})
SCORING_NAME = "score_fn"
ROTARY_NAME = "rotary_emb"
SHARED_GATE_NAME = "shared_expert_gate"
NORMS_BY_POWER = (Gemma4RMSNorm,)
"""Norms that divide by a root as ``torch.pow(squares, -0.5)``."""
INVERSE_ROOT = -0.5
OWN_GATE = "_apply_gate"
"""What stands between the projections of experts; one without an activation module of its own calls sigmoids."""
POSITIONS_PER_BLOCK = 64
SIGMOIDS = (torch.sigmoid, functional.sigmoid, torch.Tensor.sigmoid)
HYPER_CONNECTIONS = (DeepseekV4HyperConnection, DeepseekV4HyperHead)
"""What weighs several residual streams against each other."""
GATED_ATTENTION = (Qwen3NextAttention, Qwen3_5Attention, Qwen3_5MoeAttention)
"""Attention that squashes a gate by a function in its forward."""
COMPLEX_ROPE = (DeepseekV2Attention, Llama4TextAttention)
"""Attention that turns queries and keys by products of complex numbers."""
STATIC_ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn", "proportional"})


TorchFunction = Callable[..., torch.Tensor]


def make_rowwise(model: torch.nn.Module, product: RowProduct, max_positions: int) -> None:
    """Make the activations, the rotary embedding and the expert routers of ``model`` rowwise."""
    sigmoids = dict.fromkeys(SIGMOIDS, RowwiseActivation(torch.nn.Sigmoid()))
    frozen = _frozen_linear(product)
    calls_of: Sequence[tuple[tuple[type[torch.nn.Module], ...], Mapping[Any, TorchFunction]]] = (
        (NORMS_BY_POWER, {torch.pow: _power}),
        (GATED_ATTENTION, sigmoids),
        (COMPLEX_ROPE, {torch.Tensor.mul: rowwise_mul}),
        (HYPER_CONNECTIONS, {functional.linear: frozen, **sigmoids}),
        ((DeepseekV4GroupedLinear,), {torch.bmm: _grouped(frozen)}),
    )
    for path, module in list(model.named_modules()):
        parent, _, name = path.rpartition(".")
        calls = next((calls for classes, calls in calls_of if isinstance(module, classes)), None)
        if name in ACTIVATION_NAMES or name == SCORING_NAME:
            setattr(model.get_submodule(parent), name, RowwiseActivation(module))
        elif name == ROTARY_NAME and _has_static_rope(module):
            setattr(model.get_submodule(parent), name, RotaryTable(module, max_positions))
        elif calls is not None:
            _replace_calls(module, "forward", calls)
        elif is_router(path):
            _replace_calls(module, "forward", {functional.linear: frozen, **sigmoids})
            if name == SHARED_GATE_NAME:
                # What this gate gives is squashed by the block around it. Only then: a context costs each call in it.
                _replace_calls(model.get_submodule(parent), "forward", sigmoids)
        elif isinstance(module, torch.nn.Linear) and kind_of(path) is None:
            _replace_calls(module, "forward", {functional.linear: frozen})
        elif hasattr(module, OWN_GATE) and not ACTIVATION_NAMES.intersection(dict(module.named_children())):
            _replace_calls(module, OWN_GATE, sigmoids)


def rowwise_layer_functions() -> LayerFunctions:
    """The elementwise functions of layers that carry a state, rowwise."""
    return LayerFunctions(
        exp=RowwiseActivation(torch.exp),
        sigmoid=RowwiseActivation(torch.sigmoid),
        silu=RowwiseActivation(functional.silu),
        softplus=RowwiseActivation(functional.softplus),
    )


class _ReplacedCalls(TorchFunctionMode):
    """Within this context, calls of some torch functions go to others."""

    def __init__(self, replacements: Mapping[Any, TorchFunction]) -> None:
        super().__init__()
        self._replacements = replacements

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._replacements.get(func, func)(*args, **(kwargs or {}))


def _replace_calls(module: torch.nn.Module, name: str, replacements: Mapping[Any, TorchFunction]) -> None:
    """Give one module a method that computes the same by other means; its attributes and its path stay."""
    plain_method = getattr(module, name)

    def method(*args: Any, **kwargs: Any) -> Any:
        with _ReplacedCalls(replacements):
            return plain_method(*args, **kwargs)

    setattr(module, name, method)


def _power(base: torch.Tensor, exponent: float) -> torch.Tensor:
    """The same, but for the gradient of an inverse root, which torch computes by another power."""
    return base.rsqrt() if exponent == INVERSE_ROOT else torch.pow(base, exponent)


def rowwise_mul(left: torch.Tensor, right: torch.Tensor | float) -> torch.Tensor:
    """A product; of complex numbers by real ones, each rounded by itself, as vector instructions do.

    What is left over is multiplied by instructions of the compiler's choice, some of which round once for two steps.
    """
    if not isinstance(right, torch.Tensor) or not (left.is_complex() and right.is_complex()):
        return torch.mul(left, right)
    (a, b), (c, d) = (torch.view_as_real(each).unbind(-1) for each in (left, right))
    return torch.view_as_complex(torch.stack((a * c - b * d, a * d + b * c), dim=-1))


def _frozen_linear(product: RowProduct) -> TorchFunction:
    def linear(x: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None) -> torch.Tensor:
        x_TI = x.reshape(-1, weight_OI.shape[1])
        y_TO: torch.Tensor = SegmentedLinear.apply(x_TI, weight_OI, bias_O, product, NoUpdates())
        return y_TO.view(*x.shape[:-1], weight_OI.shape[0])

    return linear


def _grouped(linear: TorchFunction) -> TorchFunction:
    def product(x_GTI: torch.Tensor, weight_GIO: torch.Tensor) -> torch.Tensor:
        return torch.stack([linear(x_TI, weight_IO.t()) for x_TI, weight_IO in zip(x_GTI, weight_GIO, strict=True)])

    return product


def _has_static_rope(rotary: torch.nn.Module) -> bool:
    """Whether the angles depend on nothing but the position; a model may have a kind of rope for each kind of layer."""
    kinds = rotary.rope_type
    return STATIC_ROPE_TYPES.issuperset(kinds.values() if isinstance(kinds, Mapping) else [kinds])


class RowwiseActivation(torch.nn.Module):
    """An elementwise activation, called on whole vectors only."""

    def __init__(self, activation: TorchFunction) -> None:
        super().__init__()
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the activation."""
        num_features = x.shape[-1]
        surplus = -num_features % VECTOR_STRIDE
        rows_TN = x.reshape(-1, num_features)
        if surplus:
            rows_TN = functional.pad(rows_TN, (0, surplus))
        pieces = rows_TN.split(whole_vector_rows(rows_TN.shape[0], rows_TN.shape[1], torch.get_num_threads()))
        activated = [self.activation(piece) for piece in pieces]
        result = activated[0] if len(activated) == 1 else torch.cat(activated)
        return result[:, :num_features].reshape(x.shape)


def whole_vector_rows(num_rows: int, num_features: int, num_threads: int) -> list[int]:
    """How to cut rows into calls such that each thread of each call works on whole vectors (usually one call)."""
    counts: list[int] = []
    while num_rows > 0:
        take = num_rows
        while take > 1 and not _splits_evenly(take * num_features, num_threads):
            take -= 1
        counts.append(take)
        num_rows -= take
    return counts


def _splits_evenly(numel: int, num_threads: int) -> bool:
    threads = min(num_threads, -(-numel // PARALLEL_GRAIN))
    return threads <= 1 or numel % (threads * VECTOR_STRIDE) == 0


class RotaryTable(torch.nn.Module):
    """The angles of a rotary embedding, computed once per position (and kind of layer) and looked up.

    Most models have them as cosines and sines, some as complex numbers.

    Positions are computed in blocks when they first occur: a context may be a quarter of a million tokens long.
    """

    def __init__(self, rotary: torch.nn.Module, max_positions: int) -> None:
        super().__init__()
        self.rotary = rotary
        self.max_positions = max_positions
        self._tables: dict[str | None, _Table] = {}
        self._axis_D: torch.Tensor | None = None

    @torch.inference_mode(False)
    @torch.no_grad()
    def forward(
        self, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None, **unused: Any
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """The angles of the given positions as the rotary embedding gives them, in the dtype of ``x``."""
        if layer_type not in self._tables:
            self._tables[layer_type] = _Table(math.ceil(self.max_positions / POSITIONS_PER_BLOCK))
        table = self._tables[layer_type]
        for block in table.missing(position_ids):
            kind = {} if layer_type is None else {"layer_type": layer_type}
            start = block * POSITIONS_PER_BLOCK
            # Blocks of one size below the grain: no thread boundary, no remainder.
            positions = torch.arange(start, start + POSITIONS_PER_BLOCK, device=x.device)
            # On as many axes as are asked for: some releases of transformers know no fewer.
            angles = self.rotary(x.detach(), positions.expand(*position_ids.shape[:-2], 1, -1), **kind)
            table.fill(block, [part[0] for part in (angles if isinstance(angles, tuple) else (angles,))])
        looked_up = tuple(self._look_up(part_TD, position_ids) for part_TD in table.parts_TD)
        return looked_up if len(looked_up) > 1 else looked_up[0]

    def _look_up(self, table_TD: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """What lies in a table for positions, which may be on several axes, each feature turning with one of them."""
        if position_ids.dim() < 3:
            return table_TD[position_ids]
        positions_ABT = position_ids
        if positions_ABT.stride(0) == 0:  # text: one and the same position on all axes
            return table_TD[positions_ABT[0]]
        if self._axis_D is None:
            self._axis_D = self._axes(table_TD, num_axes=len(positions_ABT))
        return torch.stack([table_TD[positions_BT] for positions_BT in positions_ABT]).gather(
            0, self._axis_D.expand(1, *positions_ABT.shape[1:], -1)
        )[0]

    def _axes(self, table_TD: torch.Tensor, *, num_axes: int) -> torch.Tensor:
        """The axis of each feature: with a position other than 0 on that axis alone, its sine is not 0."""
        position_A11 = torch.eye(num_axes, dtype=torch.int64, device=table_TD.device)[:, :, None, None]
        turned = [self.rotary(table_TD, positions)[1][0, 0] != 0 for positions in position_A11]
        return torch.stack(turned).int().argmax(dim=0)


class _Table:
    """Angles by position, in blocks; what is not filled takes no memory."""

    def __init__(self, num_blocks: int) -> None:
        self._is_filled = torch.zeros(num_blocks, dtype=torch.bool)
        self.parts_TD: list[torch.Tensor] = []
        """Cosines and sines, say, [T, D] each."""

    def missing(self, position_ids: torch.Tensor) -> list[int]:
        """The blocks of these positions that are not there."""
        blocks = position_ids.flatten() // POSITIONS_PER_BLOCK
        missing = blocks[~self._is_filled[blocks]]
        return missing.unique().tolist() if len(missing) else []

    def fill(self, block: int, parts_TD: Sequence[torch.Tensor]) -> None:
        """Take the values of one block."""
        if not self.parts_TD:
            num_positions = len(self._is_filled) * POSITIONS_PER_BLOCK
            self.parts_TD = [part_TD.new_empty(num_positions, *part_TD.shape[1:]) for part_TD in parts_TD]
        rows = slice(block * POSITIONS_PER_BLOCK, (block + 1) * POSITIONS_PER_BLOCK)
        for kept_TD, part_TD in zip(self.parts_TD, parts_TD, strict=True):
            kept_TD[rows] = part_TD
        self._is_filled[block] = True
