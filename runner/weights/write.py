"""A directory of safetensors, written leaf by leaf: no more than a leaf is in memory, and it is there whole or not.

The shapes and types of all tensors are known before the first is written, so each file gets its header and its size at
once, and then each piece goes to its place.
"""

import contextlib
import errno
import math
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import safetensors

from runner.errors import InvalidError
from runner.storage import Store, encode_json, open_store, probe
from runner.storage.failure import make_directory, translating
from runner.storage.local import flush
from runner.weights.directory import CONFIG, INDEX, SUFFIX, WHOLE
from runner.weights.family import Piece, Shape
from runner.weights.header import DTYPES, NAMES, Tensor, encode_header

SHARD_BYTES = 5_000_000_000
UPLOAD_SECONDS = 3600.0  # for one file


class Writer:
    """The files of some tensors in a directory on this disk, which is there and empty."""

    def __init__(self, directory: Path, tensors: Mapping[str, tuple[np.dtype, Shape]], shard_bytes: int = SHARD_BYTES):
        self._directory = directory
        self._places: dict[str, Tensor] = {}
        shards = _shards(tensors, shard_bytes)
        for number, names in enumerate(shards, start=1):
            file = WHOLE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}{SUFFIX}"
            head, places = encode_header({name: (NAMES[tensors[name][0]], tensors[name][1]) for name in names})
            with translating(directory / file), (directory / file).open("wb", buffering=0) as stream:
                stream.write(head)
                os.posix_fallocate(stream.fileno(), 0, max([len(head), *(place.stop for place in places.values())]))
            self._places |= {name: place._replace(file=file) for name, place in places.items()}
        if len(shards) > 1:
            total = sum(place.stop - place.start for place in self._places.values())
            files = {name: self._places[name].file for name in sorted(self._places)}
            (directory / INDEX).write_bytes(encode_json({"metadata": {"total_size": total}, "weight_map": files}))

    def put(self, piece: Piece, values: np.ndarray) -> None:
        """Write one piece, `values` as its leaf has them, in the tensor's type: the nearest of it.

        Raises `InvalidError` if a value is too large for that type.
        """
        place = self._places[piece.tensor]
        dtype = DTYPES[place.dtype]
        values = values.swapaxes(-1, -2) if piece.transpose else values
        with np.errstate(over="ignore"):
            converted = values.astype(dtype)
        if dtype.itemsize < values.dtype.itemsize and (np.isinf(converted) & ~np.isinf(values)).any():
            raise InvalidError(f"{piece.tensor} has values that {dtype} cannot hold; use another --dtype")
        if not converted.size:
            return
        target = np.memmap(self._directory / place.file, dtype, "r+", place.start, place.shape)
        box = [slice(None)] * target.ndim
        if piece.part is not None:
            axis, start, stop = piece.part
            box[axis] = slice(start, stop)
        target[tuple(box)] = converted

    def verify(self) -> None:
        """Open every file with the format's own library."""
        for file in sorted({place.file for place in self._places.values()}):
            with safetensors.safe_open(self._directory / file, framework="np") as found:
                names = {name for name, place in self._places.items() if place.file == file}
                assert set(found.keys()) == names, f"{file} does not hold what was written"


def _shards(tensors: Mapping[str, tuple[np.dtype, Shape]], shard_bytes: int) -> list[list[str]]:
    """The names of each file's tensors, in order: no file is larger than `shard_bytes`, but of one tensor."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, (dtype, shape) in tensors.items():
        num_bytes = math.prod(shape) * dtype.itemsize
        if shards[-1] and size + num_bytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += num_bytes
    return shards


@contextlib.contextmanager
def published_whole(where: str) -> Iterator[Path]:
    """A directory on this disk to write into; what it holds at the end is at `where`, a path or URL, whole or not.

    In a bucket `config.json`, without which nobody reads the rest, is sent last. Raises `InvalidError` at once if
    something is at `where`, or it may not be written.
    """
    store = open_store(where)
    refuse_taken(store)
    if store.root is None:
        with tempfile.TemporaryDirectory(prefix="export-") as directory:
            yield Path(directory)
            _upload(Path(directory), store)
        return
    aside = store.root.with_name(f".{store.root.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        with translating(aside):
            make_directory(aside)
        yield aside
        with translating(store.root):
            for path in [*aside.iterdir(), aside]:
                flush(path)
            _rename(aside, store.root)
            flush(store.root.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _rename(aside: Path, target: Path) -> None:
    """Give it its name, where there is nothing, or an empty directory."""
    try:
        aside.rename(target)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise InvalidError(f"{target} is not empty; nothing is overwritten") from error
        raise


def refuse_taken(store: Store) -> None:
    """Raise `InvalidError` if something is where an export is to be, or if nothing can be written there."""
    if store.children(""):
        raise InvalidError(f"{store.url} is not empty; nothing is overwritten")
    if store.root is None:
        probe(store)


def _upload(directory: Path, store: Store) -> None:
    for path in sorted(directory.iterdir(), key=lambda path: (path.name == CONFIG, path.name)):
        store.upload(path, path.name, UPLOAD_SECONDS)
