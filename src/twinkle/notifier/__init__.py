"""Where a script sends its figures and its failures."""

from __future__ import annotations

from twinkle.notifier.base import Notifier, NotToldError
from twinkle.notifier.ding import DingNotifier

__all__ = ["DingNotifier", "NotToldError", "Notifier"]
