"""Import of weights: `checkpoint.init_from`, the base of adapters, and reading leaves from tensors.

`checkpoint.init_from` names another run, or published weights in Hugging Face's layout.

**Model of published weights.** Keys of `config.model` that a spec leaves out are those of the weights' `config.json`,
which the job's class translates. They are part of the run's identity like keys in the spec, and are written to
`spec.yaml`. If the weights are gone after the run has begun, the run continues with the keys in its `spec.yaml`.

**Reading.** Each process reads only the byte ranges in which its devices' shards of a leaf lie. A shard of a tensor is
many ranges if the tensor is sharded along another axis than the first. Ranges with less than `GAP_BYTES` between them
are read as one, since a request costs more than reading what lies between. Values are converted to the type of the leaf
by rounding to nearest even, F64 by way of float32. Quantised tensors are dequantised, a few megabytes at a time.

**Base of an adapter.** The frozen weights beside which an adapter is trained are part of what defines the trajectory,
by a fingerprint: for a named checkpoint, the digest of its leaves; for a run, whose newest checkpoint may change before
a resume, the id of the run; for published weights, a digest of some bytes of each tensor. The train state holds the
base, so a resume continues if the source is gone, and is refused if the source is another one.
"""

import functools
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from pydantic import BaseModel, ValidationError

from runner.attempts.attempt import Attempt
from runner.attempts.layout import open_directory
from runner.checkpoint.fork import find_continued_manifest
from runner.checkpoint.inspect import BEST, find_checkpoint, read_document
from runner.checkpoint.leaves import flatten_with_names
from runner.checkpoint.manifest import CHECKPOINTS, MAX_LISTINGS, is_committed, read_manifest, read_newest_manifest
from runner.checkpoint.restore import load_weights, validate_source_run
from runner.console import warn
from runner.errors import InvalidError, ResumeError, StorageError
from runner.huggingface.mapping import Family, TensorMatch, TensorPiece, match_tensors
from runner.huggingface.safetensors import (
    CONFIG_FILE,
    STORED_DTYPES,
    Box,
    PublishedTensor,
    PublishedWeights,
    TensorLocation,
    drop_config_keys,
    has_published_weights,
    open_published_weights,
    read_config_json,
)
from runner.spec import PARAMS, Document, ExecutionSpec, InitFromConfig, Trajectory, hash_record
from runner.storage import JsonObject, Store, Version, open_store, split_checkpoint

# Reading leaves from tensors.

GAP_BYTES = 64 << 10
SPAN_BYTES = 64 << 20  # size of one request
NUM_READERS = 8

INIT_FROM, MODEL = ("checkpoint", "init_from"), ("config", "model")

Result = TypeVar("Result")
Index = tuple[slice, ...]
Bounds = tuple[tuple[int, int], ...]
Blocks = dict[Bounds, np.ndarray]  # shards of one leaf in this process's memory
Sources = Sequence[tuple[TensorPiece, PublishedTensor | None]]


def read_leaf(store: Store, versions: Mapping[str, Version], sources: Sources, leaf: jax.Array) -> jax.Array:
    """Read a leaf from its tensors. Every process calls it.

    `leaf` has the shape, type and sharding of the result, and the values of elements that are not read.

    Raises:
        ChangedError: A file has another version than expected.
    """
    blocks: Blocks = {}
    # A leaf whose tensors have every element needs no initial values.
    is_whole = all(
        tensor is not None
        and (piece.part is not None or math.prod(tensor.shape) == math.prod(leaf.shape[len(piece.index) :]))
        for piece, tensor in sources
    )
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
    """Read the elements of a leaf's tensors into the blocks that contain them."""
    present = [(piece, tensor) for piece, tensor in sources if tensor is not None]
    # Either the spans of one tensor are read in parallel, or whole tensors: never more than `NUM_READERS` requests.
    with ThreadPoolExecutor(NUM_READERS, thread_name_prefix="read") as pool:
        if len(present) == 1:
            _fill_piece(store, versions, *present[0], blocks, pool.map)
        else:
            list(pool.map(lambda source: _fill_piece(store, versions, source[0], source[1], blocks, map), present))


