"""One interface over local disks and the buckets of three clouds.

- `store`: store interface, errors, retries, parallel calls, digests, JSON files and tables of their keys
- `local`: store on a disk, and differences between file systems
- `bucket`: store in a bucket; background writer of growing files
- `gcs`: driver for Google Cloud Storage
- `s3`: driver for Amazon S3
- `azure`: driver for Azure Blob Storage
- `jsonl`: append-only logs of JSON lines: append, read, tail
- `url`: stores from paths and URLs
"""

from runner.storage.bucket import BackgroundWriter
from runner.storage.jsonl import (
    FileTail,
    JsonlLog,
    JsonlTail,
    TailUpdate,
    append_line,
    encode_line,
    iterate_log,
    merge_parts,
    parse_line,
    parse_lines,
    read_log,
)
from runner.storage.local import ConfinedStore, LocalStore, as_local, default_cache_directory
from runner.storage.store import (
    ABSENT,
    INT_MAX,
    STEP_MAX,
    TIME_MAX,
    ChangedError,
    DeadlineError,
    DeniedError,
    DiskError,
    FileInfo,
    ForbiddenError,
    JsonObject,
    Key,
    Store,
    TransientError,
    Version,
    WrongKindError,
    compute_crc32c,
    create_file,
    encode_json,
    find_kind,
    fold_files,
    parse_json,
    parse_number,
    probe_store,
    read_json,
    run_in_parallel,
    validate_record,
)
from runner.storage.url import (
    find_extra,
    local_directory,
    make_store,
    open_store,
    resolve_place,
    split_checkpoint,
    validate_path,
    validate_url,
)
