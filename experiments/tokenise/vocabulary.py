"""Tokenizers of a tokenise job: loaded from a file, or trained on a sample of the source."""

import difflib
import hashlib
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import tokenizers

from experiments.tokenise.config import BpeConfig, BytesConfig, TiktokenConfig, TokenizerConfig
from experiments.tokenise.documents import BadRecord, Piece
from experiments.tokenise.inputs import read_file
from experiments.tokenise.pipeline import fetch_piece, read_piece
from runner.data.tokenizers import TOKENIZER_FILES, BatchTokenizer, ByteBatchTokenizer, make_tokenizer
from runner.errors import DataError, InvalidError
from runner.storage import JsonObject, Store

_MIN_SAMPLE_BYTES = 1 << 20  # from each sampled piece


@dataclass(frozen=True)
class Vocabulary:
    """Tokenizer with its record in the corpus index, and the content of its file if it has one."""

    tokenizer: BatchTokenizer
    record: JsonObject
    content: bytes | None = field(repr=False)

    @property
    def sha256(self) -> str:
        """SHA-256 of the file; "" without one."""
        return str(self.record.get("sha256", ""))

    def find_separator(self, separator: int | str | None) -> int | None:
        """Return the id of the separator. Raises `InvalidError` with the nearest token if there is none."""
        if separator is None:
            return None
        if isinstance(separator, int):
            if separator >= self.tokenizer.vocabulary_size:
                raise InvalidError(f"is {separator}; the largest id is {self.tokenizer.vocabulary_size - 1:,}")
            return separator
        tokens = self.tokenizer.list_tokens()
        if separator in tokens:
            return tokens[separator]
        if not tokens:
            raise InvalidError(f"a tokenizer of kind {self.tokenizer.name} has no token {separator!r}; give an id")
        special = [token for token in tokens if token.startswith("<")]
        near = difflib.get_close_matches(separator, special, n=1) or difflib.get_close_matches(separator, tokens, n=1)
        hint = (
            f"; did you mean {near[0]!r}?" if near else f"; its special tokens are {', '.join(special[:8]) or 'none'}"
        )
        raise InvalidError(f"the tokenizer has no token {separator!r}{hint}")


def load_vocabulary(config: TokenizerConfig) -> Vocabulary:
    """Load a tokenizer that needs no training. Raises `DataError` if its file is missing or damaged."""
    assert not isinstance(config, BpeConfig)
    if isinstance(config, BytesConfig):
        return Vocabulary(
            ByteBatchTokenizer(), {"kind": "bytes", "vocabulary_size": ByteBatchTokenizer.vocabulary_size}, None
        )
    more: JsonObject = {}
    if isinstance(config, TiktokenConfig):
        more = {"pattern": config.pattern, "special_tokens": config.special_tokens}
    try:
        return _make_vocabulary(config.kind, read_file(config.file), more)
    except DataError as error:
        raise DataError(f"{config.file}: {error}") from error


def load_trained_vocabulary(store: Store) -> Vocabulary:
    """Load the tokenizer that was trained for the corpus in `store`. Raises `DataError` if it cannot be read."""
    name = TOKENIZER_FILES["hf"]
    try:
        return _make_vocabulary("hf", store.read(name), {})
    except (FileNotFoundError, DataError) as error:
        raise DataError(
            f"{store.url}/{name}, the trained tokenizer, is missing or damaged; remove {store.url} and run again"
        ) from error


def _make_vocabulary(kind: str, content: bytes, more: JsonObject) -> Vocabulary:
    record = {"kind": kind, "file": TOKENIZER_FILES[kind], "sha256": hashlib.sha256(content).hexdigest(), **more}
    tokenizer = make_tokenizer(record, content)
    return Vocabulary(tokenizer, record | {"vocabulary_size": tokenizer.vocabulary_size}, content)


def train_bpe(config: BpeConfig, separator: int | str | None, sample: Generator[bytes]) -> bytes:
    """Train a byte-level BPE and return its `tokenizer.json`; deterministic in the sample, for any number of cores."""
    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=config.vocabulary_size,
        special_tokens=[separator] if isinstance(separator, str) else [],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    library.train_from_iterator((document.decode(errors="replace") for document in sample), trainer)
    return str(library.to_str()).encode()


def sample_documents(
    pieces: Sequence[Piece], sample_bytes: int, field_name: str, skip_bad: int
) -> Generator[bytes, Any, None]:
    """Yield about `sample_bytes` of documents, from the beginnings of pieces spread evenly over the source."""
    num_sampled = min(len(pieces), max(1, sample_bytes // _MIN_SAMPLE_BYTES))
    piece_bytes = -(-sample_bytes // num_sampled)
    bad: list[BadRecord] = []
    for index in range(num_sampled):
        piece = pieces[index * len(pieces) // num_sampled]
        left_bytes = piece_bytes
        for document in read_piece(piece, fetch_piece(piece), field_name, skip_bad, bad):
            assert isinstance(document, bytes), "a vocabulary is not trained on dialogues"
            yield document
            left_bytes -= len(document)
            if left_bytes <= 0:
                break
