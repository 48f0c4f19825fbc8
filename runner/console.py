"""Lines for a person, and for what collects logs. A closed terminal or a broken pipe never stops a run.

`say` and `warn` are records of the standard logger `runner`. What is below a warning goes to standard output, the rest
to standard error. They are shown as they are, until a job is about to run and calls `configure_console`: from then on a
job's own loggers end in the same places, and what is no plain character in a record stands there as its escape,
wherever the text came from. A secret that was named to `hide_secret` stands as `***`, before and after.
"""

import contextlib
import json
import logging
import os
import re
import sys
import time
from collections.abc import Mapping
from typing import Literal

Form = Literal["text", "json"]

LOGGER = logging.getLogger("runner")
_SECRET_NAME = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|CONNECTION_STRING)$")
_LEAST_SECRET_CHARACTERS = 8
_secrets: set[str] = set()


def escape_unprintable(text: str) -> str:
    """`text` as one line that does nothing to a terminal: what is no plain character stands as its escape."""
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)


def hide_secret(secret: str) -> None:
    """From now on `secret` stands in no record."""
    if len(secret) >= _LEAST_SECRET_CHARACTERS:
        _secrets.add(secret)


def say(line: str) -> None:
    """Print a line on standard output, if anyone still reads it."""
    LOGGER.info("%s", line)


def write_text(text: str) -> None:
    """Print a piece of a line on standard output, as UTF-8 whatever the locale. Raises `BrokenPipeError`."""
    sys.stdout.buffer.write(text.encode(errors="surrogateescape"))
    sys.stdout.buffer.flush()


def warn(line: str) -> None:
    """Print a line on standard error, if anyone still reads it."""
    LOGGER.warning("%s", line)


class _Hiding(logging.Formatter):
    """Records as they are, but for secrets."""

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter`."""
        return _hidden(super().format(record))


def _hidden(text: str) -> str:
    for secret in _secrets:
        text = text.replace(secret, "***")
    return text


class LineFormatter(logging.Formatter):
    """Records as lines.

    `text` is the message as a person reads it, which may have several lines; `dated` is one line with time, level and
    process; `json` is one line with the keys that Google Cloud's logging knows, severity, time and message.
    """

    def __init__(self, form: Form | Literal["dated"], process: int | None):
        super().__init__()
        self._form, self._process = form, process
        self._prefix = "" if process is None else f"[{process}] "

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter`."""
        message = record.getMessage()
        if record.exc_info:
            message = f"{message}\n{self.formatException(record.exc_info)}"
        message = _hidden(message)
        if self._form == "text":
            return "\n".join(f"{self._prefix}{escape_unprintable(line)}" for line in message.expandtabs().split("\n"))
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{record.msecs:03.0f}Z"
        if self._form == "dated":
            return f"{moment} {record.levelname} {self._prefix}{escape_unprintable(message)}"
        process = {} if self._process is None else {"process": self._process}
        return json.dumps({"severity": record.levelname, "time": moment, **process, "message": message})


class _Terminal(logging.Handler):
    """One of the two streams, each with a lock of its own: who does not read the one does not hold up the other."""

    def __init__(self, *, is_for_warnings: bool):
        super().__init__()
        self._is_for_warnings = is_for_warnings

    def filter(self, record: logging.LogRecord) -> bool:
        """See `logging.Handler`."""
        return (record.levelno >= logging.WARNING) == self._is_for_warnings

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`."""
        with contextlib.suppress(OSError):
            print(self.format(record), file=sys.stderr if self._is_for_warnings else sys.stdout, flush=True)


_streams = (_Terminal(is_for_warnings=False), _Terminal(is_for_warnings=True))
for _stream in _streams:
    _stream.setFormatter(_Hiding())
    LOGGER.addHandler(_stream)
LOGGER.setLevel(logging.INFO)
LOGGER.propagate = False  # what a library does to the root logger is not done to these lines


def configure_console(job_module: str, form: Form, level: str, process: int | None = None) -> None:
    """Show records from `level` on in this form; `process` is this one's number, None where there is one alone.

    The loggers of the job's own package are shown from there on too, those of libraries from a warning on. Secrets in
    the environment are hidden. May be called again.
    """
    for secret in _secrets_of(os.environ):
        hide_secret(secret)
    for stream in _streams:
        stream.setLevel(level.upper())
        stream.setFormatter(LineFormatter(form, process))
        logging.getLogger().addHandler(stream)
    for name in (LOGGER.name, job_module.partition(".")[0]):
        logging.getLogger(name).setLevel(min(logging.INFO, _streams[0].level))


def _secrets_of(variables: Mapping[str, str]) -> list[str]:
    """What a variable holds whose name says that it is secret."""
    return [value for name, value in variables.items() if _SECRET_NAME.search(name)]
