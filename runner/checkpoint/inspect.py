"""Read-only access to checkpoints: `open_checkpoint` and its parts; list, verify and copy checkpoints.

A run may be on a disk or in a bucket, and may still be running: nothing is claimed, fenced, moved or deleted, and only
a copy writes, into its target. The job's own code is not needed, since the manifest and `spec.yaml` say everything that
is needed to read the arrays. A copy is verified on both sides: while it is read, and where it has arrived.
"""

import contextlib
import dataclasses
import datetime
import enum
import errno
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
from jax.sharding import NamedSharding, PartitionSpec

from runner.checkpoint import arrays as readers
from runner.checkpoint import fingerprint
from runner.checkpoint.arrays import read_leaves
from runner.checkpoint.leaves import (
    SavedWeights,
    decode_leaves,
    encode_leaves,
    flatten_with_names,
    format_type,
    has_frozen_base,
    map_weight_names,
    parse_dtype,
    split_adapter,
    validate_manifest_leaves,
    validate_weight_name,
)
from runner.checkpoint.manifest import (
    CHECKPOINTS,
    MANIFEST,
    MAX_LISTINGS,
    Manifest,
    NotCommittedError,
    find_file_problems,
    is_committed,
    list_steps,
    read_committed,
    read_manifest,
    read_newest_manifest,
)
from runner.checkpoint.policy import find_best_step, read_metrics
from runner.console import escape_unprintable, warn
from runner.errors import EXIT_DONE, EXIT_FAILED, EXIT_INVALID, InvalidError, NewerFormatError, StorageError
from runner.process import read_memory_bytes
from runner.spec import PARAMS, Document, ExecutionSpec, Trust, parse_document, validate_spec
from runner.storage import (
    ForbiddenError,
    Store,
    WrongKindError,
    as_local,
    compute_crc32c,
    create_file,
    open_store,
    split_checkpoint,
)

Result = TypeVar("Result")

SPEC, BEST = "spec.yaml", "best"
_WEIGHTS = (PARAMS, "variables")
_NUM_COPIERS = 4
_STAGED_SUFFIX = ".tmp"  # of the directory of a copy that is not complete, whose name begins with a dot
_CHECKPOINT_ERRORS = (WrongKindError, ForbiddenError)  # of one checkpoint only: another may be good


def open_checkpoint(
    where: str | os.PathLike[str], step: int | str = "newest", like: Any = None, weights: str = PARAMS
) -> tuple[Any, ExecutionSpec]:
    """Return the weights of a checkpoint and the resolved spec of its run, read-only, even beside the running job.

    Every bit is checked as in a restore. An adapter comes merged.

    Args:
        where: directory or URL of a run, or `<run>/checkpoints/<name>`.
        step: a step, the name of a checkpoint, `best` by the metric of `checkpoint.keep_best`, or `newest`, which
            considers steps only: the newest that is good. Newer ones that are not good are reported on standard error.
        like: a tree of arrays or of `jax.ShapeDtypeStruct` with shardings, such as
            `{"params": train_setup.abstract_state.params}`. Then this is called on every host, with the name of one
            checkpoint (see `find_checkpoint`), and each host reads its part.
        weights: `params` for the weights that were trained, or the name of an average of them, such as `ema_0.999`,
            which then takes their place.

    Returns:
        With `like`, leaves like these, on any mesh. Without it `{"params": ...}`, with `variables` if the model has
        others, or the whole state of a job without `params`: nested dictionaries by the parts of the dotted names in
        the manifest, of jax arrays in the saved types, on the first device of this process. And the resolved spec.

    Raises:
        InvalidError: there is no such checkpoint, or it is not good.
        StorageError: it cannot be read now.
    """

    def read(store: Store, manifest: Manifest) -> Any:
        if like is not None:
            return _read_like(store, manifest, like, weights)
        return _nest(dict(read_weights(store, manifest, weights)))

    return use_checkpoint(where, step, read)


def find_checkpoint(where: str | os.PathLike[str], step: int | str = "newest") -> tuple[str, ExecutionSpec]:
    """Return `<run>/checkpoints/<name>` of the checkpoint that `open_checkpoint` would open, and the resolved spec.

    Only the files are checked, not the bits. Called on one host, which tells the others.
    """
    return use_checkpoint(where, step, lambda store, manifest: f"{store.url}/{CHECKPOINTS}/{manifest.name}")


