"""Displays of rows while a job runs: progress on the terminal or in a log, and asynchronous metric writers.

Process 0 uses them. A **metric writer** (`MetricWriter`) keeps rows for another tool, such as TensorBoard or W&B. It
may be slow, hang or fail, and must not delay a step. It therefore runs on a thread of its own behind a
bounded queue.

A metric writer only mirrors `metrics.jsonl`: each attempt first gives it the rows up to the step that it resumed from,
and then its own rows. So it always shows one trajectory, even if steps were lost, recomputed with other bits, or missed
while the writer was off, and it needs no state of its own. The cost is that each start writes all rows again, during
the first steps.

A writer that raises, or does not keep up, is switched off for the rest of the attempt, and `on_failure` is called once.

**TensorBoard** gets one event file per attempt, `tensorboard/events.out.tfevents.<attempt>`. Each file holds the whole
trajectory. As soon as the file of an attempt has the earlier rows, the attempt empties the previous file, and deletes
all earlier ones: a TensorBoard that is reading a file can move on to the next one only while its own file still exists.

A file consists of TFRecords (https://www.tensorflow.org/tutorials/load_data/tfrecord): the length as a uint64, its
masked CRC-32C, an `Event` of tensorboard/compat/proto/event.proto, its masked CRC-32C. It begins with a `SessionLog`
START, at which a TensorBoard that has read an earlier file drops the points of that file. For a run in a bucket the
file is in this machine's cache while the job runs, and is uploaded every `UPLOAD_SECONDS`.
"""

import contextlib
import functools
import importlib
import io
import math
import queue
import struct
import sys
import threading
import time
import wave
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from types import TracebackType
from typing import Protocol

import google_crc32c
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from runner.attempts.attempt import Attempt
from runner.console import escape_controls, say, warn
from runner.errors import format_error
from runner.metrics.file import METRICS_FILE, find_tail_problem, open_metrics_file, read_encoded_rows
from runner.metrics.media import PNG_CHANNELS, read_row_media
from runner.metrics.meta import RowValue, find_bins
from runner.metrics.rows import Row, RowTail, find_unit, format_metrics, list_own_metrics
from runner.spec import ExecutionSpec
from runner.storage import LocalStore, Store, default_cache_directory
from runner.storage.store import retry_stale

FOLDER = "tensorboard"
UPLOAD_SECONDS = 60.0
_UPLOAD_DEADLINE_SECONDS = 60.0
_STEM = "events.out.tfevents."  # TensorBoard recognises its files by "tfevents"
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # wire types of protocol buffers
_START = 1
_DT_STRING = 7
_TIME = "perf/time"  # the wall time of events. It is not plotted: single floats resolve Unix time only to minutes
_QUEUE_ROWS = 10_000
CLOSE_SECONDS = 10.0


def _encode_varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _encode_field(number: int, kind: int, payload: bytes) -> bytes:
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


def _encode_value(value: RowValue | bytes) -> bytes:
    """Return a simple_value 2, an image 4, a histo 5, an audio 6, or a tensor 8 with metadata 9 of the text plugin.

    Bytes are a PNG or WAV file. Returns nothing for null and for a damaged file. An `Image` has height 1, width 2,
    colorspace 3, which is its number of channels, and the file 4; an `Audio` has sample_rate 1, num_channels 2,
    length_frames 3, the file 4 and its type 5.
    """
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
    if isinstance(value, bytes):
        try:
            if value.startswith(b"RIFF"):
                with wave.open(io.BytesIO(value)) as file:
                    rate, sizes = struct.pack("<f", file.getframerate()), (file.getnchannels(), file.getnframes())
                number, described = 6, [_encode_field(1, _FIXED32, rate)]
                ending = _encode_field(5, _BYTES, b"audio/wav")
            else:
                width, height, _, colours = struct.unpack(">IIBB", value[16:26])
                number, described = 4, [_encode_field(1, _VARINT, _encode_varint(height))]
                sizes, ending = (width, PNG_CHANNELS[colours]), b""
        except (wave.Error, EOFError, struct.error, KeyError):
            return b""
        described += [_encode_field(each, _VARINT, _encode_varint(size)) for each, size in enumerate(sizes, 2)]
        return _encode_field(number, _BYTES, b"".join([*described, _encode_field(4, _BYTES, value), ending]))
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


class _TensorBoardWriter:
    """Event file of one attempt, a `MetricWriter`. Its methods raise `OSError` if the file cannot be written."""

    def __init__(self, store: Store, run_id: str, attempt: int):
        self._store = store
        folder = default_cache_directory() / FOLDER / run_id if store.root is None else store.root / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"{_STEM}{attempt:010}"
        # TensorBoard ignores this name; the file is renamed when it has the rows of earlier attempts.
        self._hidden_path = folder / f".{attempt:010}"
        self._is_published = False
        self._file = retry_stale(lambda: self._hidden_path.open("wb"))
        self._uploaded_seconds = 0.0
        self._write_event(0, _encode_field(3, _BYTES, b"brain.Event:2"))
        self._write_event(0, _encode_field(7, _BYTES, _encode_field(1, _VARINT, _encode_varint(_START))))

    def add(self, row: Row) -> None:
        self._write_event(row["step"], _encode_summary(row | read_row_media(self._store, row)), row.get(_TIME))
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
        self._file.close()
        self._upload()

    def _upload(self) -> None:
        if self._store.root is None:
            self._store.upload(self._path, f"{FOLDER}/{self._path.name}", _UPLOAD_DEADLINE_SECONDS)
            self._uploaded_seconds = time.monotonic()


