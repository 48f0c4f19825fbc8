"""Token files: arrays, files and objects of token ids, read as one long sequence.

- `TokenFile`: one file or object of ids. `DocumentFile` also has document boundaries; a `RecordFile` has other bytes
  between the documents.
- `TokenSequence`: several files or arrays, read as if they were concatenated. A `CompletionMask` is such a sequence.
- `TokenFiles`, `DocumentFiles`: a sequence of files as a `Source`.

`.bin` and `.npy` files, whose kinds `token_headers` lists, are opened by `open_token_files`. Files of other tools are
opened by a `TokenReader`, see `megatron`, `mds`, `array_record` and `tables`.
"""

import bisect
import functools
import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple, Self

import numpy as np

from runner.data.readers import (
    ByteRange,
    Reader,
    cache_key,
    fill_from_file,
    load_record,
    make_changed_error,
)
from runner.data.remote import CacheSettings, open_reader
from runner.data.source import Source, find_invalid_id
from runner.data.source_files import BucketFile, BucketFiles, File, SourceFile, SourceFiles
from runner.data.token_headers import HEAD_BYTES, TokenLayout, parse_head
from runner.errors import DataError
from runner.storage import JsonObject, LocalStore, run_in_parallel

LOSS_WEIGHT = "loss_weight"
TEACHER_FIELDS = ("teacher_log_sum", "teacher_logits", "teacher_ids")
ID_DTYPES = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")
SCAN_CHUNK_TOKENS = 1 << 22
SCANNED_TOKENS_MAX = 1 << 28  # takes a second or two to scan; more are scanned only if the spec names no vocabulary
_PROBE_BLOCKS = 1024
_PROBE_BLOCK_BYTES = 4096
# If ids below a million are read as ids of half the width, every other one is an upper half and below 16.
_HALVES_BELOW = 16
VOCABULARY_MAX = 1 << 22  # no published vocabulary is as large; two ids read as one are larger
_HALVES_BLOCKS = 16
_HALVES_BLOCK_TOKENS = 2048
_HALVES_PAIRS_MIN = 64
_CHECKED_FILES = 64  # by a host other than process 0, at a save
_HALVES_OBJECTS = 16  # number of objects that are sampled if a bucket holds more


def parse_dtype(name: str) -> np.dtype:
    """Return the little-endian integer type that `data.options.dtype` names. Raises DataError if it names none."""
    if name not in ID_DTYPES:
        raise DataError(f"data.options.dtype={name}: needs one of {', '.join(ID_DTYPES)}")
    return np.dtype(name).newbyteorder("<")


@dataclass(frozen=True)
class TokenFile:
    """File or object of ids, which follow each other from the byte `offset_bytes` on. Read through `reader`."""

    file: File
    dtype: np.dtype
    num_tokens: int
    offset_bytes: int
    reader: Reader

    is_contiguous: ClassVar[bool] = True  # True if there are no other bytes between the first and the last id
    has_byte_ranges: ClassVar[bool] = True  # True if a range of ids can be read as a range of bytes

    def __len__(self) -> int:
        return self.num_tokens

    def __getitem__(self, piece: slice) -> np.ndarray:
        """Read a range of ids. Raises as a `Reader` does."""
        start, stop, _ = piece.indices(self.num_tokens)
        if start >= stop:
            return np.empty(0, self.dtype)
        (content,) = self.reader.read([self.locate(start, stop)])
        return self.decode(content, start, stop)

    @property
    def label(self) -> str:
        """Name of the file in messages."""
        return str(self.file)

    def reopen(self, file: SourceFile) -> Self:
        """Return this part of the file in its present state."""
        return replace(self, file=file)

    def locate(self, start: int, stop: int) -> ByteRange:
        """Return the byte range of the ids `start .. stop`, which must not be empty."""
        size, offset = self.dtype.itemsize, self.offset_bytes
        return ByteRange(self.file, offset + start * size, offset + stop * size)

    def decode(self, content: bytes, start: int, stop: int) -> np.ndarray:
        """Return the ids `start .. stop` from the bytes at `locate(start, stop)`. Raises DataError on damage."""
        return np.frombuffer(content, self.dtype)

    @property
    def encoding(self) -> str:
        """Name of the encoding, which keeps scans of one file under different encodings apart in the cache."""
        return f"{self.dtype.name}-{self.offset_bytes}" if self.offset_bytes else self.dtype.name

    @property
    def bytes_fetched_per_token(self) -> int:
        """Bytes that reading an id transfers over the network."""
        return self.dtype.itemsize if isinstance(self.file, BucketFile) else 0

    @property
    def bytes_copied(self) -> int:
        """Size of the copy on this host's disk, if the source is in a bucket."""
        return self.file.size_bytes if self.reader.is_remote and isinstance(self.file, SourceFile) else 0


