"""The index of a corpus: what must be known of its tokens, so that nobody has to read them before the first step.

A corpus is a directory, on a disk or in a bucket, of shards and of `index.json`, which is written last and names them.
A shard is two files: `<name>.bin`, little-endian token ids, and `<name>.ends`, a little-endian int64 for each document:
how many tokens of the shard lie before its end. A document lies in one shard, and its separator, where the corpus has
one, is its last token. The fingerprint of a corpus is the digest of its index, which holds the digest of every file.

A corpus of dialogues has a third file for each shard, `<name>.answers`: a byte for each token, 1 where it is of an
answer, 0 where it is of what was asked. All shards have one, or none has.
"""

import hashlib
import json
import re
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

import numpy as np

from runner.errors import DataError
from runner.records import Key, validate_record
from runner.storage import JsonObject, Store, compute_crc32c, encode_json, parse_json

INDEX = "index.json"
FORMAT = 2  # of a corpus that says which tokens are of answers; others have 1, as ever
DTYPES = ("uint16", "uint32")
ENDS_DTYPE = np.dtype("<i8")
COMPLETION_DTYPE = np.dtype("u1")
HEAD_BYTES = 1 << 12
VOCABULARY_MAX = 1 << 32

_OF_SHARD = (
    Key("name", str, "its files are `<name>.bin` and `<name>.ends`"),
    Key("num_tokens", int, "ids in it"),
    Key("num_documents", int, "documents in it"),
    Key("largest_id", int, "its largest id; -1 if it is empty"),
    Key(
        "head_crc32c",
        str,
        "CRC-32C of the first 4,096 bytes of `<name>.bin`, looked at when a run starts",
    ),
    Key("tokens_crc32c", str, "CRC-32C of `<name>.bin`"),
    Key("ends_crc32c", str, "CRC-32C of `<name>.ends`"),
)
_ANSWERS = Key("answers_crc32c", str, "CRC-32C of `<name>.answers`; of a corpus of dialogues alone")
_OF_INDEX = (
    Key("format", int, "version of this file's form"),
    Key("dtype", str, "type of the ids: uint16 or uint32, little-endian"),
    Key("vocabulary_size", int, "every id is below it"),
    Key("tokenizer", dict, "what made the ids: its `kind`, and what tells it from another of that kind"),
    Key("separator", int | None, "the id that ends every document; null: none"),
    Key("shards", list, "the shards in reading order"),
    Key("digest", str, "SHA-256 of all the other keys"),
)
INDEX_KEYS = (*_OF_INDEX, *(replace(key, name=f"shards.{key.name}") for key in (*_OF_SHARD, _ANSWERS)))


@dataclass(frozen=True)
class CorpusShard:
    """What the index says of a shard; see `INDEX_KEYS`."""

    name: str
    num_tokens: int
    num_documents: int
    largest_id: int
    head_crc32c: str
    tokens_crc32c: str
    ends_crc32c: str
    answers_crc32c: str | None = None

    @classmethod
    def of(cls, name: str, ids: np.ndarray, ends: np.ndarray, answers: np.ndarray | None = None) -> Self:
        """What the index says of a shard of these ids, ends and answers, which are of the types of its files."""
        tokens, places = ids.tobytes(), ends.tobytes()
        largest = int(ids.max()) if len(ids) else -1
        digests = compute_crc32c(tokens[:HEAD_BYTES]), compute_crc32c(tokens), compute_crc32c(places)
        return cls(
            name, len(ids), len(ends), largest, *digests, None if answers is None else compute_crc32c(answers.tobytes())
        )

    def record(self) -> JsonObject:
        """As the index has it: without what the shard does not have."""
        return {key: value for key, value in asdict(self).items() if value is not None}

    def file_sizes(self, itemsize: int) -> dict[str, int]:
        """Its files by name with their bytes, of ids of `itemsize` bytes."""
        sizes = {f"{self.name}.bin": self.num_tokens * itemsize}
        sizes[f"{self.name}.ends"] = self.num_documents * ENDS_DTYPE.itemsize
        if self.answers_crc32c is not None:
            sizes[f"{self.name}.answers"] = self.num_tokens * COMPLETION_DTYPE.itemsize
        return sizes


