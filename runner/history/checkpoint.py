"""The checkpoints that are there, and what is known of them without reading an array.

What bounds it: the manifests of the `SEEN_MAX` newest steps and of as many other names are read. Of older ones the
ledger's word is taken.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from runner.checkpoint.manifest import CHECKPOINTS, Manifest, NotCommittedError, read_manifest
from runner.errors import StorageError
from runner.history.ledger import Ledger
from runner.history.record import Checkpoint, Trust
from runner.storage import DiskError, Store, number_in

SEEN_MAX = 32
_NUM_READERS = 8


def list_names(store: Store) -> tuple[list[int], list[str]]:
    """Steps ascending, and other names sorted."""
    names = store.children(CHECKPOINTS)
    found = sorted(step for step in map(number_in, names) if step is not None)
    return found, sorted(name for name in names if number_in(name) is None and not name.startswith("."))


def read_checkpoints(store: Store, steps: Sequence[int], names: Sequence[str], ledger: Ledger) -> list[Checkpoint]:
    """Those of `list_names`, with what the manifests and the ledger say."""
    older = [_told(step, ledger) for step in steps[:-SEEN_MAX]]
    with ThreadPoolExecutor(_NUM_READERS) as pool:
        seen = [*map(str, steps[-SEEN_MAX:]), *names[:SEEN_MAX]]
        return [*older, *pool.map(lambda name: _look(store, name, ledger), seen)]


def _told(step: int, ledger: Ledger) -> Checkpoint:
    time, num_bytes, attempt = ledger.commits.get(step, (None, None, None))
    return Checkpoint(str(step), step, Trust.UNSEEN, time, num_bytes, attempt)


def _look(store: Store, name: str, ledger: Ledger) -> Checkpoint:
    directory = f"{CHECKPOINTS}/{name}"
    try:
        manifest = read_manifest(store, directory)
        problem = _problem(store.sizes(directory), manifest)
    except NotCommittedError as error:
        return Checkpoint(name, number_in(name), Trust.UNCOMMITTED, problem=str(error))
    except StorageError as error:
        if not isinstance(error, DiskError):
            raise  # that a bucket is down says nothing of what is in it
        return Checkpoint(name, number_in(name), Trust.DAMAGED, problem=str(error))
    except (OSError, ValueError) as error:
        return Checkpoint(name, number_in(name), Trust.DAMAGED, problem=str(error))
    is_verified = manifest.is_of_a_step and manifest.step in ledger.verified
    trust = Trust.DAMAGED if problem else Trust.VERIFIED if is_verified else Trust.COMMITTED
    return Checkpoint(name, manifest.step, trust, manifest.time, manifest.num_bytes, manifest.attempt, problem)


def _problem(sizes: dict[str, int], manifest: Manifest) -> str | None:
    for name, (size, _) in manifest.files.items():
        if sizes.get(name) != size:
            return f"{name} {'is missing' if name not in sizes else f'has {sizes[name]} bytes, needs {size}'}"
    return None
