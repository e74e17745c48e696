"""Megatron's core on a machine without CUDA.

It names CUDA's device, streams and random state where it makes buffers. Torch itself stays as it is: Megatron's own
modules alone see, under the name ``torch``, a stand-in whose ``cuda`` is the CPU. With CUDA nothing is changed.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch

from twinkle.core.errors import ConfigError
from twinkle.core.process.events import event_log
from twinkle.core.process.requirements import requires

REQUIREMENT = "megatron-core>=0.16.1"
FACTORIES = ("arange", "empty", "full", "ones", "rand", "randn", "tensor", "zeros")
CPU = torch.device("cpu")
MODULES = (
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.optimizer_param_scheduler",
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.tensor_parallel.random",
    "megatron.core.transformer.moe.moe_layer",
    "megatron.core.transformer.multi_latent_attention",
    "megatron.core.transformer.transformer_config",
)
"""What this package uses; they import the rest."""

log = event_log()


def bring_up() -> None:
    """Import Megatron's core, and where torch finds no CUDA make its modules run without. Idempotent.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        requires(REQUIREMENT)
    except ImportError as error:
        raise ConfigError(
            f"MegatronModel needs the extra twinkle-queue[megatron] ({error}); or use TransformersModel"
        ) from error
    if torch.cuda.is_available():
        return
    with _without_compiling(), warnings.catch_warnings():
        # That there is no Transformer Engine, once from each of many files.
        warnings.simplefilter("ignore", UserWarning)
        for name in MODULES:
            importlib.import_module(name)
    stand_in = _TorchWithoutCuda()
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.") and vars(module).get("torch") is torch:
            vars(module)["torch"] = stand_in
    random = importlib.import_module("megatron.core.tensor_parallel.random")
    vars(random).update(_get_cuda_rng_state=_random_state, _set_cuda_rng_state=_set_random_state)
    log.info("megatron.without_cuda", next="Megatron's modules take the CPU for CUDA's device; torch is as it was")


@contextlib.contextmanager
def _without_compiling() -> Iterator[None]:
    """Megatron compiles small functions as it is imported, which on a CPU would cost a compiler's run for each."""
    compile_function = torch.compile
    torch.compile = _left_alone  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = compile_function


def _left_alone(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def _random_state(*args: Any, **settings: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _set_random_state(state: torch.Tensor, *args: Any, **settings: Any) -> None:
    torch.set_rng_state(state)


class _NoStream:
    """Work is done as it is given: nothing to wait for."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        pass

    def wait_stream(self, stream: object) -> None:
        """Nothing to do."""

    def wait_event(self, event: object) -> None:
        """Nothing to do."""

    def record_event(self, event: object = None) -> _NoStream:
        """The event is over already."""
        return self

    def record(self, stream: object = None) -> None:
        """Nothing to do."""

    def wait(self, stream: object = None) -> None:
        """Nothing to do."""

    def synchronize(self) -> None:
        """Nothing to do."""


class _CudaWithoutDevice(ModuleType):
    """What Megatron asks of ``torch.cuda``; everything else is torch's own."""

    Stream = _NoStream
    Event = _NoStream
    get_rng_state = staticmethod(_random_state)
    set_rng_state = staticmethod(_set_random_state)
    manual_seed = staticmethod(torch.manual_seed)

    def __init__(self) -> None:
        super().__init__(torch.cuda.__name__)
        self._stream = _NoStream()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)

    def current_device(self) -> torch.device:
        """The CPU."""
        return CPU

    def current_stream(self, device: object = None) -> _NoStream:
        """The only one."""
        return self._stream

    def stream(self, stream: object) -> contextlib.AbstractContextManager[None]:
        """There is only one."""
        return contextlib.nullcontext()

    def synchronize(self, device: object = None) -> None:
        """Nothing to do."""

    def empty_cache(self) -> None:
        """Nothing to do."""


class _TorchWithoutCuda(ModuleType):
    """Torch, but that ``cuda`` and what is made on it are on the CPU."""

    def __init__(self) -> None:
        super().__init__(torch.__name__)
        self.cuda = _CudaWithoutDevice()
        for name in FACTORIES:
            setattr(self, name, _on_cpu(getattr(torch, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def make(*args: Any, **settings: Any) -> torch.Tensor:
        if str(settings.get("device")).startswith("cuda"):
            settings["device"] = CPU
        return factory(*args, **settings)

    return make
