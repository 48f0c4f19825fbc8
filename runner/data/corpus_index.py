"""Index of a corpus: everything about its tokens that is needed before the first step, without a scan of them.

A corpus is a directory, on a disk or in a bucket, of shards and of `index.json`, which is written last and names them.
A shard is two files:

- `<name>.bin`: little-endian token ids.
- `<name>.ends`: for each document a little-endian int64, the number of tokens of the shard before its end.

A document lies within one shard, and its separator, if the corpus has one, is its last token. The fingerprint of a
corpus is the digest of its index, which holds the digest of every file.

A corpus of dialogues has a completion mask: a third file for each shard, `<name>.answers`, with a byte for each token,
1 for a token of a completion (an answer), 0 for a token of a prompt. Either all shards have this file or none has.

A corpus with predictions of a teacher (`evaluate --save-top-k`) has a file `<name>.top` for each shard. It holds a
record for each token (`make_top_dtype`): the K most likely tokens at its place, given those before it.
"""

import hashlib
import json
import re
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

import numpy as np

from runner.errors import DataError
from runner.storage import JsonObject, Key, Store, compute_crc32c, encode_json, parse_json, validate_record

INDEX = "index.json"
# 4 has predictions of a teacher; of the others 3 has a `begin` token, 2 a completion mask, and every other corpus is 1.
FORMAT = 4
DTYPES = ("uint16", "uint32")
ENDS_DTYPE = np.dtype("<i8")
COMPLETION_DTYPE = np.dtype("u1")
HEAD_BYTES = 1 << 12
VOCABULARY_MAX = 1 << 32

_SHARD_KEYS = (
    Key("name", str, "its files are `<name>.bin` and `<name>.ends`"),
    Key("num_tokens", int, "number of ids"),
    Key("num_documents", int, "number of documents"),
    Key("largest_id", int, "largest id; -1 if the shard is empty"),
    Key("head_crc32c", str, "CRC-32C of the first 4,096 bytes of `<name>.bin`, checked when a run starts"),
    Key("tokens_crc32c", str, "CRC-32C of `<name>.bin`"),
    Key("ends_crc32c", str, "CRC-32C of `<name>.ends`"),
)
_SIDE_KEYS = (
    Key("answers_crc32c", str, "CRC-32C of `<name>.answers`; only in a corpus of dialogues"),
    Key("top_crc32c", str, "CRC-32C of `<name>.top`; only in a corpus with predictions of a teacher"),
)
_TOP_KEYS = (
    Key("format", int, "version of the format of this file"),
    Key("dtype", str, "type of the ids: uint16 or uint32, little-endian"),
    Key("vocabulary_size", int, "every id is below it"),
    Key("tokenizer", dict, "tokenizer of the ids: its `kind`, and what identifies it among others of that kind"),
    Key("separator", int | None, "id that ends every document; null: none"),
    Key("begin", int, "id that begins every document; absent: none"),
    Key(
        "teacher", dict, "model whose predictions `<name>.top` holds, and `top_k`, their number per token; absent: none"
    ),
    Key("shards", list, "shards in reading order"),
    Key("digest", str, "SHA-256 of all the other keys"),
)
_OPTIONAL = ("begin", "teacher")
INDEX_KEYS = (*_TOP_KEYS, *(replace(key, name=f"shards.{key.name}") for key in (*_SHARD_KEYS, *_SIDE_KEYS)))


