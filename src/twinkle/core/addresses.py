"""Which network addresses what a tenant names may be sent to: those of the public internet, and what an operator adds.

A service that sends requests to where tenants say must not be their way to what only it can reach: itself, its
neighbours, a cloud's metadata.
"""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import TypeAlias

from twinkle.core.errors import InvalidInput

Address: TypeAlias = IPv4Address | IPv6Address
Network: TypeAlias = IPv4Network | IPv6Network

_NAT64 = (IPv6Network("64:ff9b::/96"), IPv6Network("64:ff9b:1::/48"))


def parse_networks(texts: Sequence[str]) -> tuple[Network, ...]:
    """Networks like ``10.1.0.0/16``.

    Raises:
        ValueError: One of them is none.
    """
    return tuple(ip_network(text) for text in texts)


def is_allowed(address: Address, allowed: Sequence[Network]) -> bool:
    """Whether it is one of the public internet or in an allowed network. One in disguise is what it stands for."""
    real = _undisguised(address)
    if any(real.version == network.version and real in network for network in allowed):
        return True
    if isinstance(real, IPv6Address) and (real.sixtofour or real.teredo or any(real in one for one in _NAT64)):
        return False
    return real.is_global and not real.is_multicast


def judge_host(host: str, allowed: Sequence[Network], *, field: str) -> None:
    """Refuse a host that is written as an address which is not allowed. Names are judged by what they stand for, later.

    Raises:
        InvalidInput: It is such an address, or a name of this machine.
    """
    try:
        address = ip_address(host.strip("[]"))
    except ValueError:
        is_local = host.rstrip(".").lower() == "localhost" and not allowed
        if not is_local:
            return
        raise InvalidInput(field, f"{host} is no address of the public internet") from None
    if not is_allowed(address, allowed):
        raise InvalidInput(field, f"{host} is no address of the public internet, and the operator has not allowed it")


def _undisguised(address: Address) -> Address:
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address
