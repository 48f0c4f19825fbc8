"""Append-only logs of JSON lines, on a disk and in a bucket, with one tailing reader.

A log is a sequence of JSON objects ("rows") under one name. It is used in three ways:

- **append**: `JsonlLog(store, name, writer, background).append(row)`. Any number of processes may append at once; each
  opens the log with a writer name of its own. `append_line` is the same for one local file outside of a run.
- **read all**: `read_log(store, name)` returns the rows as a list; `iterate_log(store, name)` gives them one by one, so
  that they need not fit into memory.
- **tail**: `JsonlTail(store, name).read()`, called again and again beside running writers, returns the rows that are
  new since the call before, each once. `FileTail` is the same for the raw lines of one local file.

On a disk the log is one file, `<name>.jsonl`, which all writers share: an append is one write under a lock. In a bucket
nothing can be appended to, so each writer has objects of its own, `<name>/<writer>.<part>.jsonl`: the newest one is
rewritten as a whole by the background writer, and a new part begins when one is larger than `PART_BYTES`. The order
of rows is that of their appending on a disk; in a bucket it holds within each writer, and `read_log` merges the writers
by the key `time` of the rows. `merge_parts` replaces the parts of many writers that have ended by one object, so that
the number of objects to read does not grow with the number of attempts.

`metrics.jsonl` has one writer and is cut back at a restart; `runner.metrics.file` builds it on the same lines and on
`FileTail`.

A reader skips a line that is no JSON object, such as one torn by a power cut. A line without its newline is still being
written: `JsonlTail` leaves it for the next call.

On a disk the tail continues behind the last line that it has read, as long as the file is the same and still has that
line there. In a bucket it reads only the parts that have changed, and continues within each. If anything that was read
is gone or different, it starts over and says so. Memory holds one line, or `NUM_READERS` parts.
"""

import fcntl
import json
import os
import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Generic, NamedTuple, TypeVar

from runner.storage.bucket import BackgroundWriter
from runner.storage.local import LocalStore, as_local, try_lock
from runner.storage.store import (
    JsonObject,
    Store,
    Version,
    fold_files,
    fsync,
    make_directory,
    parse_json,
    retry_stale,
    translate_errors,
)

PART_BYTES = 1 << 20  # a part of a bucket's log is rewritten at each append, so it must stay small
NUM_READERS = 16
_LINE_BYTES_MAX = 1 << 20  # a longer line is skipped: no writer makes one, and it might not fit into memory

Item = TypeVar("Item")


# Append.


def encode_line(row: JsonObject) -> bytes:
    """Return a JSON object as one line."""
    return (json.dumps(row) + "\n").encode()


def append_line(path: Path, line: bytes, is_durable: bool = False) -> None:
    """Append one line to a local file, in one write, so that lines of several processes never mix. Raises `OSError`.

    If the last line was torn by a full disk or a power cut, it is closed first, so that it does not damage the new one.
    With `is_durable` the whole line is on the disk when this returns.
    """
    descriptor, is_torn = retry_stale(lambda: open_for_append(path))
    try:
        content = b"\n" * is_torn + line
        # A disk that is almost full takes a part of the line, and raises an error only at the next write.
        num_bytes = 0
        while num_bytes < len(content):
            num_bytes += os.write(descriptor, content[num_bytes:])
        if is_durable:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_for_append(path: Path) -> tuple[int, bool]:
    """Return a descriptor of a file, locked where there are locks, and True if its last line was torn."""
    # O_APPEND moves to the end of the file at the write itself, even if another process has appended meanwhile. The
    # umask is subtracted from the mode.
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        # The lock keeps lines apart of which a full disk takes only a part. Without it one write has to suffice.
        try_lock(descriptor, fcntl.LOCK_EX)
        size = os.fstat(descriptor).st_size
        return descriptor, size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
    except BaseException:
        os.close(descriptor)
        raise


