"""Carries out the calls that a model wrote; whatever is wrong with one is what the model reads."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from twinkle.core.errors import InvalidInput
from twinkle.data_format.conversation import Tool as ToolInfo
from twinkle_agentic.tools.base import Tool

ERROR = "Error:"
"""How the observation of a call begins that no tool could carry out."""


class ToolManager:
    """Tools by name.

    A call is never an exception of the loop: a model that names no tool, sends arguments that are no JSON or makes a
    tool fail reads a line that begins with ``Error:``.

    Args:
        tools: By name, or in any order with the names they give themselves.
    """

    def __init__(self, tools: Mapping[str, Tool] | Iterable[Tool] | None = None) -> None:
        self._tools: dict[str, Tool] = {}
        if isinstance(tools, Mapping):
            self._tools.update(tools)
        else:
            for tool in tools or ():
                self.register(tool)

    def register(self, tool: Tool) -> None:
        """Add a tool, in place of the one of that name.

        Raises:
            InvalidInput: It does not say what it is called.
        """
        name = (tool.tool_info().get("function") or {}).get("name")
        if not name:
            raise InvalidInput("tool", f"{type(tool).__name__}.tool_info() has no function.name")
        self._tools[name] = tool

    def unregister(self, name: str) -> Tool | None:
        """Take a tool away; none if there was none of that name."""
        return self._tools.pop(name, None)

    def names(self) -> list[str]:
        """What the tools are called."""
        return list(self._tools)

    def tools(self) -> list[Tool]:
        """The tools."""
        return list(self._tools.values())

    def copy(self) -> ToolManager:
        """The same tools in a manager of its own."""
        return ToolManager(self._tools)

    def tool_infos(self) -> list[ToolInfo]:
        """What a model is told of them: the ``tools`` of a trajectory."""
        return [tool.tool_info() for tool in self._tools.values()]

    def __call__(self, tool_call: Mapping[str, Any]) -> str:
        """Carry out one call."""
        name, arguments, problem = _read(tool_call)
        if problem:
            return f"{ERROR} {problem}"
        tool = self._tools.get(name)
        if tool is None:
            near = difflib.get_close_matches(name, self._tools, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(sorted(self._tools)) or 'none'}"
            return f"{ERROR} there is no tool {name!r}; {hint}"
        try:
            return str(tool(name, arguments))
        except Exception as error:  # noqa: BLE001 - a tool's failure is an observation, for the model to deal with
            return f"{ERROR} {name} failed with {type(error).__name__}: {error}"

    def call_many(self, tool_calls: Iterable[Mapping[str, Any]]) -> list[str]:
        """Carry out the calls of one turn, one after the other: a later one may need what an earlier one did."""
        return [self(tool_call) for tool_call in tool_calls]


def _read(tool_call: Any) -> tuple[str, dict[str, Any], str]:
    """Name and arguments of a call, or what is wrong with it."""
    function = tool_call.get("function") if isinstance(tool_call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        return "", {}, "the call names no function"
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError) as error:
            return "", {}, f"the arguments of {function['name']} are no JSON: {error}"
    if not isinstance(arguments, Mapping | None):
        return "", {}, f"the arguments of {function['name']} are no object"
    return function["name"], dict(arguments or {}), ""
