"""On a CPU: how often the host would wait for a device."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


class HostReads(TorchFunctionMode):
    """Counts what would wait for a device: values that come to the host, and shapes that hang on them."""

    READS = ("cpu", "item", "tolist", "__bool__", "__int__", "__float__", "__index__", "nonzero")

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in self.READS:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


class ScalarReads(TorchDispatchMode):
    """The same below autograd, where backward passes are."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            self.count += 1
        return func(*args, **(kwargs or {}))