class JsonlLog:
    """Append-only log `name` of a run's directory, opened by one writer. Thread-safe.

    In a bucket no other writer of the log may ever have the name `writer`, and memory holds at most one part.
    """

    def __init__(self, store: Store, name: str, writer: str, background: BackgroundWriter):
        self._store, self._background = store, background
        self._path = None if store.root is None else store.root / f"{name}.jsonl"
        self._stem = f"{name}/{writer}"
        self._lock = threading.Lock()
        self._part = 0
        self._content = b""

    def append(self, row: JsonObject) -> None:
        """Append one row. On a disk it is written when this returns, in a bucket soon after. Raises `OSError`."""
        if self._path is not None:
            make_directory(self._path.parent)
            append_line(self._path, encode_line(row))
            return
        with self._lock:
            if len(self._content) > PART_BYTES:
                self._part += 1
                self._content = b""
            self._content += encode_line(row)
            name, content = f"{self._stem}.{self._part:04}.jsonl", self._content
            self._background.mark(name, lambda: self._store.write(name, content))

    def flush(self) -> None:
        """Make durable what all writers have appended on a disk. Raises `OSError`."""
        if self._path is not None:  # in a bucket every object that the background writer has sent is durable
            with translate_errors(self._path):
                fsync(self._path)
                fsync(self._path.parent)


# Read all.


def parse_line(line: bytes) -> JsonObject | None:
    """Return the JSON object in one line; None if the line is torn or holds something else."""
    with suppress(ValueError):
        return parse_json(line)
    return None


def parse_lines(content: bytes) -> list[JsonObject]:
    """Return the JSON objects in the lines of `content`, skipping every line that is none."""
    return [row for line in content.split(b"\n") if (row := parse_line(line)) is not None]


def read_log(store: Store, name: str) -> list[JsonObject]:
    """Return all rows of all writers; an empty list if there is no log. In a bucket they are sorted by `time`."""

    def get_time(row: JsonObject) -> float:
        moment = row.get("time")
        return moment if isinstance(moment, int | float) else 0.0

    rows = list(iterate_log(store, name))
    return sorted(rows, key=get_time) if store.root is None else rows


def iterate_log(store: Store, name: str) -> Iterator[JsonObject]:
    """Iterate over the rows of all writers; in a bucket over those of one writer after the other's."""
    if store.root is not None:
        for line in LocalStore(store.root).lines(f"{name}.jsonl"):
            yield from parse_lines(line.rstrip(b"\n"))
    else:
        yield from JsonlTail(store, name).read().items


# Merge.


def merge_parts(store: Store, name: str, first: int, last: int, files: Mapping[str, int]) -> None:
    """Replace the parts of ended writers by one object; see `fold_files`. Nothing is to be merged on a disk.

    Writers have names that begin with a number; those of the numbers from `first` to `last` are merged. `files` are the
    names and sizes of the objects of the log.
    """

    def find_contained(contents: dict[str, bytes], merged: bytes) -> list[str]:
        lines = set(merged.split(b"\n"))
        return [part for part, content in contents.items() if lines.issuperset(content.split(b"\n"))]

    parts = {part: files[part] for part in sorted(files) if _is_part(part, first, last)}
    fold_files(
        store,
        f"{name}/{first:06}-{last:06}.jsonl",
        parts,
        files,
        combine=lambda contents: b"".join(content.rstrip(b"\n") + b"\n" for content in contents.values()),
        find_contained=find_contained,
    )


def _is_part(path: str, first: int, last: int) -> bool:
    number = path.rpartition("/")[2].partition(".")[0]
    return number.isdecimal() and first <= int(number) <= last


def _list_parts(names: Iterable[str]) -> list[str]:
    """Return the objects of a log to read, sorted: all merged ones, and parts whose rows are in none of these."""
    merged = {each: match for each in names if (match := re.search(r"/(\d+)-(\d+)\.jsonl$", each))}
    ranges = [(int(match[1]), int(match[2])) for match in merged.values()]
    return sorted({*merged, *(each for each in names if not any(_is_part(each, *pair) for pair in ranges))})


# Tail.


class TailUpdate(NamedTuple, Generic[Item]):
    """Result of one reading of a tail."""

    # True if everything that was read before is invalid, and `items` begins with the first item of the log: at the
    # first reading, and after the log was truncated, replaced or deleted.
    is_restart: bool
    items: Iterator[Item]  # new lines or rows, to be exhausted before the next reading. Iterating may raise `OSError`


