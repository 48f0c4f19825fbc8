"""TensorBoard's event files: `tensorboard/events.out.tfevents.<attempt>` in the run's directory, one an attempt.

Each holds the whole trajectory, so an attempt empties the one before as soon as its own has the rows, and deletes those
before that: a TensorBoard that is reading one finds the next only while its own is there. A file is TFRecords
(https://www.tensorflow.org/tutorials/load_data/tfrecord): the length as a uint64, its masked CRC-32C, an `Event` of
tensorboard/compat/proto/event.proto, its masked CRC-32C. It begins with a `SessionLog` START, by which a TensorBoard
that has read an earlier file drops what that said.

For a run in a bucket the file is in this machine's cache while the job runs, and is uploaded every `UPLOAD_SECONDS`.
"""

import math
import struct
import time
from itertools import pairwise
from typing import Any

import google_crc32c

from runner.metrics.meta import find_bins
from runner.metrics.rows import Row
from runner.storage import LocalStore, Store, default_cache_directory

FOLDER = "tensorboard"
UPLOAD_SECONDS = 60.0
_UPLOAD_DEADLINE_SECONDS = 60.0
_STEM = "events.out.tfevents."  # TensorBoard knows its files by the second half
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_START = 1
_DT_STRING = 7
_TIME = "perf/time"  # the wall time of the events, not a curve: single floats count it in minutes


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _field(number: int, kind: int, payload: bytes) -> bytes:
    """One field of a protocol buffer."""
    return _varint(number << 3 | kind) + (_varint(len(payload)) if kind == _BYTES else b"") + payload


def _event(seconds: float, step: int, what: bytes) -> bytes:
    """An `Event`: wall_time 1, step 2, then one of file_version 3, summary 5, session_log 7."""
    return _field(1, _FIXED64, struct.pack("<d", seconds)) + _field(2, _VARINT, _varint(step)) + what


def _summary(row: Row) -> bytes:
    """A `Summary`: of repeated `Value` 1, each a tag 1 and what `_value` makes of it."""
    values = (
        _field(1, _BYTES, key.encode(errors="replace")) + value
        for key, given in row.items()
        if key not in ("step", _TIME) and (value := _value(given))
    )
    return _field(5, _BYTES, b"".join(_field(1, _BYTES, value) for value in values))


def _value(given: Any) -> bytes:
    """A simple_value 2, a histo 5, or of a text a tensor 8 with the metadata 9 of the text plugin; nothing of null."""
    if isinstance(given, int | float):
        return _field(2, _FIXED32, _float32(given))
    if isinstance(given, str):
        plugin = _field(1, _BYTES, _field(1, _BYTES, b"text"))  # plugin_data 1: plugin_name 1
        string = _field(1, _VARINT, _varint(_DT_STRING)) + _field(8, _BYTES, given.encode(errors="replace"))
        return _field(8, _BYTES, string) + _field(9, _BYTES, plugin)
    found = find_bins(given)
    return b"" if found is None else _field(5, _BYTES, _histogram(*found))


def _histogram(counts: list[float], edges: list[float]) -> bytes:
    """A `HistogramProto`: min 1, max 2, num 3, sum 4, sum_squares 5, bucket_limit 6, bucket 7.

    Of the values no more is known than their bins, so the sums are those of the bins' middles.
    """
    middles = [(low + high) / 2 for low, high in pairwise(edges)]
    moments = [sum(n * x**power for n, x in zip(counts, middles, strict=True)) for power in (0, 1, 2)]
    single = b"".join(
        _field(number, _FIXED64, struct.pack("<d", value))
        for number, value in enumerate([edges[0], edges[-1], *moments], 1)
    )
    packed = [struct.pack(f"<{len(values)}d", *values) for values in (edges[1:], counts)]
    return single + _field(6, _BYTES, packed[0]) + _field(7, _BYTES, packed[1])


def _float32(value: float) -> bytes:
    try:
        return struct.pack("<f", value)
    except OverflowError:
        return struct.pack("<f", math.copysign(math.inf, value))


def _masked_crc(content: bytes) -> bytes:
    crc = google_crc32c.value(content)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _record(content: bytes) -> bytes:
    length = struct.pack("<Q", len(content))
    return length + _masked_crc(length) + content + _masked_crc(content)


class TensorBoardWriter:
    """A place (see `place`): the event file of one attempt. Raises `OSError`."""

    def __init__(self, store: Store, run_id: str, attempt: int):
        self._store = store
        folder = default_cache_directory() / FOLDER / run_id if store.root is None else store.root / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"{_STEM}{attempt:010}"
        self._aside = folder / f".{attempt:010}"  # until the rows of earlier attempts are in
        self._is_published = False
        self._file = self._aside.open("wb")
        self._uploaded_seconds = 0.0
        self._put(0, _field(3, _BYTES, b"brain.Event:2"))
        self._put(0, _field(7, _BYTES, _field(1, _VARINT, _varint(_START))))

    def add(self, row: Row) -> None:
        """See `Place`."""
        self._put(row["step"], _summary(row), row.get(_TIME))
        if self._is_published:
            self._file.flush()
            if time.monotonic() - self._uploaded_seconds >= UPLOAD_SECONDS:
                self._upload()

    def _put(self, step: int, what: bytes, seconds: float | None = None) -> None:
        self._file.write(_record(_event(time.time() if seconds is None else seconds, step, what)))

    def supersede(self) -> None:
        """See `Place`."""
        self._file.flush()
        self._aside.rename(self._path)
        self._is_published = True
        self._upload()
        self._empty_earlier(LocalStore(self._path.parent), "")
        if self._store.root is None:
            self._empty_earlier(self._store, FOLDER)

    def _empty_earlier(self, store: Store, folder: str) -> None:
        names = (name for name in store.list_names(folder) if name.startswith(_STEM) and name < self._path.name)
        *older, before = ["", *sorted(names)]
        for name in filter(None, older):
            store.remove(f"{folder}/{name}".lstrip("/"))
        if before:
            store.write(f"{folder}/{before}".lstrip("/"), b"")

    def finish(self) -> None:
        """See `Place`."""
        self._file.close()
        self._upload()

    def _upload(self) -> None:
        """Of a run in a bucket: the file as it is now."""
        if self._store.root is None:
            self._store.upload(self._path, f"{FOLDER}/{self._path.name}", _UPLOAD_DEADLINE_SECONDS)
            self._uploaded_seconds = time.monotonic()
