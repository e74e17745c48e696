"""What anybody may do at the API's door, before a key is looked at."""

from __future__ import annotations

from pydantic import Field

from twinkle.core.setting_groups.group import SettingsGroup


class DoorSettings(SettingsGroup):
    """What anybody may do at the API's door, before a key is looked at."""

    max_connections: int = Field(
        default=16_384,
        gt=0,
        description="connections at once, as far as open files allow; one more ends the longest idle one, or is"
        " answered 503",
    )
    max_connections_per_address: int = Field(
        default=8192,
        ge=0,
        description="of one client's address, which is everybody's behind a proxy or on loopback; 0: no limit but all",
    )
    max_requests_per_key: int = Field(
        default=6000,
        ge=0,
        description="of one API key in progress at once, held polls among them; 0: no limit; more is answered 429",
    )
    max_url_bytes: int = Field(
        default=16 * 2**10, gt=0, description="path and query of a request; more is answered 414"
    )
    max_head_bytes: int = Field(default=64 * 2**10, gt=0, description="a request's headers; more is answered 431")
    head_timeout_s: float = Field(
        default=20.0, gt=0, description="how long a request's headers, or the first request, may take to come"
    )
    send_timeout_s: float = Field(
        default=120.0, gt=0, description="how long a client may read nothing of an answer; then its connection ends"
    )
    allowed_hosts: list[str] = Field(
        default=[],
        description="names under which clients reach the API beside its own address, for URLs in answers, like"
        ' ["twinkle.example", "twinkle.example:8443"]; better: public_url',
    )
