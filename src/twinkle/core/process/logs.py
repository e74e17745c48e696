"""Logging for every process: a stable dotted event name and facts as fields. Never data, prompts or keys."""

from __future__ import annotations

import logging
import re
import sys

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

_API_KEY = re.compile(r"tml-[A-Za-z0-9_\-]{6,}")
_URL_PASSWORD = re.compile(r"(://[^:/@\s]*:)[^@/\s]+@")
_QUIET = (
    "celery.beat",
    "httpx",
    "httpcore",
    "alembic",
    "asyncio",
    "filelock",
    "urllib3",
    "celery.worker.strategy",
    "celery.app.trace",
)
# The same list every time: a logger keeps the one it met at its first use, and must follow when logging changes.
_PROCESSORS: list[Processor] = []


def configure_logging(level: str, json: bool) -> None:
    """Send our own and the libraries' records to stderr in one form.

    Coloured columns on a terminal, else one ``key=value`` line or, with ``json``, one JSON object a record.

    Args:
        level: A name the standard library knows, e.g. ``INFO``.
        json: Whether a machine reads along.
    """
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    _PROCESSORS[:] = [*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter]
    structlog.configure(
        processors=_PROCESSORS,
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelName(level.upper())),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            # Without the libraries' "extra" fields: Celery puts task arguments there.
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *_rendering(json)],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name in _QUIET:
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))


def _rendering(json: bool) -> list[Processor]:
    if json:
        return [structlog.processors.format_exc_info, redact, structlog.processors.JSONRenderer()]
    if sys.stderr.isatty():
        return [redact, structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)]
    order = ["timestamp", "level", "event"]
    return [
        structlog.processors.format_exc_info,
        redact,
        structlog.processors.LogfmtRenderer(key_order=order, bool_as_flag=False),
    ]


def redact(_: WrappedLogger, __: str, event_dict: EventDict) -> EventDict:
    """Blot out API keys and the passwords of URLs, wherever they slipped in: the last line of defence."""
    for name, value in event_dict.items():
        if isinstance(value, str) and ("tml-" in value or "://" in value):
            event_dict[name] = _URL_PASSWORD.sub(r"\1***@", _API_KEY.sub("tml-***", value))
    return event_dict
