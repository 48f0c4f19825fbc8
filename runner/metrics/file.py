"""`metrics.jsonl`: the rows of the surviving trajectory, on a disk and in a bucket, with its writers and its readers.

Process 0 writes it.

The file holds each logged step exactly once, in order, after any number of kills: a row is written before the
checkpoint of its step is committed, and a resumed attempt first drops the rows beyond the checkpoint that it restored.
The cost of a row or a save, in time and memory, does not depend on the number of rows; only a start reads them again.

**On a disk** rows are appended one at a time. A resumed attempt replaces the file, so that a
zombie of an earlier attempt writes to the old one, which is no longer read. Each replacement first checks the fence.
Memory holds the lines that are not yet durable, `_UNSYNCED_BYTES_MAX` at most. While the disk is full it holds all new
lines, until `checkpoint.max_unsaved_minutes` ends the run.

**In a bucket** no object can be appended to. `metrics.jsonl` holds the newest rows and is written
again as a whole in the background after each row. Before it would exceed `PART_BYTES`, its older rows are sealed: they
are written to a part, `metrics/<attempt>.<number>.jsonl`, which never gets other content. `metrics.jsonl` then begins
with a line that names the parts in order, `{"parts": [[name, last step], ...]}`. After `_PARTS_MAX` parts the next part
begins with that line instead, and `metrics.jsonl` names only this part (a chain). A run whose rows fit into one object
has no parts and no such line. All runs of early versions have this form, and can continue.

1. Only the parts that `metrics.jsonl` names are read. After a kill between the write of a part and of the line that
   names it, the part is never read.
2. Each write of `metrics.jsonl` first checks the fence, that is, whether a newer attempt owns the run, and is
   conditional on the version that it replaces. A zombie that is suspended between check and write may still succeed
   once, if versions are digests of the content and the newer attempt has not changed the content yet. The owner then
   overwrites it and loses nothing, because it holds all rows that are in no part.
3. A part has the number of its attempt in its name, so that a zombie cannot write to another attempt's part.
4. A new attempt deletes the parts that it drops, those beyond the restored step, once `metrics.jsonl` no longer names
   them. A zombie cannot drop parts after that: its write would need content that still names them, which no longer
   exists.

A row therefore costs one object of at most `PART_BYTES` and `_PARTS_MAX` names, however long the run is, and memory
holds the same. There is one object for each `PART_BYTES` of rows, and at most one more for each start that was killed
while it sealed or dropped parts.

**Readers** change nothing, need no jax and may run beside a live writer. `read_rows` and `read_encoded_rows` return all
rows, `read_sample` a bounded number of them with bounded work, and `MetricsTail` follows a run and reads each row once.
"""

import contextlib
import errno
import itertools
import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from io import FileIO
from typing import NamedTuple, Protocol, TypeVar

from runner.attempts.fence import Fence
from runner.console import warn
from runner.errors import FencedError, InvalidError
from runner.metrics.rows import EncodedRow, Row, RowTail, find_last_own_step, parse_row, select_surviving
from runner.storage import (
    ABSENT,
    BackgroundWriter,
    FileTail,
    LocalStore,
    Store,
    Version,
    as_local,
    encode_line,
    parse_line,
)
from runner.storage.store import retry_stale, translate_errors

METRICS_FILE = "metrics.jsonl"


class MetricsFile(Protocol):
    """Rows of one run directory. Used by process 0; `sync` and `append` may run on different threads."""

    def rewind(self, step: int, tail: RowTail | None = None) -> Row | None:
        """Keep the rows up to `step`, and open the file for more; return the row of `step`, None if it has none.

        Called again if a running job loads an earlier step. `tail` has rows of the fast tier, which follow those of the
        file.
        """

    def has_step(self, step: int) -> bool:
        """Return True if the file has a row of `step`. Call it before `rewind`."""

    def append(self, row: Row) -> None:
        """Add a row. If the store is full or unreachable, the row is kept and written later; nothing is raised."""

    def replace_last(self, row: Row) -> None:
        """Replace the last row by a more complete one of the same step."""

    def get_newest(self) -> Row:
        """Return the newest row, empty if there is none."""

    def get_tail(self) -> RowTail:
        """Return the rows that may not be durable yet."""

    def sync(self) -> None:
        """Wait until all rows are durable. Raises `OSError`, or `FencedError` if a newer attempt owns the run."""

    def close(self) -> None:
        """Close what is open."""


