"""A corpus: shards of ids with an index, on a disk or in a bucket, and where its documents end."""

import bisect
import functools
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from runner.data.index import ENDS_DTYPE, HEAD_BYTES, INDEX, CorpusIndex, Shard, read_tokenizer
from runner.data.protocol import Source
from runner.data.remote.cache import CacheSettings
from runner.data.remote.reader import BucketReader, ByteRange
from runner.data.remote.tokens import ObjectTokens
from runner.data.source import BucketFile, blaming, describe_file
from runner.data.store import TokenFile, Tokens, read_bytes
from runner.errors import DataError
from runner.storage import ChangedError, DeniedError, ForbiddenError, Listed, Store, digest_of, open_store

VERIFIED_BYTES_MAX = 1 << 27  # shards on a disk, up to so many bytes in all, are read whole at the start (0.1 s)
LOOKED_AT_MAX = 1024  # of more shards in a bucket the heads of so many, evenly spaced, are looked at, at the start
ENDS_BYTES_MAX = 1 << 28  # of document ends in memory

Listing = dict[str, Listed]


class Corpus(Tokens, Source):
    """The shards of an index, in its order. What is found, and when:

    - a file that is missing, of another size, or (of up to 1,024 shards) may not be read: at the start;
    - another tokenizer beside the tokens than they were made with: at the start;
    - other tokens of the same size: at the start, by the head of a shard (of up to 1,024 in a bucket); behind the head,
      where the store reports CRC-32C (Google's), or the shards are on a disk and small, or an id is beyond the largest
      of the index when it is read;
    - other document ends: by their CRC, when they are read;
    - a file that is replaced while the job runs: by `check`, before each save; in a bucket by the next read of it.

    So what is never found is this: of a corpus that is large, or on S3 or Azure, tokens behind the head of a shard are
    changed between two attempts into others that are in the vocabulary.
    """

    has_documents = True
    id_limit: int  # the largest of the index + 1

    def __init__(
        self, index: CorpusIndex, parts: Sequence[TokenFile | ObjectTokens], store: Store, listing: Listing
    ) -> None:
        super().__init__(parts)
        self._index, self._store = index, store
        self._shards = [shard for shard in index.shards if shard.num_tokens]
        self.id_limit = 1 + max((shard.largest_id for shard in self._shards), default=-1)
        self._versions = {name: listed.version for name, listed in listing.items()}
        most_bytes = max((shard.num_documents for shard in self._shards), default=1) * ENDS_DTYPE.itemsize
        self._document_ends = functools.lru_cache(max(1, ENDS_BYTES_MAX // max(most_bytes, 1)))(self._read_ends)

    @property
    def index(self) -> CorpusIndex:
        """What the corpus says of itself."""
        return self._index

    @property
    def vocabulary_size(self) -> int:
        """The index's."""
        return self._index.vocabulary_size

    @property
    def fingerprint(self) -> str:
        """The digest of the index."""
        return self._index.digest

    def refuse_vocabulary(self, size: int) -> None:
        """See `Source`."""
        need = self.vocabulary_size
        if need > size:
            raise DataError(
                f"its tokenizer has {need:,} ids (the largest in the corpus is {self.id_limit - 1:,}), the model's "
                f"vocabulary {size:,}; use a vocabulary of at least {need:,}"
            )

    def _bad_id(self, token: int, position: int, limit: int) -> DataError:
        """See `Tokens`."""
        return DataError(
            f"token id {token:,} at {self.describe_position(position)} is beyond {limit - 1:,}, the largest of the "
            f"corpus by its {INDEX}: the shard is not the one that this was written for"
        )

    def document_ends(self, start: int, stop: int) -> np.ndarray:
        """See `Source`. The ends of a shard are read whole when one of them is first asked for."""
        assert 0 <= start <= stop <= len(self)
        found = [np.empty(0, np.int64)]
        for index in range(bisect.bisect_right(self._ends, start), bisect.bisect_left(self._ends, stop) + 1):
            if start == stop:
                break
            before = int(self._bounds[index])
            ends = self._document_ends(index)
            first, last = np.searchsorted(ends, [start - before, stop - before], side="right")
            found.append(ends[first:last] + before)
        return np.concatenate(found)

    def _read_ends(self, index: int) -> np.ndarray:
        """Positions in a shard at which its documents end, each once: an empty document has no place of its own."""
        shard = self._shards[index]
        name, size = f"{shard.name}.ends", shard.num_documents * ENDS_DTYPE.itemsize
        try:
            content = self._store.read_range(name, 0, size, self._versions[name])
        except (ChangedError, FileNotFoundError, ForbiddenError, DeniedError) as error:
            raise DataError(f"{self._store.url}/{name} cannot be read as at the start: {error}") from error
        _refuse_digest(f"{self._store.url}/{name}", digest_of(content), shard.ends_crc32c)
        ends = np.frombuffer(content, ENDS_DTYPE).astype(np.int64)
        if not len(ends) or ends[0] < 0 or (np.diff(ends) < 0).any() or ends[-1] != shard.num_tokens:
            raise DataError(
                f"{self._store.url}/{name}: are no ends of documents: needs numbers that never fall, the last of them "
                f"{shard.num_tokens}"
            )
        return np.unique(ends[ends > 0])


def open_corpus(name: str, directory: str, ranges: CacheSettings) -> Corpus:
    """Open the corpus in a directory or at a URL, which `data.source=name` has named; see `Corpus` for what is checked.

    Raises DataError where a person must act, `OSError` if the bucket does not answer.
    """
    with blaming(name):
        store = open_store(directory)
        index = CorpusIndex.decode(store.read(INDEX), f"{directory}/{INDEX}")
        listing = store.listing("")
        if any(index.tokenizer.get("file") == present for present in listing):
            read_tokenizer(index.tokenizer, store)
        for shard in index.shards:
            _check_shard(directory, shard, np.dtype(index.dtype).itemsize, listing)
        parts: Sequence[TokenFile | ObjectTokens]
        if store.root is not None:
            parts = _open_files(store, store.root, index)
        else:
            parts = _open_objects(store, index, listing, ranges)
        return Corpus(index, parts, store, listing)


def _check_shard(directory: str, shard: Shard, itemsize: int, listing: Listing) -> None:
    """Hold a shard's two files against the index: that they are there, their sizes, their digests where known."""
    needs = [
        (f"{shard.name}.bin", shard.num_tokens * itemsize, shard.tokens_crc32c),
        (f"{shard.name}.ends", shard.num_documents * ENDS_DTYPE.itemsize, shard.ends_crc32c),
    ]
    for name, size, digest in needs:
        found = listing.get(name)
        if found is None:
            raise DataError(f"{directory}/{name} is missing, {INDEX} names it")
        if found.size_bytes != size:
            raise DataError(f"{directory}/{name} has {found.size_bytes:,} bytes, by {INDEX} it has {size:,}")
        if found.crc32c is not None:
            _refuse_digest(f"{directory}/{name}", found.crc32c, digest)


def _refuse_digest(where: str, found: str, expected: str) -> None:
    if found != expected:
        raise DataError(f"{where} is not the file that {INDEX} was written for: CRC-32C {found}, needs {expected}")


def _open_files(store: Store, root: Path, index: CorpusIndex) -> list[TokenFile]:
    """The shards on a disk. Small ones are read, of larger ones the head."""
    dtype = np.dtype(index.dtype).newbyteorder("<")
    is_small = index.num_tokens * dtype.itemsize <= VERIFIED_BYTES_MAX
    parts = []
    for shard in index.shards:
        file = describe_file(root / f"{shard.name}.bin")
        for path in (file.path, file.path.with_name(f"{shard.name}.ends")):
            if not os.access(path, os.R_OK):
                raise DataError(f"{path} cannot be read: no permission")
        if is_small:
            _refuse_digest(str(file), store.digest(file.path.name), shard.tokens_crc32c)
        else:
            head = read_bytes(file, 0, min(HEAD_BYTES, file.size_bytes))
            _refuse_digest(str(file), digest_of(head), shard.head_crc32c)
        parts.append(TokenFile(file, dtype, shard.num_tokens, 0))
    return parts


def _open_objects(store: Store, index: CorpusIndex, listing: Listing, ranges: CacheSettings) -> list[ObjectTokens]:
    """The shards in a bucket. A listing does not tell who may read, nor what: of each file the head is asked for."""
    dtype = np.dtype(index.dtype).newbyteorder("<")
    reader = BucketReader(store, ranges.open(dtype.itemsize))

    def file_of(shard: Shard, suffix: str) -> BucketFile:
        listed = listing[f"{shard.name}.{suffix}"]
        return BucketFile(store.url, f"{shard.name}.{suffix}", listed.size_bytes, listed.version)

    looked_at = [shard for shard in index.shards if shard.num_tokens]
    looked_at = looked_at[:: max(1, -(-len(looked_at) // LOOKED_AT_MAX))]
    tokens = [file_of(shard, "bin") for shard in looked_at]
    heads = [ByteRange(file, 0, min(HEAD_BYTES, file.size_bytes)) for file in tokens]
    ends = [ByteRange(file_of(shard, "ends"), 0, 1) for shard in looked_at]
    found = reader.fetch([*heads, *ends])
    for shard, head, content in zip(looked_at, heads, found, strict=False):
        _refuse_digest(str(head.file), digest_of(content), shard.head_crc32c)
    return [ObjectTokens(file_of(shard, "bin"), dtype, shard.num_tokens, 0, reader, "") for shard in index.shards]