class FileTail:
    """Tailing reader of the raw lines of one local file, which others append to, truncate or replace."""

    def __init__(self, store: Store, name: str):
        self._store, self._name = as_local(store), name
        self.num_skipped = 0  # lines since the last restart that are too long
        self._identity = (0, 0)  # device and inode of the file that was read
        self._offset = 0
        self._last_line = b""  # the line that ends at `_offset`

    def restart(self) -> None:
        """Begin with the first line at the next reading."""
        self._identity, self._offset, self._last_line = (0, 0), 0, b""
        self.num_skipped = 0

    def read(self) -> TailUpdate[bytes]:
        """Return the lines since the last reading; none, as a restart, if there is no file. Raises `OSError`."""
        try:
            file = self._store.open(self._name)
        except FileNotFoundError:
            self.restart()
            return TailUpdate(True, iter(()))
        # A file may be truncated and grow again between two readings. Size and inode then look right, so the line
        # before the offset is compared too.
        status = os.fstat(file.fileno())
        before, self._identity = self._identity, (status.st_dev, status.st_ino)
        file.seek(self._offset - len(self._last_line))
        is_restart = not (self._identity == before and file.read(len(self._last_line)) == self._last_line)
        if is_restart:
            self._offset, self._last_line, self.num_skipped = 0, b"", 0
        return TailUpdate(is_restart, self._lines(file))

    def _lines(self, file: BinaryIO) -> Iterator[bytes]:
        with file:
            file.seek(self._offset)
            while text := file.readline(_LINE_BYTES_MAX):
                if text.endswith(b"\n"):
                    # Only a line that was handed over counts as read: the caller may stop in between.
                    self._offset, self._last_line = self._offset + len(text), text
                    yield text
                elif len(text) < _LINE_BYTES_MAX:
                    return  # a line that is still being written
                else:
                    while text and not text.endswith(b"\n"):
                        text = file.readline(_LINE_BYTES_MAX)
                    if text:
                        self._offset, self._last_line = file.tell(), text
                        self.num_skipped += 1


@dataclass(frozen=True)
class _Position:
    """Position in one part of a bucket's log: its version, an offset, and the line that ends there."""

    version: Version
    offset: int = 0
    last_line: bytes = b""


class JsonlTail:
    """Tailing reader of the log `name`: first the rows of `iterate_log`, then those that are new."""

    def __init__(self, store: Store, name: str):
        self._store, self._name = store, name
        self._file = None if store.root is None else FileTail(store, f"{name}.jsonl")
        self._num_damaged = 0
        self._positions: dict[str, _Position] = {}  # of a bucket, by part

    @property
    def num_skipped(self) -> int:
        """Lines since the last restart that hold no JSON object, or are too long."""
        return self._num_damaged + (0 if self._file is None else self._file.num_skipped)

    def _parse(self, content: bytes) -> list[JsonObject]:
        rows = parse_lines(content)
        self._num_damaged += sum(bool(line.strip()) for line in content.split(b"\n")) - len(rows)
        return rows

    def restart(self) -> None:
        """Begin with the first row at the next reading."""
        self._positions = {}
        if self._file is not None:
            self._file.restart()

    def read(self) -> TailUpdate[JsonObject]:
        """Return the rows since the last reading. Raises `OSError`."""
        if self._file is not None:
            is_restart, lines = self._file.read()
            if is_restart:
                self._num_damaged = 0
            return TailUpdate(is_restart, (row for line in lines for row in self._parse(line.rstrip(b"\n"))))
        positions = self._positions
        found = self._store.list_files(f"{self._name}/")
        listed = {part: found[part].version for part in _list_parts(found)}
        changed = [name for name in sorted(listed) if name not in positions or positions[name].version != listed[name]]
        # The known parts that have changed, at most one of each writer, decide whether the tail can continue.
        contents = {name: self._store.read(name) for name in changed if name in positions}
        is_restart = (
            not positions
            or not positions.keys() <= listed.keys()
            or any(
                content[positions[name].offset - len(positions[name].last_line) : positions[name].offset]
                != positions[name].last_line
                for name, content in contents.items()
            )
        )
        if is_restart:
            self._positions, self._num_damaged = {}, 0
            return TailUpdate(True, self._rows(sorted(listed), listed, {}))
        return TailUpdate(False, self._rows(changed, listed, contents))

    def _rows(self, names: list[str], versions: dict[str, Version], contents: dict[str, bytes]) -> Iterator[JsonObject]:
        def read(name: str) -> bytes:
            return contents[name] if name in contents else self._store.read(name)

        with ThreadPoolExecutor(NUM_READERS) as pool:
            for start in range(0, len(names), NUM_READERS):
                some = names[start : start + NUM_READERS]
                for name, content in zip(some, pool.map(read, some), strict=True):
                    position = self._positions.get(name, _Position(versions[name]))
                    # Only whole lines count as read; a part of a line waits for the next reading.
                    stop = content.rfind(b"\n") + 1
                    last_line = content[content.rfind(b"\n", 0, max(stop - 1, 0)) + 1 : stop]
                    self._positions[name] = _Position(versions[name], stop, last_line)
                    yield from self._parse(content[position.offset : stop])