def use_checkpoint(
    where: str | os.PathLike[str], step: int | str, use: Callable[[Store, Manifest], Result]
) -> tuple[Result, ExecutionSpec]:
    """Return the result of `use` for a checkpoint, and the resolved spec of its run; see `open_checkpoint`.

    `use` is called with a checkpoint whose files are good. For `newest`, the next older checkpoint is tried if it
    raises `ValueError` or `OSError`, other than errors of the user or of the store.
    """
    directory, name = split_checkpoint(os.fspath(where))
    if name is not None and step != "newest":
        raise InvalidError(f"{os.fspath(where)} names a checkpoint already; got step={step} besides")
    store = open_store(directory)
    # A job may have called a checkpoint `best` itself; that one goes first.
    if name == BEST and not store.exists(f"{CHECKPOINTS}/{BEST}/{MANIFEST}"):
        name, step = None, BEST
    try:
        spec = validate_spec(read_document(store))
        if name is None and step == "newest":
            return _use_newest(store, use), spec
        if name is None and step == BEST:
            return _use_best(store, spec, use), spec
        name = name or str(step)
        return _use_named(store, name, use), spec
    except (InvalidError, StorageError):
        raise
    except (OSError, ValueError) as error:
        if isinstance(error, NotCommittedError) and name is not None and (known := read_committed(store)):
            raise make_step_error(store, name, known) from error
        reason = escape_unprintable(f"{name or step}: {error}")
        raise InvalidError(f"{store.url}/{CHECKPOINTS}/{reason}") from error


def make_step_error(store: Store, step: str, known: Iterable[int]) -> InvalidError:
    """Return the error for a step that a run does not have; `known` are those that it has."""
    steps = ", ".join(map(str, known))
    return InvalidError(f"{store.url}: got step {step}, has {steps}; needs one of them, newest or {BEST}")


def find_best_name(store: Store) -> str | None:
    """Return the name of the run's best checkpoint; None if its spec names no metric, or no checkpoint has it."""
    try:
        return find_best_checkpoint(store, validate_spec(read_document(store)))
    except InvalidError:
        return None


def find_best_checkpoint(store: Store, spec: ExecutionSpec) -> str:
    """Return the name of the run's best checkpoint, by `checkpoint.keep_best` of its spec. Raises `InvalidError`."""
    rule = spec.checkpoint.keep_best
    if rule is None:
        raise InvalidError(f"{store.url}: its spec has no checkpoint.keep_best, which says what is best; name a step")
    found = find_best_step(read_metrics(store), rule.mode)
    if found is None:
        raise InvalidError(f"{store.url}: no checkpoint has {rule.metric}, by which the best is kept; name a step")
    return str(found)


def read_document(store: Store, trust: Trust | None = None) -> Document:
    """Return the resolved spec of the run in `store`, not yet validated.

    `trust` says which modules the spec may name besides those of this project, by default none. Raises `InvalidError`
    if no run has begun there, and `StorageError` if the spec cannot be read now.
    """
    try:
        text = store.read(SPEC).decode()
    except FileNotFoundError as error:
        raise InvalidError(f"{store.url}: no {SPEC} is here; needs the directory of a run that has begun") from error
    except UnicodeDecodeError as error:
        raise InvalidError(f"{store.url}/{SPEC}: is not text: {error}") from error
    return dataclasses.replace(parse_document(text, f"{store.url}/{SPEC}"), trust=trust or Trust())


