"""Leaves from tensors: each host reads the byte ranges that its devices' parts of a leaf lie in, and no more.

A part of a tensor is many ranges where it is cut along another axis than the first. Ranges with less than `GAP_BYTES`
between them are read as one, since to ask for each costs more than what lies between.

Values become the leaf's type: the nearest, of two that are as near the even one; F64 by way of float32.

The weights that an adapter is trained beside: their fingerprint is part of what defines the trajectory.

Of a checkpoint that `checkpoint.init_from` names it is the digest of its leaves; of a run, whose newest checkpoint may
be another by the time of a resume, the run's own id; of weights of others the digest of some bytes of each tensor. A
resume, which has the base in its own state, goes on where the source is gone; a source that is another is refused.

What `checkpoint.init_from` names: another run, or weights of others in Hugging Face's layout.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from runner.checkpoint.leaves import flatten_with_names
from runner.checkpoint.manifest import CHECKPOINTS, read_manifest, read_newest_manifest
from runner.checkpoint.restore import load_weights, validate_source_run
from runner.checkpoint.weights import BEST, find_checkpoint
from runner.console import warn
from runner.errors import InvalidError, ResumeError, StorageError
from runner.huggingface.mapping import Family, TensorMatch, TensorPiece, match_tensors
from runner.huggingface.safetensors import (
    DTYPES,
    PublishedWeights,
    TensorLocation,
    has_published_weights,
    open_published_weights,
)
from runner.records import PARAMS
from runner.run.attempt import Attempt
from runner.spec import Document, ExecutionSpec, InitFromConfig, Trajectory, hash_record
from runner.storage import Store, Version, open_store, split_checkpoint

GAP_BYTES = 64 << 10
SPAN_BYTES = 64 << 20  # that are asked for at a time
NUM_READERS = 8

Index = tuple[slice, ...]
Bounds = tuple[tuple[int, int], ...]
Blocks = dict[Bounds, np.ndarray]  # of one leaf, in this host's memory
Sources = Sequence[tuple[TensorPiece, TensorLocation | None]]


def read_leaf(store: Store, versions: Mapping[str, Version], sources: Sources, leaf: jax.Array) -> jax.Array:
    """A leaf like `leaf`, which has its shape, type, sharding, and the values of what is not read. On every host.

    Raises `ChangedError` if a file is no longer the one that was looked at, else as the store does.
    """
    is_whole = all(tensor is not None and _is_whole(piece, tensor, leaf.shape) for piece, tensor in sources)
    blocks: Blocks = {}
    for shard in leaf.addressable_shards:
        bounds = compute_bounds(shard.index, leaf.shape)
        if bounds not in blocks:
            shape = [stop - start for start, stop in bounds]
            blocks[bounds] = np.empty(shape, leaf.dtype) if is_whole else np.array(shard.data)
    fill_blocks(store, versions, sources, blocks)
    return jax.make_array_from_callback(
        leaf.shape, leaf.sharding, lambda index: blocks[compute_bounds(index or (), leaf.shape)], dtype=leaf.dtype
    )


def fill_blocks(store: Store, versions: Mapping[str, Version], sources: Sources, blocks: Blocks) -> None:
    """Put into blocks of a leaf, by where they lie in it, what its tensors have of them."""
    present = [(piece, tensor) for piece, tensor in sources if tensor is not None]

    def fill_piece(source: tuple[TensorPiece, TensorLocation], run: Callable[..., Iterable[None]]) -> None:
        piece, tensor = source
        _fill_piece(store, versions[tensor.file], piece, tensor, blocks, run)

    with ThreadPoolExecutor(NUM_READERS, thread_name_prefix="read") as pool:
        if len(present) == 1:
            fill_piece(present[0], pool.map)
        else:
            list(pool.map(lambda source: fill_piece(source, map), present))


def compute_bounds(index: Index, shape: tuple[int, ...]) -> Bounds:
    """(start, stop) on each axis of a part of an array of this shape."""
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def _is_whole(piece: TensorPiece, tensor: TensorLocation, leaf: tuple[int, ...]) -> bool:
    """Whether a tensor has every element of its piece."""
    own = leaf[len(piece.index) :]
    return piece.part is not None or math.prod(tensor.shape) == math.prod(own)


def _fill_piece(
    store: Store,
    version: Version,
    piece: TensorPiece,
    tensor: TensorLocation,
    blocks: Blocks,
    run: Callable[..., Iterable[None]],
) -> None:
    """Read what the blocks have of a piece, each range once, and put it there."""
    wanted = []
    for bounds, block in blocks.items():
        depth = len(piece.index)
        if all(start <= at < stop for at, (start, stop) in zip(piece.index, bounds[:depth], strict=True)):
            place: list[Any] = [at - start for at, (start, _) in zip(piece.index, bounds[:depth], strict=True)]
            wanted.append((block[(*place, ...)], _in_tensor(bounds[depth:], piece, tensor.shape)))
    wanted = [(target, box) for target, box in wanted if all(start < stop for start, stop in box)]
    if not wanted:
        return
    values = _read_boxes(store, version, tensor, [box for _, box in wanted], run)
    for target, box in wanted:
        found = values[tuple(slice(*bounds) for bounds in box)]
        if found.dtype.itemsize == 8:
            found = found.astype(np.float32)
        found = found.swapaxes(-1, -2) if piece.transpose else found
        target[tuple(slice(0, size) for size in found.shape)] = found.astype(target.dtype)


def _in_tensor(bounds: Sequence[tuple[int, int]], piece: TensorPiece, shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """Where in its tensor a part of a piece lies; no more than the tensor has."""
    box = list(bounds)
    if piece.transpose:
        box[-1], box[-2] = box[-2], box[-1]
    if piece.part is not None:
        axis, offset, _ = piece.part
        box[axis] = box[axis][0] + offset, box[axis][1] + offset
    return [(min(start, size), min(stop, size)) for (start, stop), size in zip(box, shape, strict=True)]


def _read_boxes(
    store: Store,
    version: Version,
    tensor: TensorLocation,
    boxes: Sequence[list[tuple[int, int]]],
    run: Callable[..., Iterable[None]],
) -> np.ndarray:
    """The tensor in memory, of which no more than the boxes is filled, and the pages of no more are touched.

    `run` calls a function for each span, one after the other or several at a time.
    """
    dtype = DTYPES[tensor.dtype]
    content = np.empty(tensor.stop - tensor.start, np.uint8)

    def fetch(span: tuple[int, int]) -> None:
        start, stop = span
        found = store.read_range(tensor.file, tensor.start + start, tensor.start + stop, version)
        content[start:stop] = np.frombuffer(found, np.uint8)

    list(run(fetch, list_byte_spans(tensor.shape, dtype.itemsize, boxes)))
    return content.view(dtype).reshape(tensor.shape)


def list_byte_spans(
    shape: tuple[int, ...], itemsize: int, boxes: Sequence[Sequence[tuple[int, int]]]
) -> Iterator[tuple[int, int]]:
    """The ranges of bytes, relative to the tensor's first, that boxes of a tensor lie in: ascending, none twice."""
    ranges = np.concatenate([_ranges(shape, itemsize, box) for box in boxes])
    ranges = ranges[np.argsort(ranges[:, 0], kind="stable")]
    ends = np.maximum.accumulate(ranges[:, 1])
    cuts = np.flatnonzero(ranges[1:, 0] - ends[:-1] > GAP_BYTES) + 1
    for start, stop in zip(ranges[np.r_[0, cuts], 0], ends[np.r_[cuts - 1, len(ends) - 1]], strict=True):
        for begin in range(int(start), int(stop), SPAN_BYTES):
            yield begin, min(begin + SPAN_BYTES, int(stop))


