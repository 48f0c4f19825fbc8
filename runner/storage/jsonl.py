"""Lines that come, each read once: for who looks at what another process writes, again and again.

On a disk a feed goes on behind the last line that it has read, as long as the file is the same and that line still
stands there; in a bucket it reads only the parts that have changed, and goes on within each. If anything that was read
is gone or another, all is read again. Half a line waits for its rest. Memory holds a line at a time, or sixteen parts.

Lines that are only ever appended: one file on a disk, parts of one writer each in a bucket.
"""

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from runner.storage.bucket import BackgroundWriter
from runner.storage.local import LocalStore, append_line
from runner.storage.store import JsonObject, Store, Version, encode_line, open_file, parse_lines, translate_errors

PART_BYTES = 1 << 20
NUM_READERS = 16


class JsonlLog(Protocol):
    """JSON objects in the order of their appending, by any number of writers."""

    def append(self, row: JsonObject) -> None:
        """Add one row. On a disk it is there on return, in a bucket soon. Raises `OSError`."""


class LocalJsonlLog:
    """`<name>.jsonl`, shared by all writers."""

    def __init__(self, store: Store, name: str):
        assert store.root is not None, "a local log needs a disk"
        self._path = store.root / f"{name}.jsonl"

    def append(self, row: JsonObject) -> None:
        """See `JsonlLog`."""
        append_line(self._path, encode_line(row))


class BucketJsonlLog:
    """`<name>/<writer>.<part>.jsonl`: each writer has parts of its own, and begins a new one when one is large."""

    def __init__(self, store: Store, name: str, writer: str, background: BackgroundWriter):
        self._store, self._background = store, background
        self._stem = f"{name}/{writer}"
        self._lock = threading.Lock()
        self._part = 0
        self._content = b""

    def append(self, row: JsonObject) -> None:
        """See `JsonlLog`."""
        with self._lock:
            if len(self._content) > PART_BYTES:
                self._part += 1
                self._content = b""
            self._content += encode_line(row)
            name, content = f"{self._stem}.{self._part:04}.jsonl", self._content
            self._background.mark(name, lambda: self._store.write(name, content))


def open_log(store: Store, name: str, writer: str, background: BackgroundWriter) -> JsonlLog:
    """The log `name` for one writer, whose name no other may have."""
    return BucketJsonlLog(store, name, writer, background) if store.root is None else LocalJsonlLog(store, name)


def read_log(store: Store, name: str) -> list[JsonObject]:
    """All rows of all writers; of several writers by their `time`."""
    rows = list(iterate_log(store, name))
    return sorted(rows, key=_time) if store.root is None else rows


def iterate_log(store: Store, name: str) -> Iterator[JsonObject]:
    """The rows one by one, so that they need not fit into memory: in a bucket those of one writer after another's."""
    if store.root is not None:
        for line in LocalStore(store.root).lines(f"{name}.jsonl"):
            yield from parse_lines(line.rstrip(b"\n"))
        return
    parts = sorted(store.list_names(name))
    with ThreadPoolExecutor(NUM_READERS) as pool:
        for start in range(0, len(parts), NUM_READERS):
            for content in pool.map(lambda part: store.read(f"{name}/{part}"), parts[start : start + NUM_READERS]):
                yield from parse_lines(content)


def _time(row: JsonObject) -> float:
    """When a row was written; 0 where it does not say."""
    moment = row.get("time")
    return moment if isinstance(moment, int | float) else 0.0


_LINE_BYTES_MAX = 1 << 20  # what is longer is passed over


