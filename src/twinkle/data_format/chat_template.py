"""Chat templates, which come with a model's files: a stranger's code, in a sandbox, bounded in work and memory.

What bounds them is counted, never timed (:mod:`twinkle.data_format.template_steps`): every turn of a loop, every call,
everything that is written, joined, compared or made takes its price before it happens. The code generator puts in what
asks for it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.compiler import CodeGenerator, Frame, operators
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from twinkle.data_format.template_filters import METHODS, priced_filters, priced_tests, take_method
from twinkle.data_format.template_steps import MAX_STEPS, Steps, TooMuchWork, length

__all__ = ["MAX_STEPS", "ChatTemplateCode", "TooMuchWork"]

MAX_SOURCE_CHARACTERS = 2**18
_DICT_ATTRIBUTES = frozenset(dir(dict))
_TIME_FORM = re.compile(r"(?:%-?[A-Za-z%]|[^%])*")


class ChatTemplateCode:
    """A compiled chat template. Callable from any thread.

    Args:
        source: What comes with the model's files.
        now: What time it is, for templates that write the date.
        max_steps: For one conversation.

    Raises:
        TemplateError: It is no template, or too long for one.
    """

    def __init__(self, source: str, now: Callable[[], datetime], *, max_steps: int = MAX_STEPS) -> None:
        if len(source) > MAX_SOURCE_CHARACTERS:
            raise TemplateError(f"it has {len(source)} characters, a chat template {MAX_SOURCE_CHARACTERS} at most")
        self._environment = _Environment(now, max_steps)
        try:
            self._template: Template = self._environment.from_string(source)
        except (RecursionError, MemoryError, SyntaxError) as error:
            raise TemplateError(f"it cannot be compiled: {error}") from error

    def render(self, values: Mapping[str, Any]) -> str:
        """The text of a conversation.

        Raises:
            TemplateError: The template refuses it, or is not written for it, or would do too much.
        """
        return self.render_with_spans(values)[0]

    def render_with_spans(self, values: Mapping[str, Any]) -> tuple[str, list[tuple[int, int]]]:
        """The text, and where in it lies what ``{% generation %}`` encloses; raises as :meth:`render` does."""
        steps = self._environment.steps
        steps.begin()
        try:
            for piece in self._template.generate(values):
                steps.write(piece)
        except TemplateError:
            raise
        except Exception as error:  # a stranger's code raises anything
            raise TemplateError(str(error) or type(error).__name__) from error
        return steps.text(), steps.spans


class _Environment(ImmutableSandboxedEnvironment):
    """What chat templates are written for."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "**", "%"})

    def __init__(self, now: Callable[[], datetime], max_steps: int) -> None:
        self.steps = Steps(max_steps)
        # Constants are computed like all else, when they are asked for and counted.
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            extensions=[_Generation, loopcontrols],
            finalize=self._written,
        )
        self.code_generator_class = _CountingGenerator
        self.filters.update(priced_filters(self.filters, self.steps))
        self.filters["tojson"] = self._to_json
        self.tests.update(priced_tests(self.tests, self.steps))
        del self.globals["lipsum"]
        self.globals["namespace"] = _Namespace
        self.globals["raise_exception"] = _raise

        def strftime_now(form: str) -> str:
            if not _TIME_FORM.fullmatch(form):
                raise TooMuchWork("strftime_now takes no widths")
            return now().strftime(form)

        self.globals["strftime_now"] = strftime_now

    def _to_json(
        self,
        value: object,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        before = self.steps.left
        depth = self.steps.take_whole(value)
        wide = (indent if isinstance(indent, int) else length(indent)) * depth + sum(map(length, separators or ()))
        self.steps.take((before - self.steps.left) * max(wide, 0) // 16)
        return self.steps.taken(
            json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
        )

    def _written(self, value: object) -> object:
        """What ``{{ }}`` is about to write."""
        if type(value) is str:
            self.steps.take_text(len(value))
        else:
            self.steps.take_whole(value)
        return value

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Whether a template may have it: of plain values only methods whose price is known."""
        if not super().is_safe_attribute(obj, attr, value):
            return False
        for kind, names in METHODS.items():
            if isinstance(obj, kind):
                return attr in names
        return True

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """``str.format``, counted."""
        formatted = super().wrap_str_format(value)
        if formatted is None:
            return None

        def counted(*args: object, **kwargs: object) -> str:
            self.steps.take_format(value.__self__, *args, *kwargs.values())
            return formatted(*args, **kwargs)

        return counted

    def getattr(self, obj: Any, attribute: str) -> Any:
        """A member: of a plain dictionary found at once, where jinja2 fails first to find an attribute of its name."""
        if type(obj) is not dict or attribute in _DICT_ATTRIBUTES:
            return super().getattr(obj, attribute)
        return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """A member, found by what may itself be large."""
        if not isinstance(argument, str):
            self.steps.take_whole(argument)
        return super().getitem(obj, argument)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """An operator, counted."""
        if operator == "+" and type(left) is str and type(right) is str:
            self.steps.take_joined(left, right)
            return left + right
        self.steps.take_operator(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - arguments may be called self
        """A call of a macro, a method or a function, counted."""
        steps = __self.steps
        steps.take()
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, tuple(METHODS)):
            args = take_method(steps, owner, __obj.__name__, args)
        elif not isinstance(__obj, Macro):
            for value in (*args, *kwargs.values()):
                steps.take_whole(value)
        return steps.taken(super().call(__context, __obj, *args, **kwargs))

    # What follows is called by what the code generator writes.

    def made(self, value: Any) -> Any:
        """A list, tuple or dictionary that was just made: with all that it holds, as often as it holds it."""
        self.steps.take_whole(value)
        return value

    def sliced(self, value: Any) -> Any:
        """A part that was just copied."""
        self.steps.take_length(value)
        return value

    def compared(self, operator: str, left: Any, right: Any) -> bool:
        """The outcome of one comparison."""
        self.steps.take_comparison(left, right, is_search=operator in ("in", "notin"))
        return bool(_COMPARISONS[operator](left, right))


_COMPARISONS: Mapping[str, Callable[[Any, Any], Any]] = {
    "eq": lambda left, right: left == right,
    "ne": lambda left, right: left != right,
    "gt": lambda left, right: left > right,
    "gteq": lambda left, right: left >= right,
    "lt": lambda left, right: left < right,
    "lteq": lambda left, right: left <= right,
    "in": lambda left, right: left in right,
    "notin": lambda left, right: left not in right,
}


class _CountingGenerator(CodeGenerator):
    """Writes what jinja2's does, and beside it what is counted."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._loop_bodies: list[list[nodes.Node]] = []
        self._loop_tests: list[nodes.Node] = []

    def visit_For(self, node: nodes.For, frame: Frame) -> None:  # noqa: N802 - jinja2's
        self._loop_bodies.append(node.body)
        if node.test is not None:
            self._loop_tests.append(node.test)
        super().visit_For(node, frame)

    def blockvisit(self, nodes: Any, frame: Frame) -> None:
        if any(nodes is body for body in self._loop_bodies):
            self.writeline("environment.steps.take()")
        super().blockvisit(nodes, frame)

    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> Any:
        if not any(node is test for test in self._loop_tests):
            return super().visit(node, *args, **kwargs)
        self.write("(environment.steps.take() or ")
        super().visit(node, *args, **kwargs)
        self.write(")")
        return None

    def visit_Output(self, node: nodes.Output, frame: Frame) -> None:  # noqa: N802 - jinja2's
        written = sum(len(child.data) for child in node.nodes if isinstance(child, nodes.TemplateData))
        self.writeline(f"environment.steps.take_text({written})")
        super().visit_Output(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802 - jinja2's
        joined = "(markup_join if context.eval_ctx.volatile or context.eval_ctx.autoescape else str_join)"
        self.write(f"{joined}(environment.made((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write(")))")

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:  # noqa: N802 - jinja2's
        if len(node.ops) == 1:
            self.write(f"environment.compared({node.ops[0].op!r}, ")
            self.visit(node.expr, frame)
            self.write(", ")
            self.visit(node.ops[0].expr, frame)
            self.write(")")
            return
        self.write("(")
        self._write_made(self.visit, node.expr, frame)
        for operand in node.ops:
            self.write(f" {operators[operand.op]} ")
            self._write_made(self.visit, operand.expr, frame)
        self.write(")")

    def visit_List(self, node: nodes.List, frame: Frame) -> None:  # noqa: N802 - jinja2's
        self._write_made(super().visit_List, node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:  # noqa: N802 - jinja2's
        self._write_made(super().visit_Dict, node, frame)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:  # noqa: N802 - jinja2's
        if node.ctx == "load":
            self._write_made(super().visit_Tuple, node, frame)
        else:
            super().visit_Tuple(node, frame)

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:  # noqa: N802 - jinja2's
        if isinstance(node.arg, nodes.Slice):
            self._write_made(super().visit_Getitem, node, frame, by="sliced")
        else:
            super().visit_Getitem(node, frame)

    def _write_made(
        self, visit: Callable[[Any, Frame], None], node: nodes.Expr, frame: Frame, *, by: str = "made"
    ) -> None:
        self.write(f"environment.{by}(")
        visit(node, frame)
        self.write(")")


class _Generation(Extension):
    """``{% generation %}``: what stands in it is the model's own."""

    tags = {"generation"}  # noqa: RUF012 - an instance's, jinja2 says

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("note_span"), [], [], body).set_lineno(line)

    def note_span(self, caller: Callable[[], str]) -> str:
        """Remember where it stands."""
        text = caller()
        assert isinstance(self.environment, _Environment)
        self.environment.steps.note_span(len(text))
        return text


class _Namespace(Namespace):
    """What a template may put its variables into, by names that are its own."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, values = args[0], dict(*args[1:], **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace takes no name like {name!r}")


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)
