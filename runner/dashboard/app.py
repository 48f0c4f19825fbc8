"""What the dashboard answers, as a WSGI application: pages, their data, three static files. It can only be read.

A run is asked for by its id, which is looked up among those that were found: no part of an address becomes a path.

Who may look: the names that the server answers to, and the token that a client must have.

A page of another site can make a browser ask this server under a name that it has turned to this machine (DNS
rebinding). The browser then sends that name as Host, so a request for any other name than this machine's is refused.
An address is no name: nobody can turn it.
"""

import functools
import gzip
import hashlib
import hmac
import http
import ipaddress
import re
import secrets
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from urllib.parse import parse_qs
from wsgiref.types import StartResponse, WSGIEnvironment

from runner.dashboard.html import read_plotly, read_static, render_live_page
from runner.errors import InvalidError

COOKIE = "runner_token"
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^\[\]:]+)(?::\d+)?")
_TOKEN = re.compile(r"[A-Za-z0-9._~-]{16,}")
_LOOPBACK_NAMES = ("localhost", "ip6-localhost")


def parse_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address that a host is written as, None if it is a name."""
    try:
        return ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return None


def is_loopback(host: str) -> bool:
    """Whether a server that is bound to `host` can only be reached from this machine."""
    address = parse_address(host)
    return host.lower() in _LOOPBACK_NAMES if address is None else address.is_loopback


def parse_host(header: str) -> str:
    """The host of a Host header in lower case, its port left out; empty if it is none."""
    found = _HOST.fullmatch(header.strip().lower())
    return found[1] if found else ""


@dataclass(frozen=True)
class AccessPolicy:
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
        host = parse_host(header)
        address = parse_address(host)
        if address is not None:
            return self.takes_addresses or address.is_loopback
        return host in self.names

    def takes(self, tokens: Sequence[str]) -> bool:
        """Whether one of the tokens of a request is right. The time that it takes does not say how far one is right."""
        wanted = self.token
        if wanted is None:
            return True
        return any(hmac.compare_digest(token.encode(), wanted.encode()) for token in tokens)


def make_access_policy(host: str, token: str | None) -> AccessPolicy:
    """For a server that is bound to `host`: one that others can reach has a token, made here if none is given.

    Raises `InvalidError` for a token that cannot stand in an address.
    """
    if token is not None and not _TOKEN.fullmatch(token):
        raise InvalidError("--token needs 16 or more of the characters A-Z a-z 0-9 . _ ~ -")
    names = {*_LOOPBACK_NAMES, host.lower()}
    if is_loopback(host):
        return AccessPolicy(frozenset(names), takes_addresses=False, token=token)
    names |= {socket.gethostname().lower(), socket.getfqdn().lower()}
    return AccessPolicy(frozenset(names), takes_addresses=True, token=token or secrets.token_urlsafe(24))


POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = [
    ("Content-Security-Policy", POLICY),
    ("X-Content-Type-Options", "nosniff"),
    ("X-Frame-Options", "DENY"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Cross-Origin-Opener-Policy", "same-origin"),
]
_METHODS = ("GET", "HEAD")
_HTML, _JSON = "text/html; charset=utf-8", "application/json"
_STATIC: dict[str, tuple[str, Callable[[], str]]] = {
    "plotly.js": ("text/javascript; charset=utf-8", read_plotly),
    "page.js": ("text/javascript; charset=utf-8", lambda: read_static("page.js")),
    "page.css": ("text/css; charset=utf-8", lambda: read_static("page.css")),
}


@dataclass(frozen=True)
class ResponseBody:
    """Bytes that are sent as they are or compressed, and the tag that names this version of them."""

    kind: str
    plain: bytes
    packed: bytes
    tag: str

    @classmethod
    def of(cls, kind: str, text: str) -> "ResponseBody":
        """Compress it, fast."""
        plain = text.encode()
        return cls(kind, plain, gzip.compress(plain, compresslevel=1), f'"{hashlib.sha256(plain).hexdigest()[:16]}"')


@dataclass(frozen=True)
class Response:
    """A response."""

    status: http.HTTPStatus
    body: ResponseBody | None = None
    headers: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class DashboardApp:
    """The application.

    Attributes:
        access: who may look.
        data: the data of a run's page by its id, of the table of all runs by ""; None if there is no such run. It
            answers at once or nearly so, may be asked from several threads, and raises `TimeoutError`.
    """

    access: AccessPolicy
    data: Callable[[str], ResponseBody | None]

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        """See PEP 3333."""
        answer = self._answer(environ)
        body = answer.body or ResponseBody.of(
            "text/plain; charset=utf-8", f"{answer.status.value} {answer.status.phrase}\n"
        )
        headers = [*_HEADERS, *answer.headers, ("Vary", "Accept-Encoding, Cookie")]
        if answer.body is not None and environ.get("HTTP_IF_NONE_MATCH") == body.tag:
            start_response("304 Not Modified", [*headers, ("ETag", body.tag)])
            return []
        is_packed = "gzip" in environ.get("HTTP_ACCEPT_ENCODING", "")
        content = body.packed if is_packed else body.plain
        headers += [("Content-Type", body.kind), ("Content-Length", str(len(content)))]
        headers += [("Content-Encoding", "gzip")] * is_packed
        headers += [("ETag", body.tag)] * (answer.body is not None)
        start_response(f"{answer.status.value} {answer.status.phrase}", headers)
        return [] if environ["REQUEST_METHOD"] == "HEAD" else [content]

    def _answer(self, environ: WSGIEnvironment) -> Response:
        no_store = ("Cache-Control", "no-store")
        if not self.access.knows_host(environ.get("HTTP_HOST", "")):
            return Response(http.HTTPStatus.MISDIRECTED_REQUEST, headers=(no_store,))
        if environ["REQUEST_METHOD"] not in _METHODS:
            return Response(http.HTTPStatus.METHOD_NOT_ALLOWED, headers=(("Allow", ", ".join(_METHODS)), no_store))
        path = environ.get("PATH_INFO", "")
        try:
            asked = parse_qs(environ.get("QUERY_STRING", ""), max_num_fields=8).get("token", [])
        except ValueError:
            return Response(http.HTTPStatus.BAD_REQUEST, headers=(no_store,))
        if not self.access.takes([*asked, *_tokens(environ)]):
            return Response(http.HTTPStatus.UNAUTHORIZED, headers=(("WWW-Authenticate", "Bearer"), no_store))
        try:
            body = self._body(path)
        except TimeoutError:
            return Response(http.HTTPStatus.SERVICE_UNAVAILABLE, headers=(("Retry-After", "5"), no_store))
        if body is None:
            return Response(http.HTTPStatus.NOT_FOUND, headers=(no_store,))
        if asked and self.access.token is not None:  # keep it out of the address from here on
            cookie = f"{COOKIE}={self.access.token}; HttpOnly; SameSite=Strict; Path=/"
            return Response(http.HTTPStatus.SEE_OTHER, headers=(("Location", path), ("Set-Cookie", cookie), no_store))
        return Response(http.HTTPStatus.OK, body, (("Cache-Control", "no-cache"),))

    def _body(self, path: str) -> ResponseBody | None:
        """What stands at a path."""
        match path.split("/"):
            case ["", ""]:
                return _page("Runs", "./", "data")
            case ["", "data"]:
                return self.data("")
            case ["", "run", run] if run:
                return None if self.data(run) is None else _page("Run", "../", f"../data/{run}")
            case ["", "data", run] if run:
                return self.data(run)
            case ["", "static", name] if name in _STATIC:
                return _static(name)
        return None


def _tokens(environ: WSGIEnvironment) -> list[str]:
    """Those that a request's headers bring."""
    found = []
    kind, _, token = environ.get("HTTP_AUTHORIZATION", "").partition(" ")
    if kind.lower() == "bearer":
        found.append(token.strip())
    for part in environ.get("HTTP_COOKIE", "").split(";"):
        name, _, value = part.strip().partition("=")
        if name == COOKIE:
            found.append(value)
    return found


@functools.cache
def _static(name: str) -> ResponseBody:
    kind, read = _STATIC[name]
    return ResponseBody.of(kind, read())


def _page(title: str, top: str, source: str) -> ResponseBody:
    return ResponseBody.of(_HTML, render_live_page(title, top, source))