def _use_newest(store: Store, use: Callable[[Store, Manifest], Result]) -> Result:
    # The run may delete its old checkpoints meanwhile. If one of those that failed has lost its manifest, a newer one
    # was committed before that, so the steps are listed again.
    for _ in range(MAX_LISTINGS):
        rejected: list[str] = []
        has_vanished = False
        steps = list_steps(store)
        for step in reversed(steps):
            try:
                found = _use_named(store, str(step), use)
            except NotCommittedError:
                continue
            except (OSError, ValueError) as error:
                if isinstance(error, InvalidError | StorageError) and not isinstance(error, _CHECKPOINT_ERRORS):
                    raise
                has_vanished = has_vanished or not is_committed(store, str(step))
                rejected.append(escape_unprintable(f"checkpoint {step} is not good: {error}"))
                continue
            for line in rejected:
                warn(line)
            return found
        # All steps of a listing may have lost their manifests before they were read; then it has changed.
        if not has_vanished and list_steps(store) == steps:
            raise InvalidError("; ".join([f"{store.url}: no good checkpoint is here", *rejected]))
    raise StorageError(f"{store.url}: {MAX_LISTINGS} times a checkpoint was deleted while it was read")


def _use_best(store: Store, spec: ExecutionSpec, use: Callable[[Store, Manifest], Result]) -> Result:
    for _ in range(MAX_LISTINGS):
        name = find_best_checkpoint(store, spec)
        try:
            return _use_named(store, name, use)
        except (OSError, ValueError) as error:
            # The run deletes the best checkpoint only once it has a better one.
            is_own = isinstance(error, InvalidError | StorageError) and not isinstance(error, _CHECKPOINT_ERRORS)
            if is_own or is_committed(store, name):
                raise
    raise StorageError(f"{store.url}: {MAX_LISTINGS} times the best checkpoint was deleted while it was read")


def _use_named(store: Store, name: str, use: Callable[[Store, Manifest], Result]) -> Result:
    directory = f"{CHECKPOINTS}/{name}"
    manifest = read_manifest(store, directory)
    problems = [] if manifest.is_checked_in_reading else find_file_problems(store, directory, manifest.files)
    if problems:
        raise ValueError(problems[0])
    return use(store, manifest)


# Weights by name.


def find_weights(manifest: Manifest, weights: str) -> SavedWeights:
    """Return the leaves that hold the weights, by the names in the trained model.

    All leaves are weights if none is called so. In a run that trains an adapter the weights are the model's own, which
    are merged when they are read. Raises `InvalidError`, with the weights that there are, if there are no such ones.
    """
    own = [name for name in manifest.leaves if name.partition(".")[0] in _WEIGHTS]
    trained = {name: name for name in own or manifest.leaves}
    if weights != PARAMS:
        validate_weight_name(manifest.leaves, weights)
        trained = map_weight_names(weights, own)
    return split_adapter(trained, manifest.identity) if has_frozen_base(manifest.leaves) else SavedWeights(trained)


# Weights as arrays.


def read_weights(store: Store, manifest: Manifest, weights: str) -> Iterator[tuple[str, jax.Array]]:
    """Iterate over the weights by the names of `find_weights`, on the first device of this process.

    Some are in memory at a time. Raises `ValueError` if the bits of a leaf are wrong, and `OSError` if it cannot be
    read.
    """
    found = find_weights(manifest, weights)
    names = {saved: name for name, saved in found.names.items()}
    # The matrices of an adapter are small, so all of them are read before the first weight.
    pairs = dict(read_named_leaves(store, manifest, [saved for pair in found.matrices.values() for saved in pair]))
    for saved, array in read_named_leaves(store, manifest, names):
        name = names[saved]
        if name in found.matrices:
            a, b = (pairs[matrix] for matrix in found.matrices[name])
            array = found.merge(array, a, b)
        yield name, array


def read_named_leaves(store: Store, manifest: Manifest, names: Iterable[str]) -> Iterator[tuple[str, jax.Array]]:
    """Iterate over leaves by their names in the manifest, like `read_weights`."""
    names = [*names]
    _validate_leaf_memory(store, manifest, names)
    for leaf in read_leaves(store, f"{CHECKPOINTS}/{manifest.name}", manifest, names):
        if leaf.problem is not None:
            raise ValueError(leaf.problem)
        yield leaf.name, leaf.array