def _ranges(shape: tuple[int, ...], itemsize: int, box: Sequence[tuple[int, int]]) -> np.ndarray:
    """The (start, stop) of every run of bytes that lie one after the other in a box."""
    inner = len(shape)  # axes from here on are whole
    while inner and box[inner - 1] == (0, shape[inner - 1]):
        inner -= 1
    strides = [math.prod(shape[axis + 1 :]) * itemsize for axis in range(len(shape))]
    starts = np.zeros(1, np.int64)
    for axis in range(inner - 1):
        starts = (starts[:, None] + np.arange(*box[axis], dtype=np.int64) * strides[axis]).reshape(-1)
    if not inner:
        return np.array([[0, math.prod(shape) * itemsize]], np.int64)
    first, last = box[inner - 1]
    starts = starts + first * strides[inner - 1]
    return np.stack([starts, starts + (last - first) * strides[inner - 1]], axis=1)


ADAPTER_BASE = "config.adapter.base"  # of the trajectory
_SAMPLE_BYTES = 4096  # from the middle of each tensor: training moves every one
_NUM_READERS = 8
_WEIGHTS = ("params.", "variables.")


def identify_adapter_base(document: Document, spec: ExecutionSpec, config: Any, store: Store) -> Trajectory:
    """What an adapter adds to the trajectory: the fingerprint of the weights that the spec names; nothing without one.

    Where they are gone it is that of the run's own. Raises `InvalidError` if they are not there and the run in `store`
    has not begun.
    """
    return {} if config.adapter is None else {ADAPTER_BASE: _fingerprint(document, spec, store)}


