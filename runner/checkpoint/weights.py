"""`open_checkpoint`: the weights of a run, for whoever only looks, on a disk or in a bucket, beside the running job.

Nothing is claimed, fenced, created, moved or deleted. The job's own code is not needed: what is read stands in the
manifest and in `spec.yaml`.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import jax
from jax.sharding import NamedSharding, PartitionSpec

from runner.checkpoint import fingerprint, readers
from runner.checkpoint.leaves import (
    decode_leaves,
    encode_leaves,
    flatten_with_names,
    parse_dtype,
    validate_manifest_leaves,
)
from runner.checkpoint.manifest import (
    CHECKPOINTS,
    MANIFEST,
    Manifest,
    NotCommittedError,
    find_file_problems,
    list_steps,
    read_committed,
    read_manifest,
)
from runner.checkpoint.policy import find_best_step
from runner.checkpoint.readers import read_leaves
from runner.checkpoint.weight_names import (
    AdapterMerge,
    AdapterSplit,
    find_adapter_merge,
    has_adapter,
    map_weight_names,
    split_adapter,
    validate_weight_name,
)
from runner.console import warn
from runner.errors import InvalidError, StorageError
from runner.records import PARAMS
from runner.spec import Document, ExecutionSpec, parse_document, validate_spec
from runner.storage import ForbiddenError, Store, WrongKindError, open_store, split_checkpoint

Result = TypeVar("Result")

SPEC, BEST = "spec.yaml", "best"
_WEIGHTS = (PARAMS, "variables")
_OF_ONE = (WrongKindError, ForbiddenError)  # what stands there is not good; another checkpoint may be
_MOST_LISTINGS = 10  # of a run that deletes its old checkpoints while one of them is read


def open_checkpoint(
    where: str | os.PathLike[str], step: int | str = "newest", like: Any = None, weights: str = PARAMS
) -> tuple[Any, ExecutionSpec]:
    """The weights of a checkpoint, and the resolved spec of its run. Changes nothing, and may be called beside the run.

    `where` is the directory or URL of a run, or `<run>/checkpoints/<name>`; `step` (or `<name>`) a step, the name of a
    checkpoint, `best` by the metric of `checkpoint.keep_best`, or `newest`, which is `step` alone: the newest that is
    good; one that is not is told on standard error. `weights` are those that are trained, `params`, or an average of
    them that rides along, such as `ema_0.999`, which then takes their place. Every bit is checked as in a restore.
    An adapter comes merged.

    The weights are `{"params": ...}`, with `variables` of a model that has others, or the whole state of a job that has
    no `params`: dictionaries by the parts of the dotted names in the manifest, jax arrays of the saved types on the
    first device of this process. With `like`, a tree of arrays or of `jax.ShapeDtypeStruct` with shardings, such as
    `{"params": blueprint.abstract_state.params}`,
    they are leaves like these, on any mesh, of which each host reads its part. It is then called on every host, with
    the name of one checkpoint: see `find_checkpoint`.

    Raises `InvalidError` if there is no such checkpoint or it is not good, `StorageError` if it cannot be read now.
    """

    def read(store: Store, manifest: Manifest) -> Any:
        if like is not None:
            return _like(store, manifest, like, weights)
        return _nest(dict(read_weights(store, manifest, weights)))

    return use_checkpoint(where, step, read)


def find_checkpoint(where: str | os.PathLike[str], step: int | str = "newest") -> tuple[str, ExecutionSpec]:
    """`<run>/checkpoints/<name>` of what `open_checkpoint` would open, as far as its files show without the bits.

    To be asked on one host, and told to the others.
    """
    return use_checkpoint(where, step, lambda store, manifest: f"{store.url}/{CHECKPOINTS}/{manifest.name}")


def use_checkpoint(
    where: str | os.PathLike[str], step: int | str, use: Callable[[Store, Manifest], Result]
) -> tuple[Result, ExecutionSpec]:
    """What `use` makes of a checkpoint, and the resolved spec of its run; `where` and `step` as in `open_checkpoint`.

    Of `newest`, `use` is called with the next older one where it raises `ValueError` or `OSError`, but for those of
    the user's and of the store. Raises like `open_checkpoint`.
    """
    directory, name = split_checkpoint(os.fspath(where))
    if name is not None and step != "newest":
        raise InvalidError(f"{os.fspath(where)} names a checkpoint already; got step={step} besides")
    store = open_store(directory)
    if name == BEST and not store.exists(f"{CHECKPOINTS}/{BEST}/{MANIFEST}"):
        name, step = None, BEST
    try:
        spec = validate_spec(read_document(store))
        if name is None and step == "newest":
            return _newest(store, use), spec
        name = name or (_best(store, spec) if step == BEST else str(step))
        return _use(store, name, use), spec
    except (InvalidError, StorageError):
        raise
    except (OSError, ValueError) as error:
        raise InvalidError(f"{store.url}/{CHECKPOINTS}/{name or step}: {error}") from error


def _best(store: Store, spec: ExecutionSpec) -> str:
    """The name of the best checkpoint by the metric that the run keeps it by."""
    rule = spec.checkpoint.keep_best
    if rule is None:
        raise InvalidError(f"{store.url}: its spec has no checkpoint.keep_best, which says what is best; name a step")
    found = find_best_step({step: manifest.metric for step, manifest in read_committed(store).items()}, rule.mode)
    if found is None:
        raise InvalidError(f"{store.url}: no checkpoint has {rule.metric}, by which the best is kept; name a step")
    return str(found)


def find_best_name(store: Store) -> str | None:
    """The name of the best checkpoint of the run in `store`, None if its spec does not say what is best, or none is."""
    try:
        return _best(store, validate_spec(read_document(store)))
    except InvalidError:
        return None


def read_document(store: Store) -> Document:
    """The resolved spec of the run in `store`, not yet validated.

    Raises `InvalidError` if no run has begun there, `StorageError` if it cannot be read now.
    """
    try:
        text = store.read(SPEC).decode()
    except FileNotFoundError as error:
        raise InvalidError(f"{store.url}: no {SPEC} is here; needs the directory of a run that has begun") from error
    except UnicodeDecodeError as error:
        raise InvalidError(f"{store.url}/{SPEC}: is no text: {error}") from error
    return parse_document(text, f"{store.url}/{SPEC}")


def _newest(store: Store, use: Callable[[Store, Manifest], Result]) -> Result:
    """What `use` makes of the newest good step."""
    for _ in range(_MOST_LISTINGS):
        rejected: list[str] = []
        has_vanished = False
        for step in reversed(list_steps(store)):
            try:
                found = _use(store, str(step), use)
            except NotCommittedError:
                continue
            except (OSError, ValueError) as error:
                if isinstance(error, InvalidError | StorageError) and not isinstance(error, _OF_ONE):
                    raise
                has_vanished = has_vanished or not _is_committed(store, step)
                rejected.append(f"checkpoint {step} is not good: {error}")
                continue
            for line in rejected:
                warn(line)
            return found
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


def _use(store: Store, name: str, use: Callable[[Store, Manifest], Result]) -> Result:
    """What `use` makes of one checkpoint whose files are good. Raises `ValueError` or `OSError` if they are not."""
    directory = f"{CHECKPOINTS}/{name}"
    manifest = read_manifest(store, directory)
    problem = (
        next(iter(find_file_problems(store, directory, manifest.files)), None) if manifest.shards is None else None
    )
    if problem is not None:
        raise ValueError(problem)
    return use(store, manifest)


def read_weights(store: Store, manifest: Manifest, weights: str) -> Iterator[tuple[str, jax.Array]]:
    """The leaves by the names of `find_weight_names`, some at a time, on the first device of this process.

    Raises `ValueError` or `OSError` as soon as one is not good.
    """
    names = {saved: name for name, saved in find_weight_names(manifest, weights).items()}
    merge, parts = find_adapter(manifest, weights)
    pairs = dict(read_named_leaves(store, manifest, [saved for pair in parts.matrices.values() for saved in pair]))
    for saved, array in read_named_leaves(store, manifest, names):
        name = names[saved]
        if name in parts.matrices:
            a, b = (pairs[matrix] for matrix in parts.matrices[name])
            array = merge(array, a, b)
        yield name, array


def read_named_leaves(store: Store, manifest: Manifest, names: Iterable[str]) -> Iterator[tuple[str, jax.Array]]:
    """The leaves of these names in the manifest, on the first device of this process; raises like `read_weights`."""
    for leaf in read_leaves(store, f"{CHECKPOINTS}/{manifest.name}", manifest, names):
        if leaf.problem is not None:
            raise ValueError(leaf.problem)
        yield leaf.name, leaf.array


def _like(store: Store, manifest: Manifest, like: Any, weights: str) -> Any:
    """Leaves like those of `like`, which has the names of the manifest. Called on every host."""
    if has_adapter(manifest.leaves) and not flatten_with_names(like).keys() <= manifest.leaves.keys():
        return _merged_like(store, manifest, like, weights)
    if weights == PARAMS:
        abstract = flatten_with_names(like)
        validate_manifest_leaves(manifest, like, may_hold_more=True)
    else:
        known = find_weight_names(manifest, weights)
        abstract = {known.get(name, name): leaf for name, leaf in flatten_with_names(like).items()}
        validate_manifest_leaves(manifest, abstract, may_hold_more=True)
    return jax.tree.unflatten(jax.tree.structure(like), _read_like(store, manifest, abstract).values())


def _read_like(store: Store, manifest: Manifest, abstract: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Leaves like those of `abstract`, by their names in the manifest, each checked by its bits."""
    directory = f"{CHECKPOINTS}/{manifest.name}"
    found = decode_leaves(
        readers.read_arrays(store, directory, manifest, encode_leaves(dict(abstract))), dict(abstract)
    )
    for name, digest in fingerprint.compute_leaf_digests(found).items():
        if digest != manifest.leaves[name]["digest"]:
            raise ValueError(f"the bits of {name} are not those that were saved")
    return found