def _validate_leaf_memory(store: Store, manifest: Manifest, names: Iterable[str]) -> None:
    """Raise `InvalidError` if this machine cannot hold one of these leaves. The manifest may declare any shape."""
    limit_bytes = read_memory_bytes()
    for name in names:
        leaf = manifest.leaves[name]
        # A type that is not known here takes at least a byte.
        with contextlib.suppress(TypeError):
            item_bytes = 1
            item_bytes = parse_dtype(leaf["dtype"]).itemsize
        num_bytes = math.prod(leaf["shape"]) * item_bytes
        if num_bytes > limit_bytes:
            raise InvalidError(
                f"{store.url}/{CHECKPOINTS}/{manifest.name}: {name} is {format_type(leaf['dtype'], leaf['shape'])} of "
                f"{num_bytes / 2**30:,.2f} GiB, and this machine has {limit_bytes / 2**30:,.2f} GiB of memory; read it "
                "on a larger machine"
            )


def _read_like(store: Store, manifest: Manifest, like: Any, weights: str) -> Any:
    """Return leaves like those of `like`, which has the names of the manifest. Called on every host."""
    wanted = flatten_with_names(like)
    if has_frozen_base(manifest.leaves) and not wanted.keys() <= manifest.leaves.keys():
        return _read_merged_like(store, manifest, like, weights)
    if weights != PARAMS:
        known = find_weights(manifest, weights).names
        wanted = {known.get(name, name): leaf for name, leaf in wanted.items()}
    validate_manifest_leaves(manifest, like if weights == PARAMS else wanted, may_hold_more=True)
    return jax.tree.unflatten(jax.tree.structure(like), _read_verified(store, manifest, wanted).values())


def _read_merged_like(store: Store, manifest: Manifest, like: Any, weights: str) -> Any:
    """Return leaves like those of a model, from a checkpoint with an adapter, merged. Called on every host."""
    parts = find_weights(manifest, weights)
    wanted = flatten_with_names(like)
    # The base is read in the type that it is stored in, and takes the wanted type only when it is merged.
    abstract = {}
    for name, leaf in wanted.items():
        saved = parts.names.get(name)
        dtype = leaf.dtype if saved is None else parse_dtype(manifest.leaves[saved]["dtype"])
        abstract[saved or name] = jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=leaf.sharding)
    validate_manifest_leaves(manifest, abstract, may_hold_more=True)
    # Each matrix is replicated on the devices of its weight: it is small, and its axes are not those of the weight.
    for name, leaf in wanted.items():
        sharding = leaf.sharding
        if isinstance(sharding, NamedSharding):
            sharding = NamedSharding(sharding.mesh, PartitionSpec())
        for matrix in parts.matrices.get(name, ()):
            record = manifest.leaves[matrix]
            abstract[matrix] = jax.ShapeDtypeStruct(
                tuple(record["shape"]), parse_dtype(record["dtype"]), sharding=sharding
            )
    found = _read_verified(store, manifest, abstract)

    def merge_leaf(name: str, leaf: Any) -> jax.Array:
        base, matrices = found[parts.names[name]], [found[matrix] for matrix in parts.matrices.get(name, ())]
        if not matrices:
            return base.astype(leaf.dtype)
        return jax.jit(lambda *all: parts.merge(*all).astype(leaf.dtype), out_shardings=leaf.sharding)(base, *matrices)

    return jax.tree.unflatten(jax.tree.structure(like), [merge_leaf(name, leaf) for name, leaf in wanted.items()])


