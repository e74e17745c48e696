"""Which client asks a hub, and whether there is anybody to ask."""

from __future__ import annotations

import socket
from importlib.util import find_spec
from urllib.parse import urlsplit
from urllib.request import getproxies

from twinkle.core.hub_settings import HUB_NAMES, HUGGING_FACE, MODELSCOPE
from twinkle.hub.remote import NotThere, Remote, Unanswered

_REACH_S = 5.0
_PORTS = {"http": 80, "https": 443}
PACKAGES = {"ms": "modelscope_hub", "hf": "huggingface_hub"}


def reachable_remote(hub: str, repository: str) -> Remote:
    """The client of a hub that may have a repository and is there to be asked.

    The hubs' libraries try for half a minute to reach one that is not.

    Raises:
        Unanswered: Its library is not installed, or nothing answers where it should be.
        NotThere: The hub has no ids like this one.
    """
    if hub == MODELSCOPE and "/" not in repository:
        raise NotThere(f"{HUB_NAMES[hub]}'s ids are owner/name")
    remote = remote_of(hub)
    place = urlsplit(remote.endpoint)
    # A proxy is asked to reach it; whether it does is for the library to find out.
    if place.hostname is not None and not (set(getproxies()) & {place.scheme, "all"}):
        try:
            socket.create_connection((place.hostname, place.port or _PORTS[place.scheme]), _REACH_S).close()
        except OSError as error:
            raise Unanswered(f"{HUB_NAMES[hub]} cannot be reached ({place.hostname}: {error})") from error
    return remote


def remote_of(hub: str) -> Remote:
    """The client of a hub.

    Raises:
        Unanswered: Its library is not installed.
    """
    if find_spec(PACKAGES[hub]) is None:
        raise Unanswered(f"{HUB_NAMES[hub]}'s library is not installed: pip install 'twinkle-queue[scripts]'")
    # Each brings its hub's library, which costs a second and is not needed where a cache has everything.
    if hub == HUGGING_FACE:
        from twinkle.hub.hugging_face import HuggingFace  # noqa: PLC0415

        return HuggingFace()
    from twinkle.hub.modelscope import ModelScope  # noqa: PLC0415

    return ModelScope()
