"""What filters, tests and methods of a chat template cost, from what they are given."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, TypeAlias

from jinja2 import pass_context
from jinja2.runtime import Context

from twinkle.data_format.template_steps import Steps, TooMuchWork, length

Arguments: TypeAlias = Mapping[str | int, Any]
"""By place, from 0 on, and by name."""
_Price: TypeAlias = Callable[[Steps, Arguments], None]

# fmt: off
_TEXT_METHODS = frozenset({
    "capitalize", "casefold", "center", "count", "endswith", "expandtabs", "find", "format", "format_map",
    "index", "isalnum", "isalpha", "isascii", "isdecimal", "isdigit", "isidentifier", "islower", "isnumeric",
    "isprintable", "isspace", "istitle", "isupper", "join", "ljust", "lower", "lstrip", "partition",
    "removeprefix", "removesuffix", "replace", "rfind", "rindex", "rjust", "rpartition", "rsplit", "rstrip",
    "split", "splitlines", "startswith", "strip", "swapcase", "title", "upper", "zfill",
})
# fmt: on
METHODS: Mapping[type, frozenset[str]] = {
    str: _TEXT_METHODS,
    list: frozenset({"count", "index", "copy"}),
    tuple: frozenset({"count", "index"}),
    dict: frozenset({"copy", "get", "items", "keys", "values"}),
    bool: frozenset(),
    int: frozenset(),
    float: frozenset(),
    bytes: frozenset(),
    range: frozenset(),
}
"""Of plain values those that a template may call; whatever others grow to is not known before."""

_REFUSED = ("pprint", "urlize", "wordwrap", "xmlattr")
_MOST_DIGITS = 64


def take_method(steps: Steps, owner: Any, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Pay for a call of one of :data:`METHODS`; what it is to be called with."""
    if not isinstance(owner, str):
        steps.take_length(owner if name == "copy" else None)
        for value in args if name in ("count", "index") else ():
            steps.take_comparison(value, owner, is_search=True)
        for value in args if name == "get" else ():
            steps.take_whole(value)
        return args
    steps.take_length(owner)
    if name in ("center", "ljust", "rjust", "zfill") and args:
        steps.take_width(args[0])
    elif name == "expandtabs":
        steps.take_width(args[0] if args else 8, times=owner.count("\t"))
    elif name == "replace" and len(args) > 1:
        _take_replaced(steps, owner, args[0], args[1])
    elif name in ("split", "rsplit", "splitlines"):
        steps.take(len(owner) // 2)
    elif name == "join" and args:
        args = (_listed(args[0]),)
        steps.take_whole(args[0])
        steps.take_width(owner, times=length(args[0]))
    return args


def priced_filters(filters: Mapping[str, Callable[..., Any]], steps: Steps) -> dict[str, Callable[..., Any]]:
    """The same filters, which pay before they run."""
    refused = {name: _refusal(name) for name in _REFUSED}
    return {name: _priced(function, steps, _PRICES.get(name, _whole)) for name, function in filters.items()} | refused


def priced_tests(tests: Mapping[str, Any], steps: Steps) -> dict[str, Callable[..., Any]]:
    """The same tests, which pay before they run."""
    return {name: _priced(function, steps, _price_of_test(name)) for name, function in tests.items()}


def _priced(function: Callable[..., Any], steps: Steps, price: _Price) -> Callable[..., Any]:
    wants = getattr(function, "jinja_pass_arg", None)

    @pass_context
    def run(context: Context, *args: Any, **kwargs: Any) -> Any:
        # What comes one by one has no length before it is there.
        if args and price not in _LAZY:
            args = (_listed(args[0]), *args[1:])
        given: dict[str | int, Any] = dict(enumerate(args))
        given.update(kwargs)
        price(steps, given)
        before = {"context": context, "eval_context": context.eval_ctx, "environment": context.environment}
        result = function(*([before[wants.name]] if wants is not None else []), *args, **kwargs)
        return steps.taken(result)

    return run


def _refusal(name: str) -> Callable[..., Any]:
    def refuse(*_args: Any) -> Any:
        raise TooMuchWork(f"the filter {name} is for web pages")

    return refuse


def _price_of_test(name: str) -> _Price:
    def price(steps: Steps, given: Arguments) -> None:
        if 1 in given:
            steps.take_comparison(given[0], given[1], is_search=name == "in")
        elif name in ("lower", "upper"):
            steps.take_whole(given.get(0))
        else:
            steps.take()

    return price


def _shallow(steps: Steps, given: Arguments) -> None:
    steps.take(1 + length(given.get(0)))


def _constant(steps: Steps, given: Arguments) -> None:
    steps.take()


def _whole(steps: Steps, given: Arguments) -> None:
    for value in given.values():
        steps.take_whole(value)


def _sorted(steps: Steps, given: Arguments) -> None:
    _shallow(steps, given)
    steps.take_sorting(given.get(0))


def _added_up(steps: Steps, given: Arguments) -> None:
    _whole(steps, given)
    if not isinstance(given.get("start", given.get(2, 0)), int | float):
        # Lists: each sum is a copy of the one before.
        before = steps.left
        steps.take_whole(given.get(0))
        steps.take((before - steps.left) * length(given.get(0)))


def _joined(steps: Steps, given: Arguments) -> None:
    _whole(steps, given)
    steps.take_width(given.get("d", given.get(1, "")), times=length(given.get(0)))


def _replaced(steps: Steps, given: Arguments) -> None:
    _whole(steps, given)
    _take_replaced(steps, given.get(0), given.get("old", given.get(1)), given.get("new", given.get(2)))


def _centred(steps: Steps, given: Arguments) -> None:
    _whole(steps, given)
    steps.take_width(given.get("width", given.get(1, 80)))


def _indented(steps: Steps, given: Arguments) -> None:
    _whole(steps, given)
    text = given.get(0)
    num_lines = len(text.splitlines()) + 1 if isinstance(text, str) else 1
    steps.take_width(given.get("width", given.get(1, 4)), times=num_lines)


def _in_parts(steps: Steps, given: Arguments) -> None:
    _shallow(steps, given)
    num = given.get("linecount", given.get("slices", given.get(1, 0)))
    steps.take(max(num, 0) if isinstance(num, int) else 0)


def _formatted(steps: Steps, given: Arguments) -> None:
    steps.take_format(str(given.get(0)), *[value for name, value in given.items() if name != 0])


def _rounded(steps: Steps, given: Arguments) -> None:
    steps.take()
    precision = given.get("precision", given.get(1, 0))
    if isinstance(precision, int) and abs(precision) > _MOST_DIGITS:
        raise TooMuchWork(f"round takes {_MOST_DIGITS} digits at most")


def _cut(steps: Steps, given: Arguments) -> None:
    _whole(steps, given)
    steps.take_text(length(given.get("end", given.get(3))))


def _take_replaced(steps: Steps, text: object, old: object, new: object) -> None:
    if isinstance(text, str) and isinstance(old, str):
        steps.take_width(new, times=text.count(old))


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, Iterator) else value


_PRICES: MutableMapping[str, _Price] = {
    **dict.fromkeys(("attr", "d", "default", "items", "length", "count", "safe", "first", "last"), _constant),
    **dict.fromkeys(("list", "map", "random", "reject", "rejectattr", "reverse", "select", "selectattr"), _shallow),
    **dict.fromkeys(("dictsort", "groupby", "max", "min", "sort", "unique"), _sorted),
    **dict.fromkeys(("batch", "slice"), _in_parts),
    "center": _centred,
    "format": _formatted,
    "indent": _indented,
    "join": _joined,
    "replace": _replaced,
    "round": _rounded,
    "sum": _added_up,
    "truncate": _cut,
}
# These take what comes one by one as it comes.
_LAZY = frozenset({_constant, _shallow, _in_parts})
