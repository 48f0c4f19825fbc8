"""The newest rows of `metrics.jsonl` and a sample of all, whatever its size.

What bounds it: on a disk `_NUM_BLOCKS` blocks spread over the file and its end are read, in a bucket the newest objects
and `_PARTS_MAX` of the others, and of what was found `ROWS_MAX` rows stay.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from runner.storage import JsonObject, Store
from runner.storage.failure import open_file, translating
from runner.train.metrics.bucket import read_content
from runner.train.metrics.disk import NAME
from runner.train.metrics.line import surviving

ROWS_MAX = 512
_NUM_BLOCKS = 128
_BLOCK_BYTES = 1 << 13
_TAILS_BYTES = (1 << 16, 1 << 20, 1 << 24)  # the next where the one before holds no whole row
_PARTS_MAX = 16
_NEWEST = 64


def read_sample(store: Store) -> tuple[JsonObject, ...]:
    """Rows in order of step, the newest last; empty if there are none. Raises `OSError`, or `ValueError` of damage."""
    texts = _texts_in_bucket(store) if store.root is None else _texts_on_disk(store.root / NAME)
    lines = list(surviving(texts))
    newest, step = lines[-_NEWEST:], max(len(lines) // (ROWS_MAX - _NEWEST), 1)
    return tuple(line.row for line in [*lines[: -_NEWEST or None][::step], *newest])


def _texts_on_disk(path: Path) -> list[bytes]:
    try:
        with translating(path), open_file(path) as file:
            size = file.seek(0, 2)
            tail: list[bytes] = []
            start = size
            for tail_bytes in _TAILS_BYTES:
                start = max(size - tail_bytes, 0)
                file.seek(start)
                tail = _whole_lines(file.read(size - start), start == 0)
                if start == 0 or any(surviving(tail)):
                    break
            stride = max(start // _NUM_BLOCKS, _BLOCK_BYTES)
            texts: list[bytes] = []
            for offset in range(0, start, stride):
                file.seek(offset)
                texts += _whole_lines(file.read(min(_BLOCK_BYTES, start - offset)), offset == 0)
            return texts + tail
    except FileNotFoundError:
        return []


def _whole_lines(content: bytes, is_first: bool) -> list[bytes]:
    """The lines of a block, without the first, which may have begun before it; the last is told by its end."""
    lines = content.split(b"\n")
    return lines if is_first else lines[1:]


def _texts_in_bucket(store: Store) -> Iterator[bytes]:
    """Of the parts some, evenly, and always the last: the object that grows may hold one row alone."""
    try:
        names, content = read_content(store)
    except FileNotFoundError:  # somebody has deleted a part
        names, content = [], store.read_versioned(NAME)[0]
    step = max(len(names) // _PARTS_MAX, 1)
    chosen: Sequence[str] = sorted({*names[::step], *names[-1:]}, key=names.index)
    with ThreadPoolExecutor(_PARTS_MAX) as pool:
        contents = list(pool.map(lambda name: _read_if_there(store, name), chosen))
    for each in (*contents, content):
        yield from each.splitlines()


def _read_if_there(store: Store, name: str) -> bytes:
    """A newer attempt may have dropped it meanwhile."""
    try:
        return store.read(name)
    except FileNotFoundError:
        return b""
