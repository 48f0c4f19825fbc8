"""Fast tier: the newest states on each host's own disk or RAM disk, beside the durable directory.

Each process keeps the pieces of a step that it needs to restore itself (its *part*), so nothing here is shared and
nothing is waited for. A step counts only if every process still has its part of it: together they choose the newest
such step, so a host that comes back empty, or with half a step, sends all of them to an older step or to the durable
directory. A part is written under a temporary name, flushed, and renamed as a whole.

A part of this process is in a `PartDirectory` (`runner.checkpoint.parts`), its copies on other hosts are made by
`Replicas` (`runner.checkpoint.replicas`). A disk may hold the fast tiers of several runs; those of runs that can never
resume from them are deleted.
"""

import contextlib
import os
import re
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np

from runner.attempts.attempt import Attempt
from runner.attempts.layout import read_owner, read_result
from runner.checkpoint.blocks import Blocks
from runner.checkpoint.leaves import Leaves
from runner.checkpoint.manifest import Manifest
from runner.checkpoint.parts import FastPart, PartDirectory
from runner.checkpoint.replicas import COPIES, ProcessPlace, Replicas, choose_holders
from runner.console import say, warn
from runner.distributed.agreement import Hosts
from runner.errors import InvalidError, ResumeError, RunnerError
from runner.process import read_creation_ticks, read_machine_id
from runner.spec import CheckpointConfig, Trajectory, hash_record
from runner.storage import (
    Key,
    LocalStore,
    Store,
    encode_json,
    local_directory,
    make_store,
    parse_json,
    parse_number,
    validate_record,
)

_HOST_FILE = "host"  # with the name of the host to which a directory of parts belongs


class UnusableTierError(InvalidError):
    """The disk of a host cannot hold its parts."""


class FastTier:
    """Parts of this process, and their copies on other hosts if the spec asks for them. Made on every host.

    Args:
        parts: the process's own parts.
        hosts: all processes of the job.
        replicas: the copies; None if there are none.
    """

    def __init__(self, parts: PartDirectory, hosts: Hosts, replicas: Replicas | None = None):
        self._parts, self._hosts, self._replicas = parts, hosts, replicas

    def list_parts(
        self, is_own: Callable[[Trajectory, int], bool], last_steps: Mapping[int, int], first_step: int
    ) -> dict[int, FastPart]:
        """Return by step each part from which this process can continue. Called on every host.

        Args:
            is_own: returns True for a trajectory, saved at a step, that this run continues.
            last_steps: by attempt, the lowest step from which a later attempt has resumed; its later parts are ignored.
            first_step: lowest step worth reading from another host.
        """
        if self._replicas is None:
            return self._parts.list_parts(is_own, last_steps)
        return self._replicas.list_parts(is_own, last_steps, first_step)

    def write(self, manifest: Manifest, blocks: Blocks, attachments: dict[str, bytes]) -> None:
        """Write this process's part of a step. Raises `OSError`."""
        self._parts.write(manifest, blocks, attachments)

    def send(self, step: int) -> None:
        """Start to copy this process's part of a step to other hosts, in the background."""
        if self._replicas is not None:
            self._replicas.send(step)

    def delete_after(self, step: int) -> None:
        """Delete the parts and the copies on this host of steps beyond `step`."""
        self._parts.delete_after(step)
        if self._replicas is not None:
            self._replicas.delete_after(step)

    def withdraw_after(self, step: int) -> None:
        """Delete the parts and copies of all hosts of steps beyond `step`, also those on their way. On every host."""
        if self._replicas is not None:
            # A copy that arrived after the deletion would outlive it.
            self._replicas.begin_generation()
            self._hosts.barrier()
        self.delete_after(step)
        if self._replicas is not None:
            # A host with copies must have deleted them before durable checkpoints are discarded.
            self._hosts.barrier()

    def close(self) -> None:
        """Stop copying."""
        if self._replicas is not None:
            self._replicas.close()

    def remove(self) -> None:
        """Delete all of it on this host, because the run is done. Call `close` first.

        What cannot be deleted is left for other runs.
        """
        directory = self._parts.directory
        shutil.rmtree(directory, ignore_errors=True)
        with contextlib.suppress(OSError):
            directory.parent.rmdir()  # by the last process of this host