@dataclass(frozen=True)
class CorpusShard:
    """Entry of a shard in the index; `INDEX_KEYS` describes the fields."""

    name: str
    num_tokens: int
    num_documents: int
    largest_id: int
    head_crc32c: str
    tokens_crc32c: str
    ends_crc32c: str
    answers_crc32c: str | None = None
    top_crc32c: str | None = None

    @classmethod
    def from_arrays(
        cls,
        name: str,
        ids: np.ndarray,
        ends: np.ndarray,
        completion: np.ndarray | None = None,
        top: np.ndarray | None = None,
    ) -> Self:
        """Return the entry of a shard with this content; the arrays have the dtypes of the shard's files."""
        id_bytes, end_bytes = ids.tobytes(), ends.tobytes()
        return cls(
            name,
            num_tokens=len(ids),
            num_documents=len(ends),
            largest_id=int(ids.max()) if len(ids) else -1,
            head_crc32c=compute_crc32c(id_bytes[:HEAD_BYTES]),
            tokens_crc32c=compute_crc32c(id_bytes),
            ends_crc32c=compute_crc32c(end_bytes),
            answers_crc32c=None if completion is None else compute_crc32c(completion.tobytes()),
            top_crc32c=None if top is None else compute_crc32c(top.tobytes()),
        )

    def to_json(self) -> JsonObject:
        """Return the entry as the index holds it, without the fields that are None."""
        return {key: value for key, value in asdict(self).items() if value is not None}

    def file_sizes(self, itemsize: int, top_itemsize: int = 0) -> dict[str, int]:
        """Return the sizes in bytes of the shard's files by name; ids and predictions have so many bytes a token."""
        sizes = {f"{self.name}.bin": self.num_tokens * itemsize}
        sizes[f"{self.name}.ends"] = self.num_documents * ENDS_DTYPE.itemsize
        if self.answers_crc32c is not None:
            sizes[f"{self.name}.answers"] = self.num_tokens * COMPLETION_DTYPE.itemsize
        if self.top_crc32c is not None:
            sizes[f"{self.name}.top"] = self.num_tokens * top_itemsize
        return sizes


def make_top_dtype(top_k: int, id_dtype: str) -> np.dtype:
    """Return the type of a token's record in `<name>.top`, without padding bytes.

    `log_sum` is the logsumexp of the logits of the whole vocabulary; infinite if the token was not predicted. `logits`
    and `ids` are those of the most likely tokens, the most likely one first.
    """
    id_type = np.dtype(id_dtype).newbyteorder("<")
    return np.dtype([("log_sum", "<f4"), ("logits", "<f4", (top_k,)), ("ids", id_type, (top_k,))])


class CorpusShards:
    """Base of everything that holds shards: a whole corpus, or a piece of one."""

    shards: tuple[CorpusShard, ...]

    @property
    def num_tokens(self) -> int:
        """Number of tokens in all shards."""
        return sum(shard.num_tokens for shard in self.shards)

    @property
    def num_documents(self) -> int:
        """Number of documents in all shards."""
        return sum(shard.num_documents for shard in self.shards)