def compute_bounds(index: Index, shape: tuple[int, ...]) -> Bounds:
    """Return (start, stop) on each axis for the part `index` of an array of this shape."""
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def _fill_piece(
    store: Store,
    versions: Mapping[str, Version],
    piece: TensorPiece,
    tensor: PublishedTensor,
    blocks: Blocks,
    run: Callable[..., Iterable[None]],
) -> None:
    """Read the parts of a piece that lie in the blocks, each byte range once, by `run`: a map, maybe in parallel."""
    depth = len(piece.index)
    wanted = []
    for bounds, block in blocks.items():
        if all(start <= at < stop for at, (start, stop) in zip(piece.index, bounds[:depth], strict=True)):
            position: list[Any] = [at - start for at, (start, _) in zip(piece.index, bounds[:depth], strict=True)]
            # The box of the block in the tensor, which may be shorter than the piece.
            box = list(bounds[depth:])
            steps = [1] * len(box)
            if piece.transpose:
                box[-1], box[-2] = box[-2], box[-1]
            if piece.part is not None:
                axis, offset, _ = piece.part
                first, last = box[axis][0], box[axis][1] - 1
                box[axis] = first * piece.step + offset, last * piece.step + offset + 1
                steps[axis] = piece.step
            box = [(min(start, size), min(stop, size)) for (start, stop), size in zip(box, tensor.shape, strict=True)]
            if all(start < stop for start, stop in box):
                wanted.append((block[(*position, ...)], box, steps))
    if not wanted:
        return
    arrays = []
    for number, stored in enumerate(tensor.stored):
        # The array has the size of the tensor, but only pages of the boxes are touched, and so take memory.
        dtype, content = STORED_DTYPES[stored.dtype], np.empty(stored.stop - stored.start, np.uint8)

        def fetch(span: tuple[int, int], stored: TensorLocation = stored, content: np.ndarray = content) -> None:
            start, stop = (stored.start + edge for edge in span)
            found = store.read_range(stored.file, start, stop, versions[stored.file])
            content[slice(*span)] = np.frombuffer(found, np.uint8)

        boxes = [tensor.find_boxes(box)[number] for _, box, _ in wanted]
        list(run(fetch, list_byte_spans(stored.shape, dtype.itemsize, boxes)))
        arrays.append(content.view(dtype).reshape(stored.shape))
    for target, box, steps in wanted:
        target = target.swapaxes(-1, -2) if piece.transpose else target
        axes = [range(*bounds, step) for bounds, step in zip(box, steps, strict=True)]
        places: list[Any] = [*(slice(len(axis)) for axis in axes), ...]
        target = target[tuple(places)]
        # One part at a time along the first axis, because conversion needs a copy, which is much larger for quantised
        # tensors.
        num_rows = max(1, SPAN_BYTES // (4 * math.prod(map(len, axes[1:]))))
        for first in range(0, len(axes[0]) if axes else 1, num_rows):
            rows = slice(first, first + num_rows)
            parts = [*(axis[rows] for axis in axes[:1]), *axes[1:]]
            found = tensor.decode(arrays, tuple(slice(part.start, part.stop, part.step) for part in parts))
            found = found.astype(np.float32) if found.dtype.itemsize == 8 else found
            target[rows if axes else ...] = found.astype(target.dtype)


def list_byte_spans(shape: tuple[int, ...], itemsize: int, boxes: Sequence[Box]) -> Iterator[tuple[int, int]]:
    """Yield the byte ranges of a tensor that contain boxes of it, ascending and without overlaps.

    A box is (start, stop) on each axis.
    """
    ranges = np.concatenate([_list_box_ranges(shape, itemsize, box) for box in boxes])
    # Ranges of several boxes may overlap; the running maximum of their ends merges them.
    ranges = ranges[np.argsort(ranges[:, 0], kind="stable")]
    ends = np.maximum.accumulate(ranges[:, 1])
    cuts = np.flatnonzero(ranges[1:, 0] - ends[:-1] > GAP_BYTES) + 1
    for start, stop in zip(ranges[np.r_[0, cuts], 0], ends[np.r_[cuts - 1, len(ends) - 1]], strict=True):
        for begin in range(int(start), int(stop), SPAN_BYTES):
            yield begin, min(begin + SPAN_BYTES, int(stop))


def _list_box_ranges(shape: tuple[int, ...], itemsize: int, box: Box) -> np.ndarray:
    """Return (start, stop) of every contiguous range of bytes in a box."""
    inner = len(shape)  # from this axis on the box has whole axes
    while inner and box[inner - 1] == (0, shape[inner - 1]):
        inner -= 1
    strides = [math.prod(shape[axis + 1 :]) * itemsize for axis in range(len(shape))]
    # Every combination of indexes on the outer axes begins one range.
    starts = np.zeros(1, np.int64)
    for axis in range(inner - 1):
        starts = (starts[:, None] + np.arange(*box[axis], dtype=np.int64) * strides[axis]).reshape(-1)
    if not inner:
        return np.array([[0, math.prod(shape) * itemsize]], np.int64)
    first, last = box[inner - 1]
    starts = starts + first * strides[inner - 1]
    return np.stack([starts, starts + (last - first) * strides[inner - 1]], axis=1)


# The base of an adapter.

ADAPTER_BASE = "config.adapter.base"  # key of the trajectory
_SAMPLE_BYTES = 4096  # from the middle of each tensor: training changes every one
_WEIGHTS = ("params.", "variables.")


def identify_frozen_base(document: Document, spec: ExecutionSpec, config: Any, store: Store) -> Trajectory:
    """Return what an adapter adds to the trajectory: the fingerprint of its base; nothing without an adapter.

    If the base is gone, the fingerprint is that which the run in `store` has saved.

    Raises:
        InvalidError: The base is not there, and the run has not begun.
    """
    if config.adapter is None:
        return {}
    rule, fork = spec.checkpoint.initial_weights, spec.checkpoint.fork_from
    own = find_continued_manifest(store, fork)
    saved = None if own is None else own.identity.get(ADAPTER_BASE)
    if rule is None:
        assert fork is not None, "the train setup refuses an adapter without a base"
        # The base is in the state that a fork begins with. A parent without one is refused for its leaves.
        return {} if saved is None else {ADAPTER_BASE: str(saved)}
    suffix = "" if rule.weights == PARAMS else f" {rule.weights}"
    with document.errors_at("checkpoint.init_from"):
        try:
            return {ADAPTER_BASE: _compute_base_fingerprint(rule.path) + suffix}
        except (InvalidError, StorageError, FileNotFoundError) as error:
            if saved is None:
                raise error if isinstance(error, InvalidError | StorageError) else ResumeError(str(error)) from error
            warn(f"checkpoint.init_from: the base cannot be read ({error}); the run continues with its own copy")
            return {ADAPTER_BASE: str(saved)}


def _compute_base_fingerprint(path: str) -> str:
    """Return the fingerprint of the weights that `checkpoint.init_from` names."""
    directory, name = split_checkpoint(path)
    store = open_store(directory)
    if name is None and has_published_weights(store):
        return f"files {_compute_files_digest(store)}"
    manifest = read_newest_manifest(store) if name is None else read_manifest(store, f"{CHECKPOINTS}/{name}")
    if manifest is None:
        raise ResumeError(f"{store.url}: no checkpoint is here")
    if name is None:
        return f"run {manifest.job}"
    # Step and optimizer state are not part of the base.
    digests = {leaf: record["digest"] for leaf, record in manifest.leaves.items() if leaf.startswith(_WEIGHTS)}
    return f"run {manifest.job} {hash_record(digests)[:16]}"


def _compute_files_digest(store: Store) -> str:
    """Return a digest of the name, type, shape and some bytes of each tensor."""
    published = open_published_weights(store)

    def sample(name: str) -> list[str]:
        found = []
        for tensor in published.tensors[name].stored:
            start = max(tensor.start, (tensor.start + tensor.stop - _SAMPLE_BYTES) // 2)
            stop = min(tensor.stop, start + _SAMPLE_BYTES)
            version = published.versions[tensor.file]
            content = store.read_range(tensor.file, start, stop, version) if start < stop else b""
            found += [tensor.dtype, str(tensor.shape), hashlib.sha256(content).hexdigest()]
        return found

    names = sorted(published.tensors)
    with ThreadPoolExecutor(NUM_READERS, thread_name_prefix="base") as pool:
        return hash_record(dict(zip(names, pool.map(sample, names), strict=True)))[:16]


# The model of published weights.


def complete_model(
    document: Document,
    spec: ExecutionSpec,
    model_class: type[BaseModel],
    read_model: Callable[[Mapping[str, Any]], JsonObject | None],
) -> Document:
    """Return the document with the keys of `config.model` that it leaves to the weights in `checkpoint.init_from`.

    Keys are filled in only if the document lacks a key that the model needs. Reads `config.json` only. Every process
    calls it, before the rendezvous.

    `read_model` returns the keys of `config.model` for the content of a `config.json`; None if the job has no such
    function.

    Raises:
        InvalidError: The weights have no `config.json`, or it describes no model of this job.
        StorageError: It cannot be read now, and the run has not begun.
    """
    rule, given = spec.checkpoint.initial_weights, spec.config.get("model")
    if rule is None or not isinstance(given, dict | None):
        return document
    try:
        model_class.model_validate_json(json.dumps(given or {}, default=str))
    except ValidationError as error:
        if not any(each["type"] == "missing" and len(each["loc"]) == 1 for each in error.errors(include_url=False)):
            return document
    else:
        return document
    with document.errors_at("checkpoint.init_from"):
        try:
            config = drop_config_keys(read_config_json(rule.path), rule.ignored_config_keys)
            try:
                values = read_model(config)
            except InvalidError as error:
                raise InvalidError(f"{rule.path}/{CONFIG_FILE}: {error}") from error
        except (InvalidError, StorageError) as error:
            recorded = _read_recorded_model(document, spec)
            if recorded is None:
                raise
            warn(f"checkpoint.init_from: {error}; the run continues with the model that it has recorded")
            return document.fill_in(MODEL, recorded, INIT_FROM)
    return document if values is None else document.fill_in(MODEL, values, INIT_FROM)


def _read_recorded_model(document: Document, spec: ExecutionSpec) -> JsonObject | None:
    """Return `config.model` of the resolved spec in the run's directory; None if the run has not begun."""
    try:
        config = read_document(open_directory(document, spec)).data.get("config")
    except InvalidError:
        return None
    model = config.get("model") if isinstance(config, dict) else None
    return model if isinstance(model, dict) else None


# `checkpoint.init_from`.

FamilyFactory = Callable[[], Family | None]


def validate_init_from(
    document: Document, rule: InitFromConfig | None, family: FamilyFactory, weights: Callable[[], Any]
) -> None:
    """Validate that a job can start from the weights that its spec names. Reads headers only. Process 0 calls it.

    `family` returns the job's mapping to published weights, or None if it has none, and `weights` the abstract leaves
    to fill. The document is for the position of errors.

    Raises:
        InvalidError: The weights do not match; one line for each problem.
    """
    if rule is None:
        return
    with document.errors_at("checkpoint.init_from"):
        store = _open_published_store(rule)
        if store is None:
            _use_best(rule.path, lambda path: validate_source_run(path, weights(), rule.weights))
        else:
            _match_published(open_published_weights(store), rule, family, weights())


def load_init_from(
    document: Document, rule: InitFromConfig, family: FamilyFactory, weights: Any, attempt: Attempt
) -> Any:
    """Return leaves like `weights` with the values that `checkpoint.init_from` names. Every process calls it.

    `family` returns the job's mapping to published weights, or None if it has none. `weights` are the leaves of the
    initial state, with its sharding. The document is for the position of errors.

    Raises:
        InvalidError: The weights do not match. Raised on every process if one of them finds it.
        StorageError: The files cannot be read. Raised on every process likewise.
    """
    with document.errors_at("checkpoint.init_from"):
        store = _open_published_store(rule)
        if store is None:
            # The best step may change at any time, so one process resolves it for all.

            def load(path: str) -> Any:
                loaded = load_weights(attempt, path, weights, rule.weights)
                _validate_finite(loaded, lambda name, _: f"{path}: {name}")
                return loaded

            return _use_best(rule.path, load, attempt.hosts.run_on_main)
        loaded, problem = None, None
        notes: tuple[str, ...] = ()
        try:
            published = open_published_weights(store)
            match = _match_published(published, rule, family, weights)
            leaves = [
                read_leaf(store, published.versions, match.pieces[name], leaf)
                for name, leaf in flatten_with_names(weights).items()
            ]
            loaded, notes = jax.tree.unflatten(jax.tree.structure(weights), leaves), match.notes
        except (InvalidError, FileNotFoundError) as error:
            problem = ["invalid", str(error)]
        except OSError as error:
            problem = ["storage", str(error)]
        # All processes exchange their problems first, so that none waits for a process that has failed.
        first = next((other for other in attempt.hosts.gather(problem) if other is not None), None)
        if first is not None:
            raise InvalidError(first[1]) if first[0] == "invalid" else StorageError(first[1])

        def describe_tensor(name: str, index: tuple[int, ...]) -> str:
            for piece, tensor in match.pieces[name]:
                if tensor is not None and piece.index == index[: len(piece.index)]:
                    return f"{store.url}/{tensor.file}: {piece.tensor}"
            return f"{store.url}: {name}"

        _validate_finite(loaded, describe_tensor)
    # Every process has the same notes.
    if attempt.hosts.is_main:
        for line in notes:
            warn(line)
    attempt.say(f"weights taken from {store.url}")
    return loaded


def _validate_finite(weights: Any, describe: Callable[[str, tuple[int, ...]], str]) -> None:
    """Raise `InvalidError` for weights with NaN, or with values beyond their type. Every process calls it.

    `describe` returns where an element was read, by the name of the leaf and its index.
    """
    # The devices compute in parallel, and only scalars are fetched.
    leaves = flatten_with_names(weights)
    has_bad = jax.jit(lambda leaf: jnp.any(~jnp.isfinite(leaf)))
    found = {name: has_bad(leaf) for name, leaf in leaves.items() if jnp.issubdtype(leaf.dtype, jnp.inexact)}
    for name, is_bad in jax.device_get(found).items():
        if is_bad:
            position = jax.jit(lambda leaf: jnp.argmax(~jnp.isfinite(leaf)))(leaves[name])
            index = tuple(int(at) for at in np.unravel_index(int(position), leaves[name].shape))
            raise InvalidError(
                f"{describe(name, index)} has values that are NaN, infinite or beyond {leaves[name].dtype}; training "
                "would diverge at the first step; use other weights"
            )


def _use_best(
    path: str, use: Callable[[str], Result], run_on_main: Callable[[Callable[[], Any]], Any] = lambda act: act()
) -> Result:
    """Return the result of `use` for `path`, with `checkpoints/best` replaced by the step that is the best now.

    On several hosts, an `InvalidError` of `use` must be raised on all of them.
    """
    if split_checkpoint(path)[1] != BEST:
        return use(path)
    for _ in range(MAX_LISTINGS):
        resolved: str = run_on_main(lambda: find_checkpoint(path)[0])
        try:
            return use(resolved)
        except InvalidError:
            # A live run deletes the best checkpoint once it has a better one.
            directory, name = split_checkpoint(resolved)
            if name is not None and run_on_main(functools.partial(is_committed, open_store(directory), name)):
                raise
    raise StorageError(f"{path}: {MAX_LISTINGS} times the best checkpoint was deleted while it was read")


def _open_published_store(rule: InitFromConfig) -> Store | None:
    """Return the store of published weights; None if the rule names a run.

    Raises:
        InvalidError: The rule has a key that only the other kind of source reads.
    """
    directory, name = split_checkpoint(rule.path)
    store = open_store(directory)
    if name is None and has_published_weights(store):
        if rule.weights != PARAMS:
            raise InvalidError(f"weights: nothing reads it: {rule.path}, in Hugging Face's layout, has no averages")
        return store
    for key in ("allow_missing", "rename", "ignored_config_keys"):
        if getattr(rule, key):
            raise InvalidError(
                f"{key}: nothing reads it: {rule.path} is not in Hugging Face's layout, and all weights of a run are "
                "taken as they are; export the run, and start from the export"
            )
    return None


def _match_published(
    published: PublishedWeights, rule: InitFromConfig, family: FamilyFactory, weights: Any
) -> TensorMatch:
    mapping = family()
    if mapping is None:
        raise InvalidError(
            f"{published.store.url} is in Hugging Face's layout, and the job does not map its parameters to Hugging "
            "Face's names; implement `family` of BaseTrainer"
        )
    shapes = {name: leaf.shape for name, leaf in flatten_with_names(weights).items()}
    return match_tensors(published, mapping, shapes, rule)
