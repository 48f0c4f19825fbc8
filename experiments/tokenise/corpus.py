"""The output of a tokenise job: shards, a record of each finished piece, whose it is, and at the end the index.

1. `owner.json` is created first, once: whoever finds another run's there is refused.
2. `sources.json` says from which files the corpus is made. They may not change under it.
3. The shards of piece 7 are `00007-000`, `00007-001` ...; `00007.json` is written after them, and says what they are.
   What has no such record is not done. Every write is whole or not there, and who makes a piece again writes the same.
4. `index.json` is written when each piece has a record.
"""

import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Self

import numpy as np

from experiments.tokenise.inputs import InputFile
from experiments.tokenise.pipeline import EncodedBatch
from runner.data.corpus_index import ENDS_DTYPE, INDEX, CorpusIndex, CorpusShard, CorpusShards, parse_shard
from runner.errors import DataError, InvalidError
from runner.records import Key, validate_record
from runner.storage import JsonObject, Store, create_file, encode_json, read_json

OWNER, SOURCES = "owner.json", "sources.json"
NAMES = (OWNER, INDEX, "00000-000.bin", "00000-000.ends")  # one of each kind
_NUM_READERS = 16
_OF_DONE = (
    Key("tokenizer", str, "SHA-256 of its file"),
    Key("shards", list, "the shards of the piece"),
    Key("num_bad", int, "lines without a text"),
    Key("first_bad", str, "where the first of them is, and what it lacks"),
    Key("num_left_out", int, "documents without tokens"),
)
_OF_DIALOGUES = (
    Key("num_dropped", int, "dialogues that were too long, or had no answer left; left out where 0"),
    Key("num_cut", int, "dialogues that have lost their end; left out where 0"),
)
_LEFTOVER = re.compile(r"\..+\.[0-9a-f]{8}\.tmp")  # of a store on a disk


@dataclass(frozen=True)
class FinishedPiece(CorpusShards):
    """What is known of a finished piece. `tokenizer` is the SHA-256 of its file, "" where it has none."""

    tokenizer: str
    shards: tuple[CorpusShard, ...]
    num_bad: int
    first_bad: str
    num_left_out: int
    num_dropped: int = 0
    num_cut: int = 0

    def record(self) -> JsonObject:
        """As it is written."""
        record = asdict(self) | {"shards": [shard.record() for shard in self.shards]}
        return {
            key: value for key, value in record.items() if value or key not in {each.name for each in _OF_DIALOGUES}
        }

    @classmethod
    def parse(cls, record: JsonObject) -> Self:
        """Raises `ValueError` or `TypeError` if it is damaged."""
        validate_record(record, (*_OF_DONE, *_OF_DIALOGUES), [key.name for key in _OF_DONE])
        return cls(**record | {"shards": tuple(map(parse_shard, record["shards"]))})


def validate_owner(store: Store, directory: str, run_id: str | None = None) -> None:
    """Raise `InvalidError` if another run writes its corpus there: one in another directory, or of another id."""
    try:
        owner = read_json(store, OWNER)
    except FileNotFoundError:
        return
    except ValueError as error:
        raise InvalidError(f"{store.url}/{OWNER} is damaged ({error}): cannot tell whose corpus this is") from error
    if owner.get("directory") != directory or run_id not in (None, owner.get("run")):
        raise InvalidError(
            f"{store.url} is the corpus of the run {owner.get('name')!r} in {owner.get('directory')}; use another "
            "output, or remove it first"
        )


def take(store: Store, directory: str, name: str, run_id: str) -> None:
    """Make this run the owner, or raise `InvalidError`. Main host only."""
    try:
        create_file(store, OWNER, encode_json({"run": run_id, "name": name, "directory": directory}))
    except FileExistsError:
        validate_owner(store, directory, run_id)


def validate_sources_unchanged(store: Store, files: Iterable[InputFile]) -> None:
    """Raise `DataError` if the corpus was begun from other files, naming the first. Main host only."""
    try:
        begun = {label: other for label, *other in read_json(store, SOURCES)["files"]}
    except FileNotFoundError:
        return
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{store.url}/{SOURCES} is damaged ({error}); remove {store.url} and run again") from error
    present = {file.label: [file.size_bytes, file.version] for file in files}
    for label in [*begun, *present]:
        if begun.get(label) != present.get(label):
            how = "is gone" if label not in present else "is new" if label not in begun else "has changed"
            raise DataError(f"{label} {how} since this job began; put it back, or use another directory")


def write_sources(store: Store, files: Iterable[InputFile]) -> None:
    """Write down what the corpus is made from. Main host only."""
    content = {"files": [[file.label, file.size_bytes, file.version] for file in files]}
    write_once(store, SOURCES, encode_json(content))


def write_once(store: Store, name: str, content: bytes) -> None:
    """Write what is not there yet as it is. Main host only."""
    if store.read_versioned(name)[0] != content:
        store.write(name, content)


def name_of(piece: int) -> str:
    """Of the record of a piece, without its suffix."""
    return f"{piece:05}"


def finished(store: Store) -> set[str]:
    """Names of the pieces that have a record, and of other files."""
    return {name.removesuffix(".json") for name in store.list_names("") if name.endswith(".json")}


