"""Derived data on disk: small records and the arrays they point to. Knows neither tokens nor text.

1. What is derived from files is kept under a key made of their paths, sizes and modification times (in a bucket: URLs
   and versions), and of FORMAT.
2. A file is written under a temporary name in the same directory, fsynced, then renamed: a reader sees it whole or not
   at all, whoever is killed. Processes that race write the same content, and the last rename wins.
3. An array is named by the digest of its content and written before the record that points to it.
4. A record carries its own digest and the size of its array: what does not match is a miss, and is rebuilt.

A cache that cannot be written never stops a run: it costs a warning and the work of deriving again.
"""

import hashlib
import json
import logging
import os
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

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
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


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
