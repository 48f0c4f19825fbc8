"""Weights & Biases as one more place to look at rows. It never stops a run and never slows one.

All of wandb happens on a thread of its own behind a bounded queue: a start that hangs on a dead server, a missing key
or a full disk costs rows in the dashboard and one line on the terminal, nothing else. The run id is the job's, so a
resumed job goes on in the same run; steps that a killed attempt has already shown are dropped by wandb itself.

Its own files are in `wandb/` of the run's directory. wandb can write to a disk alone, so for a run in a bucket they are
in this machine's cache while the job runs, and are uploaded when it ends, those of attempts that were killed here too.
"""

import netrc
import os
import queue
import threading
import urllib.parse
from pathlib import Path
from typing import Any

import wandb

from runner.spec import ExecutionSpec
from runner.storage import Store, default_cache_directory
from runner.terminal import warn
from runner.train.metrics.offline import FOLDER, upload_offline_runs
from runner.train.metrics.row import Row

_QUEUE_ROWS = 10_000
_CLOSE_SECONDS = 10.0
_ERRORS = (wandb.Error, OSError, RuntimeError, ValueError)


class Tracking:
    """A W&B run, shown `spec` as its config. Main host only."""

    def __init__(self, spec: ExecutionSpec, run_id: str, store: Store):
        self._store = store
        directory = default_cache_directory() / "wandb" / run_id if store.root is None else store.root
        self._rows: queue.Queue[Row | None] = queue.Queue(_QUEUE_ROWS)
        self._thread = threading.Thread(target=self._work, args=(spec, run_id, directory), name="wandb", daemon=True)
        self._thread.start()

    def show(self, row: Row) -> None:
        """Queue one row; dropped if the queue is full."""
        try:
            self._rows.put_nowait(row)
        except queue.Full:
            return

    def close(self) -> None:
        """Let the thread finish for some seconds, then leave it."""
        try:
            self._rows.put_nowait(None)
        except queue.Full:
            return
        self._thread.join(_CLOSE_SECONDS)

    def _work(self, spec: ExecutionSpec, run_id: str, directory: Path) -> None:
        try:
            run = _start(spec, run_id, directory)
            while (row := self._rows.get()) is not None:
                run.log({key: value for key, value in row.items() if key != "step"}, step=row["step"])
            run.finish()
            if self._store.root is None:
                upload_offline_runs(directory, self._store, _CLOSE_SECONDS)
        except _ERRORS as error:
            warn(f"wandb is off: {type(error).__name__}: {error}".split("\n", 1)[0])


def _start(spec: ExecutionSpec, run_id: str, directory: Path) -> Any:
    mode = spec.logging.wandb
    if mode == "online" and not _has_key():
        warn("wandb: no API key here, logging offline; `wandb sync` uploads it later")
        mode = "offline"
    folder = directory / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("WANDB_CACHE_DIR", str(folder / "cache"))  # else its logs lie in the home directory
    return wandb.init(
        project=spec.project,
        group=spec.group,
        name=spec.name,
        id=run_id,
        resume="allow",
        mode=mode,
        dir=str(folder),
        config=spec.model_dump(mode="json"),
        settings=wandb.Settings(silent=True, console="off", disable_git=True, disable_code=True),
    )


def _has_key() -> bool:
    """Whether wandb could log in without asking for a key, which would block."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urllib.parse.urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host or "") is not None
    except (OSError, netrc.NetrcParseError):
        return False
