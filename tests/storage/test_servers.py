"""The servers of tests/support behave like the services, as seen by their official clients through the proxy."""

import contextlib
import errno
import http.client
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import boto3
import pytest
import requests
from azure.core import MatchConditions
from azure.core.exceptions import AzureError, HttpResponseError
from azure.storage.blob import BlobServiceClient
from boto3.exceptions import Boto3Error
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from google.api_core.exceptions import GoogleAPICallError
from google.auth.credentials import AnonymousCredentials
from google.cloud import storage
from google.cloud.storage.exceptions import InvalidResponse

from runner.storage import open_store
from runner.storage.store import TransientError
from tests.support.job_process import DEADLINE_SECONDS, ROOT
from tests.support.object_stores import BACKENDS, BUCKET, AmazonServer, Backend, Faults, route_stores_to, start_backend

CONTENT = bytes(range(256)) * 8 + b"\r\n\r"
NUM_RACERS = 8
LARGE_BYTES = 20 << 20


class Client(ABC):
    """An official client without retries; `status` returns the HTTP status of its errors, or 0 without a response."""

    @abstractmethod
    def put(self, name: str, content: bytes) -> Any:
        """Write an object and return its version."""

    @abstractmethod
    def put_file(self, name: str, path: Path) -> None:
        """Write a large file."""

    @abstractmethod
    def get(self, name: str) -> bytes:
        """Read an object."""

    @abstractmethod
    def get_range(self, name: str, start: int, stop: int) -> bytes:
        """Read some bytes of an object."""

    @abstractmethod
    def names(self, prefix: str) -> list[str]:
        """List objects."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Delete an object."""

    @abstractmethod
    def create(self, name: str, content: bytes) -> Any:
        """Write an object that must not exist."""

    @abstractmethod
    def replace(self, name: str, content: bytes, version: Any) -> Any:
        """Write an object that must have this version."""

    @abstractmethod
    def status(self, error: Exception) -> int:
        """Return the HTTP status of an error of the client, or 0 if there was no complete response."""

    errors: tuple[type[Exception], ...]


class GoogleClient(Client):
    """google-cloud-storage."""

    errors = (GoogleAPICallError, InvalidResponse, requests.RequestException)

    def __init__(self) -> None:
        self.bucket = storage.Client(project="p", credentials=AnonymousCredentials()).bucket(BUCKET)

    def put(self, name: str, content: bytes, **condition: int) -> int:
        blob = self.bucket.blob(name)
        blob.upload_from_string(content, retry=None, **condition)
        return int(blob.generation)

    def put_file(self, name: str, path: Path, **condition: int) -> None:
        self.bucket.blob(name).upload_from_filename(str(path), retry=None, **condition)

    def get(self, name: str) -> bytes:
        return bytes(self.bucket.blob(name).download_as_bytes(retry=None))

    def get_range(self, name: str, start: int, stop: int) -> bytes:
        return bytes(self.bucket.blob(name).download_as_bytes(start=start, end=stop - 1, retry=None))

    def names(self, prefix: str) -> list[str]:
        return [blob.name for blob in self.bucket.list_blobs(prefix=prefix, retry=None)]

    def delete(self, name: str, **condition: int) -> None:
        self.bucket.blob(name).delete(retry=None, **condition)

    def create(self, name: str, content: bytes) -> int:
        return self.put(name, content, if_generation_match=0)

    def replace(self, name: str, content: bytes, version: int) -> int:
        return self.put(name, content, if_generation_match=version)

    def status(self, error: Exception) -> int:
        if isinstance(error, InvalidResponse):
            return int(error.response.status_code)
        return int(getattr(error, "code", None) or 0)


