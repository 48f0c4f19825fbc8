"""Output files of a tokenise job.

1. `owner.json` is created first, exactly once. A job that finds the file of another run is refused.
2. `sources.json` lists the input files, which must not change while the corpus is being written, and their change
   times (`ctime`). If only the change time of a file differs later, the documents of the finished pieces are read
   again and compared with the digests in their records: an edit that keeps size and modification time is refused, and
   a chmod, a new hard link or a restored copy is not.
3. The shards of piece 7 are `00007-000`, `00007-001`, ...; its record `00007.json`, written after them, lists them. A
   piece without a record is not finished. Each write is atomic, and making a piece again writes the same bytes.
4. `index.json` is written when every piece has a record. It completes the corpus.

Exact duplicates are found before any token is made:

1. For each piece a host computes a digest of 16 bytes of each document, and writes them sorted: `00007.digests`.
2. Process 0 reads the digests of all pieces, one range of digests at a time, and marks every document whose digest
   occurs before it in reading order. `duplicates.bin` holds a bit for each document.

Both are pure functions of the input, and each file is written at once, so a kill loses only work. They are removed when
the corpus is complete. Memory: step 1 holds 60 bytes for each document of a piece. Step 2 holds about 150 bytes for
each document of a range, which are 4 million, or a 256th of all documents if that is more. Every host holds a bit for
each document.
"""

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Self

import numpy as np

from experiments.tokenise.documents import BadRecord, Document, DocumentsDigest, DocumentSet, encode_document
from experiments.tokenise.inputs import InputFile
from experiments.tokenise.pipeline import EncodedBatch
from runner.attempts.layout import read_owner
from runner.data.corpus_index import ENDS_DTYPE, INDEX, CorpusIndex, CorpusShard, CorpusShards, parse_shard
from runner.data.tokenizers import TOKENIZER_FILES
from runner.errors import DataError, InvalidError
from runner.huggingface.assets import TOKENIZER_CONFIG
from runner.storage import (
    JsonObject,
    Key,
    Store,
    Version,
    create_file,
    encode_json,
    open_store,
    read_json,
    validate_record,
)

OWNER, SOURCES = "owner.json", "sources.json"
_TIMES = "ctimes_ns"
# One name of each kind of file.
NAMES = (OWNER, SOURCES, INDEX, "00000.json", "00000-000.bin", "00000-000.ends", "tokenizer.json", TOKENIZER_CONFIG)
_NUM_READERS = 16
DUPLICATES = "duplicates.bin"
DIGESTS = ".digests"
_RANGE_DOCUMENTS = 1 << 22
_NUM_RANGES = 256  # the digests of a piece are found by their first byte
_HEADER = np.dtype(("<u8", _NUM_RANGES + 1))  # number of the first digest of each range, and the number of digests
_DIGEST = np.dtype([("high", ">u8"), ("low", ">u8"), ("number", "<u4")])  # `number` is of the document in its piece
_PIECE_KEYS = (
    Key("tokenizer", str, "SHA-256 of its file"),
    Key("shards", list, "the shards of the piece"),
    Key("num_bad", int, "lines without a text, and documents that the tokenizer cannot encode"),
    Key("first_bad", str, "where the first of them is, and what it lacks"),
    Key("num_left_out", int, "documents without tokens"),
)
_OPTIONAL_KEYS = (
    Key("num_dropped", int, "dialogues that were too long, or had no completion left; absent if 0"),
    Key("num_cut", int, "dialogues whose end was cut off; absent if 0"),
    Key("num_duplicates", int, "documents that repeat an earlier one; absent if 0"),
    Key(
        "digest",
        str,
        "SHA-256 of the documents of the piece, repeated ones included; absent if the files are in a bucket",
    ),
)
_LEFTOVER = re.compile(r"\..+\.[0-9a-f]{8}\.tmp")  # unfinished write of a local store


