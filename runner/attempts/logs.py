"""`logs/<attempt>.<process>.log`: the log file of a process. It never delays or fails the run.

Records wait in a queue until the directory is claimed; from then on a thread appends them as they arrive. A file that
reaches `_LOG_BYTES` becomes `<attempt>.<process>.log.1`, in place of the previous one, and the new file begins with a
line that says so, so the newest lines are kept. For a run in a bucket the file is in this machine's cache, and is
uploaded every `UPLOAD_SECONDS`, sooner after a warning, and at the end. If the disk is full or hangs, lines are lost.
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

from runner.console import LOGGER, LineFormatter, escape_controls
from runner.storage import BackgroundWriter, Store, default_cache_directory
from runner.storage.store import retry_stale

LOG_FOLDER = "logs"
_LOG_BYTES = 8 << 20
_QUEUE_LINES = 10_000
FLUSH_SECONDS = 1.0
UPLOAD_SECONDS = 60.0
_UPLOAD_AFTER_WARNING_SECONDS = 5.0
_LOG_DRAIN_SECONDS = 10.0


class _Appender(logging.handlers.RotatingFileHandler):
    """Log file on this machine's disk."""

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        super().__init__(path, maxBytes=_LOG_BYTES, backupCount=1, encoding="utf-8", errors="backslashreplace")
        self._has_warned = False

    def doRollover(self) -> None:  # noqa: N802 - the standard library's name
        super().doRollover()
        assert self.stream is not None, "it is opened at once"
        name = Path(self.baseFilename).name
        self.stream.write(f"the lines before this one are in {name}.1; any older lines were deleted\n")

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the standard library's name
        if not self._has_warned:
            self._has_warned = True
            line = f"{self.baseFilename} cannot be written ({sys.exc_info()[1]})"
            print(escape_controls(line), file=sys.stderr, flush=True)


class _LogFile(logging.Handler):
    """Handler that writes all records of this process to a file, on a thread, so that no disk blocks the run."""

    def __init__(self) -> None:
        super().__init__()
        # Bounded, because the directory may never be claimed, or the disk may hang.
        self._records: queue.Queue[logging.LogRecord] = queue.Queue(_QUEUE_LINES)
        self._has_begun = False
        self._background_writer: BackgroundWriter | None = None  # of a run in a bucket
        self._last_upload_seconds = 0.0
        self._uploaded: dict[Path, int] = {}  # modification time of each uploaded file
        self._upload: Callable[[], None] = lambda: None

    def begin(self, store: Store, run_id: str, attempt: int, process: int, background_writer: BackgroundWriter) -> None:
        folder = default_cache_directory() / LOG_FOLDER / run_id if store.root is None else store.root / LOG_FOLDER
        path = folder / f"{attempt:06}.{process}.log"
        if store.root is None:
            self._background_writer, self._upload = background_writer, lambda: self._upload_to(store, path)
        self._has_begun = True
        threading.Thread(target=self._write_records, args=(path, process), name="log file", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(queue.Full):
            self._records.put_nowait(record)

    def flush(self) -> None:
        """Wait up to `FLUSH_SECONDS` for the queued records to reach this machine's disk."""
        if self._has_begun:
            with self._records.all_tasks_done:
                self._records.all_tasks_done.wait_for(lambda: not self._records.unfinished_tasks, FLUSH_SECONDS)

    def _write_records(self, path: Path, process: int) -> None:
        try:
            appender = retry_stale(lambda: _Appender(path))
        except OSError as error:
            self._has_begun = False
            print(escape_controls(f"there is no log file: {error}"), file=sys.stderr, flush=True)
            return
        appender.setFormatter(LineFormatter("dated", process))
        while True:
            record = self._records.get()
            appender.handle(record)
            self._records.task_done()
            # A warning may be the last line before the process is lost, so it is uploaded sooner.
            wait_seconds = UPLOAD_SECONDS if record.levelno < logging.WARNING else _UPLOAD_AFTER_WARNING_SECONDS
            is_due = time.monotonic() - self._last_upload_seconds >= wait_seconds
            if self._background_writer is not None and is_due:
                self._last_upload_seconds = time.monotonic()
                self._background_writer.mark(LOG_FOLDER, self._upload)

    def _upload_to(self, store: Store, path: Path) -> None:
        for each in (path, path.with_name(f"{path.name}.1")):
            if each.exists() and self._uploaded.get(each) != each.stat().st_mtime_ns:
                # Read before the content: a line that is appended meanwhile is uploaded again next time.
                modified_ns = each.stat().st_mtime_ns
                store.write(f"{LOG_FOLDER}/{each.name}", each.read_bytes())
                self._uploaded[each] = modified_ns

    def drain(self) -> None:
        self.flush()
        if self._background_writer is not None:
            self._background_writer.mark(LOG_FOLDER, self._upload)
            self._background_writer.drain(_LOG_DRAIN_SECONDS)


def install_log_file() -> None:
    """Collect all records for a log file from now on.

    Only the command line calls this: a program that calls a job has its own logs.
    """
    # One process may run several commands (tests do), and must not log to the file of an earlier one.
    for previous in _list_log_files():
        logging.getLogger().removeHandler(previous)
        LOGGER.removeHandler(previous)
    # The runner's logger does not propagate to the root logger, so the handler is added to both.
    handler = _LogFile()
    logging.getLogger().addHandler(handler)
    LOGGER.addHandler(handler)


def begin_next_log_file() -> None:
    """Collect the records from now on for the log file of another job of this process, if it has one."""
    if _list_log_files():
        drain_log_file()
        install_log_file()


def drain_log_file() -> None:
    """Give the log file of this process, if there is one, some seconds to reach the directory. Never raises."""
    for handler in _list_log_files():
        handler.drain()


def open_log_file(store: Store, run_id: str, attempt: int, process: int, background_writer: BackgroundWriter) -> None:
    """Start writing the log file of this process, if one is installed."""
    for handler in _list_log_files():
        handler.begin(store, run_id, attempt, process, background_writer)


def _list_log_files() -> list[_LogFile]:
    return [handler for handler in LOGGER.handlers if isinstance(handler, _LogFile)]
