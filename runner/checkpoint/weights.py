"""`open_checkpoint`: the weights of a run, for whoever only looks, on a disk or in a bucket, beside the running job.

Nothing is claimed, fenced, created, moved or deleted. The job's own code is not needed: what is read stands in the
manifest and in `spec.yaml`.
"""

import os
from typing import Any

import jax

from runner.checkpoint.look import read_leaves
from runner.checkpoint.manifest import (
    CHECKPOINTS,
    Manifest,
    NotCommittedError,
    file_problems,
    read_manifest,
    steps,
)
from runner.errors import InvalidError, NewerFormatError, StorageError
from runner.spec import ExecutionSpec, parse_document, validate_spec
from runner.storage import Store, open_store, split_checkpoint
from runner.terminal import warn

SPEC = "spec.yaml"
_WEIGHTS = "params"
_MOST_LISTINGS = 10  # of a run that deletes its old checkpoints while one of them is read


def open_checkpoint(where: str | os.PathLike[str], step: int | str = "newest") -> tuple[Any, ExecutionSpec]:
    """The weights of a checkpoint, and the resolved spec of its run. Changes nothing, and may be called beside the run.

    `where` is the directory or URL of a run, or `<run>/checkpoints/<name>`; `step` a step, the name of a checkpoint, or
    `newest`: the newest that is good; one that is not is told on standard error. Every bit is checked as in a restore.

    The weights are `{"params": ...}`, or the whole state of a job that has no `params`: dictionaries by the parts of
    the dotted names in the manifest, jax arrays of the saved types on the first device of this process.

    Raises `InvalidError` if there is no such checkpoint or it is not good, `StorageError` if it cannot be read now.
    """
    directory, name = split_checkpoint(os.fspath(where))
    if name is not None and step != "newest":
        raise InvalidError(f"{os.fspath(where)} names a checkpoint already; got step={step} besides")
    store = open_store(directory)
    try:
        spec = _read_spec(store)
        if name is None and step == "newest":
            return _newest(store), spec
        return _weights_of(store, name or str(step)), spec
    except (InvalidError, StorageError):
        raise
    except (OSError, ValueError) as error:
        raise InvalidError(f"{store.url}/{CHECKPOINTS}/{name or step}: {error}") from error


def _read_spec(store: Store) -> ExecutionSpec:
    try:
        text = store.read(SPEC).decode()
    except FileNotFoundError as error:
        raise InvalidError(f"{store.url}: no {SPEC} is here; needs the directory of a run that has begun") from error
    except UnicodeDecodeError as error:
        raise InvalidError(f"{store.url}/{SPEC}: is no text: {error}") from error
    return validate_spec(parse_document(text, f"{store.url}/{SPEC}"))


def _newest(store: Store) -> Any:
    """The weights of the newest good step."""
    for _ in range(_MOST_LISTINGS):
        rejected: list[str] = []
        has_vanished = False
        for step in reversed(steps(store)):
            try:
                weights = _weights_of(store, str(step))
            except NotCommittedError:
                continue
            except (NewerFormatError, StorageError):
                raise
            except (OSError, ValueError) as error:
                has_vanished = has_vanished or not _is_committed(store, step)
                rejected.append(f"checkpoint {step} is not good: {error}")
                continue
            for line in rejected:
                warn(line)
            return weights
        if not has_vanished:
            raise InvalidError("; ".join([f"{store.url}: no good checkpoint is here", *rejected]))
    raise StorageError(f"{store.url}: {_MOST_LISTINGS} times a checkpoint was deleted while it was read")


def _is_committed(store: Store, step: int) -> bool:
    """Whether a step has a manifest, good or not: if it has lost it, the run has deleted it meanwhile."""
    try:
        read_manifest(store, f"{CHECKPOINTS}/{step}")
    except NotCommittedError:
        return False
    except ValueError:
        return True
    return True


def _weights_of(store: Store, name: str) -> Any:
    """The weights of one checkpoint. Raises `ValueError` or `OSError` if it is not good."""
    directory = f"{CHECKPOINTS}/{name}"
    manifest = read_manifest(store, directory)
    problem = next(iter(file_problems(store, directory, manifest.files)), None) if manifest.shards is None else None
    if problem is not None:
        raise ValueError(problem)
    arrays: dict[str, jax.Array] = {}
    for leaf in read_leaves(store, directory, manifest, _names_of_weights(manifest)):
        if leaf.problem is not None:
            raise ValueError(leaf.problem)
        arrays[leaf.name] = leaf.array
    return _nest(arrays)


def _names_of_weights(manifest: Manifest) -> list[str]:
    weights = [name for name in manifest.leaves if name == _WEIGHTS or name.startswith(f"{_WEIGHTS}.")]
    return weights or list(manifest.leaves)


def _nest(arrays: dict[str, jax.Array]) -> Any:
    """Dictionaries inside each other, by the parts of dotted names."""
    tree: Any = {}
    for name, array in arrays.items():
        *parents, last = name.split(".")
        branch = tree
        for parent in parents:
            branch = branch.setdefault(parent, {}) if isinstance(branch, dict) else None
        if not isinstance(branch, dict) or last in branch:
            raise ValueError(f"{name} is the name of a leaf, and of what other leaves stand in")
        branch[last] = array
    return tree
