"""Azure Blob Storage: AZURE_STORAGE_CONNECTION_STRING."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from azure.core import MatchConditions
from azure.core.exceptions import AzureError, ClientAuthenticationError, HttpResponseError, ResourceNotFoundError
from azure.core.pipeline.transport import RequestsTransport
from azure.storage.blob import BlobPrefix, BlobServiceClient
from cloudpathlib.azure import AzureBlobClient, AzureBlobPath
from cloudpathlib.exceptions import MissingCredentialsError

from runner.storage.bucket import CONNECT_SECONDS, NUM_CONNECTIONS, TRY_SECONDS, ObjectInfo
from runner.storage.store import ABSENT, DeniedError, TransientError, Version


@contextlib.contextmanager
def _errors(key: str) -> Iterator[None]:
    """Turn the client's errors into those of the operating system."""
    try:
        yield
    except ClientAuthenticationError as error:
        raise DeniedError(f"{key}: {_first_line(error)}") from error
    except HttpResponseError as error:
        raise _translate(error.status_code, f"{key}: {_first_line(error)}") from error
    except (AzureError, ConnectionError) as error:
        raise TransientError(f"{key}: {type(error).__name__}: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return str(error).split("\n", 1)[0]


def _translate(status: int | None, message: str) -> OSError:
    status = status or 0
    if status in (409, 412):
        return FileExistsError(message)
    if status == 404:
        return FileNotFoundError(message)
    if status in (401, 403):
        return DeniedError(message)
    if status in (0, 408, 429) or status >= 500:
        return TransientError(message)
    return OSError(message)


def _quoted(etag: str) -> Version:
    """An entity tag as a header has it; a listing leaves the quotes out."""
    return etag if etag.startswith('"') else f'"{etag}"'


class AzureDriver:
    """Blobs of one container. Conditions are If-None-Match and If-Match."""

    def __init__(self, url: str):
        client = AzureBlobClient(blob_service_client=_one_try_client())
        path = AzureBlobPath(url, client=client)
        self.prefix = path.blob.strip("/")
        self._container = client.service_client.get_container_client(path.container)

    def get(self, key: str) -> tuple[bytes, Version]:
        """See `Driver`."""
        with _errors(key):
            download = self._container.download_blob(key)
            return download.readall(), download.properties.etag

    def get_range(self, key: str, start: int, stop: int, version: Version) -> bytes:
        """See `Driver`."""
        match = MatchConditions.IfNotModified
        with _errors(key):
            download = self._container.download_blob(
                key, offset=start, length=stop - start, etag=version, match_condition=match
            )
            return download.readall()

    def put(self, key: str, content: bytes, version: Version | None) -> Version:
        """See `Driver`."""
        condition: dict[str, Any] = {"overwrite": version != ABSENT}
        if version:
            condition |= {"etag": version, "match_condition": MatchConditions.IfNotModified}
        with _errors(key):
            return str(self._container.get_blob_client(key).upload_blob(content, **condition)["etag"])

    def put_file(self, key: str, source: Path) -> None:
        """See `Driver`."""
        with _errors(key), source.open("rb") as file:
            self._container.upload_blob(key, file, overwrite=True)

    def list(self, prefix: str, delimiter: str) -> Iterator[ObjectInfo]:
        """See `Driver`."""
        with _errors(prefix):
            if not delimiter:
                for found in self._container.list_blobs(name_starts_with=prefix):
                    yield ObjectInfo(found.name, found.size, _quoted(found.etag))
                return
            for item in self._container.walk_blobs(name_starts_with=prefix, delimiter=delimiter):
                yield (
                    ObjectInfo(item.name, 0)
                    if isinstance(item, BlobPrefix)
                    else ObjectInfo(item.name, item.size, _quoted(item.etag))
                )

    def crc32c(self, key: str) -> str | None:
        """See `Driver`. The service reports a digest of another kind."""
        return None

    def copy(self, key: str, target: str) -> None:
        """See `Driver`."""
        with _errors(key):
            source = self._container.get_blob_client(key)
            self._container.get_blob_client(target).start_copy_from_url(source.url, requires_sync=False)

    def delete(self, key: str) -> None:
        """See `Driver`."""
        with _errors(key), contextlib.suppress(ResourceNotFoundError):
            self._container.delete_blob(key)


def _one_try_client() -> BlobServiceClient:
    """The client that the environment describes, without retries of its own."""
    try:
        client = AzureBlobClient().service_client
    except MissingCredentialsError as error:
        raise ValueError("no credentials: set AZURE_STORAGE_CONNECTION_STRING") from error
    return BlobServiceClient(
        client.url,
        credential=client.credential,
        retry_total=0,
        transport=_make_transport(),
    )


def _make_transport() -> RequestsTransport:
    """The client's own, with as many connections as threads: it keeps 10, and warns of each that it throws away."""
    transport = RequestsTransport(connection_timeout=CONNECT_SECONDS, read_timeout=TRY_SECONDS)
    transport.open()
    assert transport.session is not None
    for scheme in ("https://", "http://"):
        adapter = transport.session.get_adapter(scheme)
        sized = type(adapter)(
            max_retries=adapter.max_retries, pool_connections=NUM_CONNECTIONS, pool_maxsize=NUM_CONNECTIONS
        )
        transport.session.mount(scheme, sized)
    return transport
