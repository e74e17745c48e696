"""Keywords that a call takes without knowing them, since scripts are written for others' calls as well."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from twinkle.core.process.events import event_log

log = event_log()


def known_keywords(call: str, given: Mapping[str, Any], known: Iterable[str]) -> dict[str, Any]:
    """Those of the keywords that the call knows; one line of the log names each of the others and its nearest known.

    Args:
        call: How the log calls it.
        given: The keywords.
        known: The names that the call knows, beside which it is documented to take any.
    """
    names = list(known)
    for name in given:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {near[0]}?" if near else "leave it out"
            log.warning("keyword.without_effect", call=call, keyword=name, next=hint)
    return {name: value for name, value in given.items() if name in names}