@dataclass(frozen=True)
class CorpusIndex(CorpusShards):
    """Content of `index.json`; `INDEX_KEYS` describes the fields."""

    dtype: str
    vocabulary_size: int
    tokenizer: JsonObject
    separator: int | None
    shards: tuple[CorpusShard, ...]
    begin: int | None = None
    teacher: JsonObject | None = None

    @property
    def top_dtype(self) -> np.dtype | None:
        """Type of the records of predictions; None if the corpus has none."""
        return None if self.teacher is None else make_top_dtype(self.teacher["top_k"], self.dtype)

    @property
    def has_completion_mask(self) -> bool:
        """True if the corpus says which tokens are of completions."""
        return any(shard.answers_crc32c is not None for shard in self.shards)

    @property
    def digest(self) -> str:
        """Digest of 64 hexadecimal digits, equal for equal tokens, documents and tokenizers."""
        return _digest(self._content())

    def encode(self) -> bytes:
        """Return the content of the file."""
        return encode_json(self._content() | {"digest": self.digest})

    @classmethod
    def decode(cls, content: bytes, where: str) -> Self:
        """Parse the content of the file at `where`. Raises `DataError` if it is damaged or newer than this runner."""
        try:
            record = parse_json(content)
            # A newer format comes first, because its keys may be unknown here and would be reported as damage.
            if isinstance(record.get("format"), int) and record["format"] > FORMAT:
                raise DataError(f"{where} has format {record['format']}, needs {FORMAT}: written by a newer runner")
            validate_record(record, _TOP_KEYS, [key.name for key in _TOP_KEYS if key.name not in _OPTIONAL])
            if record.pop("digest") != _digest(record):
                raise ValueError("it does not match its own digest")
            if record["format"] not in range(1, FORMAT + 1):
                raise ValueError(f"its format is {record['format']}, needs 1 to {FORMAT}")
            if record["dtype"] not in DTYPES:
                raise ValueError(f"dtype is {record['dtype'][:20]!r}, needs one of {', '.join(DTYPES)}")
            shards = tuple(map(parse_shard, record["shards"]))
            if len({shard.name for shard in shards}) < len(shards):
                raise ValueError("two of its shards have the same name")
            if record["format"] < FORMAT and (record["format"] == 3) != ("begin" in record):
                raise ValueError(f"format {record['format']} goes with a key begin only if it is 3 or {FORMAT}")
            top_k = record.get("teacher", {"top_k": None}).get("top_k")
            if (record["format"] == FORMAT) != (type(top_k) is int and top_k > 0):
                raise ValueError(f"format {record['format']} goes with a key teacher only if it is {FORMAT}")
            if any((shard.top_crc32c is None) != (top_k is None) for shard in shards):
                raise ValueError("its shards need predictions (top_crc32c) if it has a teacher, and only then")
            has_mask = {shard.answers_crc32c is not None for shard in shards}
            if len(has_mask) > 1 or (record["format"] < 3 and has_mask not in (set(), {record["format"] == 2})):
                raise ValueError(
                    f"format {record['format']}, and only some of its shards have a completion mask (answers_crc32c)"
                )
            largest, size = max((shard.largest_id for shard in shards), default=-1), record["vocabulary_size"]
            if not largest < size <= VOCABULARY_MAX:
                raise ValueError(f"vocabulary_size is {size}, needs more than its largest id, {largest}, and 32 bits")
        except DataError:
            raise
        except (ValueError, TypeError) as error:
            raise DataError(f"{where} is not the index of a corpus: {error}") from error
        return cls(
            record["dtype"],
            record["vocabulary_size"],
            record["tokenizer"],
            record["separator"],
            shards,
            record.get("begin"),
            record.get("teacher"),
        )

    def _content(self) -> JsonObject:
        # The format is the oldest that has all that the corpus has, so that a corpus keeps its digest.
        version = 3 if self.begin is not None else 2 if self.has_completion_mask else 1
        version = version if self.teacher is None else FORMAT
        content = {"format": version, **asdict(self), "shards": [shard.to_json() for shard in self.shards]}
        return {key: value for key, value in content.items() if key not in _OPTIONAL or value is not None}


def read_tokenizer(tokenizer: JsonObject, store: Store) -> bytes:
    """Return the file of the tokenizer that the corpus in `store` was made with. Raises DataError."""
    name = tokenizer["file"]
    try:
        content = store.read(name)
    except FileNotFoundError as error:
        raise DataError(f"{store.url}/{name} is missing: the corpus was tokenised with it; put it back") from error
    if hashlib.sha256(content).hexdigest() != tokenizer.get("sha256"):
        raise DataError(
            f"{store.url}/{name} is not the file that the corpus was tokenised with; put that back, or tokenise again"
        )
    return content


def parse_shard(record: JsonObject) -> CorpusShard:
    """Parse the entry of a shard. Raises `ValueError` if it is damaged."""
    if not isinstance(record, dict):
        raise ValueError(f"{str(record)[:20]!r} is not a shard")
    validate_record(record, (*_SHARD_KEYS, *_SIDE_KEYS), [key.name for key in _SHARD_KEYS])
    shard = CorpusShard(**record)
    # A name with a slash could lead outside the directory of the corpus.
    if not re.fullmatch(r"\w[\w.-]*", shard.name):
        raise ValueError(f"{shard.name[:60]!r} is not the name of a shard")
    if min(shard.num_tokens, shard.num_documents, shard.largest_id + 1) < 0:
        raise ValueError(f"shard {shard.name} has a number that is negative")
    return shard


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
