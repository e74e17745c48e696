"""Plain values and the tensors among them, as JSON and tensors: what a snapshot holds of a script. Never pickles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch

from twinkle.core.errors import InvalidInput

_PLAIN = (bool, int, float, str)


class Packer:
    """Takes values apart; the tensors gather under numbers."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}

    def pack(self, value: object) -> Any:
        """The value as JSON.

        Raises:
            InvalidInput: There is something in it that is not data.
        """
        if value is None or isinstance(value, _PLAIN):
            return value
        if isinstance(value, (list, tuple)):
            return {"list" if isinstance(value, list) else "tuple": [self.pack(item) for item in value]}
        if isinstance(value, Mapping):
            return {"dict": [[self.pack(key), self.pack(item)] for key, item in value.items()]}
        if isinstance(value, torch.Tensor):
            return {"tensor": self._put(value.detach().cpu()), "leaf": value.requires_grad}
        if isinstance(value, np.ndarray):
            return {"array": self._put(torch.from_numpy(np.ascontiguousarray(value)))}
        if isinstance(value, bytes):
            return {"bytes": self._put(torch.frombuffer(bytearray(value), dtype=torch.uint8))}
        if is_dataclass(value) and not isinstance(value, type):
            content = {field.name: self.pack(getattr(value, field.name)) for field in fields(value)}
            return {"of": type(value).__name__, "fields": content}
        raise InvalidInput("snapshot", f"cannot hold {type(value).__name__}")

    def _put(self, tensor: torch.Tensor) -> str:
        name = f"{len(self.tensors)}"
        # A copy: tensors that are views of one buffer cannot be written as they are.
        self.tensors[name] = tensor.clone().contiguous()
        return name


class Unpacker:
    """Puts values together again.

    Args:
        tensors: As :class:`Packer` gathered them.
        classes: Of which dataclasses there may be instances.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], *classes: type) -> None:
        self._tensors = tensors
        self._classes = {kind.__name__: kind for kind in classes}

    def unpack(self, packed: Any) -> Any:
        """The value."""
        if not isinstance(packed, dict):
            return packed
        match packed:
            case {"list": items}:
                return [self.unpack(item) for item in items]
            case {"tuple": items}:
                return tuple(self.unpack(item) for item in items)
            case {"dict": items}:
                return {self.unpack(key): self.unpack(item) for key, item in items}
            case {"tensor": name, "leaf": leaf}:
                return self._tensors[name].clone().requires_grad_(leaf)
            case {"array": name}:
                return self._tensors[name].numpy().copy()
            case {"bytes": name}:
                return self._tensors[name].numpy().tobytes()
            case {"of": kind, "fields": content}:
                return self._classes[kind](**{name: self.unpack(item) for name, item in content.items()})
        raise InvalidInput("snapshot", "holds something that this release does not know")
