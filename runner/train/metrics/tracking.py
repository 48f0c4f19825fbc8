"""Weights & Biases as a place that holds the rows (see `place`).

The run id is the job's in all attempts, and each attempt gives wandb the whole trajectory. Offline that is one file for
each attempt, of which the newest holds everything, and the earlier are removed: `wandb sync` of a file puts its history
in the place of what the server has under that id, so of several that hold a part each only the last would be seen
(https://github.com/wandb/wandb/issues/5865 and 3841). Online it is a start without `resume`, which writes over the
run's history line by line from the first row on (issue 3424): rows of lost steps are gone as soon as the attempt has
computed those steps anew. With `resume="allow"` the server keeps them for good, and drops the recomputed ones;
`resume_from`, which would cut them off, is not on every server.

Its own files are in `wandb/` of the run's directory. wandb can write to a disk alone, so for a run in a bucket they are
in this machine's cache while the job runs, and are uploaded when it ends, those of attempts that were killed here too.
"""

import netrc
import os
import urllib.parse
from pathlib import Path
from typing import Any

import numpy as np
import wandb

from runner.attempt.claim import Attempt
from runner.spec import ExecutionSpec
from runner.storage import default_cache_directory
from runner.terminal import warn
from runner.train.meta import bins_of
from runner.train.metrics.offline import FOLDER, remove_superseded, upload_offline_runs
from runner.train.metrics.place import CLOSE_SECONDS
from runner.train.metrics.row import Row


class Tracking:
    """A place: a W&B run, shown the resolved spec, versions, commit and hosts as its config."""

    def __init__(self, spec: ExecutionSpec, attempt: Attempt):
        self._store = store = attempt.store
        self._directory = default_cache_directory() / "wandb" / attempt.run_id if store.root is None else store.root
        self._run = _start(spec, attempt, self._directory)

    def add(self, row: Row) -> None:
        """See `Place`. A row of the same step completes the one before, which wandb holds until the next."""
        self._run.log({key: _shown(value) for key, value in row.items() if key != "step"}, step=row["step"])

    def supersede(self) -> None:
        """See `Place`."""
        remove_superseded(Path(self._run.settings.sync_dir))

    def finish(self) -> None:
        """See `Place`."""
        self._run.finish()
        if self._store.root is None:
            upload_offline_runs(self._directory, self._store, CLOSE_SECONDS)


def _shown(value: Any) -> Any:
    """A list or a histogram as W&B draws it; all else as it is."""
    found = bins_of(value)
    return value if found is None else wandb.Histogram(np_histogram=(np.asarray(found[0]), np.asarray(found[1])))


def _start(spec: ExecutionSpec, attempt: Attempt, directory: Path) -> Any:
    mode = spec.logging.wandb
    if mode == "online" and not _has_key():
        warn("wandb: no API key here, logging offline; `wandb sync` uploads it later")
        mode = "offline"
    folder = directory / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("WANDB_CACHE_DIR", str(folder / "cache"))  # else its logs lie in the home directory
    return wandb.init(
        entity=spec.logging.wandb_entity,
        project=spec.project,
        group=spec.group,
        name=spec.name,
        tags=spec.logging.wandb_tags,
        id=attempt.run_id,
        mode=mode,
        dir=str(folder),
        config=spec.model_dump(mode="json") | {"environment": attempt.environment},
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
