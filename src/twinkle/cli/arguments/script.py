"""``CLI.from_args()``: the arguments of a script from its command line, a file, the environment and ``.env``."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_type_hints

from twinkle.cli.arguments.groups import (
    ALIASES,
    PRIMARY,
    CheckpointArgs,
    DatasetArgs,
    InfraArgs,
    LoraArgs,
    LossArgs,
    ModelArgs,
    OptimizerArgs,
    RLArgs,
    SamplerArgs,
    SamplingArgs,
    SchedulerArgs,
    ServerArgs,
    TemplateArgs,
    TrainingArgs,
    stated,
)
from twinkle.cli.arguments.sources import Said, of_command_line, of_dotenv, of_environment, of_file
from twinkle.cli.arguments.values import as_type, guessed
from twinkle.core.process.events import event_log

USE_MEGATRON = "use_megatron"
"""Sets the strategy to ``native_fsdp`` where it is true, as its name would not lead one to think."""

_log = event_log()


@dataclass
class Args:
    """The arguments, by group; what no group has is in ``extra``."""

    model: ModelArgs = field(default_factory=ModelArgs)
    lora: LoraArgs = field(default_factory=LoraArgs)
    dataset: DatasetArgs = field(default_factory=DatasetArgs)
    template: TemplateArgs = field(default_factory=TemplateArgs)
    training: TrainingArgs = field(default_factory=TrainingArgs)
    optimizer: OptimizerArgs = field(default_factory=OptimizerArgs)
    scheduler: SchedulerArgs = field(default_factory=SchedulerArgs)
    loss: LossArgs = field(default_factory=LossArgs)
    sampler: SamplerArgs = field(default_factory=SamplerArgs)
    sampling: SamplingArgs = field(default_factory=SamplingArgs)
    infra: InfraArgs = field(default_factory=InfraArgs)
    server: ServerArgs = field(default_factory=ServerArgs)
    rl: RLArgs = field(default_factory=RLArgs)
    checkpoint: CheckpointArgs = field(default_factory=CheckpointArgs)
    extra: dict[str, Any] = field(default_factory=dict)

    def groups(self) -> dict[str, Any]:
        """The groups by name."""
        return {item.name: vars(self)[item.name] for item in fields(self) if item.name != "extra"}

    def get(self, key: str, default: Any = None) -> Any:
        """A value by the name that it would have on the command line; ``default`` where there is no such name."""
        place = Names(self.groups()).find(key)
        return self.extra.get(_plain(key), default) if place is None else vars(self.groups()[place[0]])[place[1]]

    def __getitem__(self, key: str) -> Any:
        place = Names(self.groups()).find(key)
        return self.extra[_plain(key)] if place is None else vars(self.groups()[place[0]])[place[1]]

    def to_dict(self) -> dict[str, Any]:
        """All that has a value, in one level; a name that several groups have means what it does on its own."""
        flat: dict[str, Any] = {}
        names = Names(self.groups())
        for group, values in self.groups().items():
            flat |= {name: value for name, value in stated(values).items() if names.find(name) == (group, name)}
        return flat | self.extra

    def get_model_args(self) -> dict[str, Any]:
        """The model's; its id is the template's where only that was named."""
        return _with_model_id(stated(self.model), self.template.model_id)

    def get_lora_args(self) -> dict[str, Any]:
        """What ``peft.LoraConfig`` takes."""
        return {
            "target_modules": self.lora.lora_target_modules or "all-linear",
            "r": self.lora.lora_r,
            "lora_alpha": self.lora.lora_alpha,
            "lora_dropout": self.lora.lora_dropout,
        }

    def get_dataset_args(self) -> dict[str, Any]:
        """The data set's."""
        return stated(self.dataset)

    def get_template_args(self) -> dict[str, Any]:
        """The template's; its model is the one that trains where none is named."""
        return _with_model_id(stated(self.template), self.model.model_id)

    def get_training_args(self) -> dict[str, Any]:
        """The loop's."""
        return stated(self.training)

    def get_optimizer_args(self) -> dict[str, Any]:
        """The optimizer's; the learning rate is called ``lr``."""
        values = stated(self.optimizer)
        return {"lr": values.pop("learning_rate"), **values}

    def get_scheduler_args(self) -> dict[str, Any]:
        """The schedule's."""
        return stated(self.scheduler)

    def get_loss_args(self) -> dict[str, Any]:
        """The loss's."""
        return stated(self.loss)

    def get_sampler_args(self) -> dict[str, Any]:
        """The sampler's."""
        return stated(self.sampler)

    def get_sampling_args(self) -> dict[str, Any]:
        """How it samples."""
        return stated(self.sampling)

    def get_infra_args(self) -> dict[str, Any]:
        """The devices'."""
        return stated(self.infra)

    def get_server_args(self) -> dict[str, Any]:
        """The server's."""
        return stated(self.server)

    def get_rl_args(self) -> dict[str, Any]:
        """Those of reinforcement learning."""
        return stated(self.rl)

    def get_checkpoint_args(self) -> dict[str, Any]:
        """The checkpoints'."""
        return stated(self.checkpoint)


