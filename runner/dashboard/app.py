"""WSGI application of the dashboard: pages, their data, figures for Prometheus, static files; and its access policy.

A run is requested by its id, which is looked up among the runs that were found: no part of an address becomes a path.

A page of another site can make a browser send requests to this server under a name that the site has pointed to this
machine (DNS rebinding). The browser then sends that name as Host, so requests for any name but this machine's are
refused. A numeric address cannot be redirected this way.
"""

import functools
import gzip
import hashlib
import hmac
import http
import ipaddress
import json
import re
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from urllib.parse import parse_qs
from wsgiref.types import StartResponse, WSGIEnvironment

from runner.dashboard.report import (
    embed_media,
    make_report_policy,
    read_plotly,
    read_static,
    render_live_page,
    render_report_page,
)
from runner.errors import InvalidError
from runner.metrics.media import CONTENT_TYPES, MEDIA_FOLDER

_COOKIE = "runner_token"
HOSTS = "hosts"  # name of the table of hosts
SWEEPS = "sweep"  # begins the names of sweeps, followed by a slash and the id
METRICS = "metrics"  # name of the figures of all runs in Prometheus' text format
_CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; media-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_REPORT_POLICY = "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"

# A name, an IPv4 address, or an IPv6 address in brackets, with an optional port.
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^\[\]:]+)(?::\d+)?")
_RUN_ID = re.compile(r"[0-9a-f]{16}")
_RUN_IDS = re.compile(r"[0-9a-f]{16}(?:,[0-9a-f]{16}){0,9}")  # of one run, or of some that are compared
_TOKEN = re.compile(r"[A-Za-z0-9._~-]{16,}")
_LOOPBACK_NAMES = ("localhost", "ip6-localhost")
# Every response forbids what no page needs: framing, other origins, and content of another type.
_HEADERS = [
    ("X-Content-Type-Options", "nosniff"),
    ("X-Frame-Options", "DENY"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Cross-Origin-Opener-Policy", "same-origin"),
]
_MEDIA_POLICY = "default-src 'none'; sandbox; frame-ancestors 'none'"  # for an image that is opened alone
_METHODS = ("GET", "HEAD")
_HTML = "text/html; charset=utf-8"
_SCRIPT = "text/javascript; charset=utf-8"
_STATIC = {"plotly.js": _SCRIPT, "page.js": _SCRIPT, "page.css": "text/css; charset=utf-8"}


def parse_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the IP address that a host is written as, None if it is a name."""
    try:
        return ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return None


def is_loopback(host: str) -> bool:
    """Return True if a server bound to `host` can only be reached from this machine."""
    address = parse_address(host)
    return host.lower() in _LOOPBACK_NAMES if address is None else address.is_loopback


@dataclass(frozen=True)
class AccessPolicy:
    """Requirements on a request."""

    names: frozenset[str]  # host names that the server answers to, in lower case
    takes_addresses: bool  # the server answers to any IP address, not only to loopback addresses
    token: str | None  # secret that a client must send, None where none is needed

    def accepts_host(self, header: str) -> bool:
        """Return True if a Host header names this server."""
        found = _HOST.fullmatch(header.strip().lower())
        host = found[1] if found else ""
        address = parse_address(host)
        if address is not None:
            return self.takes_addresses or address.is_loopback
        return host in self.names

    def accepts_tokens(self, tokens: Sequence[str]) -> bool:
        """Return True if one of the tokens of a request is right."""
        wanted = self.token
        if wanted is None:
            return True
        # The time of this comparison does not reveal how much of a token is right.
        return any(hmac.compare_digest(token.encode(), wanted.encode()) for token in tokens)


def make_access_policy(host: str, token: str | None) -> AccessPolicy:
    """Return the policy of a server bound to `host`; one that others can reach has a token, made if none is given."""
    if token is not None and not _TOKEN.fullmatch(token):
        raise InvalidError("--token needs 16 or more of the characters A-Z a-z 0-9 . _ ~ -")
    names = {*_LOOPBACK_NAMES, host.lower()}
    if not is_loopback(host):
        # Other machines know this one by its own names.
        names |= {socket.gethostname().lower(), socket.getfqdn().lower()}
        token = token or secrets.token_urlsafe(24)
    return AccessPolicy(frozenset(names), takes_addresses=not is_loopback(host), token=token)


@dataclass(frozen=True)
class ResponseBody:
    """Content of a response, plain and compressed, and the tag of this version of it."""

    kind: str
    plain: bytes
    packed: bytes | None  # None for content that is compressed already
    tag: str
    policy: str = _CONTENT_SECURITY_POLICY

    @classmethod
    def from_text(cls, kind: str, text: str, policy: str = _CONTENT_SECURITY_POLICY) -> "ResponseBody":
        """Return the body of a text with this content type."""
        plain = text.encode(errors="replace")
        # The lowest level: data are compressed again every few seconds.
        return cls(kind, plain, gzip.compress(plain, compresslevel=1), _make_tag(plain), policy)

    @classmethod
    def from_media(cls, kind: str, content: bytes) -> "ResponseBody":
        """Return the body of an image or audio with this content type."""
        return cls(kind, content, None, _make_tag(content), _MEDIA_POLICY)


def _make_tag(content: bytes) -> str:
    return f'"{hashlib.sha256(content).hexdigest()[:16]}"'


@dataclass(frozen=True)
class Response:
    """Status, content and additional headers."""

    status: http.HTTPStatus
    body: ResponseBody | None = None
    headers: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class DashboardApp:
    """WSGI application (PEP 3333)."""

    access: AccessPolicy
    # Function that returns the data of a run's page by its id, of a sweep's by `SWEEPS` and its id, of the table of all
    # runs by "", of that of hosts by `HOSTS`, or the text for Prometheus by `METRICS`; None if there is no such run. It
    # returns quickly, is called from several threads, and may raise `TimeoutError`.
    get_data: Callable[[str], ResponseBody | None]
    # Function that returns a file of images or audio by the id of its run and its name; None if no row refers to it.
    get_media: Callable[[str, str], bytes | None] = lambda run, name: None

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        """Respond to a request."""
        response = self._respond(environ)
        status = f"{response.status.value} {response.status.phrase}"
        body = response.body or ResponseBody.from_text("text/plain; charset=utf-8", f"{status}\n")
        headers = [("Content-Security-Policy", body.policy), *_HEADERS, *response.headers]
        headers.append(("Vary", "Accept-Encoding, Cookie"))
        # A browser that polls gets new data only if they differ from its own.
        if response.body is not None and environ.get("HTTP_IF_NONE_MATCH") == body.tag:
            start_response("304 Not Modified", [*headers, ("ETag", body.tag)])
            return []
        packed = body.packed if "gzip" in environ.get("HTTP_ACCEPT_ENCODING", "") else None
        content = body.plain if packed is None else packed
        headers += [("Content-Type", body.kind), ("Content-Length", str(len(content)))]
        headers += [("Content-Encoding", "gzip")] * (packed is not None)
        headers += [("ETag", body.tag)] * (response.body is not None)
        start_response(status, headers)
        return [] if environ["REQUEST_METHOD"] == "HEAD" else [content]

    def _respond(self, environ: WSGIEnvironment) -> Response:
        no_store = ("Cache-Control", "no-store")
        # A page of another site could reach this server by a name of its own (DNS rebinding).
        if not self.access.accepts_host(environ.get("HTTP_HOST", "")):
            return Response(http.HTTPStatus.MISDIRECTED_REQUEST, headers=(no_store,))
        if environ["REQUEST_METHOD"] not in _METHODS:
            return Response(http.HTTPStatus.METHOD_NOT_ALLOWED, headers=(("Allow", ", ".join(_METHODS)), no_store))
        path = environ.get("PATH_INFO", "")

        # A token comes in the address, in the Authorization header or in a cookie.
        try:
            in_address = parse_qs(environ.get("QUERY_STRING", ""), max_num_fields=8).get("token", [])
        except ValueError:
            return Response(http.HTTPStatus.BAD_REQUEST, headers=(no_store,))
        tokens = list(in_address)
        kind, _, token = environ.get("HTTP_AUTHORIZATION", "").partition(" ")
        if kind.lower() == "bearer":
            tokens.append(token.strip())
        for part in environ.get("HTTP_COOKIE", "").split(";"):
            name, _, value = part.strip().partition("=")
            if name == _COOKIE:
                tokens.append(value)
        # Checked before the path, so that a stranger learns nothing of which runs exist.
        if not self.access.accepts_tokens(tokens):
            return Response(http.HTTPStatus.UNAUTHORIZED, headers=(("WWW-Authenticate", "Bearer"), no_store))

        try:
            body = self._make_body(path)
        except TimeoutError:
            return Response(http.HTTPStatus.SERVICE_UNAVAILABLE, headers=(("Retry-After", "5"), no_store))
        if body is None:
            return Response(http.HTTPStatus.NOT_FOUND, headers=(no_store,))
        if in_address and self.access.token is not None:
            # Move the token from the address, which is shown and logged, into a cookie.
            cookie = f"{_COOKIE}={self.access.token}; HttpOnly; SameSite=Strict; Path=/"
            return Response(http.HTTPStatus.SEE_OTHER, headers=(("Location", path), ("Set-Cookie", cookie), no_store))
        return Response(http.HTTPStatus.OK, body, (("Cache-Control", "no-cache"),))

    def _make_body(self, path: str) -> ResponseBody | None:
        match path.split("/"):
            case ["", ""]:
                return ResponseBody.from_text(_HTML, render_live_page("Runs", "./", "data"))
            case ["", "data"]:
                return self.get_data("")
            case ["", "hosts"]:
                return ResponseBody.from_text(_HTML, render_live_page("Hosts", "./", f"data/{HOSTS}"))
            case ["", "data", "hosts"]:
                return self.get_data(HOSTS)
            case ["", "metrics"]:
                return self.get_data(METRICS)
            case ["", "run", run] if _RUN_IDS.fullmatch(run):
                # Reading the run here makes its data ready when the page requests them.
                if self.get_data(run) is None:
                    return None
                return ResponseBody.from_text(_HTML, render_live_page("Run", "../", f"../data/{run}"))
            case ["", "report", run] if _RUN_IDS.fullmatch(run):
                data = self.get_data(run)
                if data is None:
                    return None
                more = {"made": time.time(), "links": {"top": "../", "live": f"../run/{run}"}}
                view = json.loads(data.plain)
                embed_media(view, self.get_media)
                page = render_report_page("Report", view | more)
                return ResponseBody.from_text(_HTML, page, f"{make_report_policy()}; {_REPORT_POLICY}")
            case ["", "data", run] if _RUN_IDS.fullmatch(run):
                return self.get_data(run)
            case ["", "sweep", sweep] if _RUN_ID.fullmatch(sweep):
                if self.get_data(f"{SWEEPS}/{sweep}") is None:
                    return None
                return ResponseBody.from_text(_HTML, render_live_page("Sweep", "../", f"../data/sweep/{sweep}"))
            case ["", "data", "sweep", sweep] if _RUN_ID.fullmatch(sweep):
                return self.get_data(f"{SWEEPS}/{sweep}")
            case ["", "report", "sweep", sweep] if _RUN_ID.fullmatch(sweep):
                data = self.get_data(f"{SWEEPS}/{sweep}")
                if data is None:
                    return None
                more = {"made": time.time(), "links": {"top": "../../", "live": f"../../sweep/{sweep}"}}
                page = render_report_page("Sweep", json.loads(data.plain) | more)
                return ResponseBody.from_text(_HTML, page, f"{make_report_policy()}; {_REPORT_POLICY}")
            case ["", "media", run, step, name] if _RUN_ID.fullmatch(run):
                content = self.get_media(run, f"{MEDIA_FOLDER}/{step}/{name}")
                # The type follows from the name, whatever the file contains.
                kind = CONTENT_TYPES.get(f".{name.rpartition('.')[2]}")
                return None if content is None or kind is None else ResponseBody.from_media(kind, content)
            # Names are looked up in a table; no file is opened by a name from outside.
            case ["", "static", name] if name in _STATIC:
                return _read_static_body(name)
        return None


@functools.cache
def _read_static_body(name: str) -> ResponseBody:
    return ResponseBody.from_text(_STATIC[name], read_plotly() if name == "plotly.js" else read_static(name))
