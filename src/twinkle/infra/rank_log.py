"""The log of a script that may run as many ranks: the first one speaks, the others only of errors."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from twinkle.infra.device_mesh import current_rank

LOGGER_NAME = "twinkle"
LEVEL_VARIABLE = "LOG_LEVEL"
FORMAT = "[%(asctime)s][%(levelname)s:%(name)s] %(message)s"
LIBRARIES = ("datasets", "modelscope", "peft", "transformers")
QUIET_WHEN_LOADED = {
    "TRANSFORMERS_VERBOSITY": "error",
    "DATASETS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
}
"""The variables by which libraries that are loaded later are told to be quiet."""
PROGRESS_BARS = {
    "transformers.utils.logging": "disable_progress_bar",
    "datasets.utils.tqdm": "disable_progress_bars",
    "huggingface_hub.utils.tqdm": "disable_progress_bars",
}
"""By which those that are loaded already are."""


def get_logger(
    log_file: str | Path | None = None,
    log_level: int | str | None = None,
    file_mode: str = "w",
    only_local_master: bool = True,
) -> logging.Logger:
    """The logger of scripts. Ranks other than the first say errors alone.

    It writes to stderr, unless the script has set up ``logging`` itself: then as that says.

    Args:
        log_file: Write to this file too; of several ranks the first one does.
        log_level: ``INFO``, or what ``LOG_LEVEL`` says, if omitted.
        file_mode: ``w`` begins the file anew, ``a`` goes on in it.
        only_local_master: False lets every rank speak.
    """
    logger = logging.getLogger(LOGGER_NAME)
    speaks = current_rank() == 0 or not only_local_master
    logger.setLevel((log_level or os.environ.get(LEVEL_VARIABLE, "INFO").upper()) if speaks else logging.ERROR)
    if not logger.handlers and not logging.getLogger().handlers:
        _add(logger, logging.StreamHandler(sys.stderr))
        logger.propagate = False
    if log_file is not None and speaks and not _writes_to(logger, Path(log_file)):
        _add(logger, logging.FileHandler(log_file, file_mode))
    return logger


def quieten_rank() -> None:
    """Let this rank, which is not the first, say errors alone: ours, the script's and the libraries'."""
    for variable, value in QUIET_WHEN_LOADED.items():
        os.environ.setdefault(variable, value)
    for module, switch in PROGRESS_BARS.items():
        if module in sys.modules:
            vars(sys.modules[module])[switch]()
    for name in (None, LOGGER_NAME, *LIBRARIES):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    if find_spec("structlog") is not None:
        structlog = import_module("structlog")
        structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))


def _add(logger: logging.Logger, handler: logging.Handler) -> None:
    handler.setFormatter(logging.Formatter(FORMAT))
    logger.addHandler(handler)


def _writes_to(logger: logging.Logger, path: Path) -> bool:
    files = (handler for handler in logger.handlers if isinstance(handler, logging.FileHandler))
    return any(Path(handler.baseFilename) == path.resolve() for handler in files)
