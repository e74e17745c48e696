"""Another distribution with our import names, which pip installs beside ours, or over it, without a word."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence

OTHER = "twinkle_kit-"
RECORD = ".dist-info"


def other_distribution(folders: Sequence[str]) -> str | None:
    """The name and version of a ``twinkle-kit`` in these folders; the first there is. Lists names and opens nothing."""
    for folder in folders:
        try:
            names = os.listdir(folder or ".")
        except OSError:
            continue  # a zip file, or a folder that is not there: sys.path holds both
        for name in names:
            if name.startswith(OTHER) and name.endswith(RECORD):
                return "twinkle-kit " + name[len(OTHER) : -len(RECORD)]
    return None


def warn_of_other_distribution() -> None:
    """Say so where both are installed: which of their files is imported is a matter of who came last."""
    found = other_distribution([path for path in sys.path if path.endswith("-packages")])
    if found is not None:
        warnings.warn(
            f"{found} is installed beside twinkle-queue, and both are imported as twinkle: what runs may be"
            " a mixture of both. Run `pip uninstall twinkle-kit`, then `pip install --force-reinstall --no-deps"
            " twinkle-queue`",
            RuntimeWarning,
            stacklevel=3,
        )
