"""Who may look: the names that the server answers to, and the token that a client must have.

A page of another site can make a browser ask this server under a name that it has turned to this machine (DNS
rebinding). The browser then sends that name as Host, so a request for any other name than this machine's is refused.
An address is no name: nobody can turn it.
"""

import hmac
import ipaddress
import re
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from runner.errors import InvalidError

COOKIE = "runner_token"
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^\[\]:]+)(?::\d+)?")
_TOKEN = re.compile(r"[A-Za-z0-9._~-]{16,}")
_LOOPBACK_NAMES = ("localhost", "ip6-localhost")


def address_in(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address that a host is written as, None if it is a name."""
    try:
        return ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return None


def is_loopback(host: str) -> bool:
    """Whether a server that is bound to `host` can only be reached from this machine."""
    address = address_in(host)
    return host.lower() in _LOOPBACK_NAMES if address is None else address.is_loopback


def host_in(header: str) -> str:
    """The host of a Host header in lower case, its port left out; empty if it is none."""
    found = _HOST.fullmatch(header.strip().lower())
    return found[1] if found else ""


@dataclass(frozen=True)
class Access:
    """What a request must bring.

    Attributes:
        names: that the server answers to, in lower case.
        takes_addresses: whether it answers to any address too, not only to those of the loopback.
        token: None where none is needed.
    """

    names: frozenset[str]
    takes_addresses: bool
    token: str | None

    def knows_host(self, header: str) -> bool:
        """Whether a Host header names this server."""
        host = host_in(header)
        address = address_in(host)
        if address is not None:
            return self.takes_addresses or address.is_loopback
        return host in self.names

    def takes(self, tokens: Sequence[str]) -> bool:
        """Whether one of the tokens of a request is right. The time that it takes does not say how far one is right."""
        wanted = self.token
        if wanted is None:
            return True
        return any(hmac.compare_digest(token.encode(), wanted.encode()) for token in tokens)


def access_for(host: str, token: str | None) -> Access:
    """For a server that is bound to `host`: one that others can reach has a token, made here if none is given.

    Raises `InvalidError` for a token that cannot stand in an address.
    """
    if token is not None and not _TOKEN.fullmatch(token):
        raise InvalidError("--token needs 16 or more of the characters A-Z a-z 0-9 . _ ~ -")
    names = {*_LOOPBACK_NAMES, host.lower()}
    if is_loopback(host):
        return Access(frozenset(names), takes_addresses=False, token=token)
    names |= {socket.gethostname().lower(), socket.getfqdn().lower()}
    return Access(frozenset(names), takes_addresses=True, token=token or secrets.token_urlsafe(24))
