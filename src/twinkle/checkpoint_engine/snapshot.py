"""Recovery points of one adapter: the flat buffers and all that its next step depends on, in one blob."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from twinkle.checkpoint_engine.host_copy import HostCopy, copy_to_host
from twinkle.checkpoint_engine.tensor_file import copy_checked, read_metadata, read_tensors, write_tensors
from twinkle.core.errors import InvalidInput
from twinkle.core.process.events import event_log
from twinkle.module.adapter import AdapterPool, Measure
from twinkle.module.lora import LoraAdapter, LoraConfig

SNAPSHOT_VERSION = 1
CHECKED_AT_ONCE = 1 << 24
PLACE_FACTOR = 0x1E3779B97F4A7C15
"""Odd, and spread over all bits."""
HEADER_METADATA = "snapshot"
FIELD = "snapshot"
SCRIPT = "script"
"""What stands before the names of a script's tensors, and its entry of the header."""


@dataclass(frozen=True, kw_only=True)
class PackedScript:
    """What a script has set for an adapter and where it stands, packed (``packing``)."""

    content: Any
    tensors: Mapping[str, torch.Tensor]


log = event_log()


@dataclass(frozen=True, kw_only=True)
class StateCopy:
    """An adapter's state at one moment; it may change while this is written."""

    copy: HostCopy
    header: str

    @property
    def num_bytes(self) -> int:
        """About how large ``data`` will be."""
        return self.copy.num_bytes

    def data(self) -> bytes:
        """What ``restore`` reads. Any thread may ask."""
        return write_tensors(self.copy.tensors(), metadata=(HEADER_METADATA, self.header))


def snapshot(
    adapter: LoraAdapter, determinism: str, *, num_ranks: int = 1, script: PackedScript | None = None
) -> bytes:
    """What ``copy_state`` copies, written at once."""
    return copy_state(adapter, determinism, num_ranks=num_ranks, script=script).data()


def copy_state(
    adapter: LoraAdapter, determinism: str, *, num_ranks: int = 1, script: PackedScript | None = None
) -> StateCopy:
    """Everything needed to go on bit by bit where this trainable adapter stands, open gradients included.

    ``determinism`` is the mode of the model the adapter lives on, ``num_ranks`` how many ranks share its work;
    ``restore`` warns when either has changed. ``script`` goes with it, for ``script_of``.
    """
    if not adapter.trainable:
        raise InvalidInput(FIELD, "an adapter that is not trained has no state to recover; keep its checkpoint")
    header = {
        "version": SNAPSHOT_VERSION,
        "config": adapter.config.to_json(),
        "step": adapter.step,
        "determinism": determinism,
        "torch": torch.__version__,
        "ranks": num_ranks,
        "modules": [shape.path for shape in adapter.layout.shapes],
        "has_gradients": adapter.has_gradients,
        "measures": adapter.measures,
    }
    tensors = _buffers(adapter, has_gradients=adapter.has_gradients)
    if script is not None:
        header[SCRIPT] = script.content
        tensors |= {f"{SCRIPT}.{name}": tensor for name, tensor in script.tensors.items()}
    return StateCopy(copy=copy_to_host(tensors), header=json.dumps(header, sort_keys=True))


def script_of(content: bytes) -> PackedScript | None:
    """What was given to ``snapshot`` as the script, if anything was."""
    header = json.loads(read_metadata(FIELD, content)[HEADER_METADATA])
    if SCRIPT not in header:
        return None
    prefix = f"{SCRIPT}."
    tensors = read_tensors(FIELD, content)
    own = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    return PackedScript(content=header[SCRIPT], tensors=own)


def restore(pool: AdapterPool, content: bytes, determinism: str, *, num_ranks: int = 1) -> LoraAdapter:
    """The adapter of a snapshot, on the same base model; warns where its next bits may differ from those it had.

    ``determinism`` and ``num_ranks`` are those of the model whose pool this is, as for ``snapshot``.
    """
    try:
        header = json.loads(read_metadata(FIELD, content)[HEADER_METADATA])
        config = LoraConfig.from_json(header["config"])
        version, step, has_gradients = int(header["version"]), int(header["step"]), bool(header["has_gradients"])
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidInput(FIELD, "is not a snapshot of an adapter") from error
    if version != SNAPSHOT_VERSION:
        raise InvalidInput(FIELD, f"has version {version}, this release reads {SNAPSHOT_VERSION}")
    adapter = pool.create_empty(config)
    if header["modules"] != [shape.path for shape in adapter.layout.shapes]:
        raise InvalidInput(FIELD, "was taken on another base model")
    tensors = {name: each for name, each in read_tensors(FIELD, content).items() if not name.startswith(SCRIPT)}
    copy_checked(FIELD, tensors, _buffers(adapter, has_gradients=has_gradients))
    adapter.step = step
    adapter.has_gradients = has_gradients
    adapter.measures = {name: Measure(*measure) for name, measure in header.get("measures", {}).items()}
    adapter.publish()
    here = {"determinism": determinism, "torch": torch.__version__, "ranks": num_ranks}
    then = {"ranks": 1} | {name: header[name] for name in here if name in header}
    if then != here:
        log.warning("adapter.restore.platform_changed", then=then, here=here)
    return adapter


def fingerprint(adapter: LoraAdapter) -> str:
    """A hash of all that the next step of an adapter depends on: equal on ranks that hold the same one."""
    digest = hashlib.sha256(str(adapter.step).encode())
    buffers = (adapter.params, adapter.grad, adapter.exp_avg, adapter.exp_avg_sq)
    if adapter.params.device.type == "cpu":
        for buffer in buffers:
            digest.update(buffer.numpy().data)
    else:
        digest.update(torch.stack([sum_ for buffer in buffers for sum_ in checksums(buffer)]).cpu().numpy().data)
    return digest.hexdigest()


def checksums(buffer: torch.Tensor) -> list[torch.Tensor]:
    """Sums over the bits of a float32 buffer where it is, which is quicker than to bring it here and hash it.

    Of what is here the sum, and the sum by place: bits that differ, or lie elsewhere, show, modulo 2^64.
    """
    found = []
    for part in buffer.view(torch.int32).split(CHECKED_AT_ONCE):
        bits = part.long()
        places = torch.arange(1, len(bits) + 1, device=bits.device).mul_(PLACE_FACTOR)
        found += [bits.sum(), bits.mul_(places).sum()]
    return found


def _buffers(adapter: LoraAdapter, *, has_gradients: bool) -> dict[str, torch.Tensor]:
    buffers = {"params": adapter.params, "exp_avg": adapter.exp_avg, "exp_avg_sq": adapter.exp_avg_sq}
    if has_gradients:
        buffers["grad"] = adapter.grad
    return buffers
