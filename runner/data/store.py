"""Token ids at rest: arrays, files and objects, read as one long sequence. Knows no text and no windows.

Files are read with `pread` and never through a mapping: one that is cut under a running job would end the process with
SIGBUS, without a word. Of objects in a bucket exactly the ids that are asked for are fetched.
"""

import bisect
import functools
import hashlib
import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from runner.data.cache import cache_key, read_record, warn_unwritable, write_record
from runner.data.id_file import num_ids, parsing_npy, refuse_other_array
from runner.data.protocol import Source, first_bad
from runner.data.remote.cache import CacheSettings
from runner.data.remote.tokens import ObjectTokens, check_objects, open_object_tokens, read_objects
from runner.data.source import BucketFiles, SourceFile, SourceFiles, describe_file
from runner.errors import DataError

OPEN_FILES_MAX = 128  # a process may hold only so many, and a corpus may have thousands of files
SCAN_CHUNK_TOKENS = 1 << 22
SCANNED_TOKENS_MAX = 1 << 28  # a second or two; more of them only where the spec does not name the vocabulary
PROBE_BLOCKS = 1024
PROBE_BLOCK_BYTES = 4096
# Of ids below a million, read as half as wide ones, every other one is below 16.
HALVES_BELOW = 16
HALVES_BLOCKS = 16
HALVES_BLOCK_TOKENS = 2048
HALVES_PAIRS_MIN = 64
HALVES_OBJECTS = 16  # of more objects in a bucket so many are looked at


@dataclass(frozen=True)
class TokenFile:
    """One `.bin` or `.npy` file, whose ids begin at `offset_bytes`; open while it is in use."""

    file: SourceFile
    dtype: np.dtype
    num_tokens: int
    offset_bytes: int

    def __len__(self) -> int:
        return self.num_tokens

    def __getitem__(self, piece: slice) -> np.ndarray:
        """Read a range of ids. Raises DataError if the file is no longer the one that was opened."""
        start, stop, _ = piece.indices(self.num_tokens)
        first, size = self.offset_bytes + start * self.dtype.itemsize, max(stop - start, 0) * self.dtype.itemsize
        return np.frombuffer(read_bytes(self.file, first, first + size), self.dtype)

    @property
    def meaning(self) -> str:
        """How the bytes of the file are read: two readings of one file are kept apart in the cache."""
        return self.dtype.name

    def fill(self, targets: Sequence[tuple[int, np.ndarray]]) -> None:
        """Fill contiguous arrays of this dtype with the ids from the position beside each on. Raises DataError."""
        file = _open_file(self.file)
        itemsize, offset_bytes = self.dtype.itemsize, self.offset_bytes
        for start, out in targets:
            try:
                size = os.preadv(file.fileno(), [out.data], offset_bytes + start * itemsize)
            except OSError as error:
                raise DataError(f"data.source: cannot read {self.file.path}: {error.strerror or error}") from error
            if size < out.nbytes:
                out[:] = self[start : start + len(out)]


def read_bytes(file: SourceFile, start: int, stop: int) -> bytes:
    """Bytes `start .. stop` of a file. Raises DataError if it is no longer the one that was found, or has fewer."""
    size = stop - start
    opened = _open_file(file)  # held here: the cache may drop it meanwhile
    try:
        content = os.pread(opened.fileno(), size, start)
        while len(content) < size and (more := os.pread(opened.fileno(), size - len(content), start + len(content))):
            content += more
    except OSError as error:
        raise DataError(f"data.source: cannot read {file.path}: {error.strerror or error}") from error
    if len(content) < size:
        raise changed(file)
    return content


Part = TokenFile | ObjectTokens | np.ndarray


class Piece(NamedTuple):
    """The ids of a part from `offset` on, and the array that they belong into."""

    part: int
    offset: int
    out: np.ndarray


@dataclass(frozen=True)
class IdRange:
    """The smallest and the largest token id of a sequence, and the position where each first stands."""

    smallest: int
    smallest_position: int
    largest: int
    largest_position: int