class FileTail:
    """The lines of one file on a disk, which others append to, cut or replace."""

    def __init__(self, path: Path):
        self._path = path
        self._identity = (0, 0)
        self._offset = 0
        self._last_line = b""  # before `_offset`

    def restart(self) -> None:
        """Begin with the first line at the next reading."""
        self._identity, self._offset, self._last_line = (0, 0), 0, b""

    def read(self) -> tuple[bool, Iterator[bytes]]:
        """Whether what was read before is void, and the lines since then; none where there is no file.

        The lines are to be used up before the next reading; they may raise `OSError`, as this does.
        """
        try:
            with translate_errors(self._path):
                file = open_file(self._path)
        except FileNotFoundError:
            self.restart()
            return True, iter(())
        is_anew = not self._goes_on_in(file)
        if is_anew:
            self._offset, self._last_line = 0, b""
        return is_anew, self._lines(file)

    def _goes_on_in(self, file: BinaryIO) -> bool:
        """Whether it is the file that was read, with the same line before the place to go on at."""
        status = os.fstat(file.fileno())
        before, self._identity = self._identity, (status.st_dev, status.st_ino)
        file.seek(self._offset - len(self._last_line))
        return self._identity == before and file.read(len(self._last_line)) == self._last_line

    def _lines(self, file: BinaryIO) -> Iterator[bytes]:
        with file:
            file.seek(self._offset)
            for text in _whole_lines(file):
                self._offset, self._last_line = file.tell(), text
                yield text


def _whole_lines(file: BinaryIO) -> Iterator[bytes]:
    """The lines from here on but those that are too long; what has no end yet is left for later."""
    while text := file.readline(_LINE_BYTES_MAX):
        if text.endswith(b"\n"):
            yield text
        elif len(text) < _LINE_BYTES_MAX:
            return
        else:
            while text and not text.endswith(b"\n"):
                text = file.readline(_LINE_BYTES_MAX)


@dataclass(frozen=True)
class _Place:
    """How far a part of a bucket's log was read: of which version, up to where, and the line before that."""

    version: Version
    offset: int = 0
    last_line: bytes = b""


class JsonlTail:
    """The rows of the log `name`, as `iterate_log` gives them at first, and then those that are new."""

    def __init__(self, store: Store, name: str):
        self._store, self._name = store, name
        self._file = None if store.root is None else FileTail(store.root / f"{name}.jsonl")
        self._places: dict[str, _Place] = {}  # of a bucket, by part

    def restart(self) -> None:
        """Begin with the first row at the next reading."""
        self._places = {}
        if self._file is not None:
            self._file.restart()

    def read(self) -> tuple[bool, Iterator[JsonObject]]:
        """See `FileTail.read`."""
        if self._file is None:
            return self._read_parts()
        is_anew, lines = self._file.read()
        return is_anew, (row for line in lines for row in parse_lines(line.rstrip(b"\n")))

    def _read_parts(self) -> tuple[bool, Iterator[JsonObject]]:
        listed = {name: each.version for name, each in self._store.list_files(f"{self._name}/").items()}
        changed = [name for name in sorted(listed) if self._version_of(name) != listed[name]]
        known = [name for name in changed if name in self._places]  # the newest parts of who still writes
        contents = {name: self._store.read(name) for name in known}
        is_anew = not self._places or not self._places.keys() <= listed.keys()
        if is_anew or not all(self._goes_on_in(name, content) for name, content in contents.items()):
            self._places = {}
            return True, self._rows(sorted(listed), listed, {})
        return False, self._rows(changed, listed, contents)

    def _version_of(self, name: str) -> Version | None:
        place = self._places.get(name)
        return None if place is None else place.version

    def _goes_on_in(self, name: str, content: bytes) -> bool:
        place = self._places[name]
        return content[place.offset - len(place.last_line) : place.offset] == place.last_line

    def _rows(self, names: list[str], versions: dict[str, Version], contents: dict[str, bytes]) -> Iterator[JsonObject]:
        def read(name: str) -> bytes:
            return contents[name] if name in contents else self._store.read(name)

        with ThreadPoolExecutor(NUM_READERS) as pool:
            for start in range(0, len(names), NUM_READERS):
                some = names[start : start + NUM_READERS]
                for name, content in zip(some, pool.map(read, some), strict=True):
                    place = self._places.get(name, _Place(versions[name]))
                    stop = content.rfind(b"\n") + 1
                    last_line = content[content.rfind(b"\n", 0, max(stop - 1, 0)) + 1 : stop]
                    self._places[name] = _Place(versions[name], stop, last_line)
                    yield from parse_lines(content[place.offset : stop])
