"""Metric writer for Weights & Biases. Imports wandb, which takes about a second, so it is loaded on demand.

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
import shutil
import urllib.parse
from pathlib import Path
from typing import Any

import numpy as np
import wandb

from runner.console import warn
from runner.metrics.meta import find_bins
from runner.metrics.rows import Row
from runner.run.attempt import Attempt
from runner.spec import ExecutionSpec
from runner.storage import Store, default_cache_directory

FOLDER = "wandb"
UPLOAD_SECONDS = 10.0


def remove_superseded(current: Path) -> None:
    """Remove what earlier attempts at the run of directory `current` have left beside it: its own rows hold theirs.

    wandb names a directory `offline-run-<time>-<id>`, or `run-<time>-<id>` where it was online.
    """
    time, run_id = current.name.split("-")[-2:]
    for path in current.parent.glob(f"*run-*-{run_id}"):
        if path.name.split("-")[-2] < time:
            shutil.rmtree(path)


def upload_offline_runs(directory: Path, store: Store, deadline_seconds: float) -> None:
    """Copy what wandb has written offline below `directory` to the same names in a bucket, unless it is there.

    Then remove there what of the same runs is older. Each within `deadline_seconds`. Raises `OSError`.
    """
    present = store.list_sizes(FOLDER)
    kept = sorted(path.name for path in (directory / FOLDER).glob("wandb/offline-run-*"))
    for path in sorted((directory / FOLDER).glob("wandb/offline-run-*/**/*")):
        name = path.relative_to(directory / FOLDER).as_posix()
        if path.is_file() and present.get(name) != path.stat().st_size:
            store.upload(path, f"{FOLDER}/{name}", deadline_seconds)
    for name in {name.split("/")[1] for name in present if name.startswith("wandb/offline-run-")} - {*kept}:
        run_id = name.split("-")[-1]
        if any(own.endswith(f"-{run_id}") and name < own for own in kept):
            store.remove_tree(f"{FOLDER}/wandb/{name}")


class WandbWriter:
    """A place: a W&B run, shown the resolved spec, versions, commit and hosts as its config."""

    def __init__(self, spec: ExecutionSpec, attempt: Attempt):
        self._store = store = attempt.store
        self._directory = default_cache_directory() / "wandb" / attempt.run_id if store.root is None else store.root
        self._run = _start(spec, attempt, self._directory)

    def add(self, row: Row) -> None:
        """See `MetricWriter`. A row of the same step completes the one before, which wandb holds until the next."""
        self._run.log({key: _shown(value) for key, value in row.items() if key != "step"}, step=row["step"])

    def supersede(self) -> None:
        """See `MetricWriter`."""
        remove_superseded(Path(self._run.settings.sync_dir))

    def finish(self) -> None:
        """See `MetricWriter`."""
        self._run.finish()
        if self._store.root is None:
            upload_offline_runs(self._directory, self._store, UPLOAD_SECONDS)


def _shown(value: Any) -> Any:
    """A list or a histogram as W&B draws it; all else as it is."""
    found = find_bins(value)
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