@dataclass(frozen=True)
class FinishedPiece(CorpusShards):
    """Record of a finished piece. `tokenizer` is the SHA-256 of the tokenizer file, "" without one."""

    tokenizer: str
    shards: tuple[CorpusShard, ...]
    num_bad: int
    first_bad: str
    num_left_out: int
    num_dropped: int = 0
    num_cut: int = 0
    num_duplicates: int = 0
    digest: str = ""

    def to_json(self) -> JsonObject:
        """Return the content of the record file."""
        record = asdict(self) | {"shards": [shard.to_json() for shard in self.shards]}
        optional = {key.name for key in _OPTIONAL_KEYS}
        # A corpus of plain text has the same bytes as one that a version without dialogues wrote.
        return {key: value for key, value in record.items() if value or key not in optional}

    @classmethod
    def from_json(cls, record: JsonObject) -> Self:
        """Parse a record. Raises `ValueError` or `TypeError` if it is damaged."""
        validate_record(record, (*_PIECE_KEYS, *_OPTIONAL_KEYS), [key.name for key in _PIECE_KEYS])
        return cls(**record | {"shards": tuple(map(parse_shard, record["shards"]))})


def validate_owner(store: Store, directory: str, run_id: str | None = None) -> None:
    """Raise `InvalidError` if the corpus belongs to another run: in another directory, or with another id.

    A run that was moved has kept its id, so it still owns its corpus. A copy of a run owns only a corpus that was
    copied with it.
    """
    try:
        owner = read_json(store, OWNER)
    except FileNotFoundError:
        return
    except ValueError as error:
        raise InvalidError(
            f"{store.url}/{OWNER} is damaged ({error}), so the owner of the corpus is unknown; use another output, or "
            "remove it first"
        ) from error
    is_own = run_id in (None, owner.get("run"))
    if owner.get("directory") != directory and is_own:
        is_below = store.url.startswith(f"{directory}/")
        is_own = run_id is not None and (is_below or _read_run_id(str(owner.get("directory"))) != run_id)
    if not is_own:
        raise InvalidError(
            f"{store.url} is the corpus of the run {owner.get('name')!r} in {owner.get('directory')}; use another "
            "output, or remove it first"
        )


def _read_run_id(directory: str) -> str | None:
    try:
        store = open_store(directory)
    except InvalidError:
        return None  # such a name is accepted only where it exists, so the directory has been moved
    found = read_owner(store)
    return None if found is None else found.id


def take_ownership(store: Store, directory: str, name: str, run_id: str) -> None:
    """Make this run the owner of the corpus. Raises `InvalidError` if another run owns it. Process 0 only."""
    content = encode_json({"run": run_id, "name": name, "directory": directory})
    try:
        create_file(store, OWNER, content)
    except FileExistsError:
        validate_owner(store, directory, run_id)
        write_once(store, OWNER, content)  # the run may have been moved


SourceEntry = tuple[str, int, Version]  # label, size and version of an input file


def identify_sources(store: Store, files: Iterable[InputFile]) -> list[SourceEntry]:
    """Return the input files for the job's identity: if they have only moved, those of the beginning of the corpus.

    They have moved if their paths below a common directory, their sizes and their versions are the same.
    """
    present = [(file.label, file.size_bytes, file.version) for file in files]
    begun = _read_sources(store)
    return present if begun is None or _make_relative(begun) != _make_relative(present) else begun


def _make_relative(files: Sequence[SourceEntry]) -> list[SourceEntry]:
    directories = [label.rpartition("/")[0].split("/") for label, _, _ in files]
    num_common = len(os.path.commonprefix(directories))  # noqa: RUF071 - of lists of parts, not of texts
    return [("/".join(label.split("/")[num_common:]), size, version) for label, size, version in files]


def _read_sources(store: Store) -> list[SourceEntry] | None:
    """Return the files from which the corpus was begun; None if it was not. Raises DataError if the list is damaged."""
    try:
        return [(label, size, version) for label, size, version in read_json(store, SOURCES)["files"]]
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{store.url}/{SOURCES} is damaged ({error}); remove {store.url} and run again") from error


def list_labels(store: Store) -> list[str]:
    """Return the labels of the files from which the corpus was begun; none if it was not."""
    return [label for label, _, _ in _read_sources(store) or ()]


def validate_sources_unchanged(store: Store, files: Iterable[InputFile]) -> None:
    """Raise `DataError`, with the first difference, if the corpus was begun from other files. Process 0 only."""
    begun = {label: other for label, *other in _read_sources(store) or ()}
    if not begun:
        return
    present = {label: other for label, *other in identify_sources(store, files)}
    # In the order of the files, so that every host and every attempt reports the same difference.
    for label in [*begun, *present]:
        if begun.get(label) != present.get(label):
            how = "is gone" if label not in present else "is new" if label not in begun else "has changed"
            raise DataError(f"{label} {how} since this job began; restore it, or use another directory")


