"""Corpus as a source: shards of ids with an index, on a disk or in a bucket, with document boundaries.

A corpus of dialogues also has a completion mask, a byte for each token. With `train_on: answers` only completion tokens
count in the loss: their `loss_weight` is 1, that of other tokens 0. With `options: {top_k: K}` a token has the K most
likely tokens of a teacher, `teacher_ids` and `teacher_logits`, and the logsumexp of all logits, `teacher_log_sum`.
"""

import functools
import math
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import DTypeLike

from runner.data.corpus_index import COMPLETION_DTYPE, ENDS_DTYPE, HEAD_BYTES, INDEX, CorpusIndex, read_tokenizer
from runner.data.readers import ByteRange, DiskReader, Reader
from runner.data.remote import BucketReader, CacheSettings
from runner.data.source_files import File, describe_file, make_bucket_file, wrap_source_errors
from runner.data.token_files import TEACHER_FIELDS, CompletionMask, SideFiles, TokenFile, WeightedTokens, has_digest
from runner.errors import DataError
from runner.storage import (
    ChangedError,
    DeniedError,
    FileInfo,
    ForbiddenError,
    Store,
    compute_crc32c,
    open_store,
    run_in_parallel,
)

TrainOn = Literal["answers", "all"]
VERIFIED_BYTES_MAX = 1 << 27  # shards on a disk, up to this size in all, are read whole at the start (0.1 s)
_SAMPLED_HEADS_MAX = 1024  # of more shards in a bucket the heads of this many, evenly spaced, are checked at the start
_COMPARED_BYTES_MAX = 1 << 30  # shards that were possibly replaced under a running job, up to this size, are read whole
ENDS_BYTES_MAX = (
    1 << 28
)  # of a corpus on a disk with no more bytes of document ends, whole shards of ends stay in memory

Listing = dict[str, FileInfo]