class _PieceWriter:
    """Takes the tokens of one piece and publishes its shards, then its record."""

    def __init__(self, store: Store, piece: int, tokenizer: str) -> None:
        self._store, self._name, self._tokenizer = store, name_of(piece), tokenizer
        self._ids: list[np.ndarray] = []
        self._ends: list[np.ndarray] = []
        self._answers: list[np.ndarray] = []
        self._num_tokens = 0  # of the shard that is being made
        self._shards: list[CorpusShard] = []
        self._num_left_out = self._num_dropped = self._num_cut = 0

    def add(self, encoded: EncodedBatch) -> None:
        """The next tokens."""
        self._ids.append(encoded.ids)
        self._ends.append(encoded.ends + self._num_tokens)
        self._num_tokens += len(encoded.ids)
        self._answers += [] if encoded.answers is None else [encoded.answers]
        self._num_left_out += encoded.num_left_out
        self._num_dropped += encoded.num_dropped
        self._num_cut += encoded.num_cut
        if encoded.batch.ends_shard and self._num_tokens:
            self._publish()

    def finish(self, encoded: EncodedBatch) -> FinishedPiece:
        """After the last tokens: write the record."""
        bad = encoded.batch.bad
        first_bad, left_out = str(bad[0]) if bad else "", (self._num_left_out, self._num_dropped, self._num_cut)
        done = FinishedPiece(self._tokenizer, tuple(self._shards), len(bad), first_bad, *left_out)
        self._store.write(f"{self._name}.json", encode_json(done.record()))
        return done

    def _publish(self) -> None:
        name = f"{self._name}-{len(self._shards):03}"
        ids, ends = np.concatenate(self._ids), np.concatenate(self._ends).astype(ENDS_DTYPE)
        self._store.write(f"{name}.bin", ids.tobytes())
        self._store.write(f"{name}.ends", ends.tobytes())
        answers = np.concatenate(self._answers) if self._answers else None
        if answers is not None:
            self._store.write(f"{name}.answers", answers.tobytes())
        self._shards.append(CorpusShard.of(name, ids, ends, answers))
        self._ids, self._ends, self._answers, self._num_tokens = [], [], [], 0


def write_piece(store: Store, piece: int, tokenizer: str, stream: Iterator[EncodedBatch]) -> FinishedPiece:
    """Write the shards of the piece that is next in `stream`, then its record."""
    writer = _PieceWriter(store, piece, tokenizer)
    while True:
        batch = next(stream)
        assert batch.batch.piece == piece
        writer.add(batch)
        if batch.batch.ends_piece:
            return writer.finish(batch)


def read_done(store: Store, num_pieces: int, tokenizer: str, itemsize: int) -> list[FinishedPiece]:
    """The records of all pieces, whose ids have `itemsize` bytes.

    Raises `DataError` if one, or a shard that it names, is missing or not as it was.
    """
    sizes = store.list_sizes("")

    def read(piece: int) -> FinishedPiece:
        where = f"{store.url}/{name_of(piece)}.json"
        try:
            done = FinishedPiece.parse(read_json(store, f"{name_of(piece)}.json"))
        except (FileNotFoundError, ValueError, TypeError) as error:
            raise DataError(
                f"{where} is missing or damaged; remove it and run again: its piece is made anew"
            ) from error
        if done.tokenizer != tokenizer:
            raise DataError(f"{where} was made with another tokenizer; remove {store.url} and run again")
        lacking = _first_cut(done.shards, itemsize, sizes)
        if lacking is not None:
            raise DataError(f"{store.url}/{lacking} is missing or cut; remove {where} and run again")
        return done

    with ThreadPoolExecutor(_NUM_READERS, thread_name_prefix="read") as pool:
        return list(pool.map(read, range(num_pieces)))


def validate_same_tokenizer(store: Store, tokenizer: str) -> None:
    """Raise `DataError` if pieces were made with another tokenizer; one of them is looked at. Main host only."""
    first = min((name for name in finished(store) if name.isdecimal()), default=None)
    if first is None:
        return
    try:
        record = read_json(store, f"{first}.json")
    except ValueError:
        return  # told when all are read
    if record.get("tokenizer") != tokenizer:
        raise DataError(
            f"{store.url}: the tokenizer is not the one that its pieces were made with; put it back, or use another "
            "directory"
        )


def _first_cut(shards: Iterable[CorpusShard], itemsize: int, sizes: dict[str, int]) -> str | None:
    """The first file of a shard that is not there, or not of its size."""
    needs = {name: size for shard in shards for name, size in shard.file_sizes(itemsize).items()}
    return next((name for name, size in needs.items() if sizes.get(name) != size), None)


def read_index(store: Store) -> CorpusIndex:
    """The index. Raises `DataError` if it is damaged."""
    return CorpusIndex.decode(store.read(INDEX), f"{store.url}/{INDEX}")


def remove_leftovers(store: Store) -> None:
    """Delete files that processes were writing when they were killed. Main host only, when all pieces are done."""
    for name in store.list_names(""):
        if _LEFTOVER.fullmatch(name):
            store.remove(name)


def write_index(store: Store, index: CorpusIndex) -> None:
    """The last write of all. Main host only."""
    store.write(INDEX, index.encode())