def _fingerprint(document: Document, spec: ExecutionSpec, store: Store) -> str:
    assert spec.checkpoint.initial_weights is not None, "the job's design refuses that"
    chosen = spec.checkpoint.initial_weights.weights
    which = "" if chosen == PARAMS else f" {chosen}"
    own = read_newest_manifest(store)
    saved = None if own is None else own.identity.get(ADAPTER_BASE)
    with document.errors_at("checkpoint.init_from"):
        try:
            return _compute_base_fingerprint(spec.checkpoint.initial_weights.path) + which
        except (InvalidError, StorageError, FileNotFoundError) as error:
            if saved is None:
                raise error if isinstance(error, InvalidError | StorageError) else ResumeError(str(error)) from error
            warn(f"the base is not looked at again, the run goes on with its own copy: {error}")
            return str(saved)


def _compute_base_fingerprint(path: str) -> str:
    """What tells one base from another, by what `checkpoint.init_from` names."""
    directory, name = split_checkpoint(path)
    store = open_store(directory)
    if name is None and has_published_weights(store):
        return f"files {_digest_of_files(store)}"
    manifest = read_newest_manifest(store) if name is None else read_manifest(store, f"{CHECKPOINTS}/{name}")
    if manifest is None:
        raise ResumeError(f"{store.url}: no checkpoint is here")
    if name is None:
        return f"run {manifest.job}"
    digests = {leaf: record["digest"] for leaf, record in manifest.leaves.items() if leaf.startswith(_WEIGHTS)}
    return f"run {manifest.job} {hash_record(digests)[:16]}"


