"""What is told when a run ends by an error, or when a script has something to say."""

from __future__ import annotations

from abc import ABC, abstractmethod

from twinkle.core.errors import TwinkleError


class NotToldError(TwinkleError):
    """A message did not get where it should."""

    code = "not_told"
    retryable = True


class Notifier(ABC):
    """Tells people. ``initialize(notifier=...)`` takes one, or any function of a text."""

    @abstractmethod
    def __call__(self, message: str) -> object:
        """Tell a message.

        Raises:
            NotToldError: It did not get there.
        """