def write_sources(store: Store, files: Sequence[InputFile]) -> None:
    """Record the input files, unless this corpus was begun from them. Process 0 only.

    Files that have moved keep their first record, and the change times are those of the beginning.
    """
    if _read_times(store) is None:
        write_times(store, files)


def write_times(store: Store, files: Sequence[InputFile]) -> None:
    """Record the input files with their present change times, when their content has been compared. Process 0 only."""
    entries = [list(entry) for entry in identify_sources(store, files)]
    write_once(store, SOURCES, encode_json({"files": entries, _TIMES: [file.ctime_ns for file in files]}))


def list_touched(store: Store, files: Sequence[InputFile]) -> list[int]:
    """Return the indices of files whose change time is not the recorded one. Process 0 only.

    The files have the sizes and versions that were recorded. There are none if an earlier version began the corpus.
    """
    times = _read_times(store) or []
    return [index for index, (file, time) in enumerate(zip(files, times, strict=False)) if file.ctime_ns != time]


def _read_times(store: Store) -> list[int] | None:
    """Return the recorded change time of each file; None if there is no record of an input with as many times."""
    if (begun := _read_sources(store)) is None:
        return None
    times = read_json(store, SOURCES).get(_TIMES)
    is_valid = isinstance(times, list) and len(times) == len(begun) and all(type(time) is int for time in times)
    return times if is_valid else None


def discard(store: Store, run_id: str) -> None:
    """Remove everything but the owner from a corpus of this run that has no piece yet. Process 0 only."""
    try:
        is_own = read_json(store, OWNER).get("run") == run_id
    except (FileNotFoundError, ValueError):
        is_own = False
    # Files in a directory that the run does not own are not ours to delete.
    for name in store.list_names("") if is_own else ():
        if name in (SOURCES, DUPLICATES, TOKENIZER_CONFIG, *TOKENIZER_FILES.values()) or name.endswith(DIGESTS):
            store.remove(name)


def write_once(store: Store, name: str, content: bytes) -> None:
    """Write a file unless it exists with this content. Process 0 only."""
    if store.read_versioned(name)[0] != content:
        store.write(name, content)


def format_piece(piece: int) -> str:
    """Return the file name of a piece's record, without suffix."""
    return f"{piece:05}"


def list_finished(store: Store) -> set[str]:
    """Return the names of the pieces that have a record, among names of other JSON files."""
    return {name.removesuffix(".json") for name in store.list_names("") if name.endswith(".json")}


def write_piece(store: Store, piece: int, tokenizer: str, stream: Iterator[EncodedBatch]) -> FinishedPiece:
    """Write the shards of the piece that is next in `stream`, then its record."""
    name = format_piece(piece)
    shards: list[CorpusShard] = []
    ids: list[np.ndarray] = []
    ends: list[np.ndarray] = []
    completions: list[np.ndarray] = []
    bad: list[BadRecord] = []
    num_tokens = num_left_out = num_dropped = num_cut = 0
    while True:
        encoded = next(stream)
        assert encoded.batch.piece == piece
        ids.append(encoded.ids)
        # Ends count from the start of the shard, and a batch counts from its own start.
        ends.append(encoded.ends + num_tokens)
        completions += [] if encoded.completions is None else [encoded.completions]
        num_tokens += len(encoded.ids)
        num_left_out += encoded.num_left_out
        num_dropped += encoded.num_dropped
        num_cut += encoded.num_cut
        bad += encoded.bad
        # A shard whose documents were all left out is not written.
        if encoded.batch.ends_shard and num_tokens:
            shards.append(_write_shard(store, f"{name}-{len(shards):03}", ids, ends, completions))
            ids, ends, completions, num_tokens = [], [], [], 0
        if encoded.batch.ends_piece:
            break
    bad += encoded.batch.bad
    first_bad = str(bad[0]) if bad else ""
    counts = (num_left_out, num_dropped, num_cut, encoded.batch.num_duplicates)
    finished = FinishedPiece(tokenizer, tuple(shards), len(bad), first_bad, *counts, encoded.batch.digest)
    # The record comes last: it declares that the shards it lists are complete.
    store.write(f"{name}.json", encode_json(finished.to_json()))
    return finished


