"""Which tokenizer a job uses: read from its file, or trained on a sample of the source."""

import difflib
import hashlib
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import tokenizers

from experiments.tokenise.config import BpeConfig, BytesConfig, TiktokenConfig, TokenizerConfig
from experiments.tokenise.documents import BadRecord, Piece
from experiments.tokenise.inputs import read_file
from experiments.tokenise.pipeline import fetch_piece, piece_documents
from runner.data.tokenizers import TOKENIZER_FILES, BatchTokenizer, ByteBatchTokenizer, make_tokenizer
from runner.errors import DataError, InvalidError
from runner.storage import JsonObject, Store

_LEAST_OF_A_PIECE_BYTES = 1 << 20


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer, and what the index says of it. `content` is that of its file, None where it has none."""

    tokenizer: BatchTokenizer
    record: JsonObject
    content: bytes | None = field(repr=False)

    @property
    def sha256(self) -> str:
        """Of the file; "" where there is none."""
        return str(self.record.get("sha256", ""))

    def separator(self, wanted: int | str | None) -> int | None:
        """The id of the separator. Raises `InvalidError` with the nearest token if there is none."""
        if wanted is None:
            return None
        if isinstance(wanted, int):
            if wanted >= self.tokenizer.vocabulary_size:
                raise InvalidError(f"is {wanted}, the tokenizer's ids go up to {self.tokenizer.vocabulary_size - 1:,}")
            return wanted
        tokens = self.tokenizer.tokens()
        if wanted in tokens:
            return tokens[wanted]
        if not tokens:
            raise InvalidError(f"a tokenizer of kind {self.tokenizer.name} has no token {wanted!r}; needs an id")
        special = [token for token in tokens if token.startswith("<")]
        near = difflib.get_close_matches(wanted, special, n=1) or difflib.get_close_matches(wanted, tokens, n=1)
        hint = (
            f"; did you mean {near[0]!r}?" if near else f"; its special tokens are {', '.join(special[:8]) or 'none'}"
        )
        raise InvalidError(f"the tokenizer has no token {wanted!r}{hint}")


def read_vocabulary(config: TokenizerConfig) -> Vocabulary:
    """Of a kind that needs no training. Raises `DataError` if its file is missing or damaged."""
    assert not isinstance(config, BpeConfig)
    if isinstance(config, BytesConfig):
        return Vocabulary(
            ByteBatchTokenizer(), {"kind": "bytes", "vocabulary_size": ByteBatchTokenizer.vocabulary_size}, None
        )
    more: JsonObject = {}
    if isinstance(config, TiktokenConfig):
        more = {"pattern": config.pattern, "special_tokens": config.special_tokens}
    try:
        return _of_file(config.kind, read_file(config.file), more)
    except DataError as error:
        raise DataError(f"{config.file}: {error}") from error


def trained_vocabulary(store: Store) -> Vocabulary:
    """The one that was trained for the corpus in `store`."""
    name = TOKENIZER_FILES["hf"]
    try:
        return _of_file("hf", store.read(name), {})
    except (FileNotFoundError, DataError) as error:
        raise DataError(f"{store.url}/{name}, which was trained, is gone or damaged; remove {store.url}") from error


def _of_file(kind: str, content: bytes, more: JsonObject) -> Vocabulary:
    record = {"kind": kind, "file": TOKENIZER_FILES[kind], "sha256": hashlib.sha256(content).hexdigest(), **more}
    tokenizer = make_tokenizer(record, content)
    return Vocabulary(tokenizer, record | {"vocabulary_size": tokenizer.vocabulary_size}, content)


def train(config: BpeConfig, separator: int | str | None, sample: Generator[bytes]) -> bytes:
    """The `tokenizer.json` of a byte-level BPE: the same for the same sample, whatever the number of cores."""
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


def sample_of(
    pieces: Sequence[Piece], sample_bytes: int, field_name: str, skip_bad: int
) -> Generator[bytes, Any, None]:
    """Documents from the heads of pieces that lie evenly over the source, about `sample_bytes` in all."""
    num_sampled = min(len(pieces), max(1, sample_bytes // _LEAST_OF_A_PIECE_BYTES))
    of_each_bytes = -(-sample_bytes // num_sampled)
    bad: list[BadRecord] = []
    for index in range(num_sampled):
        piece = pieces[index * len(pieces) // num_sampled]
        left_bytes = of_each_bytes
        for document in piece_documents(piece, fetch_piece(piece), field_name, skip_bad, bad):
            assert isinstance(document, bytes), "a vocabulary is not trained on dialogues"
            yield document
            left_bytes -= len(document)
            if left_bytes <= 0:
                break
