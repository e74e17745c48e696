"""Whether the kernels that read adapters in place are right on a device: they are tried before they are trusted.

Shapes: T rows, I inputs, O outputs, R rank.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from twinkle.module.adapter import AdapterLayout, LoraAdapter, LoraConfig, LoraShape
from twinkle.module.lora_tables import Places, Tables
from twinkle.module.segmented import Segment
from twinkle.module.stacked import groups_of
from twinkle.module.tabled import MOST_MEMBERS, GroupUpdates
from twinkle.module.tried import own_kernels

MODULE = "twinkle.module.lora_kernels"


@cache
def kernels_for(device_type: str, dtype: torch.dtype) -> Any | None:
    """The kernels, if they run there and are right; where they could and are not, a line in the log says why."""

    def worst(kernels: Any) -> float:
        numbers = range(1, MOST_MEMBERS + 1)
        device = torch.device(device_type)
        return max(relative_error(kernels, device, dtype, ranks=(5, 16), num_members=number) for number in numbers)

    return own_kernels(
        MODULE,
        worst,
        device_type=device_type,
        dtype=dtype,
        event="device.no_lora_kernels",
        instead="matrices are stacked, slower",
    )


def relative_error(
    kernels: Any, device: torch.device, dtype: torch.dtype, *, ranks: tuple[int, int], num_members: int = 1
) -> float:
    """The largest of a group's updates and gradients, by norm: of two adapters, one with rows in two places.

    Members have unlike ranks and widths; the last of several is not trained by the second adapter.
    """
    num_inputs, widths = 72, (40, 24, 136)[:num_members]
    paths = [f"it.{number}" for number in range(num_members)]
    generator = torch.Generator().manual_seed(0)

    def adapter(rank: int, num_trained: int) -> LoraAdapter:
        # What lies before a matrix shifts it off the multiples that blocks begin at.
        shapes = [LoraShape("before", 3, 2, 1, 1.0)]
        for number, (path, width) in enumerate(zip(paths[:num_trained], widths, strict=False)):
            shapes.append(LoraShape(path, num_inputs, width, max(1, rank - number), 0.3 + number))
        layout = AdapterLayout(tuple(shapes))
        made = LoraAdapter(LoraConfig(rank=rank), layout, device=device, compute_dtype=dtype, trainable=True)
        made.params.copy_(torch.randn(layout.numel, generator=generator))
        made.publish()
        return made

    one, two = adapter(ranks[0], num_members), adapter(ranks[1], max(1, num_members - 1))
    spans = ((one, 0, 70), (None, 70, 73), (two, 73, 90), (one, 90, 91))
    segments = [Segment(owner, start, end, owner.grad_views if owner else None) for owner, start, end in spans]

    def rows(width: int) -> torch.Tensor:
        return torch.randn(spans[-1][2], width, generator=generator).to(device, dtype)

    x_TI, dx_TI = rows(num_inputs), rows(num_inputs)
    ys_TO, dys_TO = [rows(width) for width in widths], [rows(width) for width in widths]
    expected_ys, expected_dx = [y_TO.double() for y_TO in ys_TO], dx_TI.double()
    expected: dict[tuple[LoraAdapter, str], list[torch.Tensor]] = {}
    for owner, start, end in spans:
        for number, path in enumerate(paths if owner is not None else ()):
            if owner is None or path not in owner.compute_views:
                continue
            a_RI, b_OR = (side.double() for side in owner.compute_views[path])
            scale = owner.scales[path]
            x, dy = x_TI[start:end].double(), dys_TO[number][start:end].double()
            expected_ys[number][start:end] += scale * x @ a_RI.t() @ b_OR.t()
            expected_dx[start:end] += scale * dy @ b_OR @ a_RI
            shares = scale * (dy @ b_OR).t() @ x, scale * dy.t() @ (x @ a_RI.t())
            so_far = expected.get((owner, path), [torch.zeros_like(share) for share in shares])
            expected[owner, path] = [total + share for total, share in zip(so_far, shares, strict=True)]
    updates = GroupUpdates(Tables.of(groups_of(segments, len(x_TI)), Places(paths), kernels, device), 0)
    saved = updates.add(ys_TO, x_TI)
    updates.add_gradients(dys_TO, dx_TI=dx_TI, x_TI=x_TI, saved=saved)
    pairs = [*zip(ys_TO, expected_ys, strict=True), (dx_TI, expected_dx)]
    for (owner, path), totals in expected.items():
        pairs += zip(owner.grad_views[path], totals, strict=True)
    for each in (one, two):
        pairs.append((1 + each.grad[: each.layout.shapes[0].numel_a], torch.ones(3).double()))
    errors = [(found.double() - right.to(device)).norm() / right.norm().to(device) for found, right in pairs]
    return float(torch.stack(errors).max())
