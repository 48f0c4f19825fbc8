"""Driver for Google Cloud Storage, with application default credentials or an emulator at STORAGE_EMULATOR_HOST."""

import base64
import contextlib
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

import google.auth.exceptions
import requests
import requests.adapters
import urllib3.exceptions
from cloudpathlib.gs import GSClient, GSPath
from google.api_core import exceptions
from google.cloud.storage import Blob
from google.cloud.storage.exceptions import DataCorruption, InvalidResponse

from runner.storage.bucket import CONNECT_SECONDS, TRY_SECONDS, ObjectInfo, make_error
from runner.storage.store import ABSENT, NUM_REQUESTS, DeniedError, TransientError, Version

_TIMEOUT = (CONNECT_SECONDS, TRY_SECONDS)
_CONNECTION_ERRORS = (
    requests.RequestException,
    urllib3.exceptions.HTTPError,
    google.auth.exceptions.TransportError,
    ConnectionError,
    DataCorruption,
)


@contextlib.contextmanager
def _translate_errors(key: str) -> Iterator[None]:
    try:
        yield
    except exceptions.GoogleAPICallError as error:
        raise make_error(error.code, f"{key}: {error.message}") from error
    except InvalidResponse as error:
        raise make_error(error.response.status_code, f"{key}: {error}") from error
    except google.auth.exceptions.RefreshError as error:
        raise DeniedError(f"the credentials have expired and cannot be refreshed: {error}") from error
    except _CONNECTION_ERRORS as error:
        # The libraries put every error of the chain, with its address, into the message of the outermost one.
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, ConnectionError | socket.gaierror):
            cause = cause.__cause__ or cause.__context__
        reason = error if cause is None else cause.strerror or cause
        raise TransientError(f"{key}: {type(error).__name__}: {reason}") from error


def _decode_crc32c(blob: Blob) -> str | None:
    return None if blob.crc32c is None else base64.b64decode(blob.crc32c).hex()


class GCSDriver:
    """`Driver` of one bucket. Conditions are generation matches."""

    batch_size = 100

    def __init__(self, url: str):
        client = GSClient()
        path = GSPath(url, client=client)
        self.prefix = path.blob.strip("/")
        # The client has no option for the size of its connection pool, so the adapter of its session is replaced.
        adapter = requests.adapters.HTTPAdapter(pool_connections=NUM_REQUESTS, pool_maxsize=NUM_REQUESTS)
        client.client._http.mount("https://", adapter)
        client.client._http.mount("http://", adapter)
        self._bucket = client.client.bucket(path.bucket)

    def get(self, key: str) -> tuple[bytes, Version]:
        blob = self._bucket.blob(key)
        with _translate_errors(key):
            content = blob.download_as_bytes(timeout=_TIMEOUT, retry=None)
            if blob.generation is None:
                # Not every server sends the generation together with the content. Another writer may replace the object
                # in between, so the content is read again, of the generation that is known now.
                blob.reload(timeout=_TIMEOUT, retry=None)
                try:
                    content = blob.download_as_bytes(if_generation_match=blob.generation, timeout=_TIMEOUT, retry=None)
                except exceptions.PreconditionFailed as error:
                    raise TransientError(f"{key}: was replaced while it was read") from error
        return content, str(blob.generation)

    def get_range(self, key: str, start: int, stop: int, version: Version | None) -> bytes:
        with _translate_errors(key):
            content = self._bucket.blob(key).download_as_bytes(
                start=start,
                end=stop - 1,
                if_generation_match=None if version is None else int(version),
                timeout=_TIMEOUT,
                retry=None,
                checksum=None,  # the service's digest is that of the whole object: there is none to compare with
            )
        return bytes(content)

    def put(self, key: str, content: bytes, version: Version | None) -> Version:
        blob = self._bucket.blob(key)
        # Generation 0 stands for an object that does not exist.
        condition = {} if version is None else {"if_generation_match": 0 if version == ABSENT else int(version)}
        with _translate_errors(key):
            blob.upload_from_string(content, timeout=_TIMEOUT, retry=None, checksum="crc32c", **condition)
        return str(blob.generation)

    def put_file(self, key: str, source: Path) -> None:
        blob = self._bucket.blob(key)
        with _translate_errors(key):
            blob.upload_from_filename(str(source), timeout=_TIMEOUT, retry=None, checksum="crc32c")

    def list(self, prefix: str, delimiter: str) -> Iterator[ObjectInfo]:
        with _translate_errors(prefix):
            found = self._bucket.list_blobs(prefix=prefix, delimiter=delimiter or None, timeout=_TIMEOUT, retry=None)
            for blob in found:
                yield ObjectInfo(blob.name, blob.size, str(blob.generation), _decode_crc32c(blob))
            # The service collects the prefixes while the pages are read, so they come last.
            for name in found.prefixes:
                yield ObjectInfo(name, 0)

    def crc32c(self, key: str) -> str | None:
        blob: Blob = self._bucket.blob(key)
        with _translate_errors(key):
            blob.reload(timeout=_TIMEOUT, retry=None)
        return _decode_crc32c(blob)

    def delete(self, key: str) -> None:
        with _translate_errors(key), contextlib.suppress(exceptions.NotFound):
            self._bucket.blob(key).delete(timeout=_TIMEOUT, retry=None)

    def delete_batch(self, keys: Sequence[str]) -> None:
        with _translate_errors(keys[0]), self._bucket.client.batch():
            for key in keys:
                self._bucket.blob(key).delete(timeout=_TIMEOUT, retry=None)
