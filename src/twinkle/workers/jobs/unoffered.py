"""What a jobs worker says to plans that ask for what it has not been given."""

from __future__ import annotations

from typing import NoReturn

from twinkle.core.job import JobFailed


class Unoffered:
    """Stands for parts that this process does not have, whatever they are asked for: the job fails by that name."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __getattr__(self, name: str) -> NoReturn:
        raise JobFailed("not_offered", f"this service's jobs workers have no {self._what} ({name} was asked for)")
