"""What Weights & Biases has written: into a bucket, and away once it is superseded. Does not import wandb."""

import shutil
from pathlib import Path

from runner.storage import Store

FOLDER = "wandb"


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
    present = store.sizes(FOLDER)
    kept = sorted(path.name for path in (directory / FOLDER).glob("wandb/offline-run-*"))
    for path in sorted((directory / FOLDER).glob("wandb/offline-run-*/**/*")):
        name = path.relative_to(directory / FOLDER).as_posix()
        if path.is_file() and present.get(name) != path.stat().st_size:
            store.upload(path, f"{FOLDER}/{name}", deadline_seconds)
    for name in {name.split("/")[1] for name in present if name.startswith("wandb/offline-run-")} - {*kept}:
        run_id = name.split("-")[-1]
        if any(own.endswith(f"-{run_id}") and name < own for own in kept):
            store.remove_tree(f"{FOLDER}/wandb/{name}")
