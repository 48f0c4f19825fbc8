"""Leaves from tensors: each host reads the byte ranges that its devices' parts of a leaf lie in, and no more.

A part of a tensor is many ranges where it is cut along another axis than the first. Ranges with less than `GAP_BYTES`
between them are read as one, since to ask for each costs more than what lies between.

Values become the leaf's type: the nearest, of two that are as near the even one; F64 by way of float32.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from runner.storage import Store, Version
from runner.weights.family import Piece
from runner.weights.header import DTYPES, Tensor

GAP_BYTES = 64 << 10
SPAN_BYTES = 64 << 20  # that are asked for at a time
NUM_READERS = 8

Index = tuple[slice, ...]
Bounds = tuple[tuple[int, int], ...]
Blocks = dict[Bounds, np.ndarray]  # of one leaf, in this host's memory
Sources = Sequence[tuple[Piece, Tensor | None]]


def read_leaf(store: Store, versions: Mapping[str, Version], sources: Sources, leaf: jax.Array) -> jax.Array:
    """A leaf like `leaf`, which has its shape, type, sharding, and the values of what is not read. On every host.

    Raises `ChangedError` if a file is no longer the one that was looked at, else as the store does.
    """
    is_whole = all(tensor is not None and _is_whole(piece, tensor, leaf.shape) for piece, tensor in sources)
    blocks: Blocks = {}
    for shard in leaf.addressable_shards:
        bounds = bounds_of(shard.index, leaf.shape)
        if bounds not in blocks:
            shape = [stop - start for start, stop in bounds]
            blocks[bounds] = np.empty(shape, leaf.dtype) if is_whole else np.array(shard.data)
    fill(store, versions, sources, blocks)
    return jax.make_array_from_callback(
        leaf.shape, leaf.sharding, lambda index: blocks[bounds_of(index or (), leaf.shape)], dtype=leaf.dtype
    )


def fill(store: Store, versions: Mapping[str, Version], sources: Sources, blocks: Blocks) -> None:
    """Put into blocks of a leaf, by where they lie in it, what its tensors have of them."""
    present = [(piece, tensor) for piece, tensor in sources if tensor is not None]

    def fill_piece(source: tuple[Piece, Tensor], run: Callable[..., Iterable[None]]) -> None:
        piece, tensor = source
        _fill_piece(store, versions[tensor.file], piece, tensor, blocks, run)

    with ThreadPoolExecutor(NUM_READERS, thread_name_prefix="read") as pool:
        if len(present) == 1:
            fill_piece(present[0], pool.map)
        else:
            list(pool.map(lambda source: fill_piece(source, map), present))


def bounds_of(index: Index, shape: tuple[int, ...]) -> Bounds:
    """(start, stop) on each axis of a part of an array of this shape."""
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def _is_whole(piece: Piece, tensor: Tensor, leaf: tuple[int, ...]) -> bool:
    """Whether a tensor has every element of its piece."""
    own = leaf[len(piece.index) :]
    return piece.part is not None or math.prod(tensor.shape) == math.prod(own)


def _fill_piece(
    store: Store, version: Version, piece: Piece, tensor: Tensor, blocks: Blocks, run: Callable[..., Iterable[None]]
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


def _in_tensor(bounds: Sequence[tuple[int, int]], piece: Piece, shape: tuple[int, ...]) -> list[tuple[int, int]]:
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
    tensor: Tensor,
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

    list(run(fetch, byte_spans(tensor.shape, dtype.itemsize, boxes)))
    return content.view(dtype).reshape(tensor.shape)


def byte_spans(
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
