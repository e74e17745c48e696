"""Sending what a training records to the tools that people watch it with. Their failure never stops training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

from twinkle.core.errors import ConfigError, InvalidInput
from twinkle.core.events import event_log
from twinkle.metric.records import STEP, Record

log = event_log()

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
        _package("tensorboard")
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
        self._tool = _package(package)
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
        self._tool = _package("mlflow")
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


def _run_of(package: str) -> Callable[..., Forwarder]:
    def make(**settings: Any) -> Forwarder:
        return RunForwarder(package, **settings)

    return make


FORWARDERS: Mapping[str, Callable[..., Forwarder]] = MappingProxyType(
    {
        "tensorboard": TensorBoard,
        "wandb": _run_of("wandb"),
        "swanlab": _run_of("swanlab"),
        "mlflow": MLflow,
        "trackio": _run_of("trackio"),
    }
)


def _package(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise ConfigError(f"{name} is not installed: {error}; pip install 'twinkle-queue[{name}]'") from error


class Forwarding:
    """The forwarders of one adapter. One that fails is told once and gets nothing more."""

    def __init__(self) -> None:
        self._active: list[tuple[str, Forwarder]] = []

    def add(self, forwarder: str | Forwarder, settings: Mapping[str, Any]) -> None:
        """Open a forwarder by name, or take one; one that cannot be opened is told and left out.

        Raises:
            InvalidInput: The name is unknown.
        """
        if not isinstance(forwarder, str):
            self._active.append((type(forwarder).__name__, forwarder))
            return
        if forwarder not in FORWARDERS:
            raise InvalidInput("forwarder", f"{forwarder!r} is not known; use one of {', '.join(FORWARDERS)}")
        self._attempt(forwarder, lambda: self._active.append((forwarder, FORWARDERS[forwarder](**settings))))

    def send(self, record: Record) -> None:
        """Send a record's numbers, under ``train/`` or ``eval/`` where their names say nothing of the kind."""
        numbers = _named(record)
        for name, forwarder in list(self._active):
            if not self._attempt(name, partial(forwarder.log, numbers, record.step)):
                self._active.remove((name, forwarder))

    def close(self) -> None:
        """End every forwarder's run."""
        for name, forwarder in self._active:
            self._attempt(name, forwarder.close)
        self._active.clear()

    def names(self) -> Sequence[str]:
        """Those that are open."""
        return [name for name, _ in self._active]

    @staticmethod
    def _attempt(name: str, act: Callable[[], object]) -> bool:
        try:
            act()
        except Exception as error:  # noqa: BLE001 - whatever a tool's server or files provoke must not end a training
            log.warning(
                "metric.forwarding.failed",
                forwarder=name,
                error=f"{type(error).__name__}: {error}",
                next="training goes on; nothing more is sent there",
            )
            return False
        return True


def _named(record: Record) -> dict[str, float]:
    phase = "train" if record.kind == STEP else record.kind
    return {
        name if "/" in name else f"{phase}/{name}": value
        for name, value in record.values.items()
        if isinstance(value, float)
    }
