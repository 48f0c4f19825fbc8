"""Console output and logging. A closed terminal or a broken pipe never stops a run.

`say` and `warn` write records to the standard logger `runner`. Records below the level of a warning go to standard
output, the others to standard error. They are printed as they are until a job is about to run and calls
`configure_console`: from then on the job's own loggers are shown in the same places, and characters that are not
printable are escaped, wherever the text comes from. A secret that was passed to `hide_secret` is always printed as
`***`.
"""

import contextlib
import json
import logging
import os
import re
import sys
import time
from typing import Literal

Form = Literal["text", "json"]

LOGGER = logging.getLogger("runner")
_SECRET_NAME = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|CONNECTION_STRING)$")
_MIN_SECRET_CHARACTERS = 8  # A shorter value would hide parts of ordinary words.
_secrets: set[str] = set()


def escape_unprintable(text: str) -> str:
    """Return `text` as one line that cannot control a terminal: unprintable characters are escaped."""
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)


def hide_secret(secret: str) -> None:
    """Hide `secret` in all records from now on."""
    if len(secret) >= _MIN_SECRET_CHARACTERS:
        _secrets.add(secret)


def say(line: str) -> None:
    """Print a line to standard output, if anyone still reads it."""
    LOGGER.info("%s", line)


def write_text(text: str) -> None:
    """Print a part of a line to standard output, in UTF-8 whatever the locale. May raise `BrokenPipeError`."""
    sys.stdout.buffer.write(text.encode(errors="surrogateescape"))
    sys.stdout.buffer.flush()


def warn(line: str) -> None:
    """Print a line to standard error, if anyone still reads it."""
    LOGGER.warning("%s", line)


def _replace_secrets(text: str) -> str:
    for secret in _secrets:
        text = text.replace(secret, "***")
    return text


class _PlainFormatter(logging.Formatter):
    """Formatter that changes nothing but secrets; used until `configure_console`."""

    def format(self, record: logging.LogRecord) -> str:
        return _replace_secrets(super().format(record))


class LineFormatter(logging.Formatter):
    """Formatter of records as lines.

    `text` is the message for a person, which may have several lines; `dated` is one line with time, level and process;
    `json` is one line with the keys that Google Cloud Logging recognizes: severity, time and message.
    """

    def __init__(self, form: Form | Literal["dated"], process: int | None):
        super().__init__()
        self._form, self._process = form, process
        self._prefix = "" if process is None else f"[{process}] "

    def format(self, record: logging.LogRecord) -> str:
        """Return the record in this formatter's form."""
        message = record.getMessage()
        if record.exc_info:
            message = f"{message}\n{self.formatException(record.exc_info)}"
        message = _replace_secrets(message)
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
        self._is_for_warnings = is_for_warnings

    def filter(self, record: logging.LogRecord) -> bool:
        return (record.levelno >= logging.WARNING) == self._is_for_warnings

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):
            print(self.format(record), file=sys.stderr if self._is_for_warnings else sys.stdout, flush=True)


_streams = (_StreamHandler(is_for_warnings=False), _StreamHandler(is_for_warnings=True))
for _stream in _streams:
    _stream.setFormatter(_PlainFormatter())
    LOGGER.addHandler(_stream)
LOGGER.setLevel(logging.INFO)
LOGGER.propagate = False  # Handlers that a library adds to the root logger must not change or repeat these lines.


def configure_console(job_module: str, form: Form, level: str, process: int | None = None) -> None:
    """Show records from `level` on in the given form, and hide the secrets in the environment.

    May be called again.

    Args:
        job_module: module of the job; loggers of its top-level package are shown from `level` on, those of libraries
            from warnings on.
        form: form of the lines.
        level: name of the lowest level to show.
        process: process id to print, or None for a single-process job.
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