def _merged_like(store: Store, manifest: Manifest, like: Any, weights: str) -> Any:
    """Leaves like those of `like`, a model's, from a checkpoint with an adapter, merged. Called on every host."""
    merge, parts = find_adapter(manifest, weights)
    abstract = {
        parts.own.get(name, name): _of_type(manifest, parts.own.get(name), leaf)
        for name, leaf in flatten_with_names(like).items()
    }
    validate_manifest_leaves(manifest, abstract, may_hold_more=True)
    pairs = {
        matrix: _whole(manifest, matrix, leaf)
        for name, leaf in flatten_with_names(like).items()
        for matrix in parts.matrices.get(name, ())
    }
    found = _read_like(store, manifest, abstract | pairs)

    def made(name: str, leaf: Any) -> jax.Array:
        base, matrices = found[parts.own[name]], [found[matrix] for matrix in parts.matrices.get(name, ())]
        if not matrices:
            return base.astype(leaf.dtype)
        return jax.jit(lambda *all: merge(*all).astype(leaf.dtype), out_shardings=leaf.sharding)(base, *matrices)

    leaves = [made(name, leaf) for name, leaf in flatten_with_names(like).items()]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _of_type(manifest: Manifest, saved: str | None, leaf: Any) -> jax.ShapeDtypeStruct:
    """`leaf` in the type that the checkpoint has it in."""
    dtype = leaf.dtype if saved is None else parse_dtype(manifest.leaves[saved]["dtype"])
    return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=leaf.sharding)