class Tokens:
    """Parts read as if they were concatenated: a range may span parts, nothing is copied until it is read.

    Attributes:
        id_limit: every id must be below it and none negative, which is looked at where ids are read: by `read`,
            `read_many` and `read_ranges` alike. None: it is known already.
    """

    id_limit: int | None = None

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = [part for part in parts if len(part)]
        self._ends = list(itertools.accumulate(map(len, self.parts)))
        self._bounds = np.array([0, *self._ends])
        dtypes = {part.dtype for part in self.parts}
        self._dtype = dtypes.pop() if len(dtypes) == 1 else np.dtype(np.int64)
        remote = [part.dtype.itemsize for part in self.parts if isinstance(part, ObjectTokens)]
        self.bytes_fetched_per_token = max(remote, default=0)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def read_many(self, starts: Sequence[int] | np.ndarray, length: int) -> np.ndarray:
        """The ids of `length` positions from each of `starts` on: (number of starts, length).

        Of a file each row is one `pread` into its place; of objects all rows are asked for at a time. Raises DataError
        naming the place of an id beyond `id_limit`.
        """
        starts = np.asarray(starts, np.int64)
        found = self._gather(starts, length)
        if self.id_limit is not None and (place := first_bad(found.ravel(), self.id_limit)) is not None:
            row, column = divmod(place, length)
            raise self._bad_id(int(found[row, column]), int(starts[row]) + column, self.id_limit)
        return found

    def _gather(self, starts: np.ndarray, length: int) -> np.ndarray:
        """What `read_many` gives, not looked at."""
        assert not starts.size or (starts.min() >= 0 and starts.max() + length <= len(self))
        if len(self.parts) == 1 and isinstance(self.parts[0], np.ndarray):
            return np.lib.stride_tricks.sliding_window_view(self.parts[0], length)[starts]
        out = np.empty((len(starts), length), self._dtype)
        parts = np.searchsorted(self._bounds, starts, side="right") - 1
        fit = starts + length <= self._bounds[parts + 1]
        pieces: list[Piece] = []
        rows = zip(parts.tolist(), (starts - self._bounds[parts]).tolist(), fit.tolist(), out, strict=True)
        for part, offset, is_whole, row in rows:
            pieces += [Piece(part, offset, row)] if is_whole else self._split(part, offset, row)
        self._fill(pieces)
        return out

    def read_ranges(self, ranges: Sequence[tuple[int, int]]) -> list[np.ndarray]:
        """The ids of several stretches, each from a start to a stop; of objects all are asked for at a time.

        Raises DataError as `read_many` does.
        """
        found = self._stretches(ranges)
        if self.id_limit is not None:
            for (start, _), ids in zip(ranges, found, strict=True):
                if (place := first_bad(ids, self.id_limit)) is not None:
                    raise self._bad_id(int(ids[place]), start + place, self.id_limit)
        return found

    def _stretches(self, ranges: Sequence[tuple[int, int]]) -> list[np.ndarray]:
        """What `read_ranges` gives, not looked at."""
        assert all(start >= 0 and stop <= len(self) for start, stop in ranges)
        if len(self.parts) == 1 and isinstance(self.parts[0], np.ndarray):
            return [self.parts[0][start:stop] for start, stop in ranges]
        found = [np.empty(stop - start, self._dtype) for start, stop in ranges]
        pieces: list[Piece] = []
        for (start, _), row in zip(ranges, found, strict=True):
            part = bisect.bisect_right(self._ends, start)
            pieces += self._split(part, start - int(self._bounds[part]), row)
        self._fill(pieces)
        return found

    def _split(self, part: int, offset: int, row: np.ndarray) -> Iterator[Piece]:
        """The pieces of a row that may go over the ends of parts."""
        while len(row):
            size = min(len(row), len(self.parts[part]) - offset)
            yield Piece(part, offset, row[:size])
            row, part, offset = row[size:], part + 1, 0

    def _fill(self, pieces: Sequence[Piece]) -> None:
        pieces = sorted(pieces, key=lambda piece: piece.part)
        remote: list[tuple[ObjectTokens, int, np.ndarray]] = []
        for index, group in itertools.groupby(pieces, key=lambda piece: piece.part):
            part = self.parts[index]
            if isinstance(part, ObjectTokens):
                remote += [(part, offset, out) for _, offset, out in group]
            elif isinstance(part, TokenFile) and part.dtype == self._dtype:
                part.fill([(offset, out) for _, offset, out in group])
            else:
                for _, offset, out in group:
                    out[:] = part[offset : offset + len(out)]
        read_objects(remote)

    def read(self, start: int, stop: int) -> np.ndarray:
        """The ids of positions `start .. stop`. Raises as `read_many` does."""
        return self.read_ranges([(start, stop)])[0]

    def _bad_id(self, token: int, position: int, limit: int) -> DataError:
        """The error of an id that is negative, or not below `limit`."""
        where = self.describe_position(position)
        if token < 0:
            return DataError(f"token id {token} at {where} is negative")
        return DataError(
            f"token id {token:,} at {where} is beyond the model's vocabulary of {limit:,} ids; use a vocabulary of at "
            f"least {token + 1:,}"
        )

    def check(self) -> None:
        """Raise DataError if a file has another size or time than when the job began, or is gone. Reads no content.

        In a bucket it is one listing, of sizes and versions.
        """
        for part in self.parts:
            if isinstance(part, TokenFile) and describe_file(part.file.path) != part.file:
                raise changed(part.file)
        check_objects([part for part in self.parts if isinstance(part, ObjectTokens)])

    def describe_position(self, position: int) -> str:
        """Return where a position is, for a message: 'position 7 of corpus.bin'."""
        part = bisect.bisect_right(self._ends, position)
        holder = self.parts[part]
        offset = position - (self._ends[part - 1] if part else 0)
        return f"position {offset} of {'the text' if isinstance(holder, np.ndarray) else holder.file}"

    def probe(self) -> str:
        """Return a digest of the parts' sizes and dtypes and of 1,024 evenly spaced 4 KiB blocks of ids.

        Of a small data set that is every id. Of a large one it notices an exchange of content, not each flipped byte.
        """
        digest = hashlib.sha256()
        for part in self.parts:
            digest.update(f"{part.dtype.newbyteorder('<').str} {len(part)}\n".encode())
        block_tokens = min(PROBE_BLOCK_BYTES // max(part.dtype.itemsize for part in self.parts), len(self))
        num_blocks = min(PROBE_BLOCKS, -(-len(self) // block_tokens))
        starts = [(len(self) - block_tokens) * i // max(num_blocks - 1, 1) for i in range(num_blocks)]
        digest.update(self._gather(np.array(starts, np.int64), block_tokens).astype("<i8").data)
        return digest.hexdigest()

    def scan(self) -> IdRange:
        """Read every id once, in chunks."""
        smallest, largest = (0, -1), (0, -1)
        start = 0
        for part in self.parts:
            for offset in range(0, len(part), SCAN_CHUNK_TOKENS):
                chunk = part[offset : offset + SCAN_CHUNK_TOKENS]
                low, high = int(chunk.argmin()), int(chunk.argmax())
                if smallest[1] < 0 or int(chunk[low]) < smallest[0]:
                    smallest = (int(chunk[low]), start + offset + low)
                if largest[1] < 0 or int(chunk[high]) > largest[0]:
                    largest = (int(chunk[high]), start + offset + high)
            start += len(part)
        return IdRange(*smallest, *largest)


class TokenFiles(Tokens, Source):
    """Files that hold ids. Which ids there are is found by reading all of them, once.

    Of many ids that would take long, and of those in a bucket too: there the vocabulary that the spec names,
    `believed`, is taken at its word, and each id is looked at when it is read.
    """

    def __init__(
        self, parts: Sequence[TokenFile | ObjectTokens], cache_directory: Path, believed: int | None = None
    ) -> None:
        super().__init__(parts)
        self._cache_directory = cache_directory
        self._is_in_bucket = any(isinstance(part, ObjectTokens) for part in self.parts)
        self.id_limit = believed if self._is_in_bucket or len(self) > SCANNED_TOKENS_MAX else None

    @functools.cached_property
    def fingerprint(self) -> str:
        """Of sizes, types and a sample of the ids: see `probe`."""
        return self.probe()

    @property
    def vocabulary_size(self) -> int:
        """The one believed, else the largest id + 1. Raises DataError if an id is negative."""
        return self._id_range.largest + 1 if self.id_limit is None else self.id_limit

    @functools.cached_property
    def _id_range(self) -> IdRange:
        if self._is_in_bucket and len(self) > SCANNED_TOKENS_MAX:
            raise DataError(
                f"{len(self):,} ids in a bucket are not read to find the largest; name the vocabulary's size in the "
                "spec (config.model.vocabulary_size)"
            )
        found = scan_cached(self, self._cache_directory)
        if found.smallest < 0:
            raise self._bad_id(found.smallest, found.smallest_position, 0)
        return found

    def refuse_vocabulary(self, size: int) -> None:
        """See `Source`. Reads all ids the first time, and the answer is cached."""
        if self.vocabulary_size > size:
            raise self._bad_id(self._id_range.largest, self._id_range.largest_position, size)


def changed(file: SourceFile) -> DataError:
    """The error of a file that has another size or time than when the job began."""
    return DataError(f"{file.path}: changed since the job started; a running job needs its token files unchanged")


def open_token_files(
    source: SourceFiles | BucketFiles,
    cache_directory: Path,
    dtype: Literal["uint16", "uint32"] | None = None,
    vocabulary_size: int | None = None,
    ranges: CacheSettings | None = None,
) -> TokenFiles:
    """Open `.bin` (little-endian ids of `dtype`) and `.npy` (1-D integers) files. Raises DataError on other content.

    Without `dtype` a `.bin` file is uint16, and refused if its ids look like halves of wider ones. `vocabulary_size` is
    what the spec names, if it does; `ranges` says where ranges of objects are kept.
    """
    files: Sequence[TokenFile | ObjectTokens]
    id_type = np.dtype(dtype or "uint16").newbyteorder("<")
    if isinstance(source, BucketFiles):
        files = open_object_tokens(source, id_type, ranges or CacheSettings(cache_directory, 0, 1))
    else:
        files = [_open_token_file(file, id_type) for file in source.files]
    bins = [file for file in files if str(file.file).endswith(".bin")]
    if dtype is None:
        sampled = bins[:: max(1, -(-len(bins) // HALVES_OBJECTS))] if isinstance(source, BucketFiles) else bins
        for file in sampled:
            if _is_of_halves(file):
                raise DataError(
                    f"{file.file}: looks like uint32 ids read as uint16 (every other one is tiny); say which: "
                    "data.dtype: uint32, or uint16"
                )
    elif not bins:
        raise DataError(f"data.dtype={dtype}: nothing reads it, .npy files say their own")
    return TokenFiles(files, cache_directory, vocabulary_size)


def _is_of_halves(file: TokenFile | ObjectTokens) -> bool:
    """Whether every other id is so small, in blocks all over the file, that they must be upper halves of wider ids."""
    if len(file) < 2 * HALVES_PAIRS_MIN:
        return False
    block = min(len(file), HALVES_BLOCK_TOKENS) // 2 * 2
    starts = {(len(file) - block) * i // (HALVES_BLOCKS - 1) // 2 * 2 for i in range(HALVES_BLOCKS)}
    pairs = Tokens([file]).read_many(sorted(starts), block).reshape(-1, 2)
    low, high = pairs.max(axis=0)
    return bool(high < HALVES_BELOW <= low or high == 0 < low)


def scan_cached(tokens: Tokens, cache_directory: Path) -> IdRange:
    """Return `tokens.scan()` of token files, from the cache if these files were scanned before."""
    files = [part for part in tokens.parts if not isinstance(part, np.ndarray)]
    key = cache_key("-".join(["ids", *sorted({part.meaning for part in files})]), [part.file for part in files])
    record = read_record(cache_directory, key)
    if record is not None:
        return IdRange(**record)
    id_range = tokens.scan()
    try:
        write_record(cache_directory, key, asdict(id_range))
    except OSError as error:
        warn_unwritable(cache_directory, error)
    return id_range


def _open_token_file(file: SourceFile, dtype: np.dtype) -> TokenFile:
    if file.path.suffix == ".bin":
        return TokenFile(file, dtype, num_ids(file, dtype), 0)
    array = _map_npy(file)
    if not isinstance(array, np.ndarray):  # numpy opens a zip archive of arrays under any name
        raise DataError(f"{file.path}: needs a 1-D array of integers, holds an archive of arrays")
    refuse_other_array(file, array.dtype, array.shape)
    return TokenFile(file, array.dtype, len(array), array.offset)


@functools.lru_cache(maxsize=OPEN_FILES_MAX)
def _open_file(file: SourceFile) -> FileIO:
    """Open the file; keyed by its size and time too, so that a replaced file is never read as the one before."""
    if describe_file(file.path) != file:
        raise changed(file)
    try:
        return file.path.open("rb", buffering=0)
    except OSError as error:
        raise DataError(f"data.source: cannot read {file.path}: {error.strerror or error}") from error


def _map_npy(file: SourceFile) -> np.memmap:
    """What numpy makes of the file: its header is read, nothing of its ids."""
    if describe_file(file.path) != file:
        raise changed(file)
    try:
        with parsing_npy(file):
            array: np.memmap = np.load(file.path, mmap_mode="r", allow_pickle=False)
    except OSError as error:
        raise DataError(f"data.source: cannot read {file.path}: {error.strerror or error}") from error
    return array