def _write_shard(
    store: Store, name: str, ids: list[np.ndarray], ends: list[np.ndarray], completions: list[np.ndarray]
) -> CorpusShard:
    all_ids, all_ends = np.concatenate(ids), np.concatenate(ends).astype(ENDS_DTYPE)
    marks = np.concatenate(completions) if completions else None
    store.write(f"{name}.bin", all_ids.tobytes())
    store.write(f"{name}.ends", all_ends.tobytes())
    if marks is not None:
        # The suffix is that of earlier versions, whose corpora are still read.
        store.write(f"{name}.answers", marks.tobytes())
    return CorpusShard.from_arrays(name, all_ids, all_ends, marks)


def read_finished(store: Store, num_pieces: int, tokenizer: str, itemsize: int) -> list[FinishedPiece]:
    """Read the records of all pieces.

    `tokenizer` is the digest that all pieces must have, and `itemsize` the bytes of a token id.

    Raises:
        DataError: a record, or a shard that it lists, is missing, damaged or made with another tokenizer.
    """
    # One listing instead of a request per shard; it shows missing and truncated files.
    sizes = store.list_sizes("")

    def read(piece: int) -> FinishedPiece:
        where = f"{store.url}/{format_piece(piece)}.json"
        try:
            finished = FinishedPiece.from_json(read_json(store, f"{format_piece(piece)}.json"))
        except (FileNotFoundError, ValueError, TypeError) as error:
            raise DataError(
                f"{where} is missing or damaged; remove it and run again, which makes its piece again"
            ) from error
        if finished.tokenizer != tokenizer:
            raise DataError(f"{where} was made with another tokenizer; remove {store.url} and run again")
        needs = {name: size for shard in finished.shards for name, size in shard.file_sizes(itemsize).items()}
        damaged = next((name for name, size in needs.items() if sizes.get(name) != size), None)
        if damaged is not None:
            raise DataError(f"{store.url}/{damaged} is missing or truncated; remove {where} and run again")
        return finished

    with ThreadPoolExecutor(_NUM_READERS, thread_name_prefix="read") as pool:
        return list(pool.map(read, range(num_pieces)))


def validate_same_tokenizer(store: Store, tokenizer: str) -> None:
    """Raise `DataError` if the first finished piece was made with another tokenizer. Process 0 only."""
    # One record is enough here and is found before any work; all records are compared before the index is written.
    first = min((name for name in list_finished(store) if name.isdecimal()), default=None)
    if first is None:
        return
    try:
        record = read_json(store, f"{first}.json")
    except ValueError:
        return  # `read_finished` reports it.
    if record.get("tokenizer") != tokenizer:
        raise DataError(
            f"{store.url}: the tokenizer differs from the one that its pieces were made with; restore it, or use "
            "another directory"
        )


def read_index(store: Store) -> CorpusIndex:
    """Read the index. Raises `DataError` if it is damaged."""
    return CorpusIndex.decode(store.read(INDEX), f"{store.url}/{INDEX}")


def has_changed(store: Store, piece: int, documents: Iterator[Document]) -> bool:
    """Return True if a piece was made, or searched for duplicates, with other documents than its present ones."""
    digest, name = DocumentsDigest(), format_piece(piece)

    def add_to_digest() -> Iterator[Document]:
        for document in documents:
            digest.add(document)
            yield document

    found = compute_digests(add_to_digest())
    if store.exists(f"{name}{DIGESTS}") and store.read(f"{name}{DIGESTS}") != found:
        return True
    try:
        made_of = FinishedPiece.from_json(read_json(store, f"{name}.json")).digest
    except (FileNotFoundError, ValueError, TypeError):
        return False  # the piece is not finished, or its record is damaged, which `read_finished` reports
    # An earlier version has recorded no digest.
    return made_of not in ("", digest.hexdigest())


def remove_leftovers(store: Store) -> None:
    """Remove files of interrupted writes and of the duplicate filter. Process 0 only, when all pieces are finished."""
    for name in store.list_names(""):
        if _LEFTOVER.fullmatch(name) or name == DUPLICATES or name.endswith(DIGESTS):
            store.remove(name)