class Names:
    """Which field a name means: case does not matter, nor whether ``-`` or ``_`` is written."""

    def __init__(self, groups: Mapping[str, Any]) -> None:
        self._places: dict[str, tuple[str, str]] = {}
        for group, values in groups.items():
            for item in fields(values):
                self._places[f"{group}_{item.name}"] = (group, item.name)
        for group, values in groups.items():
            for item in fields(values):
                for name in (item.name, *item.metadata.get(ALIASES, ())):
                    if name not in self._places or item.metadata.get(PRIMARY):
                        self._places[name] = (group, item.name)

    def find(self, name: str) -> tuple[str, str] | None:
        """The group and the field."""
        return self._places.get(_plain(name))

    def nearest(self, name: str) -> str | None:
        """The known name that is most like one that is not known."""
        return next(iter(difflib.get_close_matches(_plain(name), self._places, n=1, cutoff=0.8)), None)


class CLI:
    """Reads arguments. What comes later wins: defaults, ``.env``, environment, file, command line."""

    @staticmethod
    def from_args(
        argv: Sequence[str] | None = None,
        env_file: str | Path | None = None,
        config_file: str | Path | None = None,
    ) -> Args:
        """The arguments of this process.

        Args:
            argv: The command line after the script's name: ``--key value``, ``--key=value``, ``key=value``, ``--flag``,
                ``--no-flag``.
            env_file: Default: ``.env`` in the working directory, if there is one.
            config_file: YAML or JSON, flat or by group. Default: what ``--config`` names.

        Raises:
            ConfigError: A value does not fit its field, or a file cannot be read; the message names both.
        """
        args = Args()
        names = Names(args.groups())
        line = of_command_line(argv)
        config = config_file or line.pop("config", Said("", "")).value
        sources = [of_dotenv(env_file), of_environment(names.find), of_file(config) if config else {}, line]
        for source in sources:
            for key, said in source.items():
                _set(args, names, key, said)
        if config:
            args.server.config = str(config)
        return args


def _set(args: Args, names: Names, key: str, said: Said) -> None:
    if _plain(key) == USE_MEGATRON:
        if as_type(said.value, bool, f"{key} ({said.source})"):
            args.model.strategy = "native_fsdp"
        return
    if isinstance(said.value, Mapping) and _plain(key) in args.groups():
        for name, value in said.value.items():
            _set(args, names, f"{_plain(key)}_{name}", Said(value, said.source))
        return
    place = names.find(key)
    if place is None:
        args.extra[_plain(key)] = guessed(said.value)
        near = names.nearest(key) if said.is_meant else None
        if near is not None:
            _log.warning("arguments.unknown", key=key, source=said.source, did_you_mean=near)
        return
    group = args.groups()[place[0]]
    kind = get_type_hints(type(group))[place[1]]
    setattr(group, place[1], as_type(said.value, kind, f"{key} ({said.source})"))


def _with_model_id(values: dict[str, Any], other: str | None) -> dict[str, Any]:
    return values if values.get("model_id") or not other else {**values, "model_id": other}


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")
