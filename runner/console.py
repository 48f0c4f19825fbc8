"""Console output and logging. Losing an output stream changes neither a run nor its exit code.

`protect_streams`, which every program of the project calls first, replaces the standard streams by streams whose writes
never raise: with a closed terminal, a broken pipe or a full disk, only the lines are lost. A command whose product is
its output calls `finish_output` to learn of it.

`say` and `warn` write records to the standard logger `runner`. Records below the level of a warning go to standard
output, the others to standard error. From the call of `configure_console` on, by a job that is about to run, the job's
own loggers are printed to the same streams. A secret that was passed to `hide_secret` is always printed as `***`.

A run's directory may be somebody else's, so what is printed of it must not control the terminal: `say`, `warn` and
`write_text`, through which every line of a command goes, print control characters escaped (`escape_controls`). Only the
screens of `rich` add such characters themselves, and their texts are escaped before.

`format_duration` formats the durations that the views of a run show.
"""

import contextlib
import errno
import io
import json
import logging
import math
import os
import re
import select
import shutil
import sys
import textwrap
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal

from runner.errors import StorageError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

Form = Literal["text", "json"]

LOGGER = logging.getLogger("runner")
_CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u206f\ud800-\udfff\ufeff\ufff9-\ufffb]"
)
_SECRET_NAME = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|CONNECTION_STRING)$")
_MIN_SECRET_CHARACTERS = 8  # A shorter value would hide parts of ordinary words.
_secrets: set[str] = set()
_INDENT = 4  # of the rest of a line without columns
_READER_IS_GONE = (errno.EPIPE, errno.EIO)  # a pipe without a reader, a terminal that is closed
_NON_BLOCKING_WAIT_SECONDS = 2.0


class _Output(io.RawIOBase):
    """File descriptor of standard output or standard error whose writes raise nothing."""

    def __init__(self, descriptor: int, name: str):
        self._descriptor, self.name = descriptor, name
        self._wait_seconds = _NON_BLOCKING_WAIT_SECONDS
        self.error: OSError | None = None  # the reason why some of the output was lost

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, content: "ReadableBuffer") -> int:
        left = memoryview(content).cast("B")
        num_bytes = len(left)
        try:
            while left:
                try:
                    left = left[os.write(self._descriptor, left) :]
                    self._wait_seconds = _NON_BLOCKING_WAIT_SECONDS
                except BlockingIOError:
                    # Another process may have made the terminal or pipe non-blocking for everyone who has it open.
                    _, ready, _ = select.select([], [self._descriptor], [], self._wait_seconds)
                    if not ready:
                        # There is no reader. Do not wait for the following lines either, until one can be written.
                        self._wait_seconds = 0.0
                        raise
        except OSError as error:
            self.error = error
        return num_bytes


_outputs = (_Output(1, "<stdout>"), _Output(2, "<stderr>"))


def protect_streams() -> None:
    """Keep standard input, output and error usable when they are closed or lost.

    Call it before anything opens a file. A stream that was closed at the start is opened on the null device; otherwise
    the next file that is opened would get its descriptor, and printed lines would be written to that file.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            # The lowest free descriptor is this one. Child processes inherit it, as they do the other two.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if sys.stdin is None:
        sys.stdin = open(0, closefd=False)  # noqa: SIM115 - it lasts as long as the process
    sys.stdout = _open_text(_outputs[0], sys.stdout, is_line_buffered=_outputs[0].isatty())
    sys.stderr = _open_text(_outputs[1], sys.stderr, is_line_buffered=True)


def _open_text(output: _Output, given: Any, *, is_line_buffered: bool) -> io.TextIOWrapper:
    """Return a text stream with the encoding of Python's own, if there is one, in which every text can be printed."""
    encoding, errors = ("utf-8", "strict") if given is None else (given.encoding, given.errors)
    if errors in (None, "strict", "surrogateescape"):  # the second raises for a surrogate that stands for no byte
        errors = "backslashreplace"
    is_unbuffered = given is not None and given.write_through  # by PYTHONUNBUFFERED or `python -u`
    return io.TextIOWrapper(
        # A raw stream is sufficient here, as it is for Python itself.
        output if is_unbuffered else io.BufferedWriter(output),
        encoding,
        errors,
        newline="\n",
        line_buffering=is_line_buffered,
        write_through=is_unbuffered,
    )


def finish_output() -> bool:
    """Flush standard output, and return False if it has no reader any more. For commands whose result is their output.

    Raises `StorageError` if a part of the output could not be written.
    """
    sys.stdout.flush()
    error = _outputs[0].error
    if error is None:
        return True
    if error.errno in _READER_IS_GONE:
        return False
    raise StorageError(f"standard output: {error.strerror}; what was printed is incomplete")


def escape_unprintable(text: str) -> str:
    """Return `text` as one line that cannot control a terminal: unprintable characters are escaped."""
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)


def escape_controls(text: str) -> str:
    r"""Return `text` with characters that control a terminal as `\u001b`; newlines, tabs and all other text stay.

    Besides the control characters these are the marks that change the direction of text, and halves of surrogate pairs,
    which stand for bytes of a file name that are not UTF-8.
    """
    # The form of JSON, so that a text in JSON still is.
    return _CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def hide_secret(secret: str) -> None:
    """Hide `secret` in all records from now on."""
    if len(secret) >= _MIN_SECRET_CHARACTERS:
        _secrets.add(secret)


