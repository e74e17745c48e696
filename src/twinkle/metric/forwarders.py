"""The tools that people watch a training with, all taken in one way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

from twinkle.core.errors import ConfigError

DEFAULT_PROJECT = "twinkle"


@runtime_checkable
class Forwarder(Protocol):
    """Where records go; a script may bring its own."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Take the numbers of one optimizer step, or of one report."""
        ...

    def close(self) -> None:
        """Nothing comes any more."""
        ...


class TensorBoard:
    """Event files in ``log_dir``; ``settings`` are SummaryWriter's."""

    def __init__(self, log_dir: str = "runs", **settings: Any) -> None:
        package_of("tensorboard")
        self._writer = import_module("torch.utils.tensorboard").SummaryWriter(log_dir, **settings)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """See :class:`Forwarder`."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """See :class:`Forwarder`."""
        self._writer.close()


class RunForwarder:
    """A run of W&B, SwanLab or Trackio, whose packages have the same calls; ``settings`` are those of ``init``."""

    def __init__(self, package: str, **settings: Any) -> None:
        self._tool = package_of(package)
        self._tool.init(**{"project": DEFAULT_PROJECT, **settings})

    def log(self, values: Mapping[str, float], step: int) -> None:
        """See :class:`Forwarder`."""
        self._tool.log(dict(values), step=step)

    def close(self) -> None:
        """See :class:`Forwarder`."""
        self._tool.finish()


class MLflow:
    """A run of MLflow, at ``tracking_uri`` in ``experiment``; ``settings`` are those of ``start_run``."""

    def __init__(self, tracking_uri: str | None = None, experiment: str = DEFAULT_PROJECT, **settings: Any) -> None:
        self._tool = package_of("mlflow")
        if tracking_uri is not None:
            self._tool.set_tracking_uri(tracking_uri)
        self._tool.set_experiment(experiment)
        self._tool.start_run(**settings)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """See :class:`Forwarder`. MLflow's names have no brackets."""
        named = {name.replace("(", " ").replace(")", ""): value for name, value in values.items()}
        self._tool.log_metrics(named, step=step)

    def close(self) -> None:
        """See :class:`Forwarder`."""
        self._tool.end_run()


FORWARDERS: Mapping[str, Callable[..., Forwarder]] = MappingProxyType(
    {
        "tensorboard": TensorBoard,
        "wandb": partial(RunForwarder, "wandb"),
        "swanlab": partial(RunForwarder, "swanlab"),
        "mlflow": MLflow,
        "trackio": partial(RunForwarder, "trackio"),
    }
)


def package_of(name: str) -> Any:
    """A tool's package.

    Raises:
        ConfigError: It is not installed; the error names the extra that brings it.
    """
    try:
        return import_module(name)
    except ImportError as error:
        raise ConfigError(f"{name} is not installed: {error}; pip install 'twinkle-queue[{name}]'") from error
