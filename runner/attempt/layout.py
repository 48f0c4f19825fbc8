"""The names in a run's directory, and what kind of thing each must be. In a bucket there are no kinds."""

from runner.errors import InvalidError
from runner.storage import Store, check_way, kind_of

LAYOUT = {
    "job.json": "a file",
    "attempts": "a directory",
    "spec.yaml": "a file",
    "events.jsonl": "a file",
    "metrics.jsonl": "a file",
    "checkpoints": "a directory",
    "quarantine": "a directory",
    "stacks": "a directory",
    "wandb": "a directory",
    "result.json": "a file",
}
EXPENDABLE = ("compiled",)  # where something else stands under these names the run does without them, and says so


def refuse_other_kinds(store: Store) -> None:
    """Raise `InvalidError` if something of another kind stands where the run would read or write."""
    if store.root is None:
        return
    check_way(store.root)
    for name, needed in LAYOUT.items():
        path = store.root / name
        kind = kind_of(path)
        if kind not in (None, needed):
            raise InvalidError(f"{path} is {kind}, needs {needed}; move it away")
