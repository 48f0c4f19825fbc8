"""`attempts/<number>.clock`: the time accounting of an attempt up to its last heartbeat or step.

The file has a fixed size, so that updates are cheap: a JSON line with the constant header, then `NUM_SLOTS` slots. Each
slot has a sequence number and a CRC. Readings of the training thread rotate through all slots but the last, which holds
the newest heartbeat. A reader takes the newest complete slot, so a torn write loses only that reading.

On a disk the slots are written in place, at each step and each phase, so the data survive a kill. The thread of the
heartbeat flushes them every `FLUSH_SECONDS`, which is what a power cut loses. In a bucket the background writer uploads
the whole file again, every `PERIOD_SECONDS` while the job makes progress and every `IDLE_SECONDS` otherwise.
"""

import contextlib
import itertools
import json
import os
import socket
import struct
import threading
import time
import weakref
import zlib
from dataclasses import dataclass

from runner.console import warn
from runner.distributed.clock import COUNTED_CATEGORIES, Clock, ClockReading, ClockStore, TimeCategory
from runner.process import read_creation_ticks, read_machine_id
from runner.storage import TIME_MAX, BackgroundWriter, Key, Store, parse_json, validate_record
from runner.storage.store import fsync, retry_stale

FORMAT = 1
_HEARTBEAT_SECONDS = 1.0
FLUSH_SECONDS = 10.0
SILENT_SECONDS = 30.0  # without a reading for so long, an attempt without an exit code does not count as alive
PERIOD_SECONDS, IDLE_SECONDS = 2.0, 10.0
HEADER_BYTES = 1024
NUM_SLOTS = 4
_CHECKSUM = struct.Struct("<I")
# The boot id, the process id and its creation time together identify a process, even after the id was reused.
_KEYS = (
    Key("format", int, "Version of this layout."),
    Key("began", float, "Creation of process 0.", "Unix seconds"),
    Key("host", str, "Name of its machine."),
    Key("machine", str, "Id of this boot of that machine."),
    Key("pid", int, "Id of process 0 there."),
    Key("created", int | None, "Creation of process 0, in ticks since that boot."),
    Key("uptime", float, "Time from that boot to `began`; absent in files of earlier versions.", "s"),
    Key("buckets", list, "Order of the seconds in a slot."),
)


@dataclass(frozen=True)
class ClockRecord:
    """Content of a clock file."""

    began: float  # creation of process 0, in Unix seconds
    host: str  # name of its machine
    machine: str  # id of the boot of that machine, see `runner.process.read_machine_id`
    pid: int  # process id of process 0
    created: int | None  # creation of process 0, see `runner.process.read_creation_ticks`
    reading: ClockReading  # the newest reading, with the seconds of the categories that this version counts
    # Time from the boot of that machine to `began`, in seconds, whatever its clock said; None if not known.
    uptime: float | None = None

    @property
    def is_process_alive(self) -> bool | None:
        """True if process 0 is alive, None if this machine cannot tell."""
        # Process ids are meaningless on another machine, or after a reboot of this one.
        if not self.machine or self.machine != read_machine_id() or self.created is None:
            return None
        return read_creation_ticks(self.pid) == self.created

    @property
    def has_ended(self) -> bool:
        """True if process 0 has recorded its exit code, or has run on this machine and is gone."""
        return self.reading.code is not None or self.is_process_alive is False


def get_clock_file_name(attempt: int) -> str:
    """Return the file name of an attempt's clock, next to its claim."""
    return f"attempts/{attempt}.clock"


def _make_slot_format(num_categories: int) -> struct.Struct:
    """Return the format of a slot: number, time, step, since, category, exit code or -1, seconds by category."""
    return struct.Struct(f"<QdqdHh{num_categories}d")


_SLOT = _make_slot_format(len(COUNTED_CATEGORIES))