def find_tail_problem(file: MetricsFile, attachments: Mapping[str, bytes]) -> str | None:
    """Return the reason why the rows saved with a state cannot continue the rows of the file; None if they can.

    They cannot if a later attempt, on other machines, resumed from an earlier step and so removed the row that they
    follow. Process 0 only.
    """
    if METRICS_FILE not in attachments:
        return None
    try:
        after = RowTail.decode(attachments[METRICS_FILE]).after
    except ValueError as error:
        return str(error)
    if after is None or file.has_step(after):
        return None
    return f"a later attempt resumed from a step before {after}, so these rows do not follow those of the file"


# On a disk.

_UNSYNCED_BYTES_MAX = 1 << 20
_CHUNK_BYTES = 1 << 20


class _LocalMetricsFile:
    """`metrics.jsonl` on a disk, a `MetricsFile`."""

    def __init__(self, store: LocalStore, fence: Fence):
        self._store, self._fence = store, fence
        self._path = store.root / METRICS_FILE
        self._file: FileIO | None = None
        self._num_bytes = self._num_synced_bytes = 0
        self._newest: EncodedRow | None = None
        self._synced_step: int | None = None  # step of the newest row that survives a power cut
        self._written: list[EncodedRow] = []  # written since the last sync
        self._unwritten: list[EncodedRow] = []
        # `_syncing` is held by the one thread that waits for the disk. `_lock` guards everything else and is never held
        # during that wait, so that the training thread can append meanwhile.
        self._syncing = threading.Lock()
        self._lock = threading.RLock()

    def rewind(self, step: int, tail: RowTail | None = None) -> Row | None:
        with self._syncing, self._lock:
            if self._file is not None:  # a job that runs
                self._write()
            own = select_surviving(self._store.lines(METRICS_FILE), find_last_own_step(step, tail))
            more = () if tail is None else tail.lines
            self._replace(itertools.chain(own, (line for line in more if line.step <= step)))
        return None if self._newest is None or self._newest.step != step else self._newest.row

    def has_step(self, step: int) -> bool:
        return any(line.step == step for line in select_surviving(self._store.lines(METRICS_FILE), step))

    def append(self, row: Row) -> None:
        with self._lock:
            self._newest = EncodedRow.from_row(row)
            self._unwritten.append(self._newest)
        try:
            self._write()
            if self._num_bytes - self._num_synced_bytes > _UNSYNCED_BYTES_MAX:
                self.sync()
        except OSError as error:
            warn(f"metrics.jsonl: cannot be written ({error}); {len(self._unwritten)} rows are kept in memory")

    def _write(self) -> None:
        assert self._file is not None, "rewind opens the file"
        with self._lock:
            while self._unwritten:
                line = self._unwritten[0]
                # A full disk may take a part of the line. It is removed, so that no torn line is left in the file.
                if self._file.write(line.text) != len(line.text):
                    self._file.truncate(self._num_bytes)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                self._num_bytes += len(line.text)
                self._written.append(self._unwritten.pop(0))

    def replace_last(self, row: Row) -> None:
        with self._syncing, self._lock:  # a flush that is waiting counts the rows of the former file
            self._write()
            lines = select_surviving(self._store.lines(METRICS_FILE), row["step"] - 1)
            self._replace(itertools.chain(lines, [EncodedRow.from_row(row)]))

    def get_newest(self) -> Row:
        return {} if self._newest is None else self._newest.row

    def get_tail(self) -> RowTail:
        with self._lock:
            return RowTail(self._synced_step, [*self._written, *self._unwritten])

    def sync(self) -> None:
        with self._syncing:
            with self._lock:
                if self._file is None:
                    return
                self._write()
                # Each sync checks that the file still exists, before other code relies on its durability.
                self._restore_file()
                file, size, num_lines = self._file, self._num_bytes, len(self._written)
            # The lock is not held here: a flush may take seconds on a busy disk.
            os.fsync(file.fileno())
            with self._lock:
                self._num_synced_bytes = size
                if num_lines:
                    self._synced_step = self._written[num_lines - 1].step
                    del self._written[:num_lines]

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _restore_file(self) -> None:
        """Warn if something else has truncated, deleted or replaced the file, and restore it from the open file."""
        assert self._file is not None
        own = os.fstat(self._file.fileno())
        try:
            is_there = os.path.samestat(own, retry_stale(lambda: os.stat(self._path)))
        except FileNotFoundError:
            is_there = False
        if own.st_size < self._num_bytes:
            warn(
                f"{self._path} was cut from {self._num_bytes} to {own.st_size} bytes by another program; "
                "the rows behind that are lost"
            )
            self._num_bytes = self._num_synced_bytes = own.st_size
        if not is_there:
            self._fence.check()  # the file at this path may be that of a newer attempt, which is no reason to warn
            warn(f"{self._path} was deleted or replaced while the job runs; it is restored from the open file")
            self._replace(select_surviving(_read_open_lines(self._file)))

    def _replace(self, lines: Iterable[EncodedRow]) -> None:
        """Replace the file durably by one with these lines, and open it for more. Raises `FencedError`."""
        # This process may have been suspended since its last check, while a newer attempt began or even finished.
        self._fence.check()
        newest: list[EncodedRow] = []
        size = 0

        def iterate_texts() -> Iterator[bytes]:
            nonlocal size
            for line in lines:
                newest[:] = [line]
                size += len(line.text)
                yield line.text

        self._store.write_chunks(METRICS_FILE, iterate_texts())
        self.close()
        self._file = retry_stale(lambda: self._path.open("a+b", buffering=0))
        self._num_bytes = self._num_synced_bytes = size
        self._newest = newest[0] if newest else None
        self._synced_step = None if self._newest is None else self._newest.step
        self._written.clear()