class Corpus(WeightedTokens):
    """Shards of an index, in its order.

    Errors are detected at these times:

    - A file that is missing, has another size, or may not be read (checked for up to 1,024 shards): at the start.
    - A tokenizer file other than the one with which the tokens were made: at the start.
    - Changed tokens of the same size: at the start, in the head of a shard (in a bucket: of up to 1,024 shards). Beyond
      the head: if the store reports CRC-32C (Google's), if the shards are small and on a disk, or when an id is read
      that exceeds the largest id of the index.
    - A changed completion mask: like tokens, but in a bucket not in the head; also a byte that is neither 0 nor 1, when
      it is read.
    - Changed document ends: by their CRC when they are read whole. If they are read in parts (from a bucket, or more
      than `ENDS_BYTES_MAX`), only impossible numbers are noticed.
    - A file that is replaced while the job runs: by `check`, before each save; in a bucket by the next read of it.

    One kind of change is never detected: changes between two attempts, in a corpus that is large or on S3 or Azure, of
    tokens beyond the head of a shard, of ends that are read in parts, or of the mask, if the new values are valid too.
    """

    has_documents = True
    id_limit: int  # the largest id of the index + 1

    def __init__(
        self,
        index: CorpusIndex,
        parts: Sequence[TokenFile],
        store: Store,
        listing: Listing,
        completion_mask: CompletionMask | None = None,
        top: tuple[SideFiles, int] | None = None,
    ) -> None:
        """Make the source; `top` has the predictions of a teacher, and the number of those to return."""
        super().__init__(parts, completion_mask)
        self._top = top
        if top is not None:
            self.fields = {**self.fields, **make_teacher_dtypes(top[1])}
            self.bytes_fetched_per_token += top[0].bytes_fetched_per_token
        self._index, self._store = index, store
        self._shards = [shard for shard in index.shards if shard.num_tokens]
        self.id_limit = 1 + max((shard.largest_id for shard in self._shards), default=-1)
        self._versions = {name: listed.version for name, listed in listing.items()}
        # From a bucket a host fetches only the ends near its own sequences; otherwise each of many hosts would fetch
        # all ends.
        self._are_ends_kept = store.root is not None and index.num_documents * ENDS_DTYPE.itemsize <= ENDS_BYTES_MAX
        self._read_all_ends = functools.cache(
            lambda shard: self._read_ends(shard, 0, self._shards[shard].num_documents)
        )
        self._ends_locks = [threading.Lock() for _ in self._shards]  # threads that want one shard read it once

    @property
    def index(self) -> CorpusIndex:
        """Index of the corpus."""
        return self._index

    @property
    def vocabulary_size(self) -> int:
        """Vocabulary size of the index."""
        return self._index.vocabulary_size

    @property
    def fingerprint(self) -> str:
        """Digest of the index."""
        return self._index.digest

    def read_field_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[np.ndarray]:
        """Return loss weights, or values of the teacher's predictions."""
        if name not in TEACHER_FIELDS or self._top is None:
            return super().read_field_ranges(name, ranges)
        files, top_k = self._top
        found = [records[name.removeprefix("teacher_")] for records in files.read_ranges(ranges)]
        return [values if values.ndim == 1 else values[:, :top_k] for values in found]

    def check(self) -> None:
        """Check the files of the ids, and those beside them."""
        super().check()
        if self._top is not None:
            self._top[0].check()

    def check_part(self) -> None:
        """Check some files of the ids, and of those beside them."""
        super().check_part()
        if self._top is not None:
            self._top[0].check_part()

    def find_changed(self, replaced: Mapping[int, TokenFile]) -> File | None:
        """Compare shards with the digests of the index: whole if they are not too many, else their heads."""
        is_small = sum(part.file.size_bytes for part in replaced.values()) <= _COMPARED_BYTES_MAX
        for number, part in replaced.items():
            shard, head_tokens = self._shards[number], HEAD_BYTES // part.dtype.itemsize
            if is_small:
                is_same = has_digest(part.file, shard.tokens_crc32c)
            else:
                is_same = compute_crc32c(part[:head_tokens].tobytes()) == shard.head_crc32c
            if not is_same:
                return part.file
        return None

    def validate_vocabulary(self, size: int) -> None:
        """Raise `DataError` if the corpus's tokenizer has more than `size` ids."""
        need = self.vocabulary_size
        if need > size:
            raise DataError(
                f"its tokenizer has {need:,} ids (the largest in the corpus is {self.id_limit - 1:,}), the model's "
                f"vocabulary {size:,}; use a vocabulary of at least {need:,}"
            )

    def _make_id_error(self, token: int, position: int, limit: int) -> DataError:
        return DataError(
            f"token id {token:,} at {self.describe_position(position)} is beyond {limit - 1:,}, the largest of the "
            f"corpus by its {INDEX}: the shard is not the one that this was written for"
        )

    def read_many_part_ends(self, wanted: Sequence[tuple[int, int, int]]) -> list[np.ndarray]:
        """Return the document ends of several shards, which are read at the same time."""
        return run_in_parallel([functools.partial(self.read_part_ends, *each) for each in wanted])

    def read_part_ends(self, part: int, start: int, stop: int) -> np.ndarray:
        """Return the document ends of a shard: all of them from a disk, those near the range from a bucket."""
        if self._are_ends_kept:
            # `functools.cache` alone would let several threads read the same file.
            with self._ends_locks[part]:
                return self._read_all_ends(part)
        # The search begins where the ends would be if all documents had the same length. It widens in both directions
        # until the range is covered.
        shard = self._shards[part]
        num_documents, margin = shard.num_documents, math.isqrt(shard.num_documents) + 1
        first = max(0, num_documents * start // shard.num_tokens - margin)
        last = min(num_documents, num_documents * stop // shard.num_tokens + margin)
        ends = self._read_ends(part, first, last)
        while first and ends[0] > start:
            margin *= 2
            before = max(0, first - margin)
            first, ends = before, np.concatenate([self._read_ends(part, before, first), ends])
        while last < num_documents and ends[-1] <= stop:
            margin *= 2
            after = min(num_documents, last + margin)
            last, ends = after, np.concatenate([ends, self._read_ends(part, last, after)])
        return ends

    def _read_ends(self, part: int, first: int, last: int) -> np.ndarray:
        """Return the positions within a shard at which its documents `first .. last` end; `first < last`."""
        shard, itemsize = self._shards[part], ENDS_DTYPE.itemsize
        name, is_whole = f"{shard.name}.ends", last - first == shard.num_documents
        try:
            content = self._store.read_range(name, first * itemsize, last * itemsize, self._versions[name])
        except (ChangedError, FileNotFoundError, ForbiddenError, DeniedError) as error:
            raise DataError(f"{self._store.url}/{name} cannot be read as at the start: {error}") from error
        if is_whole:
            _validate_digest(f"{self._store.url}/{name}", compute_crc32c(content), shard.ends_crc32c)
        ends = np.frombuffer(content, ENDS_DTYPE).astype(np.int64)
        # The last end of a shard is known from the index; any other end can only be bounded.
        highest = shard.num_tokens if last == shard.num_documents else min(ends[-1], shard.num_tokens)
        if not len(ends) or ends[0] < 0 or (np.diff(ends) < 0).any() or ends[-1] != highest:
            raise DataError(
                f"{self._store.url}/{name}: are not document ends: needs nondecreasing numbers, the last of them "
                f"{shard.num_tokens}"
            )
        return ends


def make_teacher_dtypes(top_k: int) -> dict[str, DTypeLike]:
    """Return the fields of a token in a corpus with predictions of a teacher."""
    vectors = np.dtype((np.float32, (top_k,))), np.dtype((np.int32, (top_k,)))
    return dict(zip(TEACHER_FIELDS, (np.float32, *vectors), strict=True))


def open_corpus(
    name: str,
    directory: str,
    cache: CacheSettings,
    train_on: TrainOn | None = None,
    *,
    default_train_on: TrainOn | None = None,
    top_k: int | None = None,
) -> Corpus:
    """Open the corpus in `directory`, and check its files as the class describes. Called on every host.

    `name` is the value of `data.source`, for messages. A corpus of dialogues needs `train_on`, or its default. `top_k`
    is the number of a teacher's predictions to return with each token; None: no prediction. Raises DataError if the
    corpus is missing, damaged, or does not fit the spec, OSError if a bucket does not answer.
    """
    with wrap_source_errors(name):
        store = open_store(directory)
        index = CorpusIndex.decode(store.read(INDEX), f"{directory}/{INDEX}")
        if index.has_completion_mask and train_on is None:
            train_on = default_train_on
            if train_on is None:
                raise DataError(
                    "the corpus has a completion mask; set data.train_on to answers, so that completion tokens alone "
                    "count in the loss, or to all"
                )
        if train_on is not None and not index.has_completion_mask:
            raise DataError(
                f"data.train_on={train_on}: nothing reads it, the corpus has no completion mask (.answers files); "
                "leave it out, or tokenise dialogues with config.chat"
            )
        available = 0 if index.teacher is None else index.teacher["top_k"]
        if top_k is not None and top_k > available:
            reason = (
                f"the corpus has {available} predictions of a teacher per token"
                if available
                else ("the corpus has no predictions of a teacher")
            )
            raise DataError(f"data.options.top_k={top_k}: {reason}; make them with evaluate --save-top-k")
        # One listing gives the size and version of every file, and in some stores its CRC-32C.
        listing = store.list_files("")
        # The tokenizer is optional: the ids are enough to train on. If it is there, it must be the right one.
        if any(index.tokenizer.get("file") == present for present in listing):
            read_tokenizer(index.tokenizer, store)

        # Compare every file with the index, as far as possible from the listing alone.
        for shard in index.shards:
            sides = [digest for digest in (shard.answers_crc32c, shard.top_crc32c) if digest is not None]
            of_shard = [shard.tokens_crc32c, shard.ends_crc32c, *sides]
            top_itemsize = 0 if index.top_dtype is None else index.top_dtype.itemsize
            sizes = shard.file_sizes(np.dtype(index.dtype).itemsize, top_itemsize)
            for (file, size), digest in zip(sizes.items(), of_shard, strict=True):
                listed = listing.get(file)
                if listed is None:
                    raise DataError(f"{directory}/{file} is missing, {INDEX} names it")
                if listed.size_bytes != size:
                    raise DataError(f"{directory}/{file} has {listed.size_bytes:,} bytes, by {INDEX} it has {size:,}")
                if listed.crc32c is not None:
                    _validate_digest(f"{directory}/{file}", listed.crc32c, digest)

        if store.root is not None:
            parts = _open_shards_on_disk(store, store.root, index, cache)
        else:
            parts = _open_shards_in_bucket(name, store, index, listing, cache)
        open_side = functools.partial(_open_side_files, name, store, index, listing, cache)
        mask, top = None, None
        if train_on == "answers":
            digests = [shard.answers_crc32c for shard in index.shards]
            mask = CompletionMask(open_side(".answers", COMPLETION_DTYPE, digests), digests)
        if top_k is not None and index.top_dtype is not None:
            digests = [shard.top_crc32c for shard in index.shards]
            top = SideFiles(open_side(".top", index.top_dtype, digests), digests), top_k
        return Corpus(index, parts, store, listing, mask, top)


def _validate_digest(where: str, found: str, expected: str) -> None:
    if found != expected:
        raise DataError(f"{where} is not the file that {INDEX} was written for: CRC-32C {found}, needs {expected}")


def _validate_readable(path: Path) -> None:
    if not os.access(path, os.R_OK):
        raise DataError(f"{path} cannot be read: no permission")


def _open_shards_on_disk(store: Store, root: Path, index: CorpusIndex, cache: CacheSettings) -> list[TokenFile]:
    """Open the shards, and check the digest of all tokens if they are few, else that of each head."""
    reader = DiskReader(cache.directory)
    dtype = np.dtype(index.dtype).newbyteorder("<")
    is_small = index.num_tokens * dtype.itemsize <= VERIFIED_BYTES_MAX
    parts = []
    for shard in index.shards:
        file = describe_file(root / f"{shard.name}.bin")
        _validate_readable(file.path)
        _validate_readable(file.path.with_name(f"{shard.name}.ends"))
        if is_small:
            _validate_digest(str(file), store.compute_digest(file.path.name), shard.tokens_crc32c)
        else:
            (head,) = reader.read([ByteRange(file, 0, min(HEAD_BYTES, file.size_bytes))])
            _validate_digest(str(file), compute_crc32c(head), shard.head_crc32c)
        parts.append(TokenFile(file, dtype, shard.num_tokens, 0, reader))
    return parts


def _open_shards_in_bucket(
    name: str, store: Store, index: CorpusIndex, listing: Listing, cache: CacheSettings
) -> list[TokenFile]:
    """Open the shards, and fetch the heads of some, because a listing shows neither permissions nor content."""
    dtype = np.dtype(index.dtype).newbyteorder("<")
    reader = BucketReader(name, store, cache, dtype.itemsize)
    tokens = [make_bucket_file(store.url, f"{shard.name}.bin", listing[f"{shard.name}.bin"]) for shard in index.shards]
    ends = [make_bucket_file(store.url, f"{shard.name}.ends", listing[f"{shard.name}.ends"]) for shard in index.shards]
    sample = [number for number, shard in enumerate(index.shards) if shard.num_tokens]
    sample = sample[:: max(1, -(-len(sample) // _SAMPLED_HEADS_MAX))]
    heads = [ByteRange(tokens[number], 0, min(HEAD_BYTES, tokens[number].size_bytes)) for number in sample]
    # One byte of the ends is enough to learn whether the file may be read.
    found = reader.fetch([*heads, *(ByteRange(ends[number], 0, 1) for number in sample)])
    for number, head, content in zip(sample, heads, found, strict=False):
        _validate_digest(str(head.file), compute_crc32c(content), index.shards[number].head_crc32c)
    return [
        TokenFile(file, dtype, shard.num_tokens, 0, reader) for shard, file in zip(index.shards, tokens, strict=True)
    ]


def _open_side_files(
    name: str,
    store: Store,
    index: CorpusIndex,
    listing: Listing,
    cache: CacheSettings,
    suffix: str,
    dtype: np.dtype,
    digests: Sequence[str | None],
) -> list[TokenFile]:
    """Open the files beside the ids; on a disk check their permissions, and their digests if they are small."""
    if store.root is None:
        reader: Reader = BucketReader(name, store, cache, dtype.itemsize)
    else:
        reader = DiskReader(cache.directory)
    parts = []
    for shard, digest in zip(index.shards, digests, strict=True):
        file_name = f"{shard.name}{suffix}"
        if store.root is None:
            file: File = make_bucket_file(store.url, file_name, listing[file_name])
        else:
            file = describe_file(store.root / file_name)
            _validate_readable(file.path)
            if index.num_tokens * dtype.itemsize <= VERIFIED_BYTES_MAX and digest is not None:
                _validate_digest(str(file), store.compute_digest(file_name), digest)
        parts.append(TokenFile(file, dtype, shard.num_tokens, 0, reader))
    return parts