def say(line: str) -> None:
    """Print a line to standard output, if anyone still reads it."""
    LOGGER.info("%s", line)


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Print no line of the runner inside the context, on any thread."""
    LOGGER.disabled, before = True, LOGGER.disabled
    try:
        yield
    finally:
        LOGGER.disabled = before


def write_text(text: str, *, is_program: bool = False) -> bool:
    """Print a part of a command's result in UTF-8, whatever the locale. Returns and raises as `finish_output`.

    Control characters are escaped, unless it is a script or manifest made of the user's own spec.
    """
    shown = text if is_program else escape_controls(text)
    sys.stdout.flush()
    sys.stdout.buffer.write(shown.encode(errors="surrogateescape"))
    sys.stdout.buffer.flush()
    return finish_output()


def write_lines(lines: Iterable[str]) -> bool:
    """Print lines of a command's result; see `write_text`. A terminal gets lines that are broken between words.

    The rest of a line begins below its last column that leaves half of the width; columns are two blanks apart.
    """
    if sys.stdout.isatty():
        width = shutil.get_terminal_size().columns
        lines = [part for line in lines for part in _break_line(line, width)]
    return write_text("".join(f"{line}\n" for line in lines))


def _break_line(line: str, width: int) -> list[str]:
    columns = [match.end() for match in re.finditer(r"  +", line) if match.end() <= width // 2]
    indent = " " * (columns[-1] if columns else min(_INDENT, width // 2))
    broken = textwrap.wrap(
        line, max(width, 2), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return broken or [""]


def warn(line: str) -> None:
    """Print a line to standard error, if anyone still reads it."""
    LOGGER.warning("%s", line)


def format_dollars(value: float, *, is_rate: bool = False) -> str:
    """Return an amount in dollars and cents, without cents from $100 on. A rate has all its digits that matter."""
    cents, digits = f"${value:,.2f}", f"${value:,.4g}"
    if is_rate:
        return max(cents, digits, key=len)
    if 0 < value < 0.01:
        return "less than $0.01"
    return f"${value:,.0f}" if value >= 100 else cents


def format_duration(seconds: float | None) -> str:
    """Return `8.2 s`, `4 min 10 s`, `3 h 5 min` or `12 d 4 h`; `?` if it is not finite, and "" for None."""
    if seconds is None:
        return ""
    if not math.isfinite(seconds):
        return "?"
    if seconds < 60:
        return f"{max(seconds, 0.0):.1f} s"
    # Upper limit of a form, then the unit, size and remainder that it shows: minutes up to 100 min, hours up to 3 days.
    limits = ((6000, "min", 60, "s", 1), (72 * 3600, "h", 3600, "min", 60), (math.inf, "d", 86400, "h", 3600))
    _, large, size, small, part = next(limit for limit in limits if seconds < limit[0])
    return f"{seconds // size:,.0f} {large} {seconds % size // part:.0f} {small}"


class LineFormatter(logging.Formatter):
    """Formatter of records as lines.

    `plain` is the message without secrets; `text` is the message of a job for a person, which may have several lines;
    `dated` is one line with time, level and process; `json` is one line with the keys that Google Cloud Logging
    recognizes: severity, time and message.
    """

    def __init__(self, form: Form | Literal["plain", "dated"], process: int | None = None):
        super().__init__()
        self._form, self._process = form, process
        self._prefix = "" if process is None else f"[{process}] "

    def format(self, record: logging.LogRecord) -> str:
        """Return the record in this formatter's form."""
        message = record.getMessage()
        if record.exc_info:
            message = f"{message}\n{self.formatException(record.exc_info)}"
        for secret in _secrets:
            message = message.replace(secret, "***")
        if self._form == "plain":
            return escape_controls(message)
        if self._form == "text":
            return "\n".join(f"{self._prefix}{escape_unprintable(line)}" for line in message.expandtabs().split("\n"))
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{record.msecs:03.0f}Z"
        if self._form == "dated":
            return f"{moment} {record.levelname} {self._prefix}{escape_unprintable(message)}"
        process = {} if self._process is None else {"process": self._process}
        return json.dumps({"severity": record.levelname, "time": moment, **process, "message": message})


class _StreamHandler(logging.Handler):
    """Handler of one of the two streams. Each has its own lock, so that an unread stream does not block the other."""

    def __init__(self, *, is_for_warnings: bool):
        super().__init__()
        self.addFilter(lambda record: (record.levelno >= logging.WARNING) == is_for_warnings)
        self._is_for_warnings = is_for_warnings

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print(self.format(record), file=sys.stderr if self._is_for_warnings else sys.stdout, flush=True)
        except OSError:
            pass
        except Exception:  # noqa: BLE001 - a record of a library or of the job may have the wrong number of values
            self.handleError(record)


_streams = (_StreamHandler(is_for_warnings=False), _StreamHandler(is_for_warnings=True))
for _stream in _streams:
    _stream.setFormatter(LineFormatter("plain"))
    LOGGER.addHandler(_stream)
LOGGER.setLevel(logging.INFO)
LOGGER.propagate = False  # Handlers that a library adds to the root logger must not change or repeat these lines.


def configure_console(job_module: str, form: Form, level: str, process: int | None = None) -> None:
    """Show records from `level` on in the given form, and hide the secrets in the environment. May be called again.

    The loggers of the top-level package of `job_module` are shown from `level` on, those of libraries from warnings on.
    `process` is printed with each line; None for a single-process job.
    """
    for name, value in os.environ.items():
        if _SECRET_NAME.search(name):
            hide_secret(value)
    for stream in _streams:
        stream.setLevel(level.upper())
        stream.setFormatter(LineFormatter(form, process))
        logging.getLogger().addHandler(stream)
    for name in (LOGGER.name, job_module.partition(".")[0]):
        logging.getLogger(name).setLevel(min(logging.INFO, _streams[0].level))