def _read_open_lines(file: FileIO) -> Iterator[bytes]:
    """Yield the lines of an open file from its beginning, without moving its position."""
    offset, torn = 0, b""
    while chunk := os.pread(file.fileno(), _CHUNK_BYTES, offset):
        offset += len(chunk)
        *whole, torn = (torn + chunk).split(b"\n")
        yield from whole
    yield torn


# In a bucket.

PART_BYTES = 1 << 18
_PARTS_MAX = 64
_READ_TRIES = 3
_PARTS_FOLDER, _PARTS = "metrics", "parts"

Value = TypeVar("Value")


class _SealedPart(NamedTuple):
    """Name of a sealed object, and the step of its last row."""

    name: str
    last_step: int


def _encode_parts(parts: list[_SealedPart]) -> bytes:
    """Return the line that names parts; nothing if there are none."""
    return encode_line({_PARTS: parts}) if parts else b""


def _decode_parts(content: bytes) -> list[_SealedPart]:
    """Return the parts that an object names, whose rows come before its own. Raises `ValueError` if they are none."""
    first = parse_line(content.partition(b"\n")[0])
    named = first.get(_PARTS, []) if first else []

    def is_part(value: object) -> bool:
        match value:
            case [str(name), int()]:
                return name.startswith(f"{_PARTS_FOLDER}/") and ".." not in name
        return False

    if not (isinstance(named, list) and all(map(is_part, named))):
        raise ValueError(f"{METRICS_FILE} names parts that are none: {str(named)[:100]}")
    return [_SealedPart(*part) for part in named]


def _retry_dropped(read: Callable[[], Value]) -> Value:
    """Return the result of `read`, tried again if a newer attempt has dropped a part meanwhile."""
    # Each try reads `metrics.jsonl` again, which then names other parts.
    for _ in range(_READ_TRIES):
        with contextlib.suppress(FileNotFoundError):
            return read()
    return read()


def _read_names(store: Store, known: Collection[str] = ()) -> tuple[list[str], bytes]:
    """Return the names of all parts in order, and the content of `metrics.jsonl`. For readers beside a live writer.

    At one of the `known` parts the chain is not followed any further; the result then begins with this part.
    """
    newest, _ = store.read_versioned(METRICS_FILE)
    names: list[str] = []
    content = newest
    # Only the first part that an object names can name earlier ones.
    while found := [part.name for part in _decode_parts(content)]:
        if found[0] in names:
            raise ValueError(f"{store.url}/{METRICS_FILE}: its parts name each other in a circle")
        names[:0] = found
        if found[0] in known:
            break
        content = store.read(found[0])
    return names, newest


