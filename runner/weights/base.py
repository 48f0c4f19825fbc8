"""The weights that an adapter is trained beside: their fingerprint is part of what defines the trajectory.

Of a checkpoint that `checkpoint.init_from` names it is the digest of its leaves; of a run, whose newest checkpoint may
be another by the time of a resume, the run's own id; of weights of others the digest of some bytes of each tensor. A
resume, which has the base in its own state, goes on where the source is gone; a source that is another is refused.
"""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from runner.checkpoint.manifest import CHECKPOINTS, newest_manifest, read_manifest
from runner.errors import InvalidError, ResumeError, StorageError
from runner.record import PARAMS
from runner.spec import Document, ExecutionSpec, Trajectory, hash_of
from runner.storage import Store, open_store, split_checkpoint
from runner.terminal import warn
from runner.weights.directory import is_published, open_published

ADAPTER_BASE = "config.adapter.base"  # of the trajectory
_SAMPLE_BYTES = 4096  # from the middle of each tensor: training moves every one
_NUM_READERS = 8
_WEIGHTS = ("params.", "variables.")


def name_base(document: Document, spec: ExecutionSpec, config: Any, store: Store) -> Trajectory:
    """What an adapter adds to the trajectory: the fingerprint of the weights that the spec names; nothing without one.

    Where they are gone it is that of the run's own. Raises `InvalidError` if they are not there and the run in `store`
    has not begun.
    """
    return {} if config.adapter is None else {ADAPTER_BASE: _fingerprint(document, spec, store)}


def _fingerprint(document: Document, spec: ExecutionSpec, store: Store) -> str:
    assert spec.checkpoint.weights is not None, "the job's design refuses that"
    chosen = spec.checkpoint.weights.weights
    which = "" if chosen == PARAMS else f" {chosen}"
    own = newest_manifest(store)
    saved = None if own is None else own.identity.get(ADAPTER_BASE)
    with document.blaming("checkpoint.init_from"):
        try:
            return base_fingerprint(spec.checkpoint.weights.path) + which
        except (InvalidError, StorageError, FileNotFoundError) as error:
            if saved is None:
                raise error if isinstance(error, InvalidError | StorageError) else ResumeError(str(error)) from error
            warn(f"the base is not looked at again, the run goes on with its own copy: {error}")
            return str(saved)


def base_fingerprint(path: str) -> str:
    """What tells one base from another, by what `checkpoint.init_from` names."""
    directory, name = split_checkpoint(path)
    store = open_store(directory)
    if name is None and is_published(store):
        return f"files {_digest_of_files(store)}"
    manifest = newest_manifest(store) if name is None else read_manifest(store, f"{CHECKPOINTS}/{name}")
    if manifest is None:
        raise ResumeError(f"{store.url}: no checkpoint is here")
    if name is None:
        return f"run {manifest.job}"
    digests = {leaf: record["digest"] for leaf, record in manifest.leaves.items() if leaf.startswith(_WEIGHTS)}
    return f"run {manifest.job} {hash_of(digests)[:16]}"


def _digest_of_files(store: Store) -> str:
    """Of the name, type and shape of each tensor, and of some of its bytes."""
    published = open_published(store)

    def sample(name: str) -> list[str]:
        tensor = published.tensors[name]
        start = max(tensor.start, (tensor.start + tensor.stop - _SAMPLE_BYTES) // 2)
        stop = min(tensor.stop, start + _SAMPLE_BYTES)
        found = store.read_range(tensor.file, start, stop, published.versions[tensor.file]) if start < stop else b""
        return [tensor.dtype, str(tensor.shape), hashlib.sha256(found).hexdigest()]

    names = sorted(published.tensors)
    with ThreadPoolExecutor(_NUM_READERS, thread_name_prefix="base") as pool:
        return hash_of(dict(zip(names, pool.map(sample, names), strict=True)))[:16]
