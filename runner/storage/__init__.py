"""Where a run's files are: one interface over a disk and the buckets of three clouds.

- `store`: What a run needs of the place that it writes to, on a disk or in a bucket: the whole surface
- `bucket`: A store in a bucket: every call has a deadline, is tried again when the failure is transient, and ne
- `azure`: Azure Blob Storage: AZURE_STORAGE_CONNECTION_STRING
- `gcs`: Google Cloud Storage: application default credentials, or an emulator at STORAGE_EMULATOR_HOST
- `local`: A store on a disk. Publish = write aside, flush to the disk, then one atomic name
- `jsonl`: Lines that come, each read once: for who looks at what another process writes, again and again
- `s3`: Amazon S3 and what speaks its protocol: the AWS environment, profiles, and AWS_ENDPOINT_URL
- `url`: From what a spec says, a path or a URL, to a store
"""

from runner.storage.bucket import BackgroundWriter
from runner.storage.jsonl import FileTail, JsonlLog, JsonlTail, iterate_log, open_log, read_log
from runner.storage.local import LocalStore, default_cache_directory
from runner.storage.store import (
    ABSENT,
    ChangedError,
    DeadlineError,
    DeniedError,
    DiskError,
    FileInfo,
    ForbiddenError,
    JsonObject,
    Store,
    TransientError,
    Version,
    WrongKindError,
    compute_crc32c,
    create_file,
    encode_json,
    encode_line,
    find_kind,
    parse_json,
    parse_lines,
    parse_number,
    probe_store,
    read_json,
)
from runner.storage.url import (
    find_extra,
    local_directory,
    make_store,
    open_store,
    split_checkpoint,
    validate_path,
    validate_url,
)

__all__ = [
    "ABSENT",
    "BackgroundWriter",
    "ChangedError",
    "DeadlineError",
    "DeniedError",
    "DiskError",
    "FileInfo",
    "FileTail",
    "ForbiddenError",
    "JsonObject",
    "JsonlLog",
    "JsonlTail",
    "LocalStore",
    "Store",
    "TransientError",
    "Version",
    "WrongKindError",
    "compute_crc32c",
    "create_file",
    "default_cache_directory",
    "encode_json",
    "encode_line",
    "find_extra",
    "find_kind",
    "iterate_log",
    "local_directory",
    "make_store",
    "open_log",
    "open_store",
    "parse_json",
    "parse_lines",
    "parse_number",
    "probe_store",
    "read_json",
    "read_log",
    "split_checkpoint",
    "validate_path",
    "validate_url",
]