def _digest_of_files(store: Store) -> str:
    """Of the name, type and shape of each tensor, and of some of its bytes."""
    published = open_published_weights(store)

    def sample(name: str) -> list[str]:
        tensor = published.tensors[name]
        start = max(tensor.start, (tensor.start + tensor.stop - _SAMPLE_BYTES) // 2)
        stop = min(tensor.stop, start + _SAMPLE_BYTES)
        found = store.read_range(tensor.file, start, stop, published.versions[tensor.file]) if start < stop else b""
        return [tensor.dtype, str(tensor.shape), hashlib.sha256(found).hexdigest()]

    names = sorted(published.tensors)
    with ThreadPoolExecutor(_NUM_READERS, thread_name_prefix="base") as pool:
        return hash_record(dict(zip(names, pool.map(sample, names), strict=True)))[:16]


FamilyOf = Callable[[], Family | None]


def validate_init_from(
    document: Document, rule: InitFromConfig | None, family: FamilyOf, weights: Callable[[], Any]
) -> None:
    """Refuse, with every line of what does not fit, weights that could not be begun with. Reads headers alone.

    `weights` gives the abstract leaves that are to be filled. Main host only. Nothing if there is no rule.
    """
    if rule is None:
        return
    with document.errors_at("checkpoint.init_from"):
        store = _published_store(rule)
        if store is None:
            validate_source_run(_named(rule.path), rule.weights)
        else:
            _match(open_published_weights(store), rule, family, weights())


def load_init_from(
    document: Document,
    rule: InitFromConfig,
    family: FamilyOf,
    weights: Any,
    attempt: Attempt,
) -> Any:
    """Leaves like those of `weights`, which lie as the state does at its init. Called on every host.

    Raises `InvalidError` or `StorageError` on every host if one cannot read them.
    """
    with document.errors_at("checkpoint.init_from"):
        store = _published_store(rule)
        if store is None:
            path = attempt.hosts.run_on_main(lambda: _named(rule.path))
            return load_weights(attempt, path, weights, rule.weights)
        loaded, problem = None, None
        told: tuple[str, ...] = ()
        try:
            loaded, told = _load(store, rule, family, weights)
        except (InvalidError, FileNotFoundError) as error:
            problem = ["invalid", str(error)]
        except OSError as error:
            problem = ["storage", str(error)]
        first = next((other for other in attempt.hosts.gather(problem) if other is not None), None)
        if first is not None:
            raise InvalidError(first[1]) if first[0] == "invalid" else StorageError(first[1])
    if attempt.hosts.is_main:
        for line in told:
            warn(line)
    attempt.say(f"weights taken from {store.url}")
    return loaded


def _named(path: str) -> str:
    """`path`, where it ends in `checkpoints/best` with the step that is the best now. On one host."""
    return find_checkpoint(path)[0] if split_checkpoint(path)[1] == BEST else path


def _published_store(rule: InitFromConfig) -> Store | None:
    """Where the weights of others are; None if the rule names a run, of which all is taken as it is."""
    directory, name = split_checkpoint(rule.path)
    store = open_store(directory)
    if name is None and has_published_weights(store):
        if rule.weights != PARAMS:
            raise InvalidError(f"weights: nothing reads it: {rule.path}, in Hugging Face's layout, has no averages")
        return store
    for key in ("allow_missing", "rename"):
        if getattr(rule, key):
            raise InvalidError(
                f"{key}: nothing reads it: {rule.path} is not in Hugging Face's layout, and of a run all weights are "
                "taken as they are; export the run, and begin with that"
            )
    return None


def _match(published: PublishedWeights, rule: InitFromConfig, family: FamilyOf, weights: Any) -> TensorMatch:
    known = family()
    if known is None:
        raise InvalidError(
            f"{published.store.url} is in Hugging Face's layout, and the job does not say how its weights are called "
            "there: see `family` of BaseTrainer"
        )
    return match_tensors(
        published, known, {name: leaf.shape for name, leaf in flatten_with_names(weights).items()}, rule
    )


def _load(store: Store, rule: InitFromConfig, family: FamilyOf, weights: Any) -> tuple[Any, tuple[str, ...]]:
    """The leaves, each host its part, and what was allowed, a line each."""
    published = open_published_weights(store)
    found = _match(published, rule, family, weights)
    leaves = [
        read_leaf(store, published.versions, found.pieces[name], leaf)
        for name, leaf in flatten_with_names(weights).items()
    ]
    return jax.tree.unflatten(jax.tree.structure(weights), leaves), found.notes