def encode_header(clock: Clock) -> bytes:
    """Return the first line of a clock file."""
    header = {
        "format": FORMAT,
        "began": clock.began,
        "host": socket.gethostname(),
        "machine": read_machine_id(),
        "pid": os.getpid(),
        "created": read_creation_ticks(os.getpid()),
        "uptime": time.clock_gettime(time.CLOCK_BOOTTIME) - clock.age_seconds,
        "buckets": [category.value for category in COUNTED_CATEGORIES],
    }
    # The header has a fixed size, so that slots have fixed places, and is a line, so that `head` shows it.
    return json.dumps(header).encode().ljust(HEADER_BYTES - 1) + b"\n"


def encode_slot(number: int, reading: ClockReading) -> bytes:
    """Return one slot; `number` grows with each write."""
    code = -1 if reading.code is None else reading.code
    content = _SLOT.pack(
        number, reading.time, reading.step, reading.since, reading.category.index, code, *reading.seconds
    )
    # A power cut may leave a partial slot. The checksum detects it, and the other slots remain.
    return _CHECKSUM.pack(zlib.crc32(content)) + content


def decode_clock_file(content: bytes) -> ClockRecord:
    """Return the newest reading. Raises `ValueError` if no slot is complete, or a newer runner wrote the file."""
    header = parse_json(content[:HEADER_BYTES])
    validate_record(header, _KEYS, [key.name for key in _KEYS if key.name != "uptime"])
    names: list[object] = header["buckets"]
    # The length check bounds the slot of a damaged header.
    if header["format"] != FORMAT or len(names) > HEADER_BYTES:
        raise ValueError(f"format {header['format']}, this runner reads {FORMAT}")
    if not all(isinstance(name, str) for name in names) or not 0 <= header["began"] <= TIME_MAX:
        raise ValueError("its buckets are no names, or its beginning is no time")
    slot = _make_slot_format(len(names))
    size = _CHECKSUM.size + slot.size
    newest = None
    for start in range(HEADER_BYTES, HEADER_BYTES + NUM_SLOTS * size, size):
        checksum, packed = content[start : start + _CHECKSUM.size], content[start + _CHECKSUM.size : start + size]
        if len(packed) < slot.size or _CHECKSUM.unpack(checksum)[0] != zlib.crc32(packed):
            continue
        number, moment, step, since, index, code, *seconds = slot.unpack(packed)
        # This also excludes NaN, for which every comparison is false.
        if step < 0 or not all(0 <= value <= TIME_MAX for value in (moment, since, *map(abs, seconds))):
            continue
        # A reading with an exit code is always the last one. Others are ordered by the time at which they were taken,
        # not by their number, because a delayed heartbeat may be written after later steps.
        rank = (code >= 0, moment, number)
        if newest is None or rank > newest[0]:
            newest = rank, (moment, step, since, index, code, seconds)
    if newest is None:
        raise ValueError("no slot is complete")
    moment, step, since, index, code, seconds = newest[1]
    # Another version may count other categories, so they are matched by name.
    seconds_by_name = dict(zip(names, seconds, strict=True))
    known = tuple(seconds_by_name.get(category.value, 0.0) for category in COUNTED_CATEGORIES)
    name = names[index] if index < len(names) else None
    category = next((each for each in COUNTED_CATEGORIES if each.value == name), TimeCategory.SHUTDOWN)
    reading = ClockReading(moment, step, since, category, known, None if code < 0 else code)
    return ClockRecord(
        header["began"],
        header["host"],
        header["machine"],
        header["pid"],
        header["created"],
        reading,
        header.get("uptime"),
    )


