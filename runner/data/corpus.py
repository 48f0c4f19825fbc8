"""A corpus: shards of ids with an index, on a disk or in a bucket, and where its documents end.

Which tokens of a corpus of dialogues are of answers, and so count in the loss. A byte a token.
"""

import functools
import math
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from runner.data.corpus_index import (
    COMPLETION_DTYPE,
    ENDS_DTYPE,
    HEAD_BYTES,
    INDEX,
    CorpusIndex,
    CorpusShard,
    read_tokenizer,
)
from runner.data.readers import ByteRange, DiskReader
from runner.data.remote import BucketReader, CacheSettings, run_in_parallel
from runner.data.source import Source
from runner.data.source_files import BucketFile, describe_file, make_bucket_file, wrap_source_errors
from runner.data.token_files import TokenFile, TokenSequence
from runner.errors import DataError
from runner.storage import ChangedError, DeniedError, FileInfo, ForbiddenError, Store, compute_crc32c, open_store

TrainOn = Literal["answers", "all"]
LOSS_WEIGHT = "loss_weight"


class CompletionMask:
    """The files `.answers` of a corpus, as one sequence beside its tokens. Read from several threads."""

    def __init__(self, parts: Sequence[TokenFile]) -> None:
        self._marks = TokenSequence(parts)
        self.bytes_fetched_per_token = self._marks.bytes_fetched_per_token

    def weights(self, ranges: Sequence[tuple[int, int]]) -> list[np.ndarray]:
        """What the tokens of each stretch count for: 1 of an answer, else 0, float32. Of objects all at once.

        Raises `DataError` naming the place of what is neither, and as `TokenSequence.read_ranges` does.
        """
        found = self._marks.read_ranges(ranges)
        for (start, _), marks in zip(ranges, found, strict=True):
            if len(marks) and marks.max() > 1:
                place = int((marks > 1).argmax())
                raise DataError(
                    f"{self._marks.describe_position(start + place)} is {marks[place]}, needs 1 (of an answer) or 0: "
                    "the file is not the one that the corpus was written with"
                )
        return [marks.astype(np.float32) for marks in found]

    def check(self) -> None:
        """Raise `DataError` if a file has changed since the job began."""
        self._marks.check()


def validate_train_on(train_on: TrainOn | None, has_completion_mask: bool) -> None:
    """Raise `DataError` where a corpus does not say which tokens are of answers and is asked, or it says and is not."""
    if train_on is not None and not has_completion_mask:
        raise DataError(
            f"data.train_on={train_on}: nothing reads it, the corpus does not say which tokens are of answers; leave "
            "it out, or tokenise dialogues with config.chat"
        )
    if train_on is None and has_completion_mask:
        raise DataError(
            "the corpus says which tokens are of answers; say data.train_on: answers, so that these alone count in the "
            "loss, or all"
        )


VERIFIED_BYTES_MAX = 1 << 27  # shards on a disk, up to so many bytes in all, are read whole at the start (0.1 s)
LOOKED_AT_MAX = 1024  # of more shards in a bucket the heads of so many, evenly spaced, are looked at, at the start
ENDS_BYTES_MAX = 1 << 28  # of document ends: where a corpus on a disk has no more, a shard's are read whole and kept

Listing = dict[str, FileInfo]


