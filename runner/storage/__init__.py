"""Where a run's files are: one interface over a disk and the buckets of three clouds.

- `store` the interface, and what is built on it alone
- `failure` what the errors of a disk mean
- `local` a directory on a disk
- `retry` try again what is transient, until a deadline
- `bucket` a prefix of a bucket, over one of three drivers
- `google` gs://
- `amazon` s3://
- `azure` az://
- `background_writer` growing files of a bucket, sent in the background
- `log` lines that are only appended
- `log_feed` the same as they come, each read once
- `url` from a path or URL to a store
- `cache_directory` where this machine keeps what it can make again
"""

from runner.storage.background_writer import BackgroundWriter
from runner.storage.cache_directory import default_cache_directory
from runner.storage.failure import DiskError, ForbiddenError, OtherKindError, kind_of
from runner.storage.local import LocalStore
from runner.storage.log import Log, iterate_log, open_log, read_log
from runner.storage.log_feed import GrowingFile, LogFeed
from runner.storage.retry import DeadlineError, DeniedError, TransientError
from runner.storage.store import (
    ABSENT,
    ChangedError,
    JsonObject,
    Listed,
    Store,
    Version,
    create,
    digest_of,
    encode_json,
    encode_line,
    number_in,
    parse_json,
    parse_lines,
    probe,
    read_json,
)
from runner.storage.url import (
    check_url,
    check_way,
    extra_of,
    local_directory,
    open_store,
    split_checkpoint,
    store_at,
)

__all__ = [
    "ABSENT",
    "BackgroundWriter",
    "ChangedError",
    "DeadlineError",
    "DeniedError",
    "DiskError",
    "ForbiddenError",
    "GrowingFile",
    "JsonObject",
    "Listed",
    "LocalStore",
    "Log",
    "LogFeed",
    "OtherKindError",
    "Store",
    "TransientError",
    "Version",
    "check_url",
    "check_way",
    "create",
    "default_cache_directory",
    "digest_of",
    "encode_json",
    "encode_line",
    "extra_of",
    "iterate_log",
    "kind_of",
    "local_directory",
    "number_in",
    "open_log",
    "open_store",
    "parse_json",
    "parse_lines",
    "probe",
    "read_json",
    "read_log",
    "split_checkpoint",
    "store_at",
]
