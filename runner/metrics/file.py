"""`metrics.jsonl` in a bucket, where no object can be appended to: sealed parts, and one object that grows.

`metrics.jsonl` holds the newest rows. It is written anew, in the background, whenever a row has come. When it would be
larger than `PART_BYTES` its older rows are first put into a part of their own, `metrics/<attempt>.<number>.jsonl`,
which is never written again with other content. Then `metrics.jsonl` begins with a line that names the parts in order,
`{"parts": [[name, last step], ...]}`. After `PARTS_MAX` of them the next part takes over that line, and is named alone.
A run whose rows fit into one object has no parts and no such line. So all runs in buckets were once, and they go on.

1. `metrics.jsonl` alone says which parts count. A kill between a part and the line that names it leaves an object that
   nobody reads.
2. Each write of `metrics.jsonl` looks whether a newer attempt owns the run, and names the version that it replaces. A
   zombie that was stopped between the two may win once, where versions are digests of the content and the newer
   attempt has not changed it yet; the owner then writes over it, and has lost nothing: what is in no part it holds.
3. A part has the number of its attempt in its name, so a zombie cannot write into another's.
4. Parts that a new attempt drops, since they go beyond the step that it restored, are deleted once `metrics.jsonl` does
   not name them. A zombie that does can replace nothing but a content that names them too, and that is gone for good.

What bounds it: a row costs one object of at most `PART_BYTES` and `PARTS_MAX` names, however long the run, and memory
holds the same. There is one object for each `PART_BYTES` of rows, besides at most one for each start that was killed
while it sealed or dropped.

`metrics.jsonl` on a disk, a row appended at a time.

A resumed attempt replaces the file. A zombie of an earlier attempt then still holds the old one, which nobody reads.

What bounds the memory: lines are held until they are on the disk, `UNSYNCED_BYTES_MAX` at most; where the disk is full,
as many as come until `checkpoint.max_unsaved_minutes` ends the run.

`metrics.jsonl`: the rows of the surviving trajectory, on a disk and in a bucket. Main host only.

The file holds each logged step exactly once, in order, whatever was killed: a row is written before the checkpoint of
its step is committed, and a resumed attempt first drops the rows beyond the checkpoint it restored. What a row or a
save costs, in time and memory, does not depend on how many rows there are; only a start reads them again.
"""

import contextlib
import errno
import itertools
import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from io import FileIO
from typing import Any, NamedTuple, Protocol, TypeVar

from runner.console import warn
from runner.errors import FencedError, InvalidError
from runner.metrics.rows import EncodedRow, Row, RowTail, decode_object, find_last_own_step, select_surviving
from runner.run.fence import Fence
from runner.storage import ABSENT, BackgroundWriter, LocalStore, Store, Version, encode_line

METRICS_FILE = "metrics.jsonl"
UNSYNCED_BYTES_MAX = 1 << 20
_CHUNK_BYTES = 1 << 20