class _LocalClockFile:
    """Clock file on a disk, written in place. An I/O error causes a warning, and the run continues."""

    def __init__(self, store: Store, name: str, header: bytes):
        assert store.root is not None, "written in place only on a disk"
        path = store.root / name
        path.unlink(missing_ok=True)  # Attempts count from 1 again if their claims were deleted.
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._file = retry_stale(lambda: os.open(path, flags, 0o666))
        # Any thread may still write a reading, so the file is closed when nobody can any more: not at the end of the
        # process, where the thread of the heartbeat still runs.
        weakref.finalize(self, os.close, self._file).atexit = False
        # The file gets its size now, so that a reader finds every slot, and a write never changes the length.
        os.ftruncate(self._file, HEADER_BYTES + NUM_SLOTS * (_CHECKSUM.size + _SLOT.size))
        os.pwrite(self._file, header, 0)
        self._numbers, self._places = itertools.count(), itertools.cycle(range(NUM_SLOTS - 1))
        self._has_warned = False
        self._directory = path.parent
        self._next_flush_seconds = 0.0  # by the monotonic clock

    def put(self, reading: ClockReading) -> None:
        self._write(reading, next(self._places))

    def put_heartbeat(self, reading: ClockReading) -> None:
        # Heartbeats have a slot of their own: one that the disk delays must not overwrite a newer step.
        self._write(reading, NUM_SLOTS - 1)
        if reading.code is not None:
            # Written to a second slot, because a delayed heartbeat could overwrite the exit code in the last one.
            self.put(reading)
        if reading.code is None and time.monotonic() < self._next_flush_seconds:
            return
        is_first, self._next_flush_seconds = not self._next_flush_seconds, time.monotonic() + FLUSH_SECONDS
        with contextlib.suppress(OSError):  # a disk that fails is reported where a slot is written
            os.fdatasync(self._file)
            if is_first:
                fsync(self._directory)

    def _write(self, reading: ClockReading, place: int) -> None:
        slot = encode_slot(next(self._numbers), reading)
        try:
            os.pwrite(self._file, slot, HEADER_BYTES + place * len(slot))
        except OSError as error:
            if not self._has_warned:
                warn(f"the attempt's clock cannot be written ({error})")
            self._has_warned = True


class _BucketClockFile:
    """Clock file in a bucket, put by the background writer, at most every `PERIOD_SECONDS`."""

    def __init__(self, store: Store, name: str, header: bytes, background_writer: BackgroundWriter):
        self._store, self._name, self._header, self._background_writer = store, name, header, background_writer
        self._numbers = itertools.count()
        self._last_sent: ClockReading | None = None

    def put(self, reading: ClockReading) -> None:
        """Do nothing: the next heartbeat follows soon."""

    def put_heartbeat(self, reading: ClockReading) -> None:
        last = self._last_sent
        # Each put is a request to the bucket, so only progress and the exit code are sent without delay.
        if last is not None and last.code == reading.code:
            has_moved = (last.step, last.category) != (reading.step, reading.category)
            if reading.time - last.time < (PERIOD_SECONDS if has_moved else IDLE_SECONDS):
                return
        self._last_sent = reading
        content = self._header + encode_slot(next(self._numbers), reading)
        self._background_writer.mark(self._name, lambda: self._store.write(self._name, content))


def start_clock_file(clock: Clock, store: Store, attempt: int, background_writer: BackgroundWriter) -> None:
    """Store the readings of `clock` in the file of this attempt from now on. Process 0 only; never raises."""
    name, header = get_clock_file_name(attempt), encode_header(clock)
    clock_store: ClockStore
    try:
        if store.root is None:
            clock_store = _BucketClockFile(store, name, header, background_writer)
        else:
            clock_store = _LocalClockFile(store, name, header)
    except OSError as error:
        warn(f"the attempt's clock cannot be written ({error}): if it is killed, its progress is not known")
        return
    clock.attach_store(clock_store)
    # On a separate thread, so that heartbeats continue while the training thread is busy, and a heartbeat that hangs on
    # the disk does not block training. The weak reference lets the thread end with the clock.
    threading.Thread(target=_send_heartbeats, args=(weakref.ref(clock),), name="clock", daemon=True).start()


def _send_heartbeats(reference: "weakref.ref[Clock]") -> None:
    while (clock := reference()) is not None and clock.send_heartbeat():
        del clock
        time.sleep(_HEARTBEAT_SECONDS)
