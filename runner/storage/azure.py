"""Driver for Azure Blob Storage, with the credentials of AZURE_STORAGE_CONNECTION_STRING."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from azure.core import MatchConditions
from azure.core.exceptions import AzureError, ClientAuthenticationError, HttpResponseError, ResourceNotFoundError
from azure.core.pipeline.transport import RequestsTransport
from azure.storage.blob import BlobPrefix, BlobServiceClient
from cloudpathlib.azure import AzureBlobClient, AzureBlobPath
from cloudpathlib.exceptions import MissingCredentialsError

from runner.storage.bucket import CONNECT_SECONDS, TRY_SECONDS, ObjectInfo, make_error
from runner.storage.store import ABSENT, NUM_REQUESTS, DeniedError, TransientError, Version

# Each request costs money, so an object of a checkpoint, of 1.5 GiB at most, is sent in one or two, where the
# library's default is blocks of 4 MiB. It reads the file while it sends, and does not hold a block in memory.
_BLOCK_BYTES = 2 << 30


@contextlib.contextmanager
def _translate_errors(key: str) -> Iterator[None]:
    try:
        yield
    except ClientAuthenticationError as error:
        raise DeniedError(f"{key}: {_first_line(error)}") from error
    except HttpResponseError as error:
        # Without a status the connection broke before there was an answer. 409 answers a conditional creation of a blob
        # that exists, 412 any other condition that does not hold.
        status = error.status_code or 503
        raise make_error(412 if status == 409 else status, f"{key}: {_first_line(error)}") from error
    except (AzureError, ConnectionError) as error:
        raise TransientError(f"{key}: {type(error).__name__}: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return str(error).split("\n", 1)[0]


def _quote(etag: str) -> Version:
    """Return an entity tag as headers have it; a listing leaves the quotes out."""
    return etag if etag.startswith('"') else f'"{etag}"'


class AzureDriver:
    """`Driver` of one container. Conditions are If-None-Match and If-Match."""

    batch_size = 256

    def __init__(self, url: str):
        try:
            described = AzureBlobClient().service_client
        except MissingCredentialsError as error:
            raise ValueError("no credentials: set AZURE_STORAGE_CONNECTION_STRING") from error
        # The client keeps 10 connections by default and warns of each that it throws away, so it gets as many as
        # there are threads.
        transport = RequestsTransport(connection_timeout=CONNECT_SECONDS, read_timeout=TRY_SECONDS)
        transport.open()
        assert transport.session is not None
        for scheme in ("https://", "http://"):
            adapter = transport.session.get_adapter(scheme)
            sized = type(adapter)(
                max_retries=adapter.max_retries, pool_connections=NUM_REQUESTS, pool_maxsize=NUM_REQUESTS
            )
            transport.session.mount(scheme, sized)
        service = BlobServiceClient(
            described.url,
            credential=described.credential,
            retry_total=0,
            transport=transport,
            max_block_size=_BLOCK_BYTES,
            max_single_get_size=_BLOCK_BYTES,
        )
        client = AzureBlobClient(blob_service_client=service)
        path = AzureBlobPath(url, client=client)
        self.prefix = path.blob.strip("/")
        self._container = client.service_client.get_container_client(path.container)

    def get(self, key: str) -> tuple[bytes, Version]:
        with _translate_errors(key):
            download = self._container.download_blob(key)
            return download.readall(), download.properties.etag

    def get_range(self, key: str, start: int, stop: int, version: Version | None) -> bytes:
        # The client passes an `etag` of None on to its transport, which does not know the argument.
        condition: dict[str, Any] = {}
        if version is not None:
            condition = {"etag": version, "match_condition": MatchConditions.IfNotModified}
        with _translate_errors(key):
            return self._container.download_blob(key, offset=start, length=stop - start, **condition).readall()

    def put(self, key: str, content: bytes, version: Version | None) -> Version:
        condition: dict[str, Any] = {"overwrite": version != ABSENT}
        if version:
            condition |= {"etag": version, "match_condition": MatchConditions.IfNotModified}
        with _translate_errors(key):
            return str(self._container.get_blob_client(key).upload_blob(content, **condition)["etag"])

    def put_file(self, key: str, source: Path) -> None:
        with _translate_errors(key), source.open("rb") as file:
            self._container.upload_blob(key, file, overwrite=True)

    def list(self, prefix: str, delimiter: str) -> Iterator[ObjectInfo]:
        with _translate_errors(prefix):
            if not delimiter:
                for found in self._container.list_blobs(name_starts_with=prefix):
                    yield ObjectInfo(found.name, found.size, _quote(found.etag))
                return
            for item in self._container.walk_blobs(name_starts_with=prefix, delimiter=delimiter):
                yield (
                    ObjectInfo(item.name, 0)
                    if isinstance(item, BlobPrefix)
                    else ObjectInfo(item.name, item.size, _quote(item.etag))
                )

    def crc32c(self, key: str) -> str | None:
        """Return None: the service reports a digest of another kind."""
        return None

    def delete(self, key: str) -> None:
        with _translate_errors(key), contextlib.suppress(ResourceNotFoundError):
            self._container.delete_blob(key)

    def delete_batch(self, keys: Sequence[str]) -> None:
        with _translate_errors(keys[0]):
            self._container.delete_blobs(*keys)