class _BucketMetricsFile:
    """`metrics.jsonl` in a bucket, a `MetricsFile`."""

    def __init__(self, store: Store, background: BackgroundWriter, fence: Fence):
        self._store, self._background, self._fence = store, background, fence
        # `_sending` is held by the one thread that sends. `_lock` guards what follows, and is never held during a
        # request.
        self._sending = threading.Lock()
        self._lock = threading.Lock()
        self._parts: list[_SealedPart] = []
        self._lines: list[EncodedRow] = []  # rows that are in no part; the newest row is always among them
        self._num_sent = 0  # leading lines that `metrics.jsonl` holds
        self._revision = self._revision_sent = 0
        self._version: Version = ABSENT
        self._num_sealed = 0  # lines that this attempt has sealed
        self._dropped: list[_SealedPart] = []

    def rewind(self, step: int, tail: RowTail | None = None) -> Row | None:
        if self._lines:  # a job that runs
            self.sync()
        content, self._version = self._store.read_versioned(METRICS_FILE)
        self._parts, self._lines = self._select_rows(find_last_own_step(step, tail), content)
        self._lines += [] if tail is None else [line for line in tail.lines if line.step <= step]
        self._num_sent = 0
        self._revision += 1
        self.sync()
        with contextlib.suppress(OSError):  # nothing names a part that is not deleted
            while self._dropped:
                self._store.remove(self._dropped[-1].name)
                self._dropped.pop()
        return self._lines[-1].row if self._lines and self._lines[-1].step == step else None

    def _select_rows(self, step: int, content: bytes) -> tuple[list[_SealedPart], list[EncodedRow]]:
        """Return the parts that lie wholly up to `step`, and the rows after them, at least one if there is any."""
        parts = self._decode_parts(content)
        lines = list(select_surviving(content.splitlines(), step, beyond=parts[-1].last_step if parts else -1))
        # Parts beyond the step are dropped one by one, until one has a row up to it.
        while parts and not lines:
            part = parts.pop()
            self._dropped.append(part)
            try:
                content = self._store.read(part.name)
            except FileNotFoundError:
                warn(f"{self._store.url}/{part.name} is missing; its rows are lost")
                continue
            parts = [*self._decode_parts(content), *parts]
            lines = list(select_surviving(content.splitlines(), step))
        return parts, lines

    def _decode_parts(self, content: bytes) -> list[_SealedPart]:
        try:
            return _decode_parts(content)
        except ValueError as error:
            reason = f"{self._store.url}: {error}; move that object away to continue without the earlier rows"
            raise InvalidError(reason) from error

    def has_step(self, step: int) -> bool:
        content, _ = self._store.read_versioned(METRICS_FILE)
        _, lines = self._select_rows(step, content)
        self._dropped.clear()
        return bool(lines) and lines[-1].step == step

    def append(self, row: Row) -> None:
        self._change(EncodedRow.from_row(row), replaced=0)

    def replace_last(self, row: Row) -> None:
        self._change(EncodedRow.from_row(row), replaced=1)

    def _change(self, line: EncodedRow, replaced: int) -> None:
        with self._lock:
            del self._lines[len(self._lines) - replaced :]
            self._num_sent = min(self._num_sent, len(self._lines))
            self._lines.append(line)
            self._revision += 1
        self._background.mark(METRICS_FILE, self._send_unless_fenced)

    def get_newest(self) -> Row:
        with self._lock:
            return self._lines[-1].row if self._lines else {}

    def get_tail(self) -> RowTail:
        with self._lock:
            # The row before the unsent ones is the last sent line or the last row of the newest part.
            before = [*(part.last_step for part in self._parts[-1:]), *(line.step for line in self._lines)]
            index = len(self._parts[-1:]) + self._num_sent - 1
            return RowTail(before[index] if index >= 0 else None, self._lines[self._num_sent :])

    def _send_unless_fenced(self) -> None:
        with contextlib.suppress(FencedError):  # the next `sync` raises it where the run can be stopped
            self.sync()

    def sync(self) -> None:
        with self._sending:
            with self._lock:
                revision, parts, lines = self._revision, list(self._parts), list(self._lines)
            # Another thread has sent everything meanwhile.
            if revision == self._revision_sent:
                return
            self._fence.check()
            start = 0
            while num_lines := _count_lines_to_seal(lines, start):
                sealed = lines[start : start + num_lines]
                # The name is a function of what was sealed before, so a second try after an error writes the same part.
                name = f"{_PARTS_FOLDER}/{self._fence.attempt:06}.{self._num_sealed + start:08}.jsonl"
                part = _SealedPart(name, sealed[-1].step)
                named = parts if len(parts) >= _PARTS_MAX else []
                self._store.write(part.name, _encode_parts(named) + b"".join(line.text for line in sealed))
                parts = [part] if named else [*parts, part]
                start += num_lines
            self._write(_encode_parts(parts) + b"".join(line.text for line in lines[start:]))
            with self._lock:
                # The last row may have been replaced while the old one was sent; then it counts as not sent.
                is_last_replaced = bool(lines) and self._lines[len(lines) - 1] is not lines[-1]
                self._parts = parts
                self._num_sent = len(lines) - start - is_last_replaced
                del self._lines[:start]
            self._num_sealed += start
            self._revision_sent = revision

    def _write(self, content: bytes) -> None:
        while True:
            try:
                self._version = self._store.write_if(METRICS_FILE, content, self._version)
                return
            except FileExistsError:  # the last write of a fenced attempt; each has only one
                self._version = self._store.read_versioned(METRICS_FILE)[1]
                self._fence.check()

    def close(self) -> None:
        """Do nothing: no file is open."""


