"""Small files, published whole or not at all.

Publish = write aside, flush to the disk, then one atomic name. A reader sees the old content, the new content or
nothing, never a part. Arrays do not pass through here: orbax writes those where no reader looks, and a manifest
published here commits them. Knows nothing of jobs or steps.
"""

import fcntl
import json
import os
import shutil
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

import google_crc32c

from runner.errors import InvalidError

_CHUNK_BYTES = 1 << 22
_REMOVE_TRIES = 10


def open_directory(text: str) -> Path:
    """The absolute path of a run's directory. Raises `InvalidError` for a scheme that cannot be written."""
    if "://" in text:
        scheme = text.split("://", 1)[0]
        raise InvalidError(f"{scheme}:// is not supported yet; got {text}, needs a local path")
    path = Path(text).expanduser().absolute()
    if path.exists() and not path.is_dir():
        raise InvalidError(f"{path} is a file, needs a directory")
    return path


def default_cache_directory() -> Path:
    """Return $RUNNER_CACHE, else $XDG_CACHE_HOME/runner, else ~/.cache/runner."""
    if directory := os.environ.get("RUNNER_CACHE"):
        return Path(directory)
    if directory := os.environ.get("XDG_CACHE_HOME"):
        return Path(directory) / "runner"
    try:
        return Path.home() / ".cache" / "runner"
    except RuntimeError:  # a container's user may have no home
        return Path(tempfile.gettempdir()) / f"runner-{os.getuid()}"


def _write_aside(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    with aside.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return aside


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def publish(path: Path, content: bytes) -> None:
    """Replace `path` by `content` atomically and durably."""
    aside = _write_aside(path, content)
    os.replace(aside, path)
    _sync_directory(path.parent)


def publish_new(path: Path, content: bytes) -> None:
    """Create `path` with `content` atomically and durably. Raises `FileExistsError` if it is there already."""
    aside = _write_aside(path, content)
    try:
        os.link(aside, path)
    finally:
        aside.unlink()
    _sync_directory(path.parent)


def encode_json(value: Any) -> bytes:
    """JSON text with a newline, keys in the order given."""
    return (json.dumps(value, indent=1) + "\n").encode()


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises `FileNotFoundError`, or `ValueError` if it is not a whole JSON object."""
    value = json.loads(path.read_bytes())
    if not isinstance(value, dict):
        raise ValueError(f"{path}: not a JSON object")
    return value


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The JSON objects in a file of lines. A torn line is left out."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_bytes().split(b"\n"):
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows


def append_line(path: Path, row: dict[str, Any]) -> None:
    """Append one JSON object as a line, in one write, so that lines of several processes never mix.

    A line that a full disk or a power cut has torn is closed first, so that it takes no other with it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        size = os.fstat(descriptor).st_size
        torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        os.write(descriptor, ("\n" * torn + json.dumps(row) + "\n").encode())
    finally:
        os.close(descriptor)


def crc32c(path: Path) -> str:
    """CRC-32C of a file's bytes: 8 hexadecimal digits, the digest that object stores report."""
    checksum = google_crc32c.Checksum()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            checksum.update(chunk)
    return checksum.hexdigest().decode()


def list_files(directory: Path) -> dict[str, Path]:
    """Every file below `directory` by its relative name, sorted."""
    files = (path for path in directory.rglob("*") if path.is_file())
    return dict(sorted((path.relative_to(directory).as_posix(), path) for path in files))


def remove_tree(directory: Path) -> None:
    """Delete a directory; one that is gone already is fine.

    A dying attempt may still be writing into it, so what appears meanwhile is deleted too.
    """
    for _ in range(_REMOVE_TRIES):
        shutil.rmtree(directory, ignore_errors=True)
        if not directory.exists():
            return
        time.sleep(0.1)
    shutil.rmtree(directory)
