"""Metric writer for TensorBoard: one event file per attempt, `tensorboard/events.out.tfevents.<attempt>`.

Each file holds the whole trajectory. As soon as the file of an attempt has the earlier rows, the attempt empties the
file before it, and deletes all files before that one: a TensorBoard that is reading a file finds the next one only
while its own is still there.

A file consists of TFRecords (https://www.tensorflow.org/tutorials/load_data/tfrecord): the length as a uint64, its
masked CRC-32C, an `Event` of tensorboard/compat/proto/event.proto, its masked CRC-32C. It begins with a `SessionLog`
START, at which a TensorBoard that has read an earlier file drops the points of that file.

For a run in a bucket the file is in this machine's cache while the job runs, and is uploaded every `UPLOAD_SECONDS`.
"""

import math
import struct
import time
from itertools import pairwise

import google_crc32c

from runner.metrics.meta import RowValue, find_bins
from runner.metrics.rows import Row
from runner.storage import LocalStore, Store, default_cache_directory

FOLDER = "tensorboard"
UPLOAD_SECONDS = 60.0
_UPLOAD_DEADLINE_SECONDS = 60.0
_STEM = "events.out.tfevents."  # TensorBoard recognises its files by "tfevents"
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # wire types of protocol buffers
_START = 1
_DT_STRING = 7
_TIME = "perf/time"  # the wall time of events. It is no curve: single floats resolve Unix time only to minutes


def _encode_varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _encode_field(number: int, kind: int, payload: bytes) -> bytes:
    """Return one field of a protocol buffer."""
    length = _encode_varint(len(payload)) if kind == _BYTES else b""
    return _encode_varint(number << 3 | kind) + length + payload


def _encode_summary(row: Row) -> bytes:
    """Return a `Summary` (field 5 of an `Event`): repeated `Value` 1, each with a tag 1 and an encoded value."""
    values = (
        _encode_field(1, _BYTES, key.encode(errors="replace")) + encoded
        for key, value in row.items()
        if key not in ("step", _TIME) and (encoded := _encode_value(value))
    )
    return _encode_field(5, _BYTES, b"".join(_encode_field(1, _BYTES, value) for value in values))


def _encode_value(value: RowValue) -> bytes:
    """Return a simple_value 2, a histo 5, or a tensor 8 with metadata 9 of the text plugin; nothing for null."""
    if isinstance(value, int | float):
        try:
            return _encode_field(2, _FIXED32, struct.pack("<f", value))
        except OverflowError:
            return _encode_field(2, _FIXED32, struct.pack("<f", math.copysign(math.inf, value)))
    if isinstance(value, str):
        plugin = _encode_field(1, _BYTES, _encode_field(1, _BYTES, b"text"))  # plugin_data 1: plugin_name 1
        dtype = _encode_field(1, _VARINT, _encode_varint(_DT_STRING))
        string = dtype + _encode_field(8, _BYTES, value.encode(errors="replace"))
        return _encode_field(8, _BYTES, string) + _encode_field(9, _BYTES, plugin)
    bins = find_bins(value)
    return b"" if bins is None else _encode_field(5, _BYTES, _encode_histogram(*bins))


def _encode_histogram(counts: list[float], edges: list[float]) -> bytes:
    """Return a `HistogramProto`: min 1, max 2, num 3, sum 4, sum_squares 5, bucket_limit 6, bucket 7.

    Only the bins of the values are known, so the sums are those of the middles of the bins.
    """
    middles = [(low + high) / 2 for low, high in pairwise(edges)]
    moments = [sum(n * x**power for n, x in zip(counts, middles, strict=True)) for power in (0, 1, 2)]
    single = b"".join(
        _encode_field(number, _FIXED64, struct.pack("<d", value))
        for number, value in enumerate([edges[0], edges[-1], *moments], 1)
    )
    packed = [struct.pack(f"<{len(values)}d", *values) for values in (edges[1:], counts)]
    return single + _encode_field(6, _BYTES, packed[0]) + _encode_field(7, _BYTES, packed[1])


def _compute_masked_crc(content: bytes) -> bytes:
    crc = google_crc32c.value(content)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


class TensorBoardWriter:
    """Event file of one attempt, a `MetricWriter`. Its methods raise `OSError` if the file cannot be written."""

    def __init__(self, store: Store, run_id: str, attempt: int):
        self._store = store
        folder = default_cache_directory() / FOLDER / run_id if store.root is None else store.root / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"{_STEM}{attempt:010}"
        # Under this name TensorBoard does not find the file, until it holds the rows of earlier attempts.
        self._hidden_path = folder / f".{attempt:010}"
        self._is_published = False
        self._file = self._hidden_path.open("wb")
        self._uploaded_seconds = 0.0
        self._write_event(0, _encode_field(3, _BYTES, b"brain.Event:2"))
        self._write_event(0, _encode_field(7, _BYTES, _encode_field(1, _VARINT, _encode_varint(_START))))

    def add(self, row: Row) -> None:
        """Write a row, and upload the file if it is time."""
        self._write_event(row["step"], _encode_summary(row), row.get(_TIME))
        # Until then the file is not visible, so the rows of earlier attempts are written without flushing each.
        if self._is_published:
            self._file.flush()
            if time.monotonic() - self._uploaded_seconds >= UPLOAD_SECONDS:
                self._upload()

    def _write_event(self, step: int, content: bytes, seconds: float | None = None) -> None:
        """Write a record with an `Event`: wall_time 1, step 2, and one of file_version 3, summary 5, session_log 7."""
        wall_time = struct.pack("<d", time.time() if seconds is None else seconds)
        event = _encode_field(1, _FIXED64, wall_time) + _encode_field(2, _VARINT, _encode_varint(step)) + content
        length = struct.pack("<Q", len(event))
        self._file.write(length + _compute_masked_crc(length) + event + _compute_masked_crc(event))

    def supersede(self) -> None:
        """Publish the file, and empty or delete those of earlier attempts."""
        self._file.flush()
        self._hidden_path.rename(self._path)
        self._is_published = True
        self._upload()
        self._empty_earlier(LocalStore(self._path.parent), "")
        if self._store.root is None:
            self._empty_earlier(self._store, FOLDER)

    def _empty_earlier(self, store: Store, folder: str) -> None:
        names = (name for name in store.list_names(folder) if name.startswith(_STEM) and name < self._path.name)
        # The empty string stands for no earlier file. Names sort by attempt.
        *older, before = ["", *sorted(names)]
        for name in filter(None, older):
            store.remove(f"{folder}/{name}".lstrip("/"))
        if before:
            store.write(f"{folder}/{before}".lstrip("/"), b"")

    def finish(self) -> None:
        """Close and upload the file."""
        self._file.close()
        self._upload()

    def _upload(self) -> None:
        """Upload the file as it is now, if the run is in a bucket."""
        if self._store.root is None:
            self._store.upload(self._path, f"{FOLDER}/{self._path.name}", _UPLOAD_DEADLINE_SECONDS)
            self._uploaded_seconds = time.monotonic()