def _count_lines_to_seal(lines: list[EncodedRow], start: int) -> int:
    """Return the number of lines from `start` that form the next part, never the last line; 0 if all fit in one."""
    size = 0
    for index in range(start, len(lines)):
        size += len(lines[index].text)
        # The last line stays outside of parts, since it may still be replaced.
        if size > PART_BYTES:
            return min(max(index - start, 1), len(lines) - 1 - start)
    return 0


# Open for writing.


def open_metrics_file(store: Store, background: BackgroundWriter, fence: Fence) -> MetricsFile:
    """Return the metrics file of a run directory, for the attempt of `fence`."""
    if store.root is None:
        return _BucketMetricsFile(store, background, fence)
    return _LocalMetricsFile(LocalStore(store.root), fence)


# Read all.


def read_encoded_rows(store: Store, step: int | None = None) -> Iterator[EncodedRow]:
    """Yield the rows up to `step` (None: all), each once and in order. For readers beside a live writer."""

    def read_objects() -> list[bytes]:
        names, content = _read_names(store)
        return [text for each in (*map(store.read, names), content) for text in each.splitlines()]

    texts = _retry_dropped(read_objects) if store.root is None else LocalStore(store.root).lines(METRICS_FILE)
    return select_surviving(texts, step)


def read_rows(store: Store) -> list[Row]:
    """Return all rows, decoded."""
    return [line.row for line in read_encoded_rows(store)]


# Read a sample.

_SAMPLE_ROWS_MAX = 512
_SAMPLE_NEWEST_ROWS = 64
_SAMPLE_NUM_BLOCKS = 128
_SAMPLE_BLOCK_BYTES = 1 << 13
# The next size is tried if the end of the file of the previous one contains no complete row.
_SAMPLE_TAILS_BYTES = (1 << 16, 1 << 20, 1 << 24)
_SAMPLE_PARTS_MAX = 16


