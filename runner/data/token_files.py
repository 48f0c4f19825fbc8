"""Token ids at rest: arrays, files and objects, read as one long sequence. Knows no text and no windows.

What is asked of a file of token ids, on a disk or in a bucket: `.bin` of whole ids, `.npy` of one dimension.
"""

import bisect
import functools
import hashlib
import io
import itertools
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple

import numpy as np

from runner.data.readers import ByteRange, Reader, cache_key, fill_from_file, read_record, warn_unwritable, write_record
from runner.data.remote import CacheSettings, open_reader, run_in_parallel
from runner.data.source import Source, find_invalid_id
from runner.data.source_files import BucketFile, BucketFiles, File, SourceFile, SourceFiles
from runner.errors import DataError

NPY_HEADER_BYTES = 1 << 12
ZIP_MAGIC = b"PK\x03\x04"  # of `np.savez`, under whatever name


def count_ids(file: File, dtype: np.dtype) -> int:
    """How many ids a `.bin` holds. Raises DataError if its size is no whole number of them."""
    if file.size_bytes % dtype.itemsize:
        raise DataError(
            f"{file}: {file.size_bytes} bytes are no whole number of {dtype.itemsize}-byte ({dtype.name}) token ids"
        )
    return file.size_bytes // dtype.itemsize


def parse_npy(file: File, head: bytes) -> tuple[np.dtype, int, int]:
    """Type, number and offset in bytes of the ids, as the first bytes of the file say. Raises DataError."""
    stream = io.BytesIO(head)
    if head.startswith(ZIP_MAGIC):
        raise DataError(f"{file}: needs a 1-D array of integers, holds an archive of arrays")
    try:
        version = np.lib.format.read_magic(stream)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(stream)
    except (ValueError, EOFError, SyntaxError, tokenize.TokenError) as error:
        reason = (str(error).splitlines() or [""])[0]
        raise DataError(f"{file}: is no whole .npy file of numbers ({reason})") from error
    if len(shape) != 1 or dtype.kind not in "iu" or shape[0] < 0:
        raise DataError(f"{file}: needs a 1-D array of integers, holds {dtype} of shape {shape}")
    num_tokens, offset = int(shape[0]), stream.tell()
    if offset + num_tokens * dtype.itemsize > file.size_bytes:
        raise DataError(f"{file}: is no whole .npy file of numbers (it is cut: {file.size_bytes} bytes)")
    return dtype, num_tokens, offset


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
    """One file or object whose ids begin at `offset_bytes`, one after the other; `reader` reads it."""

    file: File
    dtype: np.dtype
    num_tokens: int
    offset_bytes: int
    reader: Reader

    is_plain: ClassVar[bool] = True  # nothing but ids stands between the first and the last
    is_ranged: ClassVar[bool] = True  # a range of ids is a range of bytes

    def __len__(self) -> int:
        return self.num_tokens

    def __getitem__(self, piece: slice) -> np.ndarray:
        """Read a range of ids. Raises as a `Reader` does."""
        start, stop, _ = piece.indices(self.num_tokens)
        if start >= stop:
            return np.empty(0, self.dtype)
        (content,) = self.reader.read([self.locate(start, stop)])
        return self.decode(content, start, stop)

    def locate(self, start: int, stop: int) -> ByteRange:
        """The bytes that hold the ids `start .. stop`, of which there is one at least."""
        size, offset = self.dtype.itemsize, self.offset_bytes
        return ByteRange(self.file, offset + start * size, offset + stop * size)

    def decode(self, content: bytes, start: int, stop: int) -> np.ndarray:
        """The ids `start .. stop`, of the bytes that `locate` has told. Raises DataError if they are damaged."""
        return np.frombuffer(content, self.dtype)

    @property
    def meaning(self) -> str:
        """How the bytes of the file are read: two readings of one file are kept apart in the cache."""
        return self.dtype.name

    @property
    def bytes_fetched_per_token(self) -> int:
        """What reading an id takes over the network."""
        return self.dtype.itemsize if isinstance(self.file, BucketFile) else 0

    @property
    def bytes_copied(self) -> int:
        """Of a file that a host keeps whole, though its source lies in a bucket."""
        return self.file.size_bytes if self.reader.is_remote and isinstance(self.file, SourceFile) else 0


