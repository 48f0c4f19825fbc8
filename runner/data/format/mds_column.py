"""Where the token ids lie in a sample of MDS: arithmetic on sizes and bytes. Reads no file.

A sample is: for each column whose size varies, in their order, its size as uint32; then the values of all columns in
that order. The value of an array whose shape varies is: a byte, dimensions << 2 | code of the dimensions' type; the
dimensions; the elements. All is little-endian. (Source: mosaicml-streaming, `base/format/mds/encodings.py`.)
"""

from dataclasses import dataclass

import numpy as np

from runner.data.format.document import ID_DTYPES, parse_dtype

# Of an array of one dimension: its first byte, the bytes of its dimension, the smallest and largest that takes so many.
SHAPES = ((4, 1, 1, 0xFF), (5, 2, 0x100, 0xFFFF), (6, 4, 0x10000, 0xFFFFFFFF))


@dataclass(frozen=True)
class Column:
    """The column that holds the ids.

    Attributes:
        sizes: bytes of each column in a sample, in their order; None where they vary.
        place: which of them is this one.
        dtype: of the ids.
        has_shape: whether a shape stands before them.
    """

    sizes: tuple[int | None, ...]
    place: int
    dtype: np.dtype
    has_shape: bool

    @property
    def item_bytes(self) -> int:
        """Bytes of an id."""
        return self.dtype.itemsize

    @property
    def head_bytes(self) -> int:
        """Bytes of the sizes with which a sample begins."""
        return 4 * sum(size is None for size in self.sizes)

    @property
    def is_alone(self) -> bool:
        """Whether no other column varies in size, so that the size of a sample tells where its ids lie."""
        return all(size is not None for i, size in enumerate(self.sizes) if i != self.place)

    def locate_by_size(self, sample_bytes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where in each sample of so many bytes the ids begin, and how many they are. Raises ValueError."""
        assert self.is_alone
        value_bytes = sample_bytes - self.head_bytes - sum(s or 0 for i, s in enumerate(self.sizes) if i != self.place)
        value_starts = np.full(len(sample_bytes), self.head_bytes + sum(s or 0 for s in self.sizes[: self.place]))
        own = self.sizes[self.place]
        _refuse("is smaller than its columns" if own is None else "has another size than its columns", value_bytes < 0)
        if own is not None:
            _refuse("has another size than its columns", value_bytes != own)
        return self._inside(value_starts, value_bytes)

    def locate(self, content: np.ndarray, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The same of the samples that begin at the places `samples` of `content`, uint8. Raises ValueError."""
        value_starts, value_bytes = self._read_heads(content, samples)
        starts, counts = self._inside(value_starts, value_bytes)
        self._check_shapes(content, value_starts, counts)
        return starts - samples, counts

    def check(self, content: np.ndarray, samples: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> None:
        """Raise ValueError unless the samples begin as they should whose ids, so many, begin at `starts`.

        `content` need not reach further than to the first id of the last.
        """
        value_starts, value_bytes = self._read_heads(content, samples)
        _refuse(
            "begins with sizes that are not its own", value_starts + value_bytes != starts + counts * self.item_bytes
        )
        self._check_shapes(content, value_starts, counts)

    def _read_heads(self, content: np.ndarray, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where in `content` the values of this column begin, and how many bytes they have. Raises ValueError."""
        heads = iter(_gather(content, samples, self.head_bytes).view("<u4").T.astype(np.int64))
        columns = [next(heads) if size is None else size for size in self.sizes]
        ones = np.ones(len(samples), np.int64)
        return samples + self.head_bytes + sum(columns[: self.place]), columns[self.place] * ones

    def _check_shapes(self, content: np.ndarray, value_starts: np.ndarray, counts: np.ndarray) -> None:
        """Raise ValueError if a value is no array of one dimension of so many ids."""
        for first_byte, width, low, high in SHAPES if self.has_shape else ():
            is_such = (low <= counts) & (counts <= high)
            if not is_such.any():
                continue
            shape = _gather(content, value_starts[is_such], 1 + width)
            dimension = np.ascontiguousarray(shape[:, 1:]).view(f"<u{width}")[:, 0]
            _refuse("is no array of one dimension", (shape[:, 0] != first_byte) | (dimension != counts[is_such]))

    def _inside(self, value_starts: np.ndarray, value_bytes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The starts and counts of the ids in values of so many bytes. Raises ValueError."""
        if not self.has_shape:
            _refuse(f"holds no whole number of {self.dtype.name} ids", value_bytes % self.dtype.itemsize != 0)
            return value_starts, value_bytes // self.dtype.itemsize
        counts = np.zeros_like(value_bytes)
        skips = np.zeros_like(value_bytes)
        for _, width, low, high in SHAPES:
            found, rest = np.divmod(value_bytes - 1 - width, self.dtype.itemsize)
            is_such = (rest == 0) & (low <= found) & (found <= high)
            counts[is_such], skips[is_such] = found[is_such], 1 + width
        _refuse(f"holds no array of {self.dtype.name} of one dimension", skips == 0)
        return value_starts + skips, counts


def parse_column(encoding: str, sizes: tuple[int | None, ...], place: int, dtype: str | None) -> Column:
    """The column of this encoding; `dtype` is what the spec says of its ids. Raises ValueError if it holds none."""
    kind, _, rest = encoding.partition(":")
    if kind == "bytes" and not rest:
        if dtype is None:
            raise ValueError("holds bytes: say which ids they are, as data.options.dtype: int64")
        return Column(sizes, place, parse_dtype(dtype), has_shape=False)
    name, _, shape = rest.partition(":")
    if kind != "ndarray" or name not in ID_DTYPES:
        raise ValueError(f"is encoded as {encoding[:40]!r}, needs bytes or ndarray of an integer type")
    if dtype is not None:
        raise ValueError(f"holds {name}: leave out data.options.dtype, nothing reads it")
    return Column(sizes, place, parse_dtype(name), has_shape=not shape)


def _gather(content: np.ndarray, places: np.ndarray, count: int) -> np.ndarray:
    """`count` bytes from each place on, (len(places), count). Raises ValueError if one is beyond the end."""
    if len(places) and places.max() + count > len(content):
        raise ValueError("a sample reaches beyond the end of the file")
    return np.ascontiguousarray(content[places[:, None] + np.arange(count)])


def _refuse(what: str, is_wrong: np.ndarray) -> None:
    if is_wrong.any():
        raise ValueError(f"a sample {what}")
