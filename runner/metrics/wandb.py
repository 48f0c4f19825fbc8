"""Metric writer for Weights & Biases. It imports wandb, which takes about a second, and is therefore loaded on demand.

All attempts of a job use one run id, and each attempt gives wandb the whole trajectory; `.github/docs/metrics.md` says
what W&B shows. Offline, the newest file holds all rows and the earlier ones are removed, because `wandb sync` replaces
the history on the server by that of one file. Online, each attempt starts without `resume`: with `resume="allow"` the
server would keep the rows of lost steps and drop the recomputed ones, and `resume_from`, which would remove them, is
not available on every server.

Offline, a fork is a separate run, because a server that refuses forks would refuse the whole file. So it is if the user
has started another W&B run in the process: after a refused fork its id can be used again only when all W&B runs of the
process have ended.

The files of wandb are in `wandb/` of the run directory. wandb writes to local disks only, so for a run in a bucket they
are in this machine's cache while the job runs. They are uploaded when it ends, together with those of attempts that
were killed on this machine.
"""

import os
import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import wandb

from runner.attempts.attempt import Attempt
from runner.attempts.environment import has_wandb_key
from runner.console import warn
from runner.metrics.media import read_row_media
from runner.metrics.meta import RowValue, find_bins
from runner.metrics.rows import Row
from runner.spec import ExecutionSpec
from runner.storage import Store, default_cache_directory

FOLDER = "wandb"
UPLOAD_SECONDS = 10.0
_REASON_CHARACTERS_MAX = 200


def upload_offline_runs(directory: Path, store: Store, deadline_seconds: float) -> None:
    """Upload the offline runs of wandb, and then remove older ones of the same runs from the bucket.

    Files that the bucket already has are not uploaded again. The deadline is that of each file. Raises `OSError`.
    """
    present = store.list_sizes(FOLDER)
    local = sorted(path.name for path in (directory / FOLDER).glob("wandb/offline-run-*"))
    for path in sorted((directory / FOLDER).glob("wandb/offline-run-*/**/*")):
        name = path.relative_to(directory / FOLDER).as_posix()
        if path.is_file() and present.get(name) != path.stat().st_size:
            store.upload(path, f"{FOLDER}/{name}", deadline_seconds)
    # Only after the newest run is uploaded, so that a kill in between loses no row.
    for name in {name.split("/")[1] for name in present if name.startswith("wandb/offline-run-")} - {*local}:
        run_id = name.split("-")[-1]
        if any(own.endswith(f"-{run_id}") and name < own for own in local):
            store.remove_tree(f"{FOLDER}/wandb/{name}")


class WandbWriter:
    """W&B run, a `MetricWriter`. Its config is the resolved spec with versions, commit and hosts."""

    def __init__(self, spec: ExecutionSpec, attempt: Attempt):
        self._store = store = attempt.store
        self._has_warned = False
        self._directory = default_cache_directory() / "wandb" / attempt.run_id if store.root is None else store.root
        mode = spec.logging.wandb
        if mode == "online" and not has_wandb_key():
            warn("wandb: no API key found, so the run is logged offline; upload it later with `wandb sync`")
            mode = "offline"
        folder = self._directory / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        os.environ.setdefault("WANDB_CACHE_DIR", str(folder / "cache"))  # by default its logs are in the home directory

        is_alone = wandb.run is None

        def start(fork_from: str | None) -> wandb.Run:
            return wandb.init(
                entity=spec.logging.wandb_entity,
                project=spec.project,
                group=spec.group,
                name=spec.name,
                tags=spec.logging.wandb_tags,
                id=attempt.run_id,
                fork_from=fork_from,
                mode=mode,
                dir=str(folder),
                config=spec.model_dump(mode="json")
                | {"environment": attempt.environment}
                | ({"lineage": attempt.lineage} if attempt.lineage else {}),
                # By default wandb returns the active run, which is not ours.
                reinit=None if is_alone else "create_new",
                settings=wandb.Settings(silent=True, console="off", disable_git=True, disable_code=True),
            )

        lineage = attempt.lineage if mode == "online" and is_alone else {}
        moment = f"{lineage['id']}?_step={lineage['step']}" if lineage else None
        try:
            self._run = start(moment)
        # The server may not offer forks, or not have the parent, which may have logged to another project or nowhere.
        except wandb.Error as error:
            if moment is None:
                raise
            reason = str(error).split("\n", 1)[0][:_REASON_CHARACTERS_MAX]
            warn(f"wandb: the run is not shown as a fork of {moment}: {reason}; its config has the lineage")
            wandb.teardown()  # wandb holds the id of a run whose start has failed
            self._run = start(None)

    def add(self, row: Row) -> None:
        """Log a row. wandb merges successive rows of one step, so a second row of a step completes the first one."""
        values: Row = {key: convert_value(value) for key, value in row.items() if key != "step"}
        with tempfile.TemporaryDirectory() as folder:  # from which `log` copies
            for number, (key, content) in enumerate(read_row_media(self._store, row).items()):
                is_audio = content.startswith(b"RIFF")
                if is_audio or find_spec("PIL") is not None:
                    path = Path(folder, f"{number}.{'wav' if is_audio else 'png'}")
                    path.write_bytes(content)
                    values[key] = wandb.Audio(str(path)) if is_audio else wandb.Image(str(path))
                elif not self._has_warned:
                    self._has_warned = True
                    warn("wandb: images are left out, since W&B needs Pillow for them; pip install pillow")
            self._run.log({key: value for key, value in values.items() if value is not None}, step=row["step"])

    def supersede(self) -> None:
        """Remove the local runs of earlier attempts, whose rows the present one holds."""
        # wandb calls a directory `offline-run-<time>-<id>`, or `run-<time>-<id>` if it was online.
        current = Path(self._run.settings.sync_dir)
        time, run_id = current.name.split("-")[-2:]
        for path in current.parent.glob(f"*run-*-{run_id}"):
            if path.name.split("-")[-2] < time:
                shutil.rmtree(path)

    def finish(self) -> None:
        """End the run, and upload it if the run directory is in a bucket."""
        self._run.finish()
        if self._store.root is None:
            upload_offline_runs(self._directory, self._store, UPLOAD_SECONDS)


def convert_value(value: RowValue) -> RowValue | wandb.Histogram:
    """Return a list or a histogram as a W&B histogram, None for a reference to a file, and any other value as it is."""
    bins = find_bins(value)
    if bins is None and isinstance(value, dict):
        return None
    return value if bins is None else wandb.Histogram(np_histogram=(np.asarray(bins[0]), np.asarray(bins[1])))