def open_fast_tier(attempt: Attempt, config: CheckpointConfig, leaves: Leaves) -> FastTier | None:
    """Open the fast tier of this process; None if the spec asks for none. Called on every host.

    Args:
        attempt: the running attempt.
        config: the section `checkpoint` of the spec.
        leaves: abstract arrays with shardings, as they are stored.

    Raises:
        UnusableTierError: on every host, if the disk of one cannot hold its parts.
    """
    if config.local_directory is None:
        return None
    directory = local_directory(config.local_directory)
    # First, because they may take the room that this run needs.
    remove_ended_runs(directory, attempt.run_id)
    own_directory = directory / attempt.run_id / str(attempt.hosts.process_id)
    fast_tier = make_fast_tier(own_directory, attempt.hosts, leaves, config.local_replicas)
    with contextlib.suppress(OSError):  # then the parts stay until somebody deletes them
        write_run_file(own_directory, attempt.store, attempt.run_id)
    return fast_tier


def make_fast_tier(directory: Path, hosts: Hosts, leaves: Leaves, num_replicas: int = 0) -> FastTier:
    """Make the fast tier of this process, with room for its parts and copies. Called on every host.

    Args:
        directory: the process's own directory.
        hosts: all processes of the job.
        leaves: abstract arrays with shardings, as they are stored.
        num_replicas: `checkpoint.local_replicas`. An elastic job has fewer while hosts are missing.

    Raises:
        UnusableTierError: on every host, if the disk of one cannot hold its parts.
    """
    parts, part_bytes, host = PartDirectory(directory), 0, socket.gethostname()
    blocks_of: dict[str, list[str]] = {}
    for name, leaf in leaves.items():
        # A process keeps each block that it holds once, however many of its devices have a copy.
        blocks = {str(index) for index in leaf.sharding.addressable_devices_indices_map(leaf.shape).values()}
        part_bytes += int(np.prod(leaf.sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize * len(blocks)
        blocks_of[name] = sorted(blocks)
    slice_index = getattr(jax.local_devices()[0], "slice_index", None)
    place = ProcessPlace(slice_index, host, hash_record(blocks_of))

    def arrange(values: list[Any]) -> list[Any]:
        """Return for each process those of its host, its holders, the owners of its copies, and the bytes of these."""
        places = [ProcessPlace(*fields) for _, fields in values]
        by_host: dict[str, list[int]] = {}
        for process, each in enumerate(places):
            by_host.setdefault(each.host, []).append(process)
        if hosts.num_processes > 1 and len(by_host) <= num_replicas:
            warn("checkpoint.local_replicas: all copies of a part are on one host, and are lost with it")
        holders = choose_holders(places, min(num_replicas, hosts.num_processes - 1))
        owners: list[list[int]] = [[] for _ in places]
        for owner, own_holders in enumerate(holders):
            for holder in own_holders:
                owners[holder].append(owner)
        return [
            [by_host[each.host], holders[process], owners[process], sum(values[owner][0] for owner in owners[process])]
            for process, each in enumerate(places)
        ]

    own, holders, owners, copied_bytes = hosts.distribute([part_bytes, astuple(place)], arrange)
    if not num_replicas:
        _clear_former_parts(directory.parent, host, set(map(str, own)), None)
        shutil.rmtree(directory / COPIES, ignore_errors=True)
    elif own[0] == hosts.process_id:
        # One process of a host takes over what its former numbers have left.
        _clear_former_parts(directory.parent, host, set(map(str, own)), directory / COPIES)
    try:
        problem = parts.find_space_problem(part_bytes, copied_bytes, bool(holders))
        LocalStore(directory).write(_HOST_FILE, host.encode())
    except OSError as error:
        problem = f"cannot be written: {error}"
    # All hosts end together, and none waits for one that has gone.
    problem = hosts.reduce(problem, lambda problems: next((each for each in problems if each is not None), None))
    if problem is not None:
        raise UnusableTierError(problem)
    if not num_replicas or hosts.num_processes == 1:
        return FastTier(parts, hosts)
    replicas = Replicas(parts, hosts, owners, hosts.agree(secrets.token_hex(16)))
    replicas.connect(hosts.liveness.get_own_address(), holders, place)
    return FastTier(parts, hosts, replicas)


def _clear_former_parts(directory: Path, host: str, own: set[str], copies: Path | None) -> None:
    """Delete the parts of processes that this host had under other numbers, before the job lost or exchanged a host.

    Args:
        directory: directory of the run, with a directory for each process.
        host: name of this host. Where hosts share a disk, those of the others are left alone.
        own: numbers of the processes on this host.
        copies: directory to which the parts are moved instead, from where the other processes can fetch them.
    """
    with contextlib.suppress(OSError):
        for path in directory.iterdir():
            if parse_number(path.name) is None or path.name in own:
                continue
            with contextlib.suppress(OSError, ValueError):
                if LocalStore(path).read(_HOST_FILE).decode() != host:
                    continue
                if copies is not None:
                    former = path / COPIES
                    for source in [path, *(former.iterdir() if former.is_dir() else [])]:
                        (copies / source.name).mkdir(parents=True, exist_ok=True)
                        for part in source.iterdir():
                            target = copies / source.name / part.name
                            if parse_number(part.name) is not None and not target.exists():
                                os.rename(part, target)
                shutil.rmtree(path, ignore_errors=True)


# Which parts of other runs to delete from the disk of a host.


_RUN_FILE = "run.json"
_REMOVED_SUFFIX = ".removed"  # of a run's name here while its parts are being deleted
_RUN_NAME = re.compile(rf"[0-9a-f]{{12}}({re.escape(_REMOVED_SUFFIX)})?")
_MAX_RUNS = 100  # that a start looks at
_MAX_SIBLINGS = 1000  # among which a renamed run is looked for
_LOOK_SECONDS = 20.0  # for which a start waits; the directories of other runs may hang
_QUIET_SECONDS = 3600.0
_RUN_KEYS = (
    Key("directory", str, "Path or URL of the run's directory."),
    Key("ancestors", dict, "Inode of each directory above, by path, that is on the disk of the run's directory."),
    Key("id", str, "Id of the run."),
    Key("machine", str, "Boot and process numbering of the machine; empty if the system does not tell."),
    Key("process", int, "Id of the process."),
    Key("created", int | None, "When it was created, in ticks since boot."),
)


@dataclass(frozen=True)
class _RunFile:
    """Content of `run.json` in the fast tier of a process; the fields are `_RUN_KEYS`."""

    directory: str
    ancestors: Mapping[str, int]
    id: str
    machine: str
    process: int
    created: int | None

    @classmethod
    def create(cls, store: Store, run_id: str) -> Self:
        """Return the record of this process. Raises `OSError`."""
        ancestors = {}
        if store.root is not None:
            device = store.root.stat().st_dev
            found = {str(each): each.stat() for each in store.root.parents}
            # What is above the mount point tells nothing of the disk.
            ancestors = {path: status.st_ino for path, status in found.items() if status.st_dev == device}
        process = os.getpid()
        return cls(store.url, ancestors, run_id, read_machine_id(), process, read_creation_ticks(process))

    @classmethod
    def read(cls, directory: Path) -> Self:
        """Return the record in the fast tier of a process. Raises `OSError` or `ValueError`."""
        record = parse_json(LocalStore(directory).read(_RUN_FILE))
        validate_record(record, _RUN_KEYS, [key.name for key in _RUN_KEYS])
        return cls(**{key.name: record[key.name] for key in _RUN_KEYS})

    def is_quiet(self, directory: Path) -> bool:
        """Return True if the process has ended; where that cannot be told, if it has written nothing lately."""
        if self.machine and self.machine == read_machine_id():
            return self.created != read_creation_ticks(self.process)
        times = [entry.stat().st_mtime for entry in os.scandir(directory)]
        return time.time() - max(times, default=0.0) >= _QUIET_SECONDS


class _OtherRun:
    """Fast tiers of another run on this host, and the decision whether it can ever resume from them.

    It cannot in two cases:

    - The run is done: it has a `result.json`, and no part is of a later step, as those of a run that was extended are.
    - The run was deleted: its directory is missing, or belongs to another run. A disk that is not mounted now looks
      alike, so the nearest directory above that exists must be one of the run's own disk, by its inode. A run that was
      renamed is found below that directory by the id in its `job.json`.

    What cannot be decided is kept: directories that cannot be read, and parts without `run.json`. A run is also kept
    while one of its processes lives on this machine, or, where this cannot be told, for `_QUIET_SECONDS`.
    """

    def __init__(self, path: Path):
        self.path, self.run_id = path, path.name

    def find_end(self) -> str | None:
        """Return why no process of the run will ever read its parts here, or None if one may.

        Raises:
            OSError, ValueError, RunnerError: this cannot be told.
        """
        processes = [each for each in self.path.iterdir() if parse_number(each.name) is not None]
        records = {each: _RunFile.read(each) for each in processes}
        if not records or not all(
            record.id == self.run_id and record.is_quiet(each) for each, record in records.items()
        ):
            return None
        places = [place for each in processes for place in (each, *(each / COPIES).glob("*")) if place.is_dir()]
        steps = [step for place in places for path in place.iterdir() if (step := parse_number(path.name)) is not None]
        # The processes may have begun at different times, with the run in different places.
        ends = [
            self.find_end_in(make_store(directory), ancestors, max(steps, default=0))
            for directory, ancestors in {record.directory: record.ancestors for record in records.values()}.items()
        ]
        return None if None in ends else ends[0]

    def find_end_in(self, store: Store, ancestors: Mapping[str, int], last_step: int) -> str | None:
        """Return what `find_end` does, for one place of the run's directory."""
        owner = read_owner(store)
        if owner is not None and owner.id == self.run_id:
            result = read_result(store)
            return None if result is None or last_step > result.step else f"the run in {store.url} is done"
        deleted = f"the run in {store.url} was deleted"
        if store.root is None:
            return deleted if owner is not None or not store.list_names("") else None
        if owner is None and os.path.lexists(store.root):  # it may be about to be filled again
            return None
        nearest = next(each for each in store.root.parents if os.path.lexists(each))
        if ancestors.get(str(nearest)) != nearest.stat().st_ino:
            return None
        return None if self.may_be_below(nearest, len(store.root.relative_to(nearest).parts)) else deleted

    def may_be_below(self, top: Path, depth: int) -> bool:
        """Return True if the run is at this depth below a directory, or if there are too many directories to tell."""
        tops, num_seen = [top], 0
        for _ in range(depth):
            below: list[Path] = []
            for each in tops:
                with contextlib.suppress(PermissionError):  # of another user, as the run is not
                    below += [Path(entry) for entry in os.scandir(each) if entry.is_dir()]
                if num_seen + len(below) > _MAX_SIBLINGS:
                    return True
            tops, num_seen = below, num_seen + len(below)
        for each in tops:
            with contextlib.suppress(PermissionError, ResumeError):  # no run can continue there
                owner = read_owner(LocalStore(each))
                if owner is not None and owner.id == self.run_id:
                    return True
        return False


def write_run_file(directory: Path, store: Store, run_id: str) -> None:
    """Name the run and this process in the fast tier of this process. Raises `OSError`."""
    LocalStore(directory).write(_RUN_FILE, encode_json(asdict(_RunFile.create(store, run_id))))


def remove_ended_runs(local_directory: Path, own_id: str) -> None:
    """Delete the parts of other runs that can never resume from them. Called at the start, on every process.

    Waits for `_LOOK_SECONDS` at most; the rest is done in the background. Never raises, because a run must not depend
    on others.
    """

    def work() -> None:
        with contextlib.suppress(OSError):
            names = sorted(name for name in os.listdir(local_directory) if _RUN_NAME.fullmatch(name))
            for path in [local_directory / name for name in names if name != own_id][:_MAX_RUNS]:
                # Another process may do the same now, and the directories of other runs may be in any state.
                with contextlib.suppress(OSError, ValueError, RunnerError):
                    removed = path
                    if not path.name.endswith(_REMOVED_SUFFIX):
                        reason = _OtherRun(path).find_end()
                        if reason is None:
                            continue
                        # Renamed first, so that a process which comes back meanwhile has an empty directory.
                        removed = path.rename(f"{path}{_REMOVED_SUFFIX}")
                        say(f"removed the parts of run {path.name} in {local_directory}: {reason}")
                    shutil.rmtree(removed, ignore_errors=True)

    thread = threading.Thread(target=work, name="ended runs", daemon=True)
    thread.start()
    thread.join(_LOOK_SECONDS)
