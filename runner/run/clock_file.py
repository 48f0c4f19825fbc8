"""`attempts/<number>.clock`: how far an attempt had come, and where its time had gone, when it was last alive.

A record of fixed size, so that it costs next to nothing to keep: a line of JSON that says what does not change, then
`NUM_SLOTS` slots. A reading goes into the slot after the one before, and a beat into the last, with a number and a CRC:
who reads takes the newest that is whole, and a write that was cut off costs that reading alone.

On a disk it is written in place, at each step and each phase, and never flushed: what a killed process has written is
there, what a power cut takes is a second or two. In a bucket it is put anew by the background writer, every
`PERIOD_SECONDS` while the job moves and every `IDLE_SECONDS` while it does not.
"""

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
from typing import Any

from runner.console import warn
from runner.distributed.clock import COUNTED_BUCKETS, Clock, ClockReading, ClockStore, TimeBucket
from runner.process import read_creation_ticks, read_machine_id
from runner.records import Key, validate_record
from runner.storage import BackgroundWriter, Store, parse_json

FORMAT = 1
BEAT_SECONDS = 1.0
PERIOD_SECONDS, IDLE_SECONDS = 2.0, 10.0
HEAD_BYTES = 1024
NUM_SLOTS = 4
_CHECKSUM = struct.Struct("<I")
_KEYS = (
    Key("format", int, "Version of this layout."),
    Key("began", float, "When process 0 was created.", "Unix seconds"),
    Key("host", str, "Its machine."),
    Key("machine", str, "This boot of that machine."),
    Key("pid", int, "Number of process 0 there."),
    Key("created", int | None, "When it was created, in ticks since that boot."),
    Key("buckets", list, "The order of the seconds in a slot."),
)


@dataclass(frozen=True)
class ClockRecord:
    """What a clock file says.

    Attributes:
        began: when process 0 was created, in Unix seconds.
        host, machine, pid, created: which process it is, see `runner.process`.
        reading: the newest; its seconds are those of the buckets that are known here.
    """

    began: float
    host: str
    machine: str
    pid: int
    created: int | None
    reading: ClockReading

    @property
    def is_process_alive(self) -> bool | None:
        """Whether that process lives, None where that cannot be told from this machine."""
        if not self.machine or self.machine != read_machine_id() or self.created is None:
            return None
        return read_creation_ticks(self.pid) == self.created


def get_clock_file_name(attempt: int) -> str:
    """The file of an attempt, beside its claim."""
    return f"attempts/{attempt}.clock"


def _slot(num_buckets: int) -> struct.Struct:
    """Number, time, step, since, bucket, exit code (-1: none yet), seconds."""
    return struct.Struct(f"<QdqdHh{num_buckets}d")


_OWN_SLOT = _slot(len(COUNTED_BUCKETS))


def encode_header(clock: Clock) -> bytes:
    """The line that begins a file."""
    head = {
        "format": FORMAT,
        "began": clock.began,
        "host": socket.gethostname(),
        "machine": read_machine_id(),
        "pid": os.getpid(),
        "created": read_creation_ticks(os.getpid()),
        "buckets": [bucket.value for bucket in COUNTED_BUCKETS],
    }
    return json.dumps(head).encode().ljust(HEAD_BYTES - 1) + b"\n"


def encode_slot(number: int, reading: ClockReading) -> bytes:
    """A slot."""
    moment, step, since, bucket, seconds, code = reading
    content = _OWN_SLOT.pack(number, moment, step, since, bucket.index, -1 if code is None else code, *seconds)
    return _CHECKSUM.pack(zlib.crc32(content)) + content


