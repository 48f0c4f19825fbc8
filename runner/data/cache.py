"""Derived data on disk: small records and the arrays they point to. Knows neither tokens nor text.

1. What is derived from files is kept under a key made of their paths, sizes and modification times (in a bucket: URLs
   and versions), and of FORMAT.
2. A file is written under a temporary name in the same directory, fsynced, then renamed: a reader sees it whole or not
   at all, whoever is killed. Of small ones processes that race write the same content, and the last rename wins; a file
   that is known by its time, or is much work, is made by one process while the others wait.
3. An array is named by the digest of its content and written before the record that points to it.
4. A record carries its own digest and the size of its array: what does not match is a miss, and is rebuilt.

A cache that cannot be written never stops a run: it costs a warning and the work of deriving again.
"""

import fcntl
import hashlib
import json
import logging
import os
import secrets
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from runner.data.source import BucketFile, SourceFile
from runner.storage import JsonObject

FORMAT = 2  # raise it when the meaning of a record or of a tokenizer changes

logger = logging.getLogger(__name__)


def cache_key(kind: str, files: Sequence[SourceFile | BucketFile]) -> str:
    """Return the name under which what `kind` derives from `files` is kept."""
    identity = [file.identity for file in files]
    return f"{kind}-{_digest(json.dumps([FORMAT, kind, identity]).encode())[:32]}"


def read_record(directory: Path, key: str) -> JsonObject | None:
    """Return the record, or None if there is none that is whole."""
    try:
        record = json.loads((directory / f"{key}.json").read_bytes())
    except (OSError, ValueError):
        return None
    if not isinstance(record, dict) or record.get("sha256") != _digest(_canonical_json(record.get("content"))):
        return None
    return record["content"]


def write_record(directory: Path, key: str, content: JsonObject) -> None:
    """Publish a record. Raises OSError."""
    record = {"sha256": _digest(_canonical_json(content)), "content": content}
    publish(directory / f"{key}.json", [json.dumps(record, indent=1).encode()])


def publish(path: Path, chunks: Iterable[bytes | memoryview]) -> None:
    """Write `path` so that it is seen whole or not at all. Raises OSError or what `chunks` does, leaving nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.parent / f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp"
    try:
        with open(aside, "xb") as file:
            _write_through(file, chunks)
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def publish_once(path: Path, make: Callable[[], Iterable[bytes]], is_whole: Callable[[], bool]) -> None:
    """Unless `is_whole`, write `path` as `publish` does, in one process of all that come here at a time.

    Blocks while another process makes the file, and takes over from one that is killed. So a file that was found whole
    is not replaced by another of the same content, which would have another time.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.parent / f".{path.name}.tmp"
    while not is_whole():
        with open(aside, "ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if not _is_at(file, aside):
                continue  # who held it has published it, or given up
            try:
                if not is_whole():  # else published before `aside` was opened
                    file.truncate(0)
                    _write_through(file, make())
                    os.replace(aside, path)
                    return
            finally:
                if _is_at(file, aside):
                    aside.unlink()


def _write_through(file: BinaryIO, chunks: Iterable[bytes | memoryview]) -> None:
    for chunk in chunks:
        file.write(chunk)
    file.flush()
    os.fsync(file.fileno())


def _is_at(file: BinaryIO, path: Path) -> bool:
    """Whether the open file is the one at `path`."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def warn_unwritable(directory: Path, error: OSError) -> None:
    logger.warning(
        "cannot write the data cache in %s (%s): the work is repeated at every start; set RUNNER_CACHE to a "
        "directory that can be written",
        directory,
        error.strerror or error,
    )


def _canonical_json(content: Any) -> bytes:
    return json.dumps(content, sort_keys=True).encode()


def _digest(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()