class Corpus(TokenSequence, Source):
    """The shards of an index, in its order. What is found, and when:

    - a file that is missing, of another size, or (of up to 1,024 shards) may not be read: at the start;
    - another tokenizer beside the tokens than they were made with: at the start;
    - other tokens of the same size: at the start, by the head of a shard (of up to 1,024 in a bucket); behind the head,
      where the store reports CRC-32C (Google's), or the shards are on a disk and small, or an id is beyond the largest
      of the index when it is read;
    - other marks of answers: as tokens, but in a bucket by no head; what is no mark when it is read;
    - other document ends: by their CRC, when they are read whole; where they are read in parts, from a bucket or of
      more than `ENDS_BYTES_MAX`, only by numbers that cannot be;
    - a file that is replaced while the job runs: by `check`, before each save; in a bucket by the next read of it.

    So what is never found is this: of a corpus that is large, or on S3 or Azure, tokens behind the head of a shard are
    changed between two attempts into others that are in the vocabulary; or ends, which are read in parts; or marks.
    """

    has_documents = True
    id_limit: int  # the largest of the index + 1

    def __init__(
        self,
        index: CorpusIndex,
        parts: Sequence[TokenFile],
        store: Store,
        listing: Listing,
        answers: CompletionMask | None = None,
    ) -> None:
        """With `answers` these alone count: each token has a `loss_weight`."""
        super().__init__(parts)
        self._answers = answers
        if answers is not None:
            self.fields = {LOSS_WEIGHT: np.float32}
            self.bytes_fetched_per_token += answers.bytes_fetched_per_token
        self._index, self._store = index, store
        self._shards = [shard for shard in index.shards if shard.num_tokens]
        self.id_limit = 1 + max((shard.largest_id for shard in self._shards), default=-1)
        self._versions = {name: listed.version for name, listed in listing.items()}
        # Of a bucket a host fetches the ends near its own rows alone, or many hosts would fetch all of them each.
        self._are_ends_kept = store.root is not None and index.num_documents * ENDS_DTYPE.itemsize <= ENDS_BYTES_MAX
        self._kept_ends = functools.cache(lambda shard: self._read_ends(shard, 0, self._shards[shard].num_documents))
        self._keeping = [threading.Lock() for _ in self._shards]  # several threads that want one shard read it once

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

    def read_field_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[np.ndarray]:
        """See `Source`."""
        assert name == LOSS_WEIGHT
        assert self._answers is not None
        return self._answers.weights(ranges)

    def read_field(self, name: str, start: int, stop: int) -> np.ndarray:
        """See `Source`."""
        return self.read_field_ranges(name, [(start, stop)])[0]

    def check(self) -> None:
        """See `Source`."""
        super().check()
        if self._answers is not None:
            self._answers.check()

    def validate_vocabulary(self, size: int) -> None:
        """See `Source`."""
        need = self.vocabulary_size
        if need > size:
            raise DataError(
                f"its tokenizer has {need:,} ids (the largest in the corpus is {self.id_limit - 1:,}), the model's "
                f"vocabulary {size:,}; use a vocabulary of at least {need:,}"
            )

    def _bad_id(self, token: int, position: int, limit: int) -> DataError:
        """See `TokenSequence`."""
        return DataError(
            f"token id {token:,} at {self.describe_position(position)} is beyond {limit - 1:,}, the largest of the "
            f"corpus by its {INDEX}: the shard is not the one that this was written for"
        )

    def read_many_part_ends(self, asked: Sequence[tuple[int, int, int]]) -> list[np.ndarray]:
        """See `TokenSequence`. Those of several shards are read at a time."""
        return run_in_parallel([functools.partial(self.read_part_ends, *each) for each in asked])

    def read_part_ends(self, part: int, start: int, stop: int) -> np.ndarray:
        """See `TokenSequence`."""
        return self._keep_ends(part) if self._are_ends_kept else self._find_ends(part, start, stop)

    def _keep_ends(self, index: int) -> np.ndarray:
        with self._keeping[index]:
            return self._kept_ends(index)

    def _find_ends(self, index: int, start: int, stop: int) -> np.ndarray:
        """Those ends of a shard that lie between two of its positions, and some around them.

        They are looked for where they would be if all documents were alike, and from there on in both directions.
        """
        shard = self._shards[index]
        num_documents, margin = shard.num_documents, math.isqrt(shard.num_documents) + 1
        first = max(0, num_documents * start // shard.num_tokens - margin)
        last = min(num_documents, num_documents * stop // shard.num_tokens + margin)
        ends = self._read_ends(index, first, last)
        while first and ends[0] > start:
            margin *= 2
            before = max(0, first - margin)
            first, ends = before, np.concatenate([self._read_ends(index, before, first), ends])
        while last < num_documents and ends[-1] <= stop:
            margin *= 2
            after = min(num_documents, last + margin)
            last, ends = after, np.concatenate([ends, self._read_ends(index, last, after)])
        return ends

    def _read_ends(self, index: int, first: int, last: int) -> np.ndarray:
        """The positions in a shard at which its documents `first .. last` end, `first < last`."""
        shard, itemsize = self._shards[index], ENDS_DTYPE.itemsize
        name, is_whole = f"{shard.name}.ends", last - first == shard.num_documents
        try:
            content = self._store.read_range(name, first * itemsize, last * itemsize, self._versions[name])
        except (ChangedError, FileNotFoundError, ForbiddenError, DeniedError) as error:
            raise DataError(f"{self._store.url}/{name} cannot be read as at the start: {error}") from error
        if is_whole:
            _refuse_digest(f"{self._store.url}/{name}", compute_crc32c(content), shard.ends_crc32c)
        ends = np.frombuffer(content, ENDS_DTYPE).astype(np.int64)
        highest = shard.num_tokens if last == shard.num_documents else min(ends[-1], shard.num_tokens)
        if not len(ends) or ends[0] < 0 or (np.diff(ends) < 0).any() or ends[-1] != highest:
            raise DataError(
                f"{self._store.url}/{name}: are no ends of documents: needs numbers that never fall, the last of them "
                f"{shard.num_tokens}"
            )
        return ends


def open_corpus(
    name: str,
    directory: str,
    ranges: CacheSettings,
    train_on: TrainOn | None = None,
    *,
    unsaid: TrainOn | None = None,
) -> Corpus:
    """Open the corpus in a directory or at a URL, which `data.source=name` has named; see `Corpus` for what is checked.

    `train_on` says which tokens of dialogues count; `unsaid` is taken for it where a corpus has some and it is None.
    Raises DataError where a person must act, `OSError` if the bucket does not answer.
    """
    with wrap_source_errors(name):
        store = open_store(directory)
        index = CorpusIndex.decode(store.read(INDEX), f"{directory}/{INDEX}")
        train_on = unsaid if train_on is None and index.has_completion_mask else train_on
        validate_train_on(train_on, index.has_completion_mask)
        listing = store.list_files("")
        if any(index.tokenizer.get("file") == present for present in listing):
            read_tokenizer(index.tokenizer, store)
        for shard in index.shards:
            _check_shard(directory, shard, np.dtype(index.dtype).itemsize, listing)
        if store.root is not None:
            parts = _open_files(store, store.root, index, ranges)
        else:
            parts = _open_objects(name, store, index, listing, ranges)
        answers = _open_answers(name, store, index, listing, ranges) if train_on == "answers" else None
        return Corpus(index, parts, store, listing, answers)


def _check_shard(directory: str, shard: CorpusShard, itemsize: int, listing: Listing) -> None:
    """Hold a shard's files against the index: that they are there, their sizes, their digests where known."""
    digests = [shard.tokens_crc32c, shard.ends_crc32c, shard.answers_crc32c]
    for (name, size), digest in zip(shard.file_sizes(itemsize).items(), digests, strict=False):
        found = listing.get(name)
        if found is None:
            raise DataError(f"{directory}/{name} is missing, {INDEX} names it")
        if found.size_bytes != size:
            raise DataError(f"{directory}/{name} has {found.size_bytes:,} bytes, by {INDEX} it has {size:,}")
        if found.crc32c is not None and digest is not None:
            _refuse_digest(f"{directory}/{name}", found.crc32c, digest)


def _refuse_digest(where: str, found: str, expected: str) -> None:
    if found != expected:
        raise DataError(f"{where} is not the file that {INDEX} was written for: CRC-32C {found}, needs {expected}")


def _open_files(store: Store, root: Path, index: CorpusIndex, ranges: CacheSettings) -> list[TokenFile]:
    """The shards on a disk. Small ones are read, of larger ones the head."""
    reader = DiskReader(ranges.directory)
    dtype = np.dtype(index.dtype).newbyteorder("<")
    is_small = index.num_tokens * dtype.itemsize <= VERIFIED_BYTES_MAX
    parts = []
    for shard in index.shards:
        file = describe_file(root / f"{shard.name}.bin")
        for path in (file.path, file.path.with_name(f"{shard.name}.ends")):
            if not os.access(path, os.R_OK):
                raise DataError(f"{path} cannot be read: no permission")
        if is_small:
            _refuse_digest(str(file), store.compute_digest(file.path.name), shard.tokens_crc32c)
        else:
            (head,) = reader.read([ByteRange(file, 0, min(HEAD_BYTES, file.size_bytes))])
            _refuse_digest(str(file), compute_crc32c(head), shard.head_crc32c)
        parts.append(TokenFile(file, dtype, shard.num_tokens, 0, reader))
    return parts


def _open_objects(
    name: str, store: Store, index: CorpusIndex, listing: Listing, ranges: CacheSettings
) -> list[TokenFile]:
    """The shards in a bucket. A listing does not tell who may read, nor what: of each file the head is asked for."""
    dtype = np.dtype(index.dtype).newbyteorder("<")
    reader = BucketReader(name, store, ranges, dtype.itemsize)

    def file_of(shard: CorpusShard, suffix: str) -> BucketFile:
        return make_bucket_file(store.url, f"{shard.name}.{suffix}", listing[f"{shard.name}.{suffix}"])

    looked_at = [shard for shard in index.shards if shard.num_tokens]
    looked_at = looked_at[:: max(1, -(-len(looked_at) // LOOKED_AT_MAX))]
    tokens = [file_of(shard, "bin") for shard in looked_at]
    heads = [ByteRange(file, 0, min(HEAD_BYTES, file.size_bytes)) for file in tokens]
    ends = [ByteRange(file_of(shard, "ends"), 0, 1) for shard in looked_at]
    found = reader.fetch([*heads, *ends])
    for shard, head, content in zip(looked_at, heads, found, strict=False):
        _refuse_digest(str(head.file), compute_crc32c(content), shard.head_crc32c)
    return [TokenFile(file_of(shard, "bin"), dtype, shard.num_tokens, 0, reader) for shard in index.shards]


def _open_answers(
    name: str, store: Store, index: CorpusIndex, listing: Listing, ranges: CacheSettings
) -> CompletionMask:
    """What says of each token whether it is of an answer. On a disk small ones are read."""
    if store.root is None:
        remote = BucketReader(name, store, ranges, COMPLETION_DTYPE.itemsize)
        objects = [
            (shard, make_bucket_file(store.url, f"{shard.name}.answers", listing[f"{shard.name}.answers"]))
            for shard in index.shards
        ]
        return CompletionMask(
            [TokenFile(file, COMPLETION_DTYPE, shard.num_tokens, 0, remote) for shard, file in objects]
        )
    reader, is_small = DiskReader(ranges.directory), index.num_tokens <= VERIFIED_BYTES_MAX
    parts = []
    for shard in index.shards:
        file = describe_file(store.root / f"{shard.name}.answers")
        if not os.access(file.path, os.R_OK):
            raise DataError(f"{file.path} cannot be read: no permission")
        if is_small and shard.answers_crc32c is not None:
            _refuse_digest(str(file), store.compute_digest(file.path.name), shard.answers_crc32c)
        parts.append(TokenFile(file, COMPLETION_DTYPE, shard.num_tokens, 0, reader))
    return CompletionMask(parts)