TokenPart = TokenFile | np.ndarray


class IdSlice(NamedTuple):
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


class TokenSequence:
    """Parts read as if they were concatenated: a range may span parts, nothing is copied until it is read.

    All files among them have one reader.

    Attributes:
        id_limit: every id must be below it and none negative, which is looked at where ids are read: by `read`,
            `read_many` and `read_ranges` alike. None: it is known already.
    """

    id_limit: int | None = None

    def __init__(self, parts: Sequence[TokenPart]) -> None:
        self.parts = [part for part in parts if len(part)]
        self._ends = list(itertools.accumulate(map(len, self.parts)))
        self._bounds = np.array([0, *self._ends])
        dtypes = {part.dtype for part in self.parts}
        self._dtype = dtypes.pop() if len(dtypes) == 1 else np.dtype(np.int64)
        self._files = [part for part in self.parts if isinstance(part, TokenFile)]
        self.bytes_fetched_per_token = max((part.bytes_fetched_per_token for part in self._files), default=0)
        self.bytes_copied = sum(part.bytes_copied for part in self._files)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def read_many(self, starts: Sequence[int] | np.ndarray, length: int) -> np.ndarray:
        """The ids of `length` positions from each of `starts` on: (number of starts, length).

        Of a file each row is one `pread` into its place; of objects all rows are asked for at a time. Raises DataError
        naming the place of an id beyond `id_limit`.
        """
        starts = np.asarray(starts, np.int64)
        found = self._gather(starts, length)
        if self.id_limit is not None and (place := find_invalid_id(found.ravel(), self.id_limit)) is not None:
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
        pieces: list[IdSlice] = []
        rows = zip(parts.tolist(), (starts - self._bounds[parts]).tolist(), fit.tolist(), out, strict=True)
        for part, offset, is_whole, row in rows:
            pieces += [IdSlice(part, offset, row)] if is_whole else self._split(part, offset, row)
        self._fill(pieces)
        return out

    def read_ranges(self, ranges: Sequence[tuple[int, int]]) -> list[np.ndarray]:
        """The ids of several stretches, each from a start to a stop; of objects all are asked for at a time.

        Raises DataError as `read_many` does.
        """
        found = self._stretches(ranges)
        if self.id_limit is None or not found or find_invalid_id(np.concatenate(found), self.id_limit) is None:
            return found
        for (start, _), ids in zip(ranges, found, strict=True):
            if (place := find_invalid_id(ids, self.id_limit)) is not None:
                raise self._bad_id(int(ids[place]), start + place, self.id_limit)
        raise AssertionError("a bad id is in one of the stretches")

    def _stretches(self, ranges: Sequence[tuple[int, int]]) -> list[np.ndarray]:
        """What `read_ranges` gives, not looked at."""
        assert all(start >= 0 and stop <= len(self) for start, stop in ranges)
        if len(self.parts) == 1 and isinstance(self.parts[0], np.ndarray):
            return [self.parts[0][start:stop] for start, stop in ranges]
        found = [np.empty(stop - start, self._dtype) for start, stop in ranges]
        pieces: list[IdSlice] = []
        for (start, _), row in zip(ranges, found, strict=True):
            part = bisect.bisect_right(self._ends, start)
            pieces += self._split(part, start - int(self._bounds[part]), row)
        self._fill(pieces)
        return found

    def _split(self, part: int, offset: int, row: np.ndarray) -> Iterator[IdSlice]:
        """The pieces of a row that may go over the ends of parts."""
        while len(row):
            size = min(len(row), len(self.parts[part]) - offset)
            yield IdSlice(part, offset, row[:size])
            row, part, offset = row[size:], part + 1, 0

    def _fill(self, pieces: Sequence[IdSlice]) -> None:
        """Of plain ids on a disk each piece is read into its place; of all others the bytes are asked for at a time."""
        asked: list[tuple[TokenFile, int, np.ndarray]] = []
        for index, group in itertools.groupby(sorted(pieces, key=lambda piece: piece.part), lambda piece: piece.part):
            part, places = self.parts[index], [(offset, out) for _, offset, out in group if len(out)]
            if isinstance(part, np.ndarray) or not part.is_ranged:
                for offset, out in places:
                    out[:] = part[offset : offset + len(out)]
            elif part.is_plain and part.dtype == self._dtype and isinstance(part.file, SourceFile):
                itemsize = part.dtype.itemsize
                fill_from_file(part.file, [(part.offset_bytes + offset * itemsize, out) for offset, out in places])
            else:
                asked += [(part, offset, out) for offset, out in places]
        if asked:
            contents = asked[0][0].reader.read([part.locate(at, at + len(out)) for part, at, out in asked])
            for (part, at, out), content in zip(asked, contents, strict=True):
                out[:] = part.decode(content, at, at + len(out))

    def parts_between(self, start: int, stop: int) -> range:
        """The parts that hold the positions `start .. stop`; none if these are the same."""
        assert 0 <= start <= stop <= len(self)
        first = bisect.bisect_right(self._ends, start)
        return range(first, bisect.bisect_left(self._ends, stop) + 1 if start < stop else first)

    def read_part_ends(self, part: int, start: int, stop: int) -> np.ndarray:
        """Positions in a part at which its documents end, integers that never fall; of a source that has documents.

        All p with `start < p <= stop` are among them; the last of all is the part's end. An empty document repeats the
        end of the one before it, or is 0.
        """
        raise NotImplementedError

    def read_many_part_ends(self, asked: Sequence[tuple[int, int, int]]) -> list[np.ndarray]:
        """What `read_part_ends` gives for each (part, start, stop). Replace it where each waits."""
        return [self.read_part_ends(*each) for each in asked]

    def document_ends(self, start: int, stop: int) -> np.ndarray:
        """The positions p, `start < p <= stop`, at which a document ends: int64, ascending."""
        asked = [
            (part, max(start - before, 0), min(stop - before, len(self.parts[part])))
            for part in self.parts_between(start, stop)
            for before in [int(self._bounds[part])]
        ]
        found = [np.empty(0, np.int64)]
        for (part, *here), ends in zip(asked, self.read_many_part_ends(asked), strict=True):
            low, high = np.searchsorted(ends, here, side="right")
            found.append(ends[low:high].astype(np.int64) + self._bounds[part])
        ascending = np.concatenate(found)
        return ascending[np.diff(ascending, prepend=start) > 0]

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
        if self._files:
            self._files[0].reader.check([part.file for part in self._files])

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
        """Read every id once, in chunks, some of them at a time."""
        chunks = [
            (part, int(begin), offset)
            for part, begin in zip(self.parts, self._bounds, strict=False)
            for offset in range(0, len(part), SCAN_CHUNK_TOKENS)
        ]
        found = run_in_parallel([functools.partial(_range_of, *chunk) for chunk in chunks])
        low = min(found, key=lambda each: each.smallest)
        high = max(found, key=lambda each: each.largest)
        return IdRange(low.smallest, low.smallest_position, high.largest, high.largest_position)