@dataclass(frozen=True, eq=False)
class DocumentFile(TokenFile):
    """File of ids with document boundaries."""

    # Ascending integers from 0 to `num_tokens`; document i holds the tokens `bounds[i] .. bounds[i + 1]`. Two
    # neighbours are equal where a document is empty.
    bounds: np.ndarray
    # A byte for each id, 1 if it counts in the loss; None if all count.
    marks: TokenFile | None = field(default=None, kw_only=True)

    def find_documents(self, start: int, stop: int) -> tuple[int, int]:
        """Return the first document that has one of the tokens `start .. stop`, and the one after the last."""
        assert start < stop
        # `side="right"` skips empty documents, whose bounds are equal.
        first, last = np.searchsorted(self.bounds, [start, stop - 1], side="right") - 1
        return int(first), int(last) + 1


class RecordFile(DocumentFile):
    """File of documents with other bytes between them."""

    is_contiguous = False

    @property
    def bytes_fetched_per_token(self) -> int:
        """Bytes that reading an id transfers over the network, including the bytes between documents."""
        return -(-self.file.size_bytes // self.num_tokens) if isinstance(self.file, BucketFile) else 0


# Opens files of another tool: called with the files, their `Reader`, and the keys of `data.options` as keywords. Raises
# `DataError`, with one line that names the file, if one is damaged or the options do not fit.
TokenReader = Callable[..., Sequence[DocumentFile]]
_TokenPart = TokenFile | np.ndarray


class _IdSlice(NamedTuple):
    """Ids of a part from `offset` on, and the array to read them into."""

    part: int
    offset: int
    out: np.ndarray


@dataclass(frozen=True)
class IdRange:
    """Smallest and largest token id of a sequence, and the position where each occurs first."""

    smallest: int
    smallest_position: int
    largest: int
    largest_position: int


class TokenSequence:
    """Parts read as if they were concatenated, without a copy. All files among them have the same reader."""

    # Number that every id must be below, checked by `read`, `read_many` and `read_ranges` together with the sign; None
    # if the ids are known to be valid.
    id_limit: int | None = None

    def __init__(self, parts: Sequence[_TokenPart]) -> None:
        self.parts = [part for part in parts if len(part)]
        self._ends = list(itertools.accumulate(map(len, self.parts)))
        self._bounds = np.array([0, *self._ends])
        # Parts of one dtype are read without a conversion; mixed ones are read as int64, which holds all ids.
        dtypes = {part.dtype for part in self.parts}
        self._dtype = dtypes.pop() if len(dtypes) == 1 else np.dtype(np.int64)
        self._files = [part for part in self.parts if isinstance(part, TokenFile)]
        self._start_probe: str | None = None
        self._has_unstable_inodes = False
        self._file_indices = [index for index, part in enumerate(self.parts) if isinstance(part, TokenFile)]
        self._next_checked = 0  # number of the file with which `check_part` goes on
        self.bytes_fetched_per_token = max((part.bytes_fetched_per_token for part in self._files), default=0)
        self.bytes_copied = sum(part.bytes_copied for part in self._files)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return the ids of positions `start .. stop`. Raises DataError naming the place of an invalid id."""
        return self.read_ranges([(start, stop)])[0]

    def read_many(self, starts: Sequence[int] | np.ndarray, length: int) -> np.ndarray:
        """Return the ids of `length` positions from each start on, of shape (len(starts), length).

        From a disk each range is one `pread` into its place; from a bucket all ranges are requested at the same time.
        Raises DataError naming the place of an invalid id.
        """
        starts = np.asarray(starts, np.int64)
        found = self._gather(starts, length)
        if self.id_limit is not None and (index := find_invalid_id(found.ravel(), self.id_limit)) is not None:
            number, offset = divmod(index, length)
            raise self._make_id_error(int(found[number, offset]), int(starts[number]) + offset, self.id_limit)
        return found

    def read_ranges(self, ranges: Sequence[tuple[int, int]]) -> list[np.ndarray]:
        """Return the ids of several ranges, from a bucket all at the same time. Raises DataError for an invalid id."""
        assert all(start >= 0 and stop <= len(self) for start, stop in ranges)
        if len(self.parts) == 1 and isinstance(self.parts[0], np.ndarray):
            found = [self.parts[0][start:stop] for start, stop in ranges]
        else:
            found = [np.empty(stop - start, self._dtype) for start, stop in ranges]
            pieces: list[_IdSlice] = []
            for (start, _), out in zip(ranges, found, strict=True):
                part = bisect.bisect_right(self._ends, start)
                pieces += self._split(part, start - int(self._bounds[part]), out)
            self._fill(pieces)
        # The usual case is one check over everything; only a failure looks for the range.
        if self.id_limit is None or not found or find_invalid_id(np.concatenate(found), self.id_limit) is None:
            return found
        for (start, _), ids in zip(ranges, found, strict=True):
            if (index := find_invalid_id(ids, self.id_limit)) is not None:
                raise self._make_id_error(int(ids[index]), start + index, self.id_limit)
        # The check over everything failed, so one of the ranges must have failed.
        raise AssertionError("an invalid id is in one of the ranges")

    def _gather(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Return the ids as `read_many` does, without the check."""
        assert not starts.size or (starts.min() >= 0 and starts.max() + length <= len(self))
        if len(self.parts) == 1 and isinstance(self.parts[0], np.ndarray):
            return np.lib.stride_tricks.sliding_window_view(self.parts[0], length)[starts]
        out = np.empty((len(starts), length), self._dtype)
        parts = np.searchsorted(self._bounds, starts, side="right") - 1
        is_within_part = starts + length <= self._bounds[parts + 1]
        pieces: list[_IdSlice] = []
        offsets = (starts - self._bounds[parts]).tolist()
        for part, offset, is_whole, target in zip(parts.tolist(), offsets, is_within_part.tolist(), out, strict=True):
            pieces += [_IdSlice(part, offset, target)] if is_whole else self._split(part, offset, target)
        self._fill(pieces)
        return out

    def _split(self, part: int, offset: int, out: np.ndarray) -> Iterator[_IdSlice]:
        """Split a range that may cross the ends of parts."""
        while len(out):
            size = min(len(out), len(self.parts[part]) - offset)
            yield _IdSlice(part, offset, out[:size])
            out, part, offset = out[size:], part + 1, 0

    def _fill(self, pieces: Sequence[_IdSlice]) -> None:
        """Read every piece into its array.

        Contiguous ids on a disk go straight to their place. The bytes of all other pieces are requested in one call, so
        that a bucket answers them at the same time.
        """
        requested: list[tuple[TokenFile, int, np.ndarray]] = []
        # Pieces of one part are read together. The sort is stable, so their order within a part stays.
        for index, group in itertools.groupby(sorted(pieces, key=lambda piece: piece.part), lambda piece: piece.part):
            part, targets = self.parts[index], [(offset, out) for _, offset, out in group if len(out)]
            if isinstance(part, np.ndarray) or not part.has_byte_ranges:
                for offset, out in targets:
                    out[:] = part[offset : offset + len(out)]
            elif part.is_contiguous and part.dtype == self._dtype and isinstance(part.file, SourceFile):
                itemsize = part.dtype.itemsize
                fill_from_file(part.file, [(part.offset_bytes + offset * itemsize, out) for offset, out in targets])
            else:
                requested += [(part, offset, out) for offset, out in targets]
        if requested:
            reader = requested[0][0].reader
            contents = reader.read([part.locate(offset, offset + len(out)) for part, offset, out in requested])
            for (part, offset, out), content in zip(requested, contents, strict=True):
                out[:] = part.decode(content, offset, offset + len(out))

    def parts_between(self, start: int, stop: int) -> range:
        """Return the parts that hold the positions `start .. stop`; none for an empty range."""
        assert 0 <= start <= stop <= len(self)
        first = bisect.bisect_right(self._ends, start)
        return range(first, bisect.bisect_left(self._ends, stop) + 1 if start < stop else first)

    def read_part_ends(self, part: int, start: int, stop: int) -> np.ndarray:
        """Return the positions within a part at which its documents end, as integers that never fall.

        Implemented by sources that have documents. The result must include all p with `start < p <= stop`, and may
        include others. The last document ends at the end of the part. An empty document repeats the end of the one
        before it, or is 0.
        """
        raise NotImplementedError

    def read_many_part_ends(self, wanted: Sequence[tuple[int, int, int]]) -> list[np.ndarray]:
        """Return `read_part_ends` for each (part, start, stop). Override it where each read waits."""
        return [self.read_part_ends(*each) for each in wanted]

    def document_ends(self, start: int, stop: int) -> np.ndarray:
        """Return the positions p, `start < p <= stop`, at which a document ends: int64, ascending."""
        wanted = [
            (part, max(start - before, 0), min(stop - before, len(self.parts[part])))
            for part in self.parts_between(start, stop)
            for before in [int(self._bounds[part])]
        ]
        # The empty array makes the concatenation below valid when no part is touched.
        found = [np.empty(0, np.int64)]
        for (part, *range_), ends in zip(wanted, self.read_many_part_ends(wanted), strict=True):
            low, high = np.searchsorted(ends, range_, side="right")
            found.append(ends[low:high].astype(np.int64) + self._bounds[part])
        ends = np.concatenate(found)
        return ends[np.diff(ends, prepend=start) > 0]  # without the repeated ends of empty documents

    def _make_id_error(self, token: int, position: int, limit: int) -> DataError:
        place = self.describe_position(position)
        if token < 0:
            return DataError(f"token id {token} at {place} is negative")
        return DataError(
            f"token id {token:,} at {place} is beyond the model's vocabulary of {limit:,} ids; use a vocabulary of at "
            f"least {token + 1:,}"
        )

    def check(self) -> None:
        """Raise DataError if a file has changed since the job started. Usually reads no content.

        In a bucket this is one listing, of sizes and versions. On a disk another size or modification time means a
        change. If only the change time or the inode differs, the content is compared, once; a chmod, a new hard link or
        a restored backup is therefore not a change.
        """
        self._check(self._file_indices)

    def check_part(self) -> None:
        """Check at most `_CHECKED_FILES` files of a disk, other ones each time, and nothing of a bucket.

        A bucket is the same for all hosts, and its objects are read by their versions. Many hosts that checked all of
        many files on a shared disk would keep its metadata server busy.
        """
        indices = self._file_indices
        if indices and not self._files[0].reader.is_remote:
            first = self._next_checked % len(indices)
            self._next_checked = first + _CHECKED_FILES
            self._check([*indices, *indices][first : first + min(_CHECKED_FILES, len(indices))])

    def _check(self, indices: Sequence[int]) -> None:
        if not indices:
            return
        replaced: dict[int, TokenFile] = {}
        checked = [(index, part) for index in indices if isinstance(part := self.parts[index], TokenFile)]
        present = self._files[0].reader.check([part.file for _, part in checked])
        for (index, part), file in zip(checked, present, strict=True):
            if isinstance(file, SourceFile):
                assert isinstance(part.file, SourceFile), "a file does not move into a bucket"
                is_same_inode = self._has_unstable_inodes or file.inode == part.file.inode
                if file.ctime_ns != part.file.ctime_ns or not is_same_inode:
                    replaced[index] = part.reopen(file)
        if not replaced:
            return
        if (changed := self.find_changed(replaced)) is not None:
            raise make_changed_error(changed)
        # On some network file systems inodes change all the time, and comparing the content each time would be
        # expensive.
        self._has_unstable_inodes |= all(
            part.file.ctime_ns == old.file.ctime_ns
            for index, part in replaced.items()
            for old in [self.parts[index]]
            if isinstance(part.file, SourceFile) and isinstance(old, TokenFile) and isinstance(old.file, SourceFile)
        )
        for index, part in replaced.items():
            self.parts[index] = part
        self._files = [part for part in self.parts if isinstance(part, TokenFile)]

    def find_changed(self, replaced: Mapping[int, TokenFile]) -> File | None:
        """Return a file whose content has changed by `probe`, if that was taken; `replaced` has candidates by part."""
        if self._start_probe is None:
            return None
        present = TokenSequence([replaced.get(index, part) for index, part in enumerate(self.parts)])
        return None if present.probe() == self._start_probe else next(iter(replaced.values())).file

    def describe_position(self, position: int) -> str:
        """Return a description of a position for error messages, such as 'position 7 of corpus.bin'."""
        index = bisect.bisect_right(self._ends, position)
        part = self.parts[index]
        offset = position - (self._ends[index - 1] if index else 0)
        return f"position {offset} of {'the text' if isinstance(part, np.ndarray) else part.label}"

    def probe(self) -> str:
        """Return a digest of the parts' sizes and dtypes, and of 1,024 evenly spaced 4 KiB blocks of ids.

        In a small data set these blocks cover every id. In a large one the digest notices replaced content, but not
        each flipped byte.
        """
        digest = hashlib.sha256()
        for part in self.parts:
            digest.update(f"{part.dtype.newbyteorder('<').str} {len(part)}\n".encode())
        block_tokens = min(_PROBE_BLOCK_BYTES // max(part.dtype.itemsize for part in self.parts), len(self))
        num_blocks = min(_PROBE_BLOCKS, -(-len(self) // block_tokens))
        starts = [(len(self) - block_tokens) * i // max(num_blocks - 1, 1) for i in range(num_blocks)]
        # The digest is computed before the ids are checked, because it must not depend on a vocabulary.
        digest.update(self._gather(np.array(starts, np.int64), block_tokens).astype("<i8").data)
        return digest.hexdigest()

    def scan(self) -> IdRange:
        """Read every id once, several chunks at a time, and return the smallest and the largest."""

        def scan_chunk(part: _TokenPart, begin: int, offset: int) -> IdRange:
            chunk = part[offset : offset + SCAN_CHUNK_TOKENS]
            low, high = int(chunk.argmin()), int(chunk.argmax())
            return IdRange(int(chunk[low]), begin + offset + low, int(chunk[high]), begin + offset + high)

        found = run_in_parallel(
            [
                functools.partial(scan_chunk, part, int(begin), offset)
                for part, begin in zip(self.parts, self._bounds, strict=False)
                for offset in range(0, len(part), SCAN_CHUNK_TOKENS)
            ]
        )
        low = min(found, key=lambda chunk: chunk.smallest)
        high = max(found, key=lambda chunk: chunk.largest)
        return IdRange(low.smallest, low.smallest_position, high.largest, high.largest_position)


def has_digest(file: File, digest: str | None) -> bool:
    """Return True if a file on a disk has this CRC-32C, or if none is known."""
    assert isinstance(file, SourceFile), "objects of a bucket have versions"
    return digest is None or LocalStore(file.path.parent).compute_digest(file.path.name) == digest


class SideFiles(TokenSequence):
    """Files with a value for each id of a source. Thread-safe."""

    def __init__(self, parts: Sequence[TokenFile], digests: Sequence[str | None] = ()) -> None:
        """Join these files; `digests` are their CRC-32C on a disk, where known."""
        super().__init__(parts)
        pairs = zip(parts, digests or [None] * len(parts), strict=True)
        self._digests = [digest for part, digest in pairs if len(part)]

    def find_changed(self, replaced: Mapping[int, TokenFile]) -> File | None:
        """Compare the files whole with their digests."""
        return next((part.file for i, part in replaced.items() if not has_digest(part.file, self._digests[i])), None)


class CompletionMask(SideFiles):
    """Marks beside the ids of a source: 1 for a token that counts in the loss as a target, else 0."""

    def read_weights(self, ranges: Sequence[tuple[int, int]]) -> list[np.ndarray]:
        """Return the loss weights of several ranges of tokens, float32. Raises DataError for a mark but 0 and 1."""
        found = self.read_ranges(ranges)
        for (start, _), marks in zip(ranges, found, strict=True):
            if len(marks) and marks.max() > 1:
                index = int((marks > 1).argmax())
                raise DataError(
                    f"{self.describe_position(start + index)} is {marks[index]}, needs 1 (completion) or 0: "
                    "the file is not the one that the corpus was written with"
                )
        return [marks.astype(np.float32) for marks in found]


class WeightedTokens(TokenSequence, Source):
    """Base of files of ids as a source. With a completion mask each token has a loss weight."""

    def __init__(self, parts: Sequence[TokenFile], completion_mask: CompletionMask | None = None) -> None:
        super().__init__(parts)
        self._completion_mask = completion_mask
        if completion_mask is not None:
            self.fields = {LOSS_WEIGHT: np.float32}
            self.bytes_fetched_per_token += completion_mask.bytes_fetched_per_token

    def read_field_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[np.ndarray]:
        """Return the loss weights of several ranges; from a bucket all are requested at the same time."""
        assert name == LOSS_WEIGHT
        assert self._completion_mask is not None
        return self._completion_mask.read_weights(ranges)

    def read_field(self, name: str, start: int, stop: int) -> np.ndarray:
        """Return the loss weights of one range."""
        return self.read_field_ranges(name, [(start, stop)])[0]

    def check(self) -> None:
        """Check the files of the ids and of the completion mask."""
        super().check()
        if self._completion_mask is not None:
            self._completion_mask.check()

    def check_part(self) -> None:
        """Check some files of the ids and of the completion mask."""
        super().check_part()
        if self._completion_mask is not None:
            self._completion_mask.check_part()


class TokenFiles(WeightedTokens):
    """Files of ids as a source. The range of the ids is found by reading all of them once.

    For many ids, and for ids in a bucket, that would take too long. The vocabulary in the spec is then trusted, and
    each id is checked when it is read.
    """

    def __init__(
        self,
        parts: Sequence[TokenFile],
        trusted_vocabulary_size: int | None = None,
        completion_mask: CompletionMask | None = None,
        records: dict[str, JsonObject] | None = None,
    ) -> None:
        super().__init__(parts, completion_mask)
        # Records of the cache, by key, that hold what was read of objects in a bucket, for the other hosts.
        self.records = records or {}
        self._is_in_bucket = any(part.reader.is_remote for part in self._files)
        self._given_range: IdRange | None = None
        # A scan is cheap for few ids on a disk, and finds an invalid id before the first step.
        if self._is_in_bucket or len(self) > SCANNED_TOKENS_MAX:
            self.id_limit = trusted_vocabulary_size

    @functools.cached_property
    def fingerprint(self) -> str:
        """Digest of sizes, dtypes and a sample of the ids."""
        if self._is_in_bucket:  # where versions identify the content
            key = _make_record_key("probe", self)
            self.records[key] = load_record(self._files[0].reader.directory, key, lambda: {"probe": self.probe()})
            self._start_probe = str(self.records[key]["probe"])
        else:
            self._start_probe = self.probe()
        return self._start_probe

    @property
    def vocabulary_size(self) -> int:
        """Trusted vocabulary, else the largest id + 1. Raises DataError if an id is negative."""
        return self.id_range.largest + 1 if self.id_limit is None else self.id_limit

    @functools.cached_property
    def id_range(self) -> IdRange:
        """Smallest and largest id. The first access reads all ids, and caches the result on disk. Raises DataError."""
        if self._given_range is not None:
            return self._given_range
        if self._is_in_bucket and len(self) > SCANNED_TOKENS_MAX:
            raise DataError(
                f"{len(self):,} ids in a bucket are not read to find the largest; name the vocabulary's size in the "
                "spec (config.model.vocabulary_size)"
            )
        found = scan_cached(self, self._files[0].reader.directory)
        if found.smallest < 0:
            raise self._make_id_error(found.smallest, found.smallest_position, 0)
        return found

    def trust_vocabulary(self, vocabulary_size: int) -> None:
        """Check many ids against this vocabulary when they are read, instead of reading all of them now."""
        if self.id_limit is None and len(self) > SCANNED_TOKENS_MAX:
            self.id_limit = vocabulary_size

    def set_id_range(self, found: IdRange) -> None:
        """Accept the range that another host has found, and check each id against it when it is read."""
        self._given_range, self.id_limit = found, found.largest + 1

    def validate_vocabulary(self, size: int) -> None:
        """Raise `DataError` if an id is outside the vocabulary; reads all ids unless a vocabulary is trusted."""
        if self.vocabulary_size > size:
            raise self._make_id_error(self.id_range.largest, self.id_range.largest_position, size)


class DocumentFiles(TokenFiles):
    """Files of documents as a source. Empty documents are ignored."""

    has_documents = True

    def __init__(self, parts: Sequence[DocumentFile], trusted_vocabulary_size: int | None = None) -> None:
        marks = [part.marks for part in parts if part.marks is not None]
        super().__init__(parts, trusted_vocabulary_size, CompletionMask(marks) if marks else None)
        self._document_files = [part for part in parts if len(part)]

    def read_part_ends(self, part: int, start: int, stop: int) -> np.ndarray:
        """Return the ends of all documents of the file."""
        return self._document_files[part].bounds[1:]

    @functools.cached_property
    def fingerprint(self) -> str:
        """Digest of sizes, dtypes, samples of the ids and of the marks, and the end of each document."""
        digest = hashlib.sha256(super().fingerprint.encode())
        for file in self._document_files:
            # Empty documents are left out, because they do not affect examples.
            ends = file.bounds[1:][np.diff(file.bounds) > 0].astype("<i8")
            digest.update(f"{len(ends)}\n".encode())
            digest.update(ends.data)
        if self._completion_mask is None:
            return digest.hexdigest()
        return hashlib.sha256(f"{digest.hexdigest()} {self._completion_mask.probe()}".encode()).hexdigest()


def open_token_files(
    source: SourceFiles | BucketFiles,
    cache: CacheSettings,
    dtype: Literal["uint16", "uint32"] | None = None,
    trusted_vocabulary_size: int | None = None,
) -> TokenFiles:
    """Open `.bin` and `.npy` files, in order. Raises DataError on any other content.

    `dtype` is the type of the little-endian ids in files without a header. Without it those in `.bin` files are uint16,
    and refused if they look like halves of wider ids.
    """
    reader = open_reader(source, cache)
    sources: Sequence[File] = source.files

    def make_files(layouts: Sequence[TokenLayout]) -> list[TokenFile]:
        sized = reader.for_id_width(max(layout.dtype.itemsize for layout in layouts))
        return [TokenFile(file, *layout[:3], sized) for file, layout in zip(sources, layouts, strict=True)]

    def find_layouts() -> JsonObject:
        heads = reader.read([ByteRange(file, 0, min(file.size_bytes, HEAD_BYTES)) for file in sources])
        layouts = [parse_head(file, head, dtype) for file, head in zip(sources, heads, strict=True)]
        raw = [file for file, layout in zip(make_files(layouts), layouts, strict=True) if layout.is_raw]
        if dtype is not None and all(str(file).endswith(".npy") for file in sources) and not raw:
            raise DataError(f"data.dtype={dtype}: nothing reads it, .npy files say their own; leave it out")
        for sampled in raw[:: max(1, -(-len(raw) // _HALVES_OBJECTS))] if reader.is_remote else raw:
            _validate_width(sampled, dtype, trusted_vocabulary_size)
        return {"layouts": [[layout.dtype.str, *layout[1:]] for layout in layouts]}

    # A read of each of many objects is worth a record, which other hosts get too.
    key = cache_key(f"layouts-{dtype}-{trusted_vocabulary_size is not None}", sources)
    record = load_record(reader.directory, key, find_layouts) if reader.is_remote else find_layouts()
    layouts = [TokenLayout(np.dtype(name), *rest) for name, *rest in record["layouts"]]
    return TokenFiles(make_files(layouts), trusted_vocabulary_size, records={key: record} if reader.is_remote else {})


def _validate_width(file: TokenFile, dtype: str | None, vocabulary_size: int | None) -> None:
    """Raise `DataError` if raw ids look like ids of another width, in blocks all over the file.

    Such ids are alternately lower and upper halves, or each is two ids in one. The `dtype` or the vocabulary in the
    spec overrides the check.
    """
    if len(file) < 2 * _HALVES_PAIRS_MIN:
        return
    block = min(len(file), _HALVES_BLOCK_TOKENS) // 2 * 2
    # The blocks begin at even positions, so that low and high halves stay apart.
    starts = {(len(file) - block) * i // (_HALVES_BLOCKS - 1) // 2 * 2 for i in range(_HALVES_BLOCKS)}
    pairs = TokenSequence([file]).read_many(sorted(starts), block).reshape(-1, 2)
    low, high = map(int, pairs.max(axis=0))
    if dtype is None and (high < _HALVES_BELOW <= low or high == 0 < low):
        raise DataError(
            f"{file.file}: looks like uint32 ids read as uint16 (every other one is tiny); say which: data.dtype: "
            "uint32, or uint16"
        )
    if dtype == "uint32" and high == 0 < low:
        raise DataError(
            f"{file.file}: looks like ids of 8 bytes read as uint32 (every other one is 0); write them as uint32"
        )
    if dtype == "uint32" and vocabulary_size is None and max(low, high) >= VOCABULARY_MAX:
        raise DataError(
            f"{file.file}: looks like uint16 ids read as uint32 (they go up to {max(low, high):,}); set data.dtype: "
            "uint16, or name the vocabulary's size in the spec (config.model.vocabulary_size)"
        )


def scan_cached(tokens: TokenSequence, cache_directory: Path) -> IdRange:
    """Return `tokens.scan()` of token files, from the cache if these files have been scanned before."""
    return IdRange(**load_record(cache_directory, _make_record_key("ids", tokens), lambda: asdict(tokens.scan())))


def _make_record_key(kind: str, tokens: TokenSequence) -> str:
    # The encoding is part of the key: a file read with another id type has other ids.
    files = [part for part in tokens.parts if not isinstance(part, np.ndarray)]
    return cache_key("-".join([kind, *sorted({part.encoding for part in files})]), [part.file for part in files])