def _whole(manifest: Manifest, name: str, leaf: Any) -> jax.ShapeDtypeStruct:
    """A matrix of an adapter, on every device that its weight lies on."""
    sharding = leaf.sharding
    if isinstance(sharding, NamedSharding):
        sharding = NamedSharding(sharding.mesh, PartitionSpec())
    record = manifest.leaves[name]
    return jax.ShapeDtypeStruct(tuple(record["shape"]), parse_dtype(record["dtype"]), sharding=sharding)


def find_adapter(manifest: Manifest, weights: str) -> tuple[AdapterMerge, AdapterSplit]:
    """How a checkpoint's weights are merged, and of what; of one without an adapter nothing is."""
    merge = find_adapter_merge(manifest.identity)
    if merge is None or not has_adapter(manifest.leaves):
        return AdapterMerge(0.0), AdapterSplit({}, {})
    return merge, split_adapter(_trained_names(manifest, weights))


def find_weight_names(manifest: Manifest, weights: str) -> Mapping[str, str]:
    """The leaves that are weights, by the names that they have in those that are trained: the names in the manifest.

    All leaves, where none is called so; of a run that trains an adapter the model's own, which are merged when they are
    read. Raises `InvalidError` if there are no such `weights`, and says which are.
    """
    trained = _trained_names(manifest, weights)
    return split_adapter(trained).own if has_adapter(manifest.leaves) else trained


def _trained_names(manifest: Manifest, weights: str) -> Mapping[str, str]:
    """The same, with an adapter beside its base."""
    own = [name for name in manifest.leaves if name.partition(".")[0] in _WEIGHTS]
    if weights == PARAMS:
        return {name: name for name in own or manifest.leaves}
    validate_weight_name(manifest.leaves, weights)
    return map_weight_names(weights, own)


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