def decode_clock_file(content: bytes) -> ClockRecord:
    """The newest reading of a file. Raises `ValueError` if none is whole, or a newer runner has written it."""
    head = parse_json(content[:HEAD_BYTES])
    validate_record(head, _KEYS, [key.name for key in _KEYS])
    names: list[object] = head["buckets"]
    if head["format"] != FORMAT or len(names) > HEAD_BYTES:
        raise ValueError(f"format {head['format']}, this runner reads {FORMAT}")
    slot = _slot(len(names))
    size = _CHECKSUM.size + slot.size
    texts = [content[start : start + size] for start in range(HEAD_BYTES, HEAD_BYTES + NUM_SLOTS * size, size)]
    whole = [
        slot.unpack(text[_CHECKSUM.size :])
        for text in texts
        if len(text) == size and _CHECKSUM.unpack(text[: _CHECKSUM.size])[0] == zlib.crc32(text[_CHECKSUM.size :])
    ]
    if not whole:
        raise ValueError("no reading in it is whole")
    _, moment, step, since, index, code, *seconds = max(whole, key=_rank)
    found = dict(zip(names, seconds, strict=True))
    known = tuple(found.get(bucket.value, 0.0) for bucket in COUNTED_BUCKETS)
    bucket = next(
        (each for each in COUNTED_BUCKETS if index < len(names) and each.value == names[index]), TimeBucket.SHUTDOWN
    )
    reading = ClockReading(moment, step, since, bucket, known, None if code < 0 else code)
    return ClockRecord(head["began"], head["host"], head["machine"], head["pid"], head["created"], reading)


def _rank(slot: tuple[Any, ...]) -> tuple[bool, float, int]:
    """The newest last, by its steady clock: a beat may be written after steps that came behind it.

    What has the exit code is the last word.
    """
    number, moment, _, _, _, code, *_ = slot
    return code >= 0, moment, number


class _LocalClockFile:
    """Writes in place. A disk that gives an error costs the record, not the run."""

    def __init__(self, store: Store, name: str, head: bytes):
        assert store.root is not None, "written in place only on a disk"
        path = store.root / name
        path.unlink(missing_ok=True)  # attempts count from 1 again where their numbers were lost
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        os.ftruncate(self._file, HEAD_BYTES + NUM_SLOTS * (_CHECKSUM.size + _OWN_SLOT.size))
        os.pwrite(self._file, head, 0)
        self._numbers, self._places = itertools.count(), itertools.cycle(range(NUM_SLOTS - 1))
        self._has_warned = False

    def put(self, reading: ClockReading) -> None:
        self._write(reading, next(self._places))

    def put_heartbeat(self, reading: ClockReading) -> None:
        """Into a slot of its own: held up by the disk, a beat would come over what has been put since."""
        self._write(reading, NUM_SLOTS - 1)
        if reading.code is not None:
            self.put(reading)  # and such a beat over the exit code

    def _write(self, reading: ClockReading, place: int) -> None:
        slot = encode_slot(next(self._numbers), reading)
        try:
            os.pwrite(self._file, slot, HEAD_BYTES + place * len(slot))
        except OSError as error:
            if not self._has_warned:
                warn(f"the attempt's clock cannot be written ({error})")
            self._has_warned = True


class _BucketClockFile:
    """Has the newest reading put by the background writer, at most every `PERIOD_SECONDS`."""

    def __init__(self, store: Store, name: str, head: bytes, background: BackgroundWriter):
        self._store, self._name, self._head, self._background = store, name, head, background
        self._numbers = itertools.count()
        self._sent: ClockReading | None = None

    def put(self, reading: ClockReading) -> None:
        """Nothing: the next beat is soon."""

    def put_heartbeat(self, reading: ClockReading) -> None:
        sent = self._sent
        if sent is not None and sent.code == reading.code:
            has_moved = (sent.step, sent.bucket) != (reading.step, reading.bucket)
            if reading.time - sent.time < (PERIOD_SECONDS if has_moved else IDLE_SECONDS):
                return
        self._sent = reading
        content = self._head + encode_slot(next(self._numbers), reading)
        self._background.mark(self._name, lambda: self._store.write(self._name, content))


def start_clock_file(clock: Clock, store: Store, attempt: int, background: BackgroundWriter) -> None:
    """From now on keep what `clock` says in the file of this attempt. Main host only; never raises."""
    name, head = get_clock_file_name(attempt), encode_header(clock)
    keeper: ClockStore
    try:
        keeper = (
            _BucketClockFile(store, name, head, background)
            if store.root is None
            else _LocalClockFile(store, name, head)
        )
    except OSError as error:
        warn(f"the attempt's clock cannot be written ({error}): after a kill nobody knows how far it had come")
        return
    clock.attach_store(keeper)
    threading.Thread(target=_beat, args=(weakref.ref(clock),), name="clock", daemon=True).start()


def _beat(reference: "weakref.ref[Clock]") -> None:
    """Beat until the job has come to its end. On a thread of its own: a disk that hangs holds nobody else up."""
    while (clock := reference()) is not None and clock.send_heartbeat():
        del clock
        time.sleep(BEAT_SECONDS)