def read_sample(store: Store) -> tuple[Row, ...]:
    """Return a sample of the rows of `metrics.jsonl` in order of step, including the newest; empty if there are none.

    On a disk `_SAMPLE_NUM_BLOCKS` blocks spread over the file and its end are read, in a bucket the newest objects and
    `_SAMPLE_PARTS_MAX` of the others. About `_SAMPLE_ROWS_MAX` rows are returned, whatever the size of the run. Raises
    `OSError`, or `ValueError` if the file is damaged.
    """
    texts = _sample_bucket(store) if store.root is None else _sample_disk(as_local(store))
    lines = list(select_surviving(texts))
    newest, stride = lines[-_SAMPLE_NEWEST_ROWS:], max(len(lines) // (_SAMPLE_ROWS_MAX - _SAMPLE_NEWEST_ROWS), 1)
    return tuple(line.row for line in [*lines[: -_SAMPLE_NEWEST_ROWS or None][::stride], *newest])


def _sample_disk(store: LocalStore) -> list[bytes]:
    def split_lines(content: bytes, is_first_block: bool) -> list[bytes]:
        # The first line may have begun before the block. The last one is recognized as incomplete by its end.
        lines = content.split(b"\n")
        return lines if is_first_block else lines[1:]

    try:
        with store.open(METRICS_FILE) as file, translate_errors(store.root / METRICS_FILE):
            size = file.seek(0, 2)
            tail: list[bytes] = []
            start = size
            for tail_bytes in _SAMPLE_TAILS_BYTES:
                start = max(size - tail_bytes, 0)
                file.seek(start)
                tail = split_lines(file.read(size - start), start == 0)
                if start == 0 or any(select_surviving(tail)):
                    break
            stride = max(start // _SAMPLE_NUM_BLOCKS, _SAMPLE_BLOCK_BYTES)
            texts: list[bytes] = []
            for offset in range(0, start, stride):
                file.seek(offset)
                texts += split_lines(file.read(min(_SAMPLE_BLOCK_BYTES, start - offset)), offset == 0)
            return texts + tail
    except FileNotFoundError:
        return []


def _sample_bucket(store: Store) -> Iterator[bytes]:
    try:
        names, content = _retry_dropped(lambda: _read_names(store))
    except FileNotFoundError:  # A part was deleted.
        names, content = [], store.read_versioned(METRICS_FILE)[0]
    stride = max(len(names) // _SAMPLE_PARTS_MAX, 1)
    # The last part is always included: the object that grows may contain only one row.
    chosen: Sequence[str] = sorted({*names[::stride], *names[-1:]}, key=names.index)

    def read_part(name: str) -> bytes:
        try:
            return store.read(name)
        except FileNotFoundError:  # A newer attempt may have dropped it meanwhile.
            return b""

    with ThreadPoolExecutor(_SAMPLE_PARTS_MAX) as pool:
        contents = list(pool.map(read_part, chosen))
    for each in (*contents, content):
        yield from each.splitlines()


# Tail.


class MetricsTailUpdate(NamedTuple):
    """Result of one reading of a metrics tail."""

    is_restart: bool  # True if rows of earlier readings are invalid, and `rows` begins with the first row of the run
    # New rows that are final, to be consumed before the next reading. Iterating may raise `OSError`.
    rows: Iterator[Row]
    newest: list[Row]  # rows after these, which may still change; a later reading returns them again


class _RowIterator:
    """Rows among lines of text, each step once and in ascending order."""

    def __init__(self, step: int = -1):
        self.step, self.num_damaged = step, 0

    def iterate(self, texts: Iterable[bytes]) -> Iterator[Row]:
        for text in texts:
            row = parse_row(text)
            if row is None:
                self.num_damaged += bool(text.strip())
            elif row["step"] > self.step:
                self.step = row["step"]
                yield row


class MetricsTail:
    """Tailing reader of the rows of one run directory, which begins with the first row.

    Memory holds one line, in a bucket one part.
    """

    def __init__(self, store: Store):
        self._store = store
        self._file = None if store.root is None else FileTail(store, METRICS_FILE)
        self._rows = _RowIterator()  # its state follows the rows that are final
        # Of a bucket: names of the parts that were read, in order, and damaged lines in the object that grows.
        self._parts: list[str] = []
        self._num_damaged_newest = 0

    @property
    def num_skipped(self) -> int:
        """Number of lines since the last restart that are not rows."""
        num_long = 0 if self._file is None else self._file.num_skipped
        return self._rows.num_damaged + self._num_damaged_newest + num_long

    def read(self) -> MetricsTailUpdate:
        """Return the rows that are new since the last reading; none if there are no rows yet.

        Raises `OSError` if the store does not respond, and `ValueError` if a line that names parts is damaged.
        """
        if self._file is not None:
            is_restart, lines = self._file.read()
            if is_restart:
                self._rows = _RowIterator()
            return MetricsTailUpdate(is_restart, self._rows.iterate(lines), [])
        names, content = _retry_dropped(lambda: _read_names(self._store, self._parts))
        # The names may begin in the middle of the known parts; a part never changes, so those before it are the same.
        if names and names[0] in self._parts:
            names = [*self._parts[: self._parts.index(names[0])], *names]
        # A resumed attempt replaces parts, so if known parts are gone, all rows are read again.
        is_restart = names[: len(self._parts)] != self._parts or not self._parts
        if is_restart:
            self._parts, self._rows = [], _RowIterator()
        sealed = _decode_parts(content)
        newest = _RowIterator(sealed[-1].last_step if sealed else -1)
        # The first line names the parts.
        newest_rows = list(newest.iterate(content.splitlines()[bool(sealed) :]))
        self._num_damaged_newest = newest.num_damaged
        return MetricsTailUpdate(is_restart, self._iterate_parts(names[len(self._parts) :]), newest_rows)

    def _iterate_parts(self, names: Iterable[str]) -> Iterator[Row]:
        for name in names:
            part = _RowIterator(self._rows.step)
            for row in part.iterate(self._store.read(name).splitlines()):
                self._rows.step = part.step
                yield row
            self._rows.num_damaged += part.num_damaged
            # Only a part whose rows were all handed over counts as read: the caller may stop in between.
            self._parts.append(name)
