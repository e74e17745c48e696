"""Environments in OpenEnv's form: behind a server of theirs, or in this process from an installed package.

Written to the layout that OpenEnv publishes; tested with a package and a client of the same form.
"""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any

from twinkle.core.errors import ConfigError, InvalidInput
from twinkle.data_format.conversation import Tool as ToolInfo
from twinkle.data_format.conversation import Trajectory
from twinkle_agentic.envs.base import Env, StepResult
from twinkle_agentic.envs.env_tool import EPISODE_REWARD

ActionMapper = Callable[[str, dict[str, Any]], Any]
GENERIC_CLIENT = "openenv.core.generic_client.GenericEnvClient"
TEXT_FIELDS = ("result", "output", "content", "text", "message")
"""Where the text of an observation is, by custom."""


class OpenEnv(Env):
    """One environment of OpenEnv.

    Args:
        base_url: Of the server that runs it.
        env_cls: The client's class, or where it is to be imported from (``coding_env.CodingEnv``); the generic one if
            omitted.
        env_kwargs: Arguments of the client, or of the environment itself.
        tool_schema: What a model is told of its actions.
        env_name: In place of a server: the installed package whose environment is made in this process.
        action_mapper: Makes an action of a call's name and arguments.
    """

    def __init__(
        self,
        base_url: str | None = None,
        env_cls: str | type | None = None,
        env_kwargs: Mapping[str, Any] | None = None,
        tool_schema: list[ToolInfo] | None = None,
        *,
        env_name: str | None = None,
        action_mapper: ActionMapper | None = None,
    ) -> None:
        if (base_url is None) == (env_name is None):
            raise InvalidInput("base_url", "or env_name: send one of them, a server's address or an installed package")
        self._tool_schema = tool_schema or []
        self._map_action = action_mapper or _as_call
        self._reward = 0.0
        settings = dict(env_kwargs or {})
        self._action_class: Any = None
        self._backend: Any
        if env_name is not None:
            self._backend = _find(env_name, "server", "Environment")(**settings)
            self._action_class = _find(env_name, "models", "Action")
        else:
            kind = env_cls if isinstance(env_cls, type) else _import(env_cls or GENERIC_CLIENT)
            self._backend = kind(base_url=base_url, **settings).sync().__enter__()

    def reset(self, trajectory: Trajectory | None = None) -> StepResult:
        """See :class:`Env`."""
        self._reward = 0.0
        return StepResult(observation=observation_text(self._backend.reset()))

    def step(self, tool_name: str, arguments: dict[str, Any]) -> StepResult:
        """See :class:`Env`; ``info`` tells the reward of the episode so far."""
        action = self._map_action(tool_name, arguments)
        if self._action_class is not None and isinstance(action, Mapping):
            action = self._action_class(**action)
        result = self._backend.step(action)
        reward = float(getattr(result, "reward", None) or 0.0)
        self._reward += reward
        return StepResult(
            observation=observation_text(result),
            reward=reward,
            done=bool(getattr(result, "done", False)),
            info={EPISODE_REWARD: self._reward},
        )

    def tools(self) -> list[ToolInfo]:
        """See :class:`Env`."""
        return self._tool_schema

    def close(self) -> None:
        """Leave the server, or close the environment where it can be closed."""
        if self._action_class is None:
            self._backend.__exit__(None, None, None)
        elif hasattr(self._backend, "close"):
            self._backend.close()


def observation_text(result: Any) -> str:
    """What a model reads of a result: its observation's text, else all of it as JSON."""
    seen = getattr(result, "observation", result)
    if isinstance(seen, str):
        return seen
    fields = seen if isinstance(seen, Mapping) else _fields_of(seen)
    for name in TEXT_FIELDS:
        if isinstance(fields.get(name), str):
            return str(fields[name])
    return json.dumps(fields, ensure_ascii=False, default=str)


def _fields_of(value: Any) -> dict[str, Any]:
    dump = getattr(value, "model_dump", None)
    return dict(dump()) if callable(dump) else dict(getattr(value, "__dict__", {}))


def _as_call(tool_name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"tool_name": tool_name, "arguments": arguments}


def _import(path: str) -> Any:
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"env_cls: {path} is not there ({error}); pip install openenv, or name a client") from error


def _find(package: str, part: str, ending: str) -> Any:
    """The one class of that ending in a part of an installed package, or in the module of the part that is named so."""
    stem = package.removesuffix("_env")
    for path in (f"{package}.{part}.{stem}_{ending.lower()}", f"{package}.{part}", f"envs.{package}.{part}"):
        try:
            module = importlib.import_module(path)
        except ImportError:
            continue
        found = [
            value
            for name, value in vars(module).items()
            if inspect.isclass(value) and name.endswith(ending) and value.__module__.startswith(module.__name__)
        ]
        if len(found) == 1:
            return found[0]
    raise ConfigError(f"env_name: the package {package} is not installed, or its {part} has no class ...{ending}")