class LocalMetricsFile:
    """See `MetricsFile`."""

    def __init__(self, store: LocalStore, fence: Fence):
        self._store, self._fence = store, fence
        self._path = store.root / METRICS_FILE
        self._file: FileIO | None = None
        self._num_bytes = self._num_synced_bytes = 0
        self._newest: EncodedRow | None = None
        self._synced_step: int | None = None  # of the newest row that a power cut leaves
        self._written: list[EncodedRow] = []  # since then
        self._unwritten: list[EncodedRow] = []
        self._syncing = threading.Lock()  # held while one thread waits for the disk
        self._lock = threading.RLock()  # of all the rest; never held meanwhile

    def rewind(self, step: int, tail: RowTail | None = None) -> Row | None:
        """See `MetricsFile`."""
        own = select_surviving(self._store.lines(METRICS_FILE), find_last_own_step(step, tail))
        more = () if tail is None else tail.lines
        self._replace(itertools.chain(own, (line for line in more if line.step <= step)))
        return None if self._newest is None or self._newest.step != step else self._newest.row

    def has_step(self, step: int) -> bool:
        """See `MetricsFile`."""
        return any(line.step == step for line in select_surviving(self._store.lines(METRICS_FILE), step))

    def append(self, row: Row) -> None:
        """See `MetricsFile`. The row survives this process from here on."""
        with self._lock:
            self._newest = EncodedRow.of(row)
            self._unwritten.append(self._newest)
        try:
            self._write()
            if self._num_bytes - self._num_synced_bytes > UNSYNCED_BYTES_MAX:
                self.sync()
        except OSError as error:
            warn(f"metrics cannot be written ({error}); {len(self._unwritten)} rows are kept")

    def _write(self) -> None:
        """Write what is unwritten, each row whole or not at all."""
        assert self._file is not None, "rewind opens the file"
        with self._lock:
            while self._unwritten:
                line = self._unwritten[0]
                if self._file.write(line.text) != len(line.text):
                    self._file.truncate(self._num_bytes)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                self._num_bytes += len(line.text)
                self._written.append(self._unwritten.pop(0))

    def replace_last(self, row: Row) -> None:
        """See `MetricsFile`."""
        with self._lock:
            self._write()
            lines = select_surviving(self._store.lines(METRICS_FILE), row["step"] - 1)
            self._replace(itertools.chain(lines, [EncodedRow.of(row)]))

    def get_newest(self) -> Row:
        """See `MetricsFile`."""
        return {} if self._newest is None else self._newest.row

    def get_tail(self) -> RowTail:
        """See `MetricsFile`."""
        with self._lock:
            return RowTail(self._synced_step, [*self._written, *self._unwritten])

    def sync(self) -> None:
        """See `MetricsFile`."""
        with self._syncing:
            with self._lock:
                if self._file is None:
                    return
                self._write()
                self._check_place()
                file, size, num_lines = self._file, self._num_bytes, len(self._written)
            os.fsync(file.fileno())
            with self._lock:
                self._num_synced_bytes = size
                if num_lines:
                    self._synced_step = self._written[num_lines - 1].step
                    del self._written[:num_lines]

    def close(self) -> None:
        """See `MetricsFile`."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _check_place(self) -> None:
        """If somebody has deleted, replaced or cut the file, say so, and make it anew from what is still open."""
        assert self._file is not None
        own = os.fstat(self._file.fileno())
        try:
            is_there = os.path.samestat(own, os.stat(self._path))
        except FileNotFoundError:
            is_there = False
        if own.st_size < self._num_bytes:
            warn(f"{self._path} was cut from {self._num_bytes} to {own.st_size} bytes by somebody else; rows are lost")
            self._num_bytes = self._num_synced_bytes = own.st_size
        if not is_there:
            self._fence.check()  # it may be a newer attempt's by now
            warn(f"{self._path} was deleted or replaced while the job runs; it is made anew from the open file")
            self._replace(select_surviving(_texts_of(self._file)))

    def _replace(self, lines: Iterable[EncodedRow]) -> None:
        """Put a file with these lines in the place of what is there, durably, and open it for more."""
        newest: list[EncodedRow] = []
        size = 0

        def texts() -> Iterator[bytes]:
            nonlocal size
            for line in lines:
                newest[:] = [line]
                size += len(line.text)
                yield line.text

        self._store.write_chunks(METRICS_FILE, texts())
        self.close()
        self._file, self._num_bytes, self._num_synced_bytes = self._path.open("a+b", buffering=0), size, size
        self._newest = newest[0] if newest else None
        self._synced_step = None if self._newest is None else self._newest.step
        self._written.clear()


def _texts_of(file: FileIO) -> Iterator[bytes]:
    """The lines of an open file, wherever it stands."""
    offset, torn = 0, b""
    while chunk := os.pread(file.fileno(), _CHUNK_BYTES, offset):
        offset += len(chunk)
        *whole, torn = (torn + chunk).split(b"\n")
        yield from whole
    yield torn


PART_BYTES = 1 << 18
PARTS_MAX = 64
_READ_TRIES = 3
PARTS_FOLDER, _PARTS = "metrics", "parts"

Value = TypeVar("Value")


class SealedPart(NamedTuple):
    """A sealed object, and the step of its last row."""

    name: str
    last_step: int


def encode_parts(parts: list[SealedPart]) -> bytes:
    """The line that names parts; nothing if there are none."""
    return encode_line({_PARTS: parts}) if parts else b""


def decode_parts(content: bytes) -> list[SealedPart]:
    """The parts that an object names, which come before its own rows. Raises `ValueError` if what it names is none."""
    first = decode_object(content.partition(b"\n")[0])
    named = first.get(_PARTS, []) if first else []
    if not (isinstance(named, list) and all(map(_is_part, named))):
        raise ValueError(f"{METRICS_FILE} names parts that are none: {str(named)[:100]}")
    return [SealedPart(*part) for part in named]


def _is_part(value: Any) -> bool:
    match value:
        case [str(name), int()]:
            return name.startswith(f"{PARTS_FOLDER}/") and ".." not in name
    return False


def read_content(store: Store, known: Collection[str] = ()) -> tuple[list[str], bytes]:
    """The names of all parts in order, and the object that grows. For readers, who may meet a writer at work.

    Parts are named in a chain, of which each link is read; where it comes to one of `known`, names begin with that.
    Raises `OSError`, and `ValueError` if what is named is damaged.
    """
    return _read_whole(lambda: _content(store, known))


def _read_texts(store: Store) -> list[bytes]:
    """All rows as lines of text, parts first. For readers, who may meet a writer at work."""

    def read() -> list[bytes]:
        names, content = _content(store, ())
        return [text for each in (*map(store.read, names), content) for text in each.splitlines()]

    return _read_whole(read)


def _read_whole(read: Callable[[], Value]) -> Value:
    """What `read` returns, tried again where a newer attempt has dropped a part meanwhile, and names it no more."""
    for _ in range(_READ_TRIES):
        with contextlib.suppress(FileNotFoundError):
            return read()
    return read()


def _content(store: Store, known: Collection[str]) -> tuple[list[str], bytes]:
    content, _ = store.read_versioned(METRICS_FILE)
    return _names_of_parts(store, content, known), content


def _names_of_parts(store: Store, content: bytes, known: Collection[str]) -> list[str]:
    """Only the first part that an object names can name others."""
    names: list[str] = []
    while found := [part.name for part in decode_parts(content)]:
        if found[0] in names:
            raise ValueError(f"{store.url}/{METRICS_FILE}: its parts name each other in a circle")
        names[:0] = found
        if found[0] in known:
            break
        content = store.read(found[0])
    return names


class BucketMetricsFile:
    """See `MetricsFile`."""

    def __init__(self, store: Store, background: BackgroundWriter, fence: Fence):
        self._store, self._background, self._fence = store, background, fence
        self._sending = threading.Lock()  # held while one thread sends
        self._lock = threading.Lock()  # of what follows; never held over the network
        self._parts: list[SealedPart] = []
        self._lines: list[EncodedRow] = []  # that are in no part; if there is any row, the newest is here
        self._num_sent = 0  # of them, from the first on
        self._revision = self._revision_sent = 0
        self._version: Version = ABSENT
        self._num_sealed = 0
        self._dropped: list[SealedPart] = []

    def rewind(self, step: int, tail: RowTail | None = None) -> Row | None:
        """See `MetricsFile`."""
        content, self._version = self._store.read_versioned(METRICS_FILE)
        self._parts, self._lines = self._rows_up_to(find_last_own_step(step, tail), content)
        self._lines += [] if tail is None else [line for line in tail.lines if line.step <= step]
        self._num_sent = 0
        self._revision += 1
        self.sync()
        self._delete_dropped()
        return self._lines[-1].row if self._lines and self._lines[-1].step == step else None

    def _rows_up_to(self, step: int, content: bytes) -> tuple[list[SealedPart], list[EncodedRow]]:
        """The parts that are wholly up to `step`, and the rows after them, at least one if there is any.

        Raises `InvalidError` if what is named is damaged.
        """
        parts = self._named_by(content)
        lines = list(select_surviving(content.splitlines(), step, beyond=parts[-1].last_step if parts else -1))
        while parts and not lines:
            part = parts.pop()
            self._dropped.append(part)
            try:
                content = self._store.read(part.name)
            except FileNotFoundError:
                warn(f"{self._store.url}/{part.name} is missing: its rows are lost")
                continue
            parts = [*self._named_by(content), *parts]
            lines = list(select_surviving(content.splitlines(), step))
        return parts, lines

    def _named_by(self, content: bytes) -> list[SealedPart]:
        try:
            return decode_parts(content)
        except ValueError as error:
            reason = f"{self._store.url}: {error}; move that object away to go on without the rows before"
            raise InvalidError(reason) from error

    def has_step(self, step: int) -> bool:
        """See `MetricsFile`."""
        content, _ = self._store.read_versioned(METRICS_FILE)
        _, lines = self._rows_up_to(step, content)
        self._dropped.clear()
        return bool(lines) and lines[-1].step == step

    def append(self, row: Row) -> None:
        """See `MetricsFile`."""
        self._change(EncodedRow.of(row), replaced=0)

    def replace_last(self, row: Row) -> None:
        """See `MetricsFile`."""
        self._change(EncodedRow.of(row), replaced=1)

    def _change(self, line: EncodedRow, replaced: int) -> None:
        with self._lock:
            del self._lines[len(self._lines) - replaced :]
            self._num_sent = min(self._num_sent, len(self._lines))
            self._lines.append(line)
            self._revision += 1
        self._background.mark(METRICS_FILE, self._send_unless_fenced)

    def get_newest(self) -> Row:
        """See `MetricsFile`."""
        with self._lock:
            return self._lines[-1].row if self._lines else {}

    def get_tail(self) -> RowTail:
        """See `MetricsFile`."""
        with self._lock:
            before = [*(part.last_step for part in self._parts[-1:]), *(line.step for line in self._lines)]
            index = len(self._parts[-1:]) + self._num_sent - 1
            return RowTail(before[index] if index >= 0 else None, self._lines[self._num_sent :])

    def _send_unless_fenced(self) -> None:
        with contextlib.suppress(FencedError):  # the next `sync` says so to somebody who can stop the run
            self.sync()

    def sync(self) -> None:
        """See `MetricsFile`."""
        with self._sending:
            with self._lock:
                revision, parts, lines = self._revision, list(self._parts), list(self._lines)
            if revision == self._revision_sent:
                return
            self._fence.check()
            start = 0
            while num_lines := _num_lines_to_seal(lines, start):
                parts = self._seal(parts, lines[start : start + num_lines], self._num_sealed + start)
                start += num_lines
            self._write(encode_parts(parts) + b"".join(line.text for line in lines[start:]))
            with self._lock:
                is_last_replaced = bool(lines) and self._lines[len(lines) - 1] is not lines[-1]
                self._parts = parts
                self._num_sent = len(lines) - start - is_last_replaced
                del self._lines[:start]
            self._num_sealed += start
            self._revision_sent = revision

    def _seal(self, parts: list[SealedPart], lines: list[EncodedRow], number: int) -> list[SealedPart]:
        """Put these lines into a part; the parts that are to be named then. Tried again it is the same part.

        `number` counts the lines that this attempt has sealed before.
        """
        part = SealedPart(f"{PARTS_FOLDER}/{self._fence.attempt:06}.{number:08}.jsonl", lines[-1].step)
        named = parts if len(parts) >= PARTS_MAX else []
        self._store.write(part.name, encode_parts(named) + b"".join(line.text for line in lines))
        return [part] if named else [*parts, part]

    def _write(self, content: bytes) -> None:
        while True:
            try:
                self._version = self._store.write_if(METRICS_FILE, content, self._version)
                return
            except FileExistsError:  # a last write of an attempt that is fenced; each has only one
                self._version = self._store.read_versioned(METRICS_FILE)[1]
                self._fence.check()

    def _delete_dropped(self) -> None:
        with contextlib.suppress(OSError):  # what stays is named nowhere
            while self._dropped:
                self._store.remove(self._dropped[-1].name)
                self._dropped.pop()

    def close(self) -> None:
        """See `MetricsFile`."""


def _num_lines_to_seal(lines: list[EncodedRow], start: int) -> int:
    """How many lines from `start` on make the next part, never the last one: none if all fit into one object."""
    size = 0
    for index in range(start, len(lines)):
        size += len(lines[index].text)
        if size > PART_BYTES:
            return min(max(index - start, 1), len(lines) - 1 - start)
    return 0


class MetricsFile(Protocol):
    """The rows of one directory."""

    def rewind(self, step: int, tail: RowTail | None = None) -> Row | None:
        """Keep the rows up to `step`, of the file and then of `tail`, and open it for more; the row of `step`."""

    def has_step(self, step: int) -> bool:
        """Whether the file has a row of `step`. Before `rewind`."""

    def append(self, row: Row) -> None:
        """Add one row. Never raises for a store that is full or down: the row is kept, and tried again."""

    def replace_last(self, row: Row) -> None:
        """Write the last row anew, with what was still missing in it."""

    def get_newest(self) -> Row:
        """The newest row, empty if there is none."""

    def get_tail(self) -> RowTail:
        """The rows that may not be durable yet."""

    def sync(self) -> None:
        """Wait until all rows are durable. Raises `OSError` if they cannot be, `FencedError` if others write them."""

    def close(self) -> None:
        """Release what is open."""


def open_metrics_file(store: Store, background: BackgroundWriter, fence: Fence) -> MetricsFile:
    """The metrics of a run's directory, for the attempt that `fence` stands for."""
    if store.root is None:
        return BucketMetricsFile(store, background, fence)
    return LocalMetricsFile(LocalStore(store.root), fence)


def read_encoded_rows(store: Store, step: int | None = None) -> Iterator[EncodedRow]:
    """The rows of a run up to `step` (None: all), for who looks at it; each once, in order, and no torn line."""
    texts = _read_texts(store) if store.root is None else LocalStore(store.root).lines(METRICS_FILE)
    return select_surviving(texts, step)


def read_rows(store: Store) -> list[Row]:
    """All of them, decoded."""
    return [line.row for line in read_encoded_rows(store)]
