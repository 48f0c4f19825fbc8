"""From what a spec says of checkpoints to the parts that save, restore and retain them."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from runner.attempt.event_log import EventLog
from runner.attempt.fence import Fence
from runner.checkpoint.fast import FastTier
from runner.checkpoint.restore import Restorer
from runner.checkpoint.retention import Retention
from runner.checkpoint.save import Place, Saver
from runner.checkpoint.writer import OrbaxWriter, PieceWriter, Writer
from runner.errors import InvalidError
from runner.hosts.agreement import Hosts
from runner.spec import Checkpoint
from runner.storage import Store, default_cache_directory


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of one attempt."""

    saver: Saver
    restorer: Restorer
    retention: Retention
    has_fast_tier: bool


def open_checkpoints(
    rule: Checkpoint,
    store: Store,
    hosts: Hosts,
    fence: Fence,
    ledger: EventLog,
    *,
    job_id: str,
    before_commit: Callable[[], None],
    abstract: Any,
) -> Checkpoints:
    """All that one attempt needs. `abstract` is the state's. Called on every host.

    Raises `InvalidError` on every host if the fast tier of one cannot hold its parts.
    """
    place = Place(store, hosts, fence, ledger, _open_fast_tier(rule, hosts, job_id, abstract))
    best = None if rule.keep_best is None else rule.keep_best.mode
    retention = Retention(place, rule.keep_last, rule.keep_every_steps, best)

    def after_commit(manifest: dict[str, Any]) -> None:
        if hosts.is_main and manifest["name"].isdecimal():
            retention.apply(manifest)

    writer = _open_writer(store, hosts, job_id)
    saver = Saver(place, writer, rule.max_unsaved_minutes * 60, before_commit, after_commit)
    return Checkpoints(saver, Restorer(place), retention, place.fast is not None)


def _open_writer(store: Store, hosts: Hosts, job_id: str) -> Writer:
    if store.root is not None:
        return OrbaxWriter(store, hosts)
    staging = default_cache_directory() / "staging" / f"{job_id}.{hosts.process_id}"
    shutil.rmtree(staging, ignore_errors=True)  # of an attempt that was killed
    return PieceWriter(store, hosts, staging)


def _open_fast_tier(rule: Checkpoint, hosts: Hosts, job_id: str, abstract: Any) -> FastTier | None:
    if rule.local_directory is None:
        return None
    fast = FastTier(Path(rule.local_directory).expanduser().absolute() / job_id / str(hosts.process_id))
    try:
        problem = fast.room(sum(_own_bytes(leaf) for leaf in jax.tree.leaves(abstract)))
    except OSError as error:
        problem = f"cannot be written: {error}"
    problem = next((text for text in hosts.gather(problem) if text is not None), None)
    if problem is not None:
        raise InvalidError(problem)
    return fast


def _own_bytes(leaf: Any) -> int:
    """Bytes of an abstract array that this process holds, each element once."""
    shard = leaf.sharding.shard_shape(leaf.shape)
    blocks = {str(index) for index in leaf.sharding.addressable_devices_indices_map(leaf.shape).values()}
    return int(np.prod(shard)) * leaf.dtype.itemsize * len(blocks)
