"""`logs/<attempt>.<process>.log`: what a process has said, for who asks after its end. Never in a run's way.

Lines wait in a queue until the directory is claimed, then a thread appends them as they come. When a file has
`LOG_BYTES` it becomes `<attempt>.<process>.log.1`, in the place of the one before, and the new one begins with a line
that says so: the newest lines stay. For a run in a bucket the file is in this machine's cache, and is uploaded every
`UPLOAD_SECONDS`, sooner after a warning, and at the end. A disk that is full or hangs costs the lines.
"""

import contextlib
import logging
import logging.handlers
import queue
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from runner.console import LOGGER, LineFormatter
from runner.storage import BackgroundWriter, Store, default_cache_directory

LOG_FOLDER = "logs"
LOG_BYTES = 8 << 20
QUEUE_LINES = 10_000
FLUSH_SECONDS = 1.0
UPLOAD_SECONDS = 60.0
_UPLOAD_AFTER_A_WARNING_SECONDS = 5.0
DRAIN_SECONDS = 10.0


class _Appender(logging.handlers.RotatingFileHandler):
    """The file on this machine's disk."""

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        super().__init__(path, maxBytes=LOG_BYTES, backupCount=1, encoding="utf-8", errors="backslashreplace")
        self._has_warned = False

    def doRollover(self) -> None:  # noqa: N802 - the standard library's name
        """See `RotatingFileHandler`."""
        super().doRollover()
        assert self.stream is not None, "it is opened at once"
        name = Path(self.baseFilename).name
        self.stream.write(f"the lines before are in {name}.1; those before that, if there were any, are gone\n")

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - likewise
        """Once, on standard error alone."""
        if not self._has_warned:
            self._has_warned = True
            print(f"{self.baseFilename} cannot be written ({sys.exc_info()[1]})", file=sys.stderr, flush=True)


class LogFile(logging.Handler):
    """All records of this process, from `begin` on in a file. Written on a thread: a disk that hangs stops nobody."""

    def __init__(self) -> None:
        super().__init__()
        self._records: queue.Queue[logging.LogRecord] = queue.Queue(QUEUE_LINES)
        self._has_begun = False
        self._background: BackgroundWriter | None = None  # of a run in a bucket
        self._mark_seconds = 0.0
        self._sent: dict[Path, int] = {}  # what is in the bucket, by its time of change
        self._send: Callable[[], None] = lambda: None

    def begin(self, store: Store, run_id: str, attempt: int, process: int, background: BackgroundWriter) -> None:
        """The directory is this attempt's. Called once."""
        folder = default_cache_directory() / LOG_FOLDER / run_id if store.root is None else store.root / LOG_FOLDER
        path = folder / f"{attempt:06}.{process}.log"
        if store.root is None:
            self._background, self._send = background, lambda: self._send_to(store, path)
        self._has_begun = True
        threading.Thread(target=self._work, args=(path, process), name="log file", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`. Waits for nothing; a line too many is left out."""
        with contextlib.suppress(queue.Full):
            self._records.put_nowait(record)

    def flush(self) -> None:
        """Give what was said a second to arrive on this machine's disk."""
        if self._has_begun:
            with self._records.all_tasks_done:
                self._records.all_tasks_done.wait_for(lambda: not self._records.unfinished_tasks, FLUSH_SECONDS)

    def _work(self, path: Path, process: int) -> None:
        try:
            appender = _Appender(path)
        except OSError as error:
            self._has_begun = False
            print(f"there is no log file: {error}", file=sys.stderr, flush=True)
            return
        appender.setFormatter(LineFormatter("dated", process))
        while True:
            record = self._records.get()
            appender.handle(record)
            self._records.task_done()
            wait_seconds = UPLOAD_SECONDS if record.levelno < logging.WARNING else _UPLOAD_AFTER_A_WARNING_SECONDS
            if self._background is not None and time.monotonic() - self._mark_seconds >= wait_seconds:
                self._mark_seconds = time.monotonic()
                self._background.mark(LOG_FOLDER, self._send)

    def _send_to(self, store: Store, path: Path) -> None:
        """Write what has changed into the bucket: the file, and the one before it if there is one."""
        for each in (path, path.with_name(f"{path.name}.1")):
            if each.exists() and self._sent.get(each) != each.stat().st_mtime_ns:
                changed = each.stat().st_mtime_ns
                store.write(f"{LOG_FOLDER}/{each.name}", each.read_bytes())
                self._sent[each] = changed

    def finish(self) -> None:
        """Before the end of the process: give what was said some seconds to arrive in the bucket. Never raises."""
        self.flush()
        if self._background is not None:
            self._background.mark(LOG_FOLDER, self._send)
            self._background.drain(DRAIN_SECONDS)


def install_log_file() -> None:
    """Keep what is said from now on. The command alone calls it: who calls a job from a program has its own log."""
    for before in _log_files():
        logging.getLogger().removeHandler(before)
        LOGGER.removeHandler(before)
    handler = LogFile()
    logging.getLogger().addHandler(handler)
    LOGGER.addHandler(handler)


def drain_log_file() -> None:
    """See `LogFile.finish`."""
    for handler in _log_files():
        handler.finish()


def open_log_file(store: Store, run_id: str, attempt: int, process: int, background: BackgroundWriter) -> None:
    """Give the log file of this process its place, if there is one."""
    for handler in _log_files():
        handler.begin(store, run_id, attempt, process, background)


def _log_files() -> list[LogFile]:
    return [handler for handler in LOGGER.handlers if isinstance(handler, LogFile)]