def compute_digests(documents: Iterator[Document]) -> bytes:
    """Return the content of the digest file of a piece."""
    found = bytearray()
    for number, document in enumerate(documents):
        found += hashlib.blake2b(encode_document(document), digest_size=16).digest() + number.to_bytes(4, "little")
    digests = np.frombuffer(found, _DIGEST)
    digests = digests[np.lexsort((digests["low"], digests["high"]))]
    first_bytes = (digests["high"] >> np.uint64(56)).astype(np.int64)
    starts = np.searchsorted(first_bytes, np.arange(_NUM_RANGES + 1)).astype("<u8")
    return starts.tobytes() + digests.tobytes()


def mark_duplicates(store: Store, names: Sequence[str], report: Callable[[int, int], None]) -> DocumentSet:
    """Return the documents that repeat an earlier one, from the digest files of all pieces in order.

    `report` is called with the number of digests read and the number of all, now and then.

    Raises:
        DataError: a file is damaged.
    """
    versions = {name: found.version for name, found in store.list_files("").items() if name.endswith(DIGESTS)}

    def read(piece: int, start: int, stop: int) -> bytes:
        return store.read_range(names[piece], start, stop, versions[names[piece]]) if start < stop else b""

    with ThreadPoolExecutor(_NUM_READERS) as pool:
        try:
            headers = list(pool.map(lambda piece: read(piece, 0, _HEADER.itemsize), range(len(names))))
            starts = np.stack([np.frombuffer(header, "<u8").astype(np.int64) for header in headers])
            found = DocumentSet(starts[:, -1].tolist())
            totals = np.cumsum([0, *np.diff(starts, axis=1).sum(axis=0)])
            first = 0
            while first < _NUM_RANGES:
                # At least one range, and more while they are small.
                stop = max(first + 1, int(np.searchsorted(totals, totals[first] + _RANGE_DOCUMENTS, "right")) - 1)
                places = _HEADER.itemsize + starts[:, [first, stop]] * _DIGEST.itemsize
                contents = list(pool.map(read, range(len(names)), *places.T.tolist()))
                digests = [np.frombuffer(content, _DIGEST) for content in contents]
                _mark_range(digests, found)
                report(int(totals[stop]), int(totals[-1]))
                first = stop
        except (ValueError, KeyError) as error:
            raise DataError(
                f"{store.url}: a file *{DIGESTS} is damaged or missing ({error}); remove all of them and run again"
            ) from error
    return found


def _mark_range(digests: Sequence[np.ndarray], found: DocumentSet) -> None:
    """Add the documents of one range of digests that repeat an earlier one."""
    pieces = np.repeat(np.arange(len(digests)), [len(each) for each in digests])
    joined = np.concatenate(digests)
    high, low = joined["high"].astype("<u8"), joined["low"].astype("<u8")
    # The sort is stable, so among equal digests the first document comes first.
    order = np.lexsort((low, high))
    high, low = high[order], low[order]
    is_repeated = np.zeros(len(order), bool)
    is_repeated[1:] = (high[1:] == high[:-1]) & (low[1:] == low[:-1])
    repeated = order[is_repeated]
    found.add(pieces[repeated], joined["number"][repeated].astype(np.int64))


def encode_set(documents: DocumentSet) -> bytes:
    """Return the content of `duplicates.bin`: the number of pieces, the documents of each, the bits."""
    return np.int64(len(documents.counts)).tobytes() + documents.counts.tobytes() + documents.bits.tobytes()


def decode_set(content: bytes, where: str) -> DocumentSet:
    """Parse the content of `duplicates.bin`. Raises `DataError` if it is damaged."""
    size = int(np.frombuffer(content[:8], np.int64)[0]) if len(content) >= 8 else -1
    bits = content[8 + 8 * max(size, 0) :]
    if size < 0 or len(content) < 8 + 8 * size:
        raise DataError(f"{where} is damaged; remove it and run again")
    found = DocumentSet(np.frombuffer(content, np.int64, size, 8).tolist())
    if len(bits) != len(found.bits):
        raise DataError(f"{where} is damaged; remove it and run again")
    found.bits = np.frombuffer(bits, np.uint8)
    return found