class MetricWriter(Protocol):
    """Writer that keeps rows for another tool. It is called on one thread, which may wait; an exception ends it."""

    def add(self, row: Row) -> None:
        """Write a row. Steps ascend; a row with the step of the row before has only the keys that are new."""

    def supersede(self) -> None:
        """Remove the files of earlier attempts, whose rows have all been written again. Called once."""

    def finish(self) -> None:
        """Finish after the last row."""


class RowDisplay(Protocol):
    """Display of rows, called by the training thread."""

    def show(self, row: Row) -> None:
        """Show a row. Must not block for long, and never raise."""

    def close(self) -> None:
        """Finish within seconds."""


class _AsyncMetricWriter:
    """Asynchronous metric writer, a `RowDisplay`.

    Its thread opens the writer and gives it the surviving rows of `earlier` attempts. `on_failure` is called once with
    `name` and the reason, when the writer is switched off.
    """

    def __init__(
        self,
        name: str,
        open_writer: Callable[[], MetricWriter],
        earlier: Callable[[], Iterable[Row]],
        on_failure: Callable[[str, str], None],
    ):
        self._name, self._on_failure = name, on_failure
        self._rows: queue.Queue[Row | None] = queue.Queue(_QUEUE_ROWS)
        self._off = threading.Lock()  # acquired once, by the thread that switches the writer off
        self._thread = threading.Thread(target=self._work, args=(open_writer, earlier), name=name, daemon=True)
        self._thread.start()

    def show(self, row: Row) -> None:
        self._put(row)

    def close(self) -> None:
        """Wait up to `CLOSE_SECONDS` for the writer to finish, then abandon its thread."""
        # None tells the thread to finish after the rows that are queued.
        if self._put(None):
            self._thread.join(CLOSE_SECONDS)
            if self._thread.is_alive():
                self._switch_off(f"it has not finished {CLOSE_SECONDS:g} s after the last row")

    def _put(self, row: Row | None) -> bool:
        """Queue a row or the end; return False if the writer is switched off or its queue is full."""
        if self._off.locked():
            return False
        try:
            self._rows.put_nowait(row)
        except queue.Full:
            self._switch_off(f"{_QUEUE_ROWS} rows wait for it")
            return False
        return True

    def _work(self, open_writer: Callable[[], MetricWriter], earlier: Callable[[], Iterable[Row]]) -> None:
        with contextlib.ExitStack() as stack:
            stack.push(self._on_exit)
            writer = open_writer()
            last: Row = {}
            for last in earlier():
                writer.add(last)
            writer.supersede()
            while (row := self._rows.get()) is not None and not self._off.locked():
                if row["step"] == last.get("step"):
                    # The row completes the one before, as after an evaluation; only new keys are written.
                    writer.add({key: value for key, value in row.items() if key == "step" or key not in last})
                else:
                    writer.add(row)
                last = row
            writer.finish()

    def _on_exit(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> bool:
        # Catch every exception of a writer: a library for viewing rows must not end a run.
        if error is not None:
            self._switch_off(format_error(error))
        return isinstance(error, Exception)

    def _switch_off(self, reason: str) -> None:
        if self._off.acquire(blocking=False):
            self._on_failure(self._name, reason)


def _format_row(row: Row) -> str:
    keys = {"loss": "train/loss", "val": "val/loss"}
    # A mean over nothing is shown as `-`.
    parts = [
        f"{name} {'-' if row[key] is None else format(row[key], '.4f')}" for name, key in keys.items() if key in row
    ]
    parts += format_metrics(list_own_metrics(row))
    unit = find_unit(row)
    if speed := row.get(f"perf/{unit}_per_second"):
        parts.append(f"{speed:,.0f} {unit}/s")
    return "  ".join(parts)


class _LiveProgress:
    """Progress bar on a terminal, a `RowDisplay`."""

    def __init__(self, name: str, total_steps: int, step: int, console: Console):
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}", markup=False),
            TimeRemainingColumn(),
        )
        self._progress = Progress(*columns, console=console)
        self._task = self._progress.add_task(name, total=total_steps, completed=step, figures="")
        with contextlib.suppress(OSError):
            self._progress.start()

    def show(self, row: Row) -> None:
        # The terminal may be closed at any time.
        with contextlib.suppress(OSError):
            line = escape_controls(_format_row(row))
            self._progress.update(self._task, completed=row["step"], figures=line)
            if any(key.startswith("val/") for key in row):
                self._progress.console.print(f"step {row['step']}  {line}", highlight=False)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._progress.stop()