def _read_verified(store: Store, manifest: Manifest, abstract: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Return leaves like those of `abstract`, by their names in the manifest, each checked by its bits."""
    _validate_leaf_memory(store, manifest, abstract)
    directory = f"{CHECKPOINTS}/{manifest.name}"
    arrays = readers.read_arrays(store, directory, manifest, encode_leaves(dict(abstract)))
    found = decode_leaves(arrays, dict(abstract))
    problem = fingerprint.find_bits_problem(found, manifest.leaves)
    if problem is not None:
        raise ValueError(problem)
    return found


def _nest(arrays: dict[str, jax.Array]) -> Any:
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


# List, verify and copy.


def copy_checkpoint(source: Store, name: str | None, target: Store) -> str:
    """Copy one committed checkpoint, by default the newest, to the same name in `target`; return its name.

    Raises `InvalidError` if there is none, if it is damaged, or if the target has one of that name.
    """
    if name is not None:
        return _copy_named(source, name, target)
    for _ in range(MAX_LISTINGS):
        newest = read_newest_manifest(source)
        if newest is None:
            raise InvalidError(f"{source.url}: no checkpoint is here")
        try:
            return _copy_named(source, newest.name, target)
        except (InvalidError, FileNotFoundError):
            # The run deletes its old checkpoints while one of them is copied: then there is a newer one.
            if is_committed(source, newest.name):
                raise
            if not is_committed(target, newest.name):
                target.remove_tree(f"{CHECKPOINTS}/{newest.name}")
    raise StorageError(f"{source.url}: {MAX_LISTINGS} times a checkpoint was deleted while it was copied")


def _copy_named(source: Store, name: str, target: Store) -> str:
    directory = f"{CHECKPOINTS}/{name}"
    try:
        manifest = read_manifest(source, directory)
    except (FileNotFoundError, ValueError) as error:
        raise InvalidError(f"{source.url}/{escape_unprintable(f'{directory}: {error}')}") from error
    taken = f"{target.url}/{directory} is there already; nothing is overwritten"
    if target.exists(f"{directory}/{MANIFEST}"):
        raise InvalidError(taken)
    # On a disk the copy has another name, which is none of a checkpoint, until it is complete: what a copy that was
    # killed has left is replaced by the next one. In a bucket, and where a save that was not committed has the name,
    # the manifest alone makes it a checkpoint.
    is_staged = target.root is not None and not target.exists(directory)
    place = f"{CHECKPOINTS}/.{name}{_STAGED_SUFFIX}" if is_staged else directory

    def copy_file(file: str) -> None:
        content = source.read(f"{directory}/{file}")
        if [len(content), compute_crc32c(content)] != list(manifest.files[file]):
            raise InvalidError(f"{source.url}/{directory}: {file} is not what its manifest says; nothing was committed")
        target.write(f"{place}/{file}", content)

    try:
        if is_staged:
            target.remove_tree(place)
        with ThreadPoolExecutor(_NUM_COPIERS, thread_name_prefix="copy") as pool:
            list(pool.map(copy_file, manifest.files))
        problems = find_file_problems(target, place, manifest.files)
        if problems:
            raise InvalidError(
                f"{target.url}/{escape_unprintable(f'{directory}: {problems[0]}')}; nothing was committed"
            )
        # As in a save, the manifest comes last and commits the copy.
        create_file(target, f"{place}/{MANIFEST}", manifest.encode())
        if is_staged:
            # The rename fails if the name was taken meanwhile.
            as_local(target).move_tree(place, directory)
    except FileExistsError as error:
        raise InvalidError(taken) from error
    except OSError as error:
        if error.errno == errno.ENOTEMPTY:
            raise InvalidError(taken) from error
        raise
    finally:
        if is_staged:
            target.remove_tree(place)
    return name


class VerifyDepth(enum.Enum):
    """Depth to which a checkpoint is verified."""

    MANIFEST = "manifest"  # the manifest alone
    FILES = "files"  # size and CRC-32C of every file; in a bucket as the store itself reports them
    BITS = "bits"  # every byte is read, and the fingerprint of every leaf computed again


@dataclass(frozen=True)
class CheckpointEntry:
    """One directory below `checkpoints/`, and what is wrong with it, one line each."""

    name: str
    manifest: Manifest | None  # None if it is missing, damaged, or of a newer runner
    problems: tuple[str, ...] = ()
    is_committed: bool = True  # False if the directory has no manifest
    is_newer: bool = False  # True if a newer runner has written it


def list_entries(store: Store, depth: VerifyDepth = VerifyDepth.MANIFEST) -> Iterator[CheckpointEntry]:
    """Iterate over every checkpoint: steps by number, then other names. Raises `StorageError` if one is unreachable.

    Checkpoints that a live run commits meanwhile come last.
    """
    seen = set[str]()
    for _ in range(MAX_LISTINGS):
        has_vanished = False
        for entry in _list_unseen(store, depth, seen):
            # The run deletes a checkpoint only once it has a newer one, which is listed then.
            has_vanished = has_vanished or not entry.is_committed
            seen.add(entry.name)
            yield entry
        if not has_vanished:
            return


def _list_unseen(store: Store, depth: VerifyDepth, seen: set[str]) -> Iterator[CheckpointEntry]:
    names = set(store.list_names(CHECKPOINTS)) - seen
    for name in sorted(names, key=lambda name: (not name.isdecimal(), name.zfill(20))):
        directory = f"{CHECKPOINTS}/{name}"
        if name.startswith(".") and name.endswith(_STAGED_SUFFIX):
            yield CheckpointEntry(name, None, ("a copy that is not complete",), is_committed=False)
            continue
        try:
            manifest = read_manifest(store, directory)
        except NotCommittedError as error:
            yield CheckpointEntry(name, None, (str(error),), is_committed=False)
        except NewerFormatError as error:
            yield CheckpointEntry(name, None, (str(error),), is_newer=True)
        except StorageError:
            raise
        except (ValueError, OSError) as error:
            yield CheckpointEntry(name, None, (f"{MANIFEST}: {error}",))
        else:
            problems = tuple(_find_problems(store, directory, manifest, depth))
            if problems and not is_committed(store, name):
                # The run deletes its old checkpoints while this command reads them.
                yield CheckpointEntry(name, None, ("was deleted by the run meanwhile",), is_committed=False)
            else:
                yield CheckpointEntry(name, manifest, problems)


def _find_problems(store: Store, directory: str, manifest: Manifest, depth: VerifyDepth) -> list[str]:
    if depth is VerifyDepth.MANIFEST:
        return []
    problems = find_file_problems(store, directory, manifest.files, trust_store=depth is not VerifyDepth.BITS)
    # Arrays of damaged files cannot be read, so the bits are compared only if all files are good.
    if problems or depth is not VerifyDepth.BITS:
        return problems
    if fingerprint.combine_digests(manifest.leaves) != manifest.fingerprint:
        return ["the fingerprint is not that of the leaves"]
    _validate_leaf_memory(store, manifest, manifest.leaves)
    try:
        leaves = read_leaves(store, directory, manifest, manifest.leaves)
        return [leaf.problem for leaf in leaves if leaf.problem is not None]
    except StorageError:
        raise
    except (ValueError, OSError) as error:
        return [str(error)]


def format_report(store: Store, depth: VerifyDepth, best: str | None = None) -> tuple[list[str], int]:
    """Return lines for a person about every checkpoint, with a mark at the best, and an exit code.

    The code is 0 if everything committed is good as far as it was verified, 1 if not, 2 if a newer runner has written
    some of it.
    """
    lines, code = [], EXIT_DONE
    for entry in list_entries(store, depth):
        name = f"{escape_unprintable(entry.name):>10}"
        is_bad = bool(entry.problems and entry.is_committed)
        if entry.manifest is None:
            state = "of a newer runner" if entry.is_newer else "DAMAGED" if is_bad else "not committed"
            lines.append(f"{name}  {state}")
        else:
            manifest = entry.manifest
            try:
                moment = datetime.datetime.fromtimestamp(manifest.time).isoformat(" ", "seconds")
            except (ValueError, OverflowError, OSError):  # a time that no calendar has
                moment = "at an unknown time"
            state = "DAMAGED" if is_bad else "committed" if depth is VerifyDepth.MANIFEST else "good"
            lines.append(
                f"{name}  {state}  {manifest.num_bytes / 1e6:,.1f} MB in {len(manifest.files)} files  "
                f"{moment}  attempt {manifest.attempt}  fingerprint {escape_unprintable(manifest.fingerprint)}"
                + (f"  best: {manifest.metric:g}" if entry.name == best and manifest.metric is not None else "")
            )
        lines += [f"{'':>10}  {escape_unprintable(problem)}" for problem in entry.problems]
        code = max(code, EXIT_INVALID if entry.is_newer else EXIT_FAILED if is_bad else EXIT_DONE)
    return lines or [f"{store.url}: no checkpoints"], code


def keeps_metric(store: Store, spec: ExecutionSpec) -> bool:
    """Return True if the parent in `store` measured its checkpoints by the same `checkpoint.keep_best` as this spec."""
    try:
        return validate_spec(read_document(store)).checkpoint.keep_best == spec.checkpoint.keep_best
    except InvalidError:  # a parent that was copied without its spec
        return False