class AmazonClient(Client):
    """boto3."""

    errors = (ClientError, BotoCoreError, Boto3Error)

    def __init__(self) -> None:
        self.client = boto3.client("s3", config=Config(retries={"total_max_attempts": 1}))

    def put(self, name: str, content: bytes, **condition: str) -> str:
        return str(self.client.put_object(Bucket=BUCKET, Key=name, Body=content, **condition)["ETag"])

    def put_file(self, name: str, path: Path) -> None:
        self.client.upload_file(str(path), BUCKET, name)

    def get(self, name: str) -> bytes:
        return bytes(self.client.get_object(Bucket=BUCKET, Key=name)["Body"].read())

    def get_range(self, name: str, start: int, stop: int) -> bytes:
        return bytes(self.client.get_object(Bucket=BUCKET, Key=name, Range=f"bytes={start}-{stop - 1}")["Body"].read())

    def names(self, prefix: str) -> list[str]:
        return [found["Key"] for found in self.client.list_objects_v2(Bucket=BUCKET, Prefix=prefix).get("Contents", [])]

    def delete(self, name: str) -> None:
        self.client.delete_object(Bucket=BUCKET, Key=name)

    def create(self, name: str, content: bytes) -> str:
        return self.put(name, content, IfNoneMatch="*")

    def replace(self, name: str, content: bytes, version: str) -> str:
        return self.put(name, content, IfMatch=version)

    def status(self, error: Exception) -> int:
        return int(error.response["ResponseMetadata"]["HTTPStatusCode"]) if isinstance(error, ClientError) else 0


class AzureClient(Client):
    """azure-storage-blob."""

    errors = (AzureError,)

    def __init__(self) -> None:
        connection = os.environ["AZURE_STORAGE_CONNECTION_STRING"]
        self.container = BlobServiceClient.from_connection_string(connection, retry_total=0).get_container_client(
            BUCKET
        )

    def put(self, name: str, content: bytes) -> str:
        return str(self.container.get_blob_client(name).upload_blob(content, overwrite=True)["etag"])

    def put_file(self, name: str, path: Path) -> None:
        with path.open("rb") as file:
            self.container.upload_blob(name, file, overwrite=True, max_concurrency=4)

    def get(self, name: str) -> bytes:
        return bytes(self.container.download_blob(name).readall())

    def get_range(self, name: str, start: int, stop: int) -> bytes:
        return bytes(self.container.download_blob(name, offset=start, length=stop - start).readall())

    def names(self, prefix: str) -> list[str]:
        return [found.name for found in self.container.list_blobs(name_starts_with=prefix)]

    def delete(self, name: str) -> None:
        self.container.delete_blob(name)

    def create(self, name: str, content: bytes) -> str:
        return str(self.container.get_blob_client(name).upload_blob(content, overwrite=False)["etag"])

    def replace(self, name: str, content: bytes, version: str) -> str:
        blob = self.container.get_blob_client(name)
        condition = {"etag": version, "match_condition": MatchConditions.IfNotModified}
        return str(blob.upload_blob(content, overwrite=True, **condition)["etag"])

    def status(self, error: Exception) -> int:
        is_answer = isinstance(error, HttpResponseError) and hasattr(error, "error_code")
        return int(error.status_code or 0) if is_answer else 0


CLIENTS: dict[str, type[Client]] = {"gs": GoogleClient, "s3": AmazonClient, "az": AzureClient}


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    """Start each server, with an environment that routes clients to its proxy."""
    with start_backend(request.param) as started:
        route_stores_to(monkeypatch, started)
        yield started