def _range_of(part: TokenPart, begin: int, offset: int) -> IdRange:
    """The ids of one chunk of a part, which begins at the position `begin`."""
    chunk = part[offset : offset + SCAN_CHUNK_TOKENS]
    low, high = int(chunk.argmin()), int(chunk.argmax())
    return IdRange(int(chunk[low]), begin + offset + low, int(chunk[high]), begin + offset + high)


class TokenFiles(TokenSequence, Source):
    """Files that hold ids. Which ids there are is found by reading all of them, once.

    Of many ids that would take long, and of those in a bucket too: there the vocabulary that the spec names,
    `believed`, is taken at its word, and each id is looked at when it is read.
    """

    def __init__(self, parts: Sequence[TokenFile], cache_directory: Path, believed: int | None = None) -> None:
        super().__init__(parts)
        self._cache_directory = cache_directory
        self._is_in_bucket = any(part.reader.is_remote for part in self._files)
        self._taken: IdRange | None = None
        if self._is_in_bucket or len(self) > SCANNED_TOKENS_MAX:
            self.id_limit = believed

    @functools.cached_property
    def fingerprint(self) -> str:
        """Of sizes, types and a sample of the ids: see `probe`."""
        return self.probe()

    @property
    def vocabulary_size(self) -> int:
        """The one believed, else the largest id + 1. Raises DataError if an id is negative."""
        return self.id_range.largest + 1 if self.id_limit is None else self.id_limit

    @functools.cached_property
    def id_range(self) -> IdRange:
        """Which ids there are. Reads all of them the first time, and keeps the answer. Raises DataError."""
        if self._taken is not None:
            return self._taken
        if self._is_in_bucket and len(self) > SCANNED_TOKENS_MAX:
            raise DataError(
                f"{len(self):,} ids in a bucket are not read to find the largest; name the vocabulary's size in the "
                "spec (config.model.vocabulary_size)"
            )
        found = scan_cached(self, self._cache_directory)
        if found.smallest < 0:
            raise self._bad_id(found.smallest, found.smallest_position, 0)
        return found

    def trust_vocabulary(self, vocabulary_size: int) -> None:
        """Of many ids: do not read them to find the largest, but look at each when it is read."""
        if self.id_limit is None and len(self) > SCANNED_TOKENS_MAX:
            self.id_limit = vocabulary_size

    def take(self, found: IdRange) -> None:
        """Believe what another host has found, and look at each id when it is read."""
        self._taken, self.id_limit = found, found.largest + 1

    def validate_vocabulary(self, size: int) -> None:
        """See `Source`. Reads all ids the first time, and the answer is cached."""
        if self.vocabulary_size > size:
            raise self._bad_id(self.id_range.largest, self.id_range.largest_position, size)


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
    reader = open_reader(source, ranges or CacheSettings(cache_directory, 0, 1))
    files = _open_token_files(source.files, np.dtype(dtype or "uint16").newbyteorder("<"), reader)
    bins = [file for file in files if str(file.file).endswith(".bin")]
    if dtype is None:
        for file in bins[:: max(1, -(-len(bins) // HALVES_OBJECTS))] if reader.is_remote else bins:
            if _is_of_halves(file):
                raise DataError(
                    f"{file.file}: looks like uint32 ids read as uint16 (every other one is tiny); say which: "
                    "data.dtype: uint32, or uint16"
                )
    elif not bins:
        raise DataError(f"data.dtype={dtype}: nothing reads it, .npy files say their own")
    return TokenFiles(files, cache_directory, vocabulary_size)


def _is_of_halves(file: TokenFile) -> bool:
    """Whether every other id is so small, in blocks all over the file, that they must be upper halves of wider ids."""
    if len(file) < 2 * HALVES_PAIRS_MIN:
        return False
    block = min(len(file), HALVES_BLOCK_TOKENS) // 2 * 2
    starts = {(len(file) - block) * i // (HALVES_BLOCKS - 1) // 2 * 2 for i in range(HALVES_BLOCKS)}
    pairs = TokenSequence([file]).read_many(sorted(starts), block).reshape(-1, 2)
    low, high = pairs.max(axis=0)
    return bool(high < HALVES_BELOW <= low or high == 0 < low)


def scan_cached(tokens: TokenSequence, cache_directory: Path) -> IdRange:
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


def _open_token_files(files: Sequence[File], dtype: np.dtype, reader: Reader) -> list[TokenFile]:
    """What each file holds: `.bin` ids of `dtype`; of `.npy` the header is read."""
    arrays = [file for file in files if str(file).endswith(".npy")]
    heads = reader.read([ByteRange(file, 0, min(file.size_bytes, NPY_HEADER_BYTES)) for file in arrays])
    shapes = {file: parse_npy(file, head) for file, head in zip(arrays, heads, strict=True)}
    found = [shapes.get(file) or (dtype, count_ids(file, dtype), 0) for file in files]
    reader = reader.for_id_width(max(dtype.itemsize for dtype, _, _ in found))
    return [TokenFile(file, *shape, reader) for file, shape in zip(files, found, strict=True)]
