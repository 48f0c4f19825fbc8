"""Output files of a tokenise job.

1. `owner.json` is created first, exactly once. A job that finds the file of another run is refused.
2. `sources.json` lists the input files, which must not change while the corpus is being written.
3. The shards of piece 7 are `00007-000`, `00007-001`, ...; its record `00007.json`, written after them, lists them. A
   piece without a record is not finished. Each write is atomic, and making a piece again writes the same bytes.
4. `index.json` is written when every piece has a record. It completes the corpus.
"""

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Self

import numpy as np

from experiments.tokenise.inputs import InputFile
from experiments.tokenise.pipeline import EncodedBatch
from runner.data.corpus_index import ENDS_DTYPE, INDEX, CorpusIndex, CorpusShard, CorpusShards, parse_shard
from runner.errors import DataError, InvalidError
from runner.records import Key, validate_record
from runner.run.layout import read_owner
from runner.storage import JsonObject, Store, Version, create_file, encode_json, open_store, read_json

OWNER, SOURCES = "owner.json", "sources.json"
NAMES = (OWNER, INDEX, "00000-000.bin", "00000-000.ends")  # one name of each kind of file
_NUM_READERS = 16
_PIECE_KEYS = (
    Key("tokenizer", str, "SHA-256 of its file"),
    Key("shards", list, "the shards of the piece"),
    Key("num_bad", int, "lines without a text"),
    Key("first_bad", str, "where the first of them is, and what it lacks"),
    Key("num_left_out", int, "documents without tokens"),
)
_DIALOGUE_KEYS = (
    Key("num_dropped", int, "dialogues that were too long, or had no completion left; absent if 0"),
    Key("num_cut", int, "dialogues whose end was cut off; absent if 0"),
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

    def to_json(self) -> JsonObject:
        """Return the content of the record file."""
        record = asdict(self) | {"shards": [shard.to_json() for shard in self.shards]}
        optional = {key.name for key in _DIALOGUE_KEYS}
        # A corpus of plain text has the same bytes as one that a version without dialogues wrote.
        return {key: value for key, value in record.items() if value or key not in optional}

    @classmethod
    def from_json(cls, record: JsonObject) -> Self:
        """Parse a record. Raises `ValueError` or `TypeError` if it is damaged."""
        validate_record(record, (*_PIECE_KEYS, *_DIALOGUE_KEYS), [key.name for key in _PIECE_KEYS])
        return cls(**record | {"shards": tuple(map(parse_shard, record["shards"]))})


def validate_owner(store: Store, directory: str, run_id: str | None = None) -> None:
    """Raise `InvalidError` if the corpus belongs to another run: in another directory, or with another id.

    A run that was moved, and with it its id, still owns its corpus. A copy of a run owns only one that was copied too.
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
    """Return the id of the run in a directory; None if there is none."""
    found = read_owner(open_store(directory))
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
    """Return the input files for the job's identity: as they were when the corpus was begun, if they only have moved.

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


def write_sources(store: Store, files: Iterable[InputFile]) -> None:
    """Record the input files; files that have moved keep their first record. Process 0 only."""
    content = {"files": [list(entry) for entry in identify_sources(store, files)]}
    write_once(store, SOURCES, encode_json(content))


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
        # A shard whose documents were all left out is not written.
        if encoded.batch.ends_shard and num_tokens:
            shards.append(_write_shard(store, f"{name}-{len(shards):03}", ids, ends, completions))
            ids, ends, completions, num_tokens = [], [], [], 0
        if encoded.batch.ends_piece:
            break
    bad = encoded.batch.bad
    first_bad = str(bad[0]) if bad else ""
    counts = (num_left_out, num_dropped, num_cut)
    finished = FinishedPiece(tokenizer, tuple(shards), len(bad), first_bad, *counts)
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

    Args:
        store: directory of the corpus.
        num_pieces: number of pieces.
        tokenizer: digest of the tokenizer that all pieces must have.
        itemsize: bytes of a token id.

    Raises:
        DataError: a record, or a shard that it lists, is missing, damaged or made with another tokenizer.
    """
    # One listing instead of a request per shard; it tells a missing and a truncated file alike.
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


def remove_leftovers(store: Store) -> None:
    """Remove files of writes that were interrupted. Process 0 only, when all pieces are finished."""
    for name in store.list_names(""):
        if _LEFTOVER.fullmatch(name):
            store.remove(name)


def write_index(store: Store, index: CorpusIndex) -> None:
    """Write the index, which completes the corpus. Process 0 only."""
    store.write(INDEX, index.encode())
