"""An environment in a micro virtual machine: a sandbox of E2B, or of what speaks its protocol (AgentENV)."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from twinkle.core.errors import ConfigError, InvalidInput
from twinkle.core.process.events import event_log
from twinkle.data_format.conversation import Tool as ToolInfo
from twinkle.data_format.conversation import Trajectory
from twinkle_agentic.envs.base import Env, StepResult

INSTALL = "pip install 'twinkle-queue[agents]'"
MAX_CHARACTERS = 32 * 1024

Handler = Callable[["AgentEnv", dict[str, Any]], str]
MakeSandbox = Callable[..., Any]

_log = event_log()


def _tool(name: str, description: str, required: Mapping[str, str], optional: Mapping[str, str]) -> ToolInfo:
    properties = {key: {"type": "string", "description": text} for key, text in {**required, **optional}.items()}
    parameters = {"type": "object", "properties": properties, "required": list(required)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


_PATH = {"path": "An absolute path in the sandbox."}
DEFAULT_TOOLS: tuple[ToolInfo, ...] = (
    _tool(
        "run_command",
        "Runs a shell command in the sandbox and returns what it printed.",
        {"command": "The command."},
        {"cwd": "The folder to run it in."},
    ),
    _tool("write_file", "Writes a text file in the sandbox.", {**_PATH, "content": "What it is to hold."}, {}),
    _tool("read_file", "Reads a text file of the sandbox.", _PATH, {}),
)


class AgentEnv(Env):
    """One sandbox an episode: ``reset`` makes it anew, ``close`` ends it, tools run within.

    What goes wrong within a sandbox is what the model reads. It rewards nothing: judge whole conversations with a
    reward, or override ``step``.

    Args:
        template: Of which image sandboxes are made, by its name on the server.
        api_url: The server's address; ``E2B_API_URL`` if omitted.
        api_key: For it; ``E2B_API_KEY`` if omitted. AgentENV takes any.
        sandbox_timeout: Seconds that an idle sandbox lives.
        command_timeout: Seconds that a command may take.
        setup_commands: Run at the beginning of every episode.
        sandbox_envs: Environment variables of the sandbox.
        metadata: To find it by on the server.
        refresh_timeout: Whether every step makes it live on.
        include_default_tools: ``run_command``, ``write_file`` and ``read_file``.
        make_sandbox: In place of ``e2b.Sandbox.create``.

    Raises:
        ConfigError: The package ``e2b`` is not installed.
    """

    def __init__(
        self,
        template: str,
        api_url: str | None = None,
        api_key: str | None = None,
        sandbox_timeout: int = 300,
        command_timeout: int = 120,
        setup_commands: Sequence[str] = (),
        sandbox_envs: Mapping[str, str] | None = None,
        metadata: Mapping[str, str] | None = None,
        refresh_timeout: bool = True,
        include_default_tools: bool = True,
        *,
        make_sandbox: MakeSandbox | None = None,
    ) -> None:
        if not template:
            raise InvalidInput("template", "is empty; send the name of an image on the server")
        address = api_url or os.environ.get("E2B_API_URL")
        key = api_key or os.environ.get("E2B_API_KEY")
        # Only E2B's own server has keys of the form that its package insists on.
        own_server = {"api_url": address, "sandbox_url": address, "validate_api_key": False} if address else {}
        self._connection = {**own_server, "api_key": key or ("none" if address else None)}
        self._make = make_sandbox or _e2b()
        self._template = template
        self._settings = {"timeout": sandbox_timeout, "envs": sandbox_envs, "metadata": metadata}
        self._sandbox_timeout = sandbox_timeout
        self._command_timeout = command_timeout
        self._setup = tuple(setup_commands)
        self._refreshes = refresh_timeout
        self._tools: dict[str, tuple[ToolInfo, Handler]] = {}
        if include_default_tools:
            for info, handler in zip(DEFAULT_TOOLS, (_run_command, _write_file, _read_file), strict=True):
                self.register_tool(info, handler)
        self.sandbox: Any = None

    def register_tool(self, tool_info: ToolInfo, handler: Handler) -> Self:
        """Add a tool, in place of the one of that name; ``handler(env, arguments)`` gives what the model reads.

        Raises:
            InvalidInput: It has no name.
        """
        name = (tool_info.get("function") or {}).get("name")
        if not name:
            raise InvalidInput("tool_info", "has no function.name")
        self._tools[name] = (tool_info, handler)
        return self

    def register_command_tool(self, tool_info: ToolInfo, command_template: str) -> Self:
        """Add a tool that runs a command; ``{argument}`` in it is what the model sent, quoted for the shell."""

        def run(env: AgentEnv, arguments: dict[str, Any]) -> str:
            quoted = {name: shlex.quote(str(value)) for name, value in arguments.items()}
            return env.run_command(command_template.format(**quoted))

        return self.register_tool(tool_info, run)

    def reset(self, trajectory: Trajectory | None = None) -> StepResult:
        """Begin in a new sandbox; what the first commands printed."""
        self.close()
        settings = {name: value for name, value in {**self._settings, **self._connection}.items() if value is not None}
        self.sandbox = self._make(self._template, **settings)
        printed = [self.run_command(command) for command in self._setup]
        return StepResult(observation="\n".join(printed), info=self._info())

    def step(self, tool_name: str, arguments: dict[str, Any] | None = None) -> StepResult:
        """Run a tool; whatever goes wrong is what the model reads."""
        if self.sandbox is None:
            return StepResult(observation="Error: there is no sandbox; call reset() first", done=True)
        if tool_name not in self._tools:
            return StepResult(observation=f"Error: there is no tool {tool_name!r}; there are: {', '.join(self._tools)}")
        try:
            observation = self._tools[tool_name][1](self, dict(arguments or {}))
            if self._refreshes:
                self.sandbox.set_timeout(self._sandbox_timeout)
        except KeyError as error:
            return StepResult(observation=f"Error: {tool_name} needs the argument {error}", info=self._info())
        except Exception as error:  # noqa: BLE001 - a sandbox's failure is an observation, for the model to deal with
            reason = f"{type(error).__name__}: {error}"
            _log.warning("sandbox.failed", tool=tool_name, error=reason, next="the model reads it")
            return StepResult(observation=f"Error: {reason}", info=self._info())
        return StepResult(observation=shortened(observation), info=self._info())

    def tools(self) -> list[ToolInfo]:
        """See :class:`Env`."""
        return [info for info, _ in self._tools.values()]

    def run_command(self, command: str, cwd: str | None = None) -> str:
        """Run a shell command in the sandbox; what it printed, and how it ended if badly."""
        try:
            ended = self.sandbox.commands.run(command, cwd=cwd, timeout=self._command_timeout)
        except Exception as error:
            # What ends with another code than 0 is raised, with what it printed.
            if not hasattr(error, "exit_code"):
                raise
            ended = error
        parts = [ended.stdout, f"[stderr]\n{ended.stderr}" if ended.stderr else ""]
        parts.append(f"[exit code: {ended.exit_code}]" if ended.exit_code else "")
        return shortened("\n".join(part for part in parts if part)) or "(no output)"

    def close(self) -> None:
        """End the sandbox; one that cannot be reached ends by its own time limit."""
        sandbox, self.sandbox = self.sandbox, None
        if sandbox is None:
            return
        try:
            sandbox.kill()
        except Exception as error:  # noqa: BLE001 - the server ends what nobody uses
            reason = f"{type(error).__name__}: {error}"
            _log.warning("sandbox.not_ended", error=reason, next=f"it ends after {self._sandbox_timeout} s")

    def _info(self) -> dict[str, Any]:
        return {"sandbox_id": getattr(self.sandbox, "sandbox_id", None)}


def shortened(text: str) -> str:
    """The text, cut where a model has read enough."""
    if len(text) <= MAX_CHARACTERS:
        return text
    return f"{text[:MAX_CHARACTERS]}\n... ({len(text) - MAX_CHARACTERS} characters left out)"


def _run_command(env: AgentEnv, arguments: dict[str, Any]) -> str:
    return env.run_command(str(arguments["command"]), arguments.get("cwd"))


def _write_file(env: AgentEnv, arguments: dict[str, Any]) -> str:
    env.sandbox.files.write(arguments["path"], str(arguments["content"]))
    return f"Wrote {arguments['path']}"


def _read_file(env: AgentEnv, arguments: dict[str, Any]) -> str:
    return str(env.sandbox.files.read(arguments["path"]))


def _e2b() -> MakeSandbox:
    try:
        # An extra: most environments live in this process.
        from e2b import Sandbox  # noqa: PLC0415
    except ModuleNotFoundError:
        raise ConfigError(f"a sandbox in a virtual machine needs the package e2b: {INSTALL}") from None
    make: MakeSandbox = Sandbox.create
    return make