@pytest.fixture
def google(monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    """Start the Google server, which the proxy partly implements."""
    with start_backend("gs") as started:
        route_stores_to(monkeypatch, started)
        yield started


@pytest.fixture
def client(backend: Backend) -> Client:
    """Return the official client of the service."""
    return CLIENTS[backend.name]()


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """Return an object name unique to the test that needs quoting."""
    return f"{request.node.name}/a b+c%20d/é.bin"


def get_failure_status(client: Client, action: Callable[..., Any], *arguments: Any) -> int:
    """Return the HTTP status of an action that must fail."""
    with pytest.raises(client.errors) as caught:
        action(*arguments)
    return client.status(caught.value)


def run_racing(client: Client, actions: Sequence[Callable[[], Any]]) -> list[int]:
    """Run actions in parallel threads and return their statuses, 200 for success."""
    statuses: list[int] = []
    barrier = threading.Barrier(len(actions))

    def run(action: Callable[[], Any]) -> None:
        barrier.wait()
        try:
            action()
            statuses.append(200)
        except client.errors as error:
            statuses.append(client.status(error))

    threads = [threading.Thread(target=run, args=(action,)) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return statuses


# Services.


def test_an_object_is_written_read_listed_and_deleted(backend, client, name):
    client.put(name, CONTENT)
    assert client.get(name) == CONTENT
    assert client.get_range(name, 250, 260) == CONTENT[250:260]
    assert client.names(name[:-4]) == [name]
    client.put(name, b"")
    assert client.get(name) == b""
    client.delete(name)
    assert client.names(name) == []
    assert get_failure_status(client, client.get, name) == 404
    path = f"/{BUCKET}/{name}"
    assert [method for method, asked in backend.proxy.requests if asked == path and method == "DELETE"] == ["DELETE"]
    assert [method for method, asked in backend.proxy.requests if asked == path and method in ("PUT", "POST")] != []
    assert not backend.proxy.fired


def test_the_backend_helpers_access_objects_without_the_proxy(backend, client, name):
    client.put(name, CONTENT)
    num_requests = len(backend.proxy.requests)
    assert backend.names(name) == {name: len(CONTENT)}
    assert backend.read(name) == CONTENT
    backend.write(name, b"damage")
    backend.write(f"{name}.second", b"")
    assert backend.names(name) == {name: 6, f"{name}.second": 0}
    backend.delete(f"{name}.second")
    assert len(backend.proxy.requests) == num_requests
    assert client.get(name) == b"damage"
    backend.delete(name)
    for use in (backend.read, backend.delete):
        with pytest.raises(FileNotFoundError):
            use(name)


def test_a_large_file_is_uploaded(backend, client, name, tmp_path):
    content = os.urandom(LARGE_BYTES)
    (tmp_path / "large").write_bytes(content)
    client.put_file(name, tmp_path / "large")
    assert client.get(name) == content
    assert backend.names(name) == {name: LARGE_BYTES}
    assert {asked for method, asked in backend.proxy.requests if method != "GET"} == {f"/{BUCKET}/{name}"}


@pytest.mark.soak
def test_a_file_of_a_checkpoint_takes_few_requests(backend, tmp_path):
    """Each request costs money, and a save of a large job has thousands of such files."""
    num_bytes, store = 300 << 20, open_store(backend.url("few"))
    source = tmp_path / "pack"
    with source.open("wb") as file:
        file.truncate(num_bytes)
    store.upload(source, "pack", 120.0)
    sent = len(backend.proxy.requests)
    # Google's library sends 100 MiB at a time.
    assert sent <= (5 if backend.name == "gs" else 2), backend.proxy.requests
    assert store.read_range("pack", num_bytes - (64 << 20), num_bytes, None) == bytes(64 << 20)
    assert len(backend.proxy.requests) == sent + 1


def test_an_object_is_created_once(client, name):
    client.create(name, b"first")
    assert get_failure_status(client, client.create, name, b"second") in (409, 412)
    assert client.get(name) == b"first"


def test_one_of_many_creators_wins(backend, client, name):
    statuses = run_racing(client, [lambda i=i: client.create(name, b"%d" % i) for i in range(NUM_RACERS)])
    assert sorted(statuses)[0] == 200
    assert set(sorted(statuses)[1:]) <= {409, 412}
    assert not backend.proxy.fired


def test_only_an_unchanged_version_is_replaced(client, name):
    first = client.put(name, b"first")
    second = client.replace(name, b"second", first)
    assert get_failure_status(client, client.replace, name, b"stale", first) == 412
    assert client.get(name) == b"second"
    client.replace(name, b"third", second)
    assert client.get(name) == b"third"


def test_one_of_many_replacers_wins(client, name):
    version = client.put(name, b"first")
    statuses = run_racing(client, [lambda i=i: client.replace(name, b"%d" % i, version) for i in range(NUM_RACERS)])
    assert sorted(statuses) == [200] + [412] * (NUM_RACERS - 1)


def test_head_returns_only_the_size(monkeypatch, name):
    with start_backend("s3") as backend:
        route_stores_to(monkeypatch, backend)
        client = AmazonClient()
        client.put(name, CONTENT)
        assert client.client.head_object(Bucket=BUCKET, Key=name)["ContentLength"] == len(CONTENT)
        assert ("HEAD", f"/{BUCKET}/{name}") in backend.proxy.requests


# Additions of the proxy to Google's emulator.


def test_a_download_returns_its_generation(google, name):
    client = GoogleClient()
    generation = client.put(name, CONTENT)
    blob = client.bucket.blob(name)
    blob.download_as_bytes()
    assert int(blob.generation) == generation
    client.put(name, b"newer")
    with pytest.raises(client.errors) as caught:
        blob.download_as_bytes(retry=None)
    assert client.status(caught.value) == 404


def test_a_resumable_upload_passes_the_proxy_and_keeps_its_condition(google, name, tmp_path):
    client = GoogleClient()
    (tmp_path / "large").write_bytes(bytes(LARGE_BYTES))
    client.put_file(name, tmp_path / "large", if_generation_match=0)
    assert [method for method, path in google.proxy.requests if path == f"/{BUCKET}/{name}"] == ["POST", "PUT"]
    with pytest.raises(client.errors) as caught:
        client.put_file(name, tmp_path / "large", if_generation_match=0)
    assert client.status(caught.value) == 412

    late = f"{name}.late"
    upload = client.bucket.blob(late).create_resumable_upload_session(if_generation_match=0)
    client.put(late, b"first")
    assert requests.put(upload, data=b"second").status_code == 412
    assert google.read(late) == b"first"


def test_a_delete_keeps_its_condition(google, name):
    client = GoogleClient()
    first = client.put(name, b"first")
    second = client.put(name, b"second")
    with pytest.raises(client.errors) as caught:
        client.delete(name, if_generation_match=first)
    assert client.status(caught.value) == 412
    client.delete(name, if_generation_match=second)
    assert google.names(name) == {}


def test_an_unknown_condition_is_rejected_by_the_proxy(google, name):
    client = GoogleClient()
    with pytest.raises(client.errors) as caught:
        client.put(name, b"", if_metageneration_match=1)
    assert client.status(caught.value) == 501


def test_chunked_bodies_and_expect_headers_are_accepted(google):
    target = f"/upload/storage/v1/b/{BUCKET}/o?uploadType=media&name=chunked"
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", google.proxy.port)) as connection:
        pieces = iter([b"one", b"two"])
        connection.request("POST", target, pieces, {"Expect": "100-continue"}, encode_chunked=True)
        response = connection.getresponse()
        assert (response.status, json.loads(response.read())["size"]) == (200, "6")
        local_port = connection.sock.getsockname()[1]
        connection.request("GET", f"/{BUCKET}/chunked")
        assert connection.getresponse().read() == b"onetwo"
        assert connection.sock.getsockname()[1] == local_port, "the connection was not kept alive"
    assert google.proxy.requests == [("POST", f"/{BUCKET}/chunked"), ("GET", f"/{BUCKET}/chunked")]


# Faults.


def test_an_injected_error_prevents_the_operation(backend, client, name):
    backend.write(name, b"first")
    statuses = set()
    for status in (503, 429):
        backend.proxy.faults = Faults(error_rate=1.0, error_statuses=(status,))
        statuses |= {
            get_failure_status(client, client.get, name),
            get_failure_status(client, client.put, name, b"second"),
        }
    assert statuses == {503, 429}
    assert backend.proxy.fired == {"error": 4}
    assert backend.read(name) == b"first"


def test_an_injected_cut_truncates_a_download(backend, client, name):
    backend.write(name, CONTENT)
    backend.proxy.faults.cut_rate = 1.0
    assert get_failure_status(client, client.get, name) == 0
    assert set(backend.proxy.fired) == {"cut"}  # Azure's client reads a body up to three times
    backend.proxy.faults.cut_rate = 0.0
    assert client.get(name) == CONTENT


def test_a_write_with_a_lost_response_is_applied(backend, client, name):
    backend.proxy.faults.cut_rate = 1.0
    assert get_failure_status(client, client.put, name, CONTENT) == 0
    assert backend.proxy.fired == {"cut": 1}
    assert backend.read(name) == CONTENT


@pytest.mark.parametrize("content", [CONTENT, bytes(1 << 20)], ids=["small", "large"])
def test_a_truncated_write_is_not_applied(backend, client, name, content):
    backend.proxy.faults.cut_upload_rate = 1.0
    assert get_failure_status(client, client.put, name, content) == 0
    assert backend.proxy.fired == {"cut_upload": 1}
    assert backend.names(name) == {}
    assert get_failure_status(client, client.get, name) == 404


def test_an_outage_can_be_started_and_ended(backend, client, name):
    backend.write(name, CONTENT)
    assert client.get(name) == CONTENT
    backend.proxy.faults.outage = True
    assert get_failure_status(client, client.get, name) == 0
    assert get_failure_status(client, client.put, name, b"second") == 0
    assert backend.proxy.fired == {"outage": 2}
    backend.proxy.reset()
    assert client.get(name) == CONTENT
    assert not backend.proxy.fired
    assert set(backend.proxy.requests) == {("GET", f"/{BUCKET}/{name}")}


def test_forbidden_requests_are_denied(backend, client, name):
    backend.write(name, CONTENT)
    backend.proxy.faults.forbidden = True
    assert get_failure_status(client, client.get, name) == 403
    assert get_failure_status(client, client.names, name) == 403
    assert get_failure_status(client, client.put, name, b"second") == 403
    assert backend.proxy.fired == {"forbidden": 3}
    backend.proxy.faults = Faults(forbidden_writes=True)
    assert client.get(name) == CONTENT
    assert get_failure_status(client, client.put, name, b"second") == 403
    assert get_failure_status(client, client.delete, name) == 403
    assert backend.proxy.fired == {"forbidden": 3, "forbidden_writes": 2}
    assert backend.read(name) == CONTENT


def test_latency_only_delays(backend, client, name):
    backend.proxy.faults.latency_seconds = 0.01
    client.put(name, CONTENT)
    assert client.get(name) == CONTENT
    assert backend.proxy.fired == {"latency": len(backend.proxy.requests)}


def test_requests_share_a_limited_bandwidth(backend, client, name):
    backend.proxy.faults.bytes_per_second = 10 * len(CONTENT)
    began = time.monotonic()
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(client.put, [f"{name}/{number}" for number in range(3)], [CONTENT] * 3))
    assert client.get(f"{name}/0") == CONTENT
    assert time.monotonic() - began >= 0.4
    assert not backend.proxy.fired


def test_faults_apply_only_to_matching_requests(backend, client, name):
    faults = Faults(matching=lambda method, path: method != "GET" and path.endswith("/manifest.json"), error_rate=1.0)
    backend.proxy.faults = faults
    client.put(name, CONTENT)
    assert get_failure_status(client, client.put, f"{name}/manifest.json", CONTENT) in faults.error_statuses
    assert get_failure_status(client, client.get, f"{name}/manifest.json") == 404
    assert backend.proxy.fired == {"error": 1}


def test_random_faults_are_determined_by_the_seed(monkeypatch):
    def fates(seed: int) -> list[int]:
        with start_backend("s3", seed) as backend:
            route_stores_to(monkeypatch, backend)
            client = AmazonClient()
            backend.write("chance", CONTENT)
            backend.proxy.faults = Faults(error_rate=0.3, cut_rate=0.3)
            found = [run_racing(client, [lambda: client.get("chance")])[0] for _ in range(30)]
            assert backend.proxy.fired["error"] == sum(status in (503, 429) for status in found)
            assert backend.proxy.fired["cut"] == found.count(0)
            return found

    first = fates(1)
    assert set(first) == {200, 503, 429, 0}
    assert fates(1) == first
    assert fates(2) != first


def test_a_client_killed_during_an_upload_writes_nothing():
    with start_backend("s3") as backend:
        with socket.create_connection(("127.0.0.1", backend.proxy.port)) as connection:
            connection.sendall(f"PUT /{BUCKET}/torn HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n".encode())
            connection.sendall(bytes(500))
        assert backend.names("torn") == {}


def test_a_service_that_cannot_be_reached_is_described_in_one_short_line(backend):
    driver = open_store(backend.url("away"))._driver
    backend.proxy.close()
    try:
        raise FileNotFoundError(errno.ENOENT, "an earlier error")
    except FileNotFoundError:  # which is not the cause of the next one
        with pytest.raises(TransientError, match=r"away/x: ") as caught:
            driver.put("away/x", b"", None)
    assert "earlier" not in str(caught.value)
    assert len(str(caught.value)) < 200
    assert "\n" not in str(caught.value)
    assert str(caught.value).count("Connection") <= 2, caught.value


def test_a_closed_proxy_does_not_respond(backend, client, name):
    client.put(name, CONTENT)
    backend.proxy.close()
    assert get_failure_status(client, client.get, name) == 0


# Processes.


def test_servers_exit_with_the_process_that_started_them():
    program = (
        "import time; from tests.support.object_stores import BACKENDS, start_backend\n"
        "print(*[start_backend(name).server.port for name in BACKENDS], flush=True); time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        ports = [int(word) for word in process.stdout.readline().split()]
        assert len(ports) == len(BACKENDS)
        assert all(listens(port) for port in ports)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    deadline = time.monotonic() + DEADLINE_SECONDS
    while any(listens(port) for port in ports) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(listens(port) for port in ports)


def listens(port: int) -> bool:
    with contextlib.suppress(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_SECONDS).close()
        return True
    return False


def test_a_server_that_does_not_start_reports_the_reason():
    class BrokenServer(AmazonServer):
        def _command(self, port: int) -> Sequence[str]:
            return [sys.executable, "-c", f"raise SystemExit('no licence for port {port}')"]

    with pytest.raises(AssertionError, match="ended with 1\nno licence for port"):
        BrokenServer()


class OldServer:
    """An object of a server that sends no generation with the content, replaced right after the first download."""

    def __init__(self) -> None:
        self.generation: int | None = None
        self._versions = [(b"first", 1), (b"second", 2)]

    def blob(self, key: str) -> "OldServer":
        return self

    def download_as_bytes(self, if_generation_match: int | None = None, **options: Any) -> bytes:
        content, generation = self._versions[0]
        assert if_generation_match in (None, generation)
        self._versions = self._versions[-1:]
        return content

    def reload(self, **options: Any) -> None:
        self.generation = self._versions[0][1]


def test_content_and_generation_belong_to_the_same_write() -> None:
    gcs = importlib.import_module("runner.storage.gcs")
    driver = gcs.GCSDriver.__new__(gcs.GCSDriver)
    driver._bucket = OldServer()
    assert driver.get("a") == (b"second", "2")
