"""What Weights & Biases has written offline, on the way into a bucket. Does not import wandb."""

from pathlib import Path

from runner.storage import Store

FOLDER = "wandb"


def upload_offline_runs(directory: Path, store: Store, deadline_seconds: float) -> None:
    """Copy what wandb has written offline below `directory` to the same names in a bucket, unless it is there.

    Each within `deadline_seconds`. Raises `OSError`.
    """
    present = store.sizes(FOLDER)
    for path in sorted((directory / FOLDER).glob("wandb/offline-run-*/**/*")):
        name = path.relative_to(directory / FOLDER).as_posix()
        if path.is_file() and present.get(name) != path.stat().st_size:
            store.upload(path, f"{FOLDER}/{name}", deadline_seconds)
