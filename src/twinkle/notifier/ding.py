"""Messages to a group of DingTalk, through a robot of its own."""

from __future__ import annotations

import base64
import hashlib
import hmac
import time
from collections.abc import Callable
from typing import Any

import httpx

from twinkle.core.errors import ConfigError
from twinkle.notifier.base import Notifier, NotToldError

LONGEST_TITLE = 64
LONGEST_TEXT = 15_000
"""DingTalk takes 20,000 bytes; a traceback may be longer, and its end says most."""


class DingNotifier(Notifier):
    """Tells a DingTalk group.

    Args:
        ding_url: The robot's webhook, ``https://oapi.dingtalk.com/robot/send?access_token=...``.
        secret: Signs each message, for a robot that was made with additional signing.
        timeout: Seconds to wait for DingTalk.
        clock: Seconds since 1970, for the signature.

    Raises:
        ConfigError: There is no such URL.
    """

    def __init__(
        self,
        ding_url: str,
        secret: str | None = None,
        timeout: float = 5.0,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if not ding_url.startswith(("http://", "https://")):
            raise ConfigError("ding_url: is no URL; send the webhook of a robot of the group")
        self._url = ding_url
        self._secret = secret
        self._timeout = timeout
        self._clock = clock

    def __call__(self, message: str) -> dict[str, Any]:
        """Tell a message in Markdown; DingTalk's answer. Blocks as long as ``timeout``.

        Raises:
            NotToldError: DingTalk did not answer, or refused.
        """
        text = message if len(message) <= LONGEST_TEXT else f"...{message[-LONGEST_TEXT:]}"
        body = {"msgtype": "markdown", "markdown": {"title": _title(message), "text": text}}
        url = httpx.URL(self._url).copy_merge_params(self._signature())
        try:
            response = httpx.post(url, json=body, timeout=self._timeout)
            response.raise_for_status()
            answer: dict[str, Any] = response.json()
        except (httpx.HTTPError, ValueError) as error:
            # The URL bears the robot's token, and httpx writes it into its messages.
            raise NotToldError(f"DingTalk was not told: {type(error).__name__}") from None
        if answer.get("errcode", 0) != 0:
            raise NotToldError(f"DingTalk refused: {answer.get('errcode')} {answer.get('errmsg')}")
        return answer

    def __repr__(self) -> str:
        return f"{type(self).__name__}({httpx.URL(self._url).host})"

    def _signature(self) -> dict[str, str]:
        if self._secret is None:
            return {}
        timestamp = str(round(self._clock() * 1000))
        digest = hmac.new(self._secret.encode(), f"{timestamp}\n{self._secret}".encode(), hashlib.sha256).digest()
        return {"timestamp": timestamp, "sign": base64.b64encode(digest).decode()}


def _title(message: str) -> str:
    """The first line that says something, without the marks of a heading."""
    lines = (line.strip().lstrip("#").strip() for line in message.splitlines())
    return next((line for line in lines if line), "Twinkle")[:LONGEST_TITLE]