class CorpusShards:
    """What holds shards: a corpus, or a piece of one."""

    shards: tuple[CorpusShard, ...]

    @property
    def num_tokens(self) -> int:
        return sum(shard.num_tokens for shard in self.shards)

    @property
    def num_documents(self) -> int:
        return sum(shard.num_documents for shard in self.shards)


@dataclass(frozen=True)
class CorpusIndex(CorpusShards):
    """The content of `index.json`; see `INDEX_KEYS`."""

    dtype: str
    vocabulary_size: int
    tokenizer: JsonObject
    separator: int | None
    shards: tuple[CorpusShard, ...]

    @property
    def has_completion_mask(self) -> bool:
        """Whether it says which tokens are of answers."""
        return any(shard.answers_crc32c is not None for shard in self.shards)

    @property
    def digest(self) -> str:
        """64 hexadecimal digits; the same for the same tokens, documents and tokenizer."""
        return _digest(self._content())

    def encode(self) -> bytes:
        """The content of the file."""
        return encode_json(self._content() | {"digest": self.digest})

    @classmethod
    def decode(cls, content: bytes, where: str) -> Self:
        """Parse the content of the file at `where`. Raises `DataError` if it is damaged or newer than this runner."""
        try:
            record = parse_json(content)
            if isinstance(record.get("format"), int) and record["format"] > FORMAT:
                raise DataError(f"{where} has format {record['format']}, needs {FORMAT}: written by a newer runner")
            validate_record(record, _OF_INDEX, [key.name for key in _OF_INDEX])
            if record.pop("digest") != _digest(record):
                raise ValueError("it does not match its own digest")
            if record["format"] not in range(1, FORMAT + 1):
                raise ValueError(f"its format is {record['format']}, needs 1 to {FORMAT}")
            if record["dtype"] not in DTYPES:
                raise ValueError(f"dtype is {record['dtype'][:20]!r}, needs one of {', '.join(DTYPES)}")
            shards = tuple(map(parse_shard, record["shards"]))
            if len({shard.name for shard in shards}) < len(shards):
                raise ValueError("two of its shards have one name")
            if {shard.answers_crc32c is not None for shard in shards} not in (set(), {record["format"] == FORMAT}):
                raise ValueError(f"format {record['format']}, and some of its shards say which tokens are of answers")
            largest, size = max((shard.largest_id for shard in shards), default=-1), record["vocabulary_size"]
            if not largest < size <= VOCABULARY_MAX:
                raise ValueError(f"vocabulary_size is {size}, needs more than its largest id, {largest}, and 32 bits")
        except DataError:
            raise
        except (ValueError, TypeError) as error:
            raise DataError(f"{where} is no index of a corpus: {error}") from error
        return cls(record["dtype"], record["vocabulary_size"], record["tokenizer"], record["separator"], shards)

    def _content(self) -> JsonObject:
        form = FORMAT if self.has_completion_mask else 1
        return {"format": form, **asdict(self), "shards": [shard.record() for shard in self.shards]}


def read_tokenizer(tokenizer: JsonObject, store: Store) -> bytes:
    """The file of the tokenizer that a corpus in `store` was made with. Raises `DataError` if it is gone or another."""
    name = tokenizer["file"]
    try:
        content = store.read(name)
    except FileNotFoundError as error:
        raise DataError(f"{store.url}/{name} is missing: the corpus was tokenised with it") from error
    if hashlib.sha256(content).hexdigest() != tokenizer.get("sha256"):
        raise DataError(
            f"{store.url}/{name} is not the file that the corpus was tokenised with; put that back, or tokenise again"
        )
    return content


def parse_shard(record: JsonObject) -> CorpusShard:
    """What the index says of a shard. Raises `ValueError` if it is damaged."""
    if not isinstance(record, dict):
        raise ValueError(f"{str(record)[:20]!r} is no shard")
    validate_record(record, (*_OF_SHARD, _ANSWERS), [key.name for key in _OF_SHARD])
    shard = CorpusShard(**record)
    if not re.fullmatch(r"\w[\w.-]*", shard.name):
        raise ValueError(f"{shard.name[:60]!r} is no name of a shard")
    if min(shard.num_tokens, shard.num_documents, shard.largest_id + 1) < 0:
        raise ValueError(f"shard {shard.name} has a number that is negative")
    return shard


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
