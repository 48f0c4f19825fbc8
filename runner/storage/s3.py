"""Driver for Amazon S3 and compatible services, with the AWS environment, profiles and AWS_ENDPOINT_URL."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import botocore.session
from boto3.exceptions import Boto3Error
from boto3.s3.transfer import TransferConfig
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, CredentialRetrievalError, NoCredentialsError
from cloudpathlib.s3 import S3Client, S3Path

from runner.storage.bucket import CONNECT_SECONDS, TRY_SECONDS, ObjectInfo, make_error
from runner.storage.store import ABSENT, NUM_REQUESTS, DeniedError, TransientError, Version

# Codes of throttling and of internal errors, which do not always come with a status of 429 or 5xx.
_THROTTLED = (
    "SlowDown",
    "RequestTimeout",
    "Throttling",
    "ThrottlingException",
    "RequestLimitExceeded",
    "InternalError",
)
_ONE_TRY = Config(
    retries={"total_max_attempts": 1},
    connect_timeout=CONNECT_SECONDS,
    read_timeout=TRY_SECONDS,
    max_pool_connections=NUM_REQUESTS,
)
# Many files are sent at a time, so that no file needs threads of its own for its parts. An object of a checkpoint is at
# most 1.5 GiB. It is sent in one request, since each costs money: in parts of 8 MiB, which is boto3's default, a save
# of 1,024 hosts with 5 GiB each would take 600,000.
_TRANSFER = TransferConfig(multipart_threshold=2 << 30, multipart_chunksize=1 << 30, use_threads=False)


@contextlib.contextmanager
def _translate_errors(key: str) -> Iterator[None]:
    try:
        yield
    except ClientError as error:
        raise _from_client_error(error, key) from error
    except (NoCredentialsError, CredentialRetrievalError) as error:
        raise DeniedError(f"no AWS credentials: {error}") from error
    except Boto3Error as error:
        # boto3 wraps the error of an upload in one of its own, and only the cause has the status.
        cause = error.__context__ or error.__cause__
        raise (
            _from_client_error(cause, key) if isinstance(cause, ClientError) else TransientError(f"{key}: {error}")
        ) from error
    except (BotoCoreError, ConnectionError) as error:
        raise TransientError(f"{key}: {type(error).__name__}: {error}") from error


def _from_client_error(error: ClientError, key: str) -> OSError:
    code = error.response.get("Error", {}).get("Code", "")
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    # The code says more than the status.
    if code == "PreconditionFailed":
        status = 412
    # 409 answers two conditional writes that meet. Neither has lost yet, so the writer must ask again.
    elif code == "ConditionalRequestConflict" or status == 409 or code in _THROTTLED:
        status = 503
    elif code in ("ExpiredToken", "InvalidAccessKeyId"):
        status = 403
    return make_error(status, f"{key}: {error}")


class S3Driver:
    """`Driver` of one bucket. Conditions are If-None-Match and If-Match."""

    batch_size = 1000

    def __init__(self, url: str):
        # The configuration goes through the session, because the client of cloudpathlib takes none.
        session = botocore.session.get_session()
        session.set_default_client_config(_ONE_TRY)
        client = S3Client(botocore_session=session)
        path = S3Path(url, client=client)
        self.prefix = path.key.strip("/")
        self._bucket = path.bucket
        self._client = client.client

    def get(self, key: str) -> tuple[bytes, Version]:
        with _translate_errors(key):
            answer = self._client.get_object(Bucket=self._bucket, Key=key)
            return answer["Body"].read(), answer["ETag"]

    def get_range(self, key: str, start: int, stop: int, version: Version | None) -> bytes:
        piece, condition = f"bytes={start}-{stop - 1}", {} if version is None else {"IfMatch": version}
        with _translate_errors(key):
            answer = self._client.get_object(Bucket=self._bucket, Key=key, Range=piece, **condition)
            return bytes(answer["Body"].read())

    def put(self, key: str, content: bytes, version: Version | None) -> Version:
        # S3 supports two conditions: `IfNoneMatch: *` if the object must not exist, and `IfMatch` with its entity tag.
        condition = {} if version is None else {"IfNoneMatch": "*"} if version == ABSENT else {"IfMatch": version}
        with _translate_errors(key):
            return str(self._client.put_object(Bucket=self._bucket, Key=key, Body=content, **condition)["ETag"])

    def put_file(self, key: str, source: Path) -> None:
        with _translate_errors(key):
            self._client.upload_file(str(source), self._bucket, key, Config=_TRANSFER)

    def list(self, prefix: str, delimiter: str) -> Iterator[ObjectInfo]:
        pages = self._client.get_paginator("list_objects_v2")
        with _translate_errors(prefix):
            for page in pages.paginate(Bucket=self._bucket, Prefix=prefix, Delimiter=delimiter):
                for found in page.get("Contents", []):
                    yield ObjectInfo(found["Key"], found["Size"], found["ETag"])
                for found in page.get("CommonPrefixes", []):
                    yield ObjectInfo(found["Prefix"], 0)

    def crc32c(self, key: str) -> str | None:
        """Return None: the service reports a digest of another kind by default."""
        return None

    def delete(self, key: str) -> None:
        with _translate_errors(key):
            self._client.delete_object(Bucket=self._bucket, Key=key)

    def delete_batch(self, keys: Sequence[str]) -> None:
        batch = {"Objects": [{"Key": key} for key in keys], "Quiet": True}
        with _translate_errors(keys[0]):
            answer = self._client.delete_objects(Bucket=self._bucket, Delete=batch)
            for error in answer.get("Errors", []):
                raise ClientError({"Error": error}, "DeleteObjects")
