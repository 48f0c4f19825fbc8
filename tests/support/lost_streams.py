"""Processes that lose standard streams: closed from the start, or while they run."""

import contextlib
import fcntl
import os
import select
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# Ways in which a stream is lost, or cannot encode every text.
STREAM_LOSSES = (
    "closed",
    "no reader",
    "reader leaves",
    "full disk",
    "terminal closes",
    "nobody reads",
    "ascii",
    "latin-1",
    "utf-8 and buffered",
)
# Ways that also apply to standard input.
INPUT_LOSSES = ("closed", "terminal closes")
STREAMS = {"input": (0,), "output": (1,), "error": (2,), "all": (0, 1, 2)}
_ON_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl({}, termios.TIOCSCTTY, 0); os.execvp(sys.argv[1], sys.argv[1:])"
)


@dataclass
class ProcessWithLostStreams:
    """A process whose streams can be taken away.

    Attributes:
        process: the process.
        ours: descriptors of this process that are read until they are closed; then the streams are lost.
    """

    process: "subprocess.Popen[bytes]"
    ours: list[int]

    def __post_init__(self) -> None:
        self._is_lost = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        poll = select.poll()  # `select.select` refuses the descriptors of a process that has opened 1,024
        for descriptor in self.ours:
            poll.register(descriptor, select.POLLIN)
        while not self._is_lost.is_set():
            for descriptor, _ in poll.poll(20):
                with contextlib.suppress(OSError):  # a terminal without open descriptors at the other end
                    os.read(descriptor, 65536)
        for descriptor in self.ours:
            os.close(descriptor)

    def lose_streams(self) -> None:
        """Take away the streams that still exist."""
        self._is_lost.set()
        self._reader.join()


@contextlib.contextmanager
def start_with_lost_streams(
    command: Sequence[str], way: str, streams: Sequence[int], variables: Mapping[str, str], directory: Path
) -> Iterator[ProcessWithLostStreams]:
    """Start a command that loses `streams` in one of `STREAM_LOSSES`; its other output goes to files in `directory`."""
    variables = {**variables}
    words, ours, theirs = list(command), [], []
    given: list[int] = []
    for number, name in enumerate(("input", "output", "error")):
        flags = os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        given.append(os.open(os.devnull if number == 0 else directory / name, flags))
    if way == "closed":
        words = ["bash", "-c", f'exec "$@" {" ".join(f"{stream}>&-" for stream in streams)}', "bash", *words]
    elif way == "terminal closes":
        ours_too, terminal = os.openpty()
        ours.append(ours_too)
        words = [sys.executable, "-ISc", _ON_TERMINAL.format(streams[0]), *words]
        for stream in streams:
            os.close(given[stream])
            given[stream] = os.dup(terminal)
        os.close(terminal)
    elif way in ("ascii", "latin-1"):
        variables["PYTHONIOENCODING"] = way
    elif way == "utf-8 and buffered":
        variables.pop("PYTHONUNBUFFERED", None)
    else:
        for stream in set(streams) - {0}:
            os.close(given[stream])
            if way == "full disk":
                given[stream] = os.open("/dev/full", os.O_RDWR)
                continue
            reader, given[stream] = os.pipe()
            if way == "no reader":
                os.close(reader)
            elif way == "reader leaves":
                ours.append(reader)
            else:
                _fill(given[stream])
                theirs.append(reader)
    lossy = ProcessWithLostStreams(
        subprocess.Popen(
            words,
            env=variables,
            stdin=given[0],
            stdout=given[1],
            stderr=given[2],
            start_new_session=True,
        ),
        ours,
    )
    for descriptor in given:
        os.close(descriptor)
    try:
        yield lossy
    finally:
        lossy.lose_streams()
        for descriptor in theirs:
            os.close(descriptor)
        if lossy.process.poll() is None:
            lossy.process.kill()
            lossy.process.wait()


def _fill(pipe: int) -> None:
    """Make a pipe non-blocking and full for all its holders."""
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(pipe, b"x" * 4096)