class _PlainProgress:
    """One line per row, for logs; a `RowDisplay`."""

    def __init__(self, count_units: Callable[[int], int], total_steps: int):
        self._count_units = count_units
        self._total_steps = total_steps

    def show(self, row: Row) -> None:
        speed = row.get(f"perf/{find_unit(row)}_per_second")
        units = self._count_units(self._total_steps) - self._count_units(row["step"])
        left = f"  {units / speed:.0f} s left" if speed else ""
        say(f"step {row['step']}/{self._total_steps}  {_format_row(row)}{left}")

    def close(self) -> None:
        """Do nothing: every line is printed."""


def make_progress(spec: ExecutionSpec, total_steps: int, step: int, count_units: Callable[[int], int]) -> RowDisplay:
    """Return a progress bar if standard output is a terminal and logs are text, plain lines otherwise."""
    # A program that calls a job itself may have no standard output.
    if sys.stdout is not None and sys.stdout.isatty() and spec.logging.format == "text":
        return _LiveProgress(spec.name, total_steps, step, Console(markup=False))
    return _PlainProgress(count_units, total_steps)


def open_displays(
    attempt: Attempt, spec: ExecutionSpec, total_steps: int, count_units: Callable[[int], int], step: int
) -> list[RowDisplay]:
    """Return the displays that the spec names, for an attempt that continues from `step`."""

    def read_earlier() -> Iterator[Row]:
        return (line.row for line in read_encoded_rows(attempt.store, step))

    def report_failure(name: str, reason: str) -> None:
        warn(f"{name} is switched off: {reason}")
        attempt.record("sink_off", None, sink=name, reason=reason)

    def open_wandb() -> MetricWriter:
        # The import of wandb takes a second. The thread of the writer can wait for it, the training thread cannot.
        writer: MetricWriter = importlib.import_module("runner.metrics.wandb").WandbWriter(spec, attempt)
        return writer

    displays: list[RowDisplay] = [make_progress(spec, total_steps, step, count_units)]
    if spec.logging.tensorboard:
        open_tensorboard = functools.partial(_TensorBoardWriter, attempt.store, attempt.run_id, attempt.number)
        displays.append(_AsyncMetricWriter("tensorboard", open_tensorboard, read_earlier, report_failure))
    if spec.logging.wandb != "disabled":
        displays.append(_AsyncMetricWriter("wandb", open_wandb, read_earlier, report_failure))
    return displays


class RowLog:
    """Rows that a job writes itself, by `log_metrics`. Made and called on every host; process 0 writes."""

    def __init__(self, attempt: Attempt, spec: ExecutionSpec, total_steps: int):
        self._attempt, self._spec, self._total_steps = attempt, spec, total_steps
        self._file = open_metrics_file(attempt.store, attempt.background_writer, attempt.fence)
        self._is_open = False
        self._displays: list[RowDisplay] = []

    def find_problem(self, attachments: dict[str, bytes]) -> str | None:
        """Return the reason why the rows saved with a state cannot continue those of the file; None if they can."""
        return find_tail_problem(self._file, attachments)

    def rewind(self, step: int, attachments: dict[str, bytes] | None = None) -> None:
        """Remove the rows after `step`, which was restored or loaded. A job without rows gets no file."""
        content = (attachments or {}).get(METRICS_FILE)
        if not self._attempt.hosts.is_main:
            return
        if content is None and not self._is_open and not self._attempt.store.exists(METRICS_FILE):
            return
        self._file.rewind(step, None if content is None else RowTail.decode(content))
        self._is_open = True
        self.close()

    def add(self, step: int, values: Row) -> None:
        """Write a row, or add the values to that of `step`. Waits for nothing."""
        if not self._attempt.hosts.is_main:
            return
        self._attempt.fence.check_locally()
        if not self._is_open:
            self._file.rewind(step)
            self._is_open = True
        newest = self._file.get_newest()
        row = {**(newest if newest.get("step") == step else {"step": step}), **values}
        row |= {"perf/time": time.time(), "perf/attempt": self._attempt.number}
        if newest.get("step") == step:
            self._file.replace_last(row)
        else:
            self._file.append(row)
        if not self._displays:
            before = max(step - 1, 0)
            self._displays = open_displays(self._attempt, self._spec, self._total_steps, lambda step: 0, before)
        for display in self._displays:
            display.show(row)

    def get_metric(self, name: str, step: int) -> float | None:
        """Return a metric of the row of `step`; None if it has none, and on processes other than 0."""
        row = self._file.get_newest() if self._is_open else {}
        value = row.get(name) if row.get("step") == step else None
        return float(value) if isinstance(value, int | float) else None

    def get_attachments(self) -> dict[str, bytes]:
        """Return the rows to save with a state in the fast tier. Process 0 only."""
        return {METRICS_FILE: self._file.get_tail().encode()} if self._is_open else {}

    def sync(self) -> None:
        """Wait until the rows are durable. Thread-safe; raises `OSError`."""
        if self._is_open:
            self._file.sync()

    def close(self) -> None:
        """Finish the displays."""
        for display in self._displays:
            display.close()
        self._displays = []
