"""Concurrent fetching, reading and encoding of pieces.

One thread fetches files from buckets, one reads documents, two encode (while the tokenizer library uses all cores for
one batch, the other thread converts ids to arrays), and the caller writes. The result and its order do not depend on
the timing of the threads.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from experiments.tokenise.chat import ChatReader, Dialogue, Renderer, mark_tokens
from experiments.tokenise.documents import BadRecord, Document, Piece, fetch_small, read_documents
from runner.data.batches import Prefetcher
from runner.data.corpus_index import COMPLETION_DTYPE
from runner.data.tokenizers import BatchTokenizer
from runner.errors import DataError

BATCH_BYTES = 4 << 20  # enough to occupy all cores of a large host
BATCH_DOCUMENTS = 16384
_NUM_ENCODERS = 2
_NUM_FETCHERS = 8
_BATCHES_AHEAD = 8

In = TypeVar("In")
Out = TypeVar("Out")


@dataclass(frozen=True)
class DocumentBatch:
    """Consecutive documents of one piece.

    Attributes:
        piece: number of the piece.
        documents: the documents.
        bad: lines and rows of the piece without a text; in its last batch only.
        ends_shard: True if a shard ends after the last document.
        ends_piece: True if the piece ends after the last document.
    """

    piece: int
    documents: list[Document]
    bad: tuple[BadRecord, ...]
    ends_shard: bool
    ends_piece: bool


@dataclass(frozen=True)
class EncodedBatch:
    """Tokens of a batch of documents.

    Attributes:
        batch: the documents.
        ids: token ids of all documents, (number of tokens,).
        ends: end of each document in `ids`, (number of documents,).
        num_left_out: number of documents without tokens.
        completions: mark of each completion token, as `ids`; None if the documents are not dialogues.
        num_dropped: number of dialogues dropped because they were too long or had no completion left.
        num_cut: number of dialogues whose end was cut off.
    """

    batch: DocumentBatch
    ids: np.ndarray
    ends: np.ndarray
    num_left_out: int
    completions: np.ndarray | None = None
    num_dropped: int = 0
    num_cut: int = 0


def encode_pieces(
    pieces: Iterable[tuple[int, Piece]],
    tokenizer: BatchTokenizer,
    separator: int | None,
    field: str,
    shard_bytes: int,
    skip_bad: int,
    chat: ChatReader | None = None,
) -> Generator[EncodedBatch]:
    """Yield the tokens of numbered pieces, in order. The caller must close the generator or exhaust it.

    Raises:
        DataError: a file cannot be read, or a piece has more than `skip_bad` bad lines.
    """
    fetched = prefetch(((number, piece, fetch_piece(piece)) for number, piece in pieces), 1)
    batches = prefetch(_read_batches(fetched, field, shard_bytes, skip_bad, chat), _BATCHES_AHEAD)
    if chat is not None:
        return map_in_order(lambda batch: encode_dialogues(batch, tokenizer, separator, chat), batches, _NUM_ENCODERS)
    return map_in_order(lambda batch: encode_texts(batch, tokenizer, separator), batches, _NUM_ENCODERS)


def encode_texts(batch: DocumentBatch, tokenizer: BatchTokenizer, separator: int | None) -> EncodedBatch:
    """Encode documents of text.

    A document without tokens and without a separator is left out, since a corpus cannot hold it.
    """
    texts = [document for document in batch.documents if isinstance(document, bytes)]
    found: Sequence[np.ndarray] = tokenizer.encode_batch(texts) if texts else []
    num_documents, tail = len(found), 0 if separator is None else 1
    if separator is None:
        found = [ids for ids in found if len(ids)]
    lengths = np.array([len(ids) + tail for ids in found], np.int64)
    if separator is not None:
        end = np.array([separator], tokenizer.dtype)
        found = [array for ids in found for array in (ids, end)]
    ids = np.concatenate(found) if found else np.empty(0, tokenizer.dtype)
    return EncodedBatch(batch, ids, np.cumsum(lengths), num_documents - len(lengths))


def encode_dialogues(
    batch: DocumentBatch, tokenizer: BatchTokenizer, separator: int | None, chat: ChatReader
) -> EncodedBatch:
    """Encode dialogues and mark their completion tokens. Long dialogues are cut or dropped as `chat` says."""
    dialogues = [document for document in batch.documents if isinstance(document, Dialogue)]
    encoded = tokenizer.encode_spans([dialogue.text for dialogue in dialogues]) if dialogues else []
    marked = [
        mark_tokens(dialogue, ids, spans, separator, chat.max_tokens)
        for dialogue, (ids, spans) in zip(dialogues, encoded, strict=True)
    ]
    # A dialogue that was cut before its first completion token has no token that counts in the loss.
    kept = [tokens for tokens in marked if not tokens.is_cut or (chat.cuts_longer and tokens.marks.any())]
    # A document without tokens would be an empty range, which the index of a corpus does not have.
    full = [tokens for tokens in kept if len(tokens.ids)]
    ids = np.concatenate([np.empty(0, tokenizer.dtype), *(tokens.ids for tokens in full)])
    completions = np.concatenate([np.empty(0, COMPLETION_DTYPE), *(tokens.marks for tokens in full)])
    ends = np.cumsum(np.array([len(tokens.ids) for tokens in full], np.int64))
    num_cut = sum(tokens.is_cut for tokens in full)
    return EncodedBatch(batch, ids, ends, len(kept) - len(full), completions, len(marked) - len(kept), num_cut)


def read_piece(
    piece: Piece,
    contents: Sequence[bytes | None],
    field: str,
    skip_bad: int,
    bad: list[BadRecord],
    renderer: Renderer | None = None,
) -> Generator[Document]:
    """Yield the documents of a piece, and append bad records to `bad`. Raises `DataError` for more than `skip_bad`."""
    for part, content in zip(piece, contents, strict=True):
        for document in read_documents(part, content, field, renderer):
            if not isinstance(document, BadRecord):
                yield document
                continue
            bad.append(document)
            if len(bad) > skip_bad:
                raise DataError(format_too_many(str(document), len(bad), skip_bad))


def format_too_many(first: str, num_bad: int, skip_bad: int) -> str:
    """Format the message for more bad lines than are allowed."""
    return first if skip_bad == 0 else f"{first}; {num_bad} bad lines so far, config.skip_bad allows {skip_bad}"


def fetch_piece(piece: Piece) -> list[bytes | None]:
    """Fetch the small files of a piece that are in a bucket, concurrently; None for each other file."""
    with ThreadPoolExecutor(_NUM_FETCHERS, thread_name_prefix="fetch") as pool:
        return list(pool.map(fetch_small, piece))


def _read_batches(
    pieces: Generator[tuple[int, Piece, list[bytes | None]]],
    field: str,
    shard_bytes: int,
    skip_bad: int,
    chat: ChatReader | None,
) -> Generator[DocumentBatch]:
    """Yield the documents in batches.

    The shards of a piece depend only on its documents, so a piece that is processed again gives the same shards.
    """
    rendering = contextlib.nullcontext() if chat is None else Renderer(chat.template)
    with contextlib.closing(pieces), rendering as renderer:
        for number, piece, contents in pieces:
            bad: list[BadRecord] = []
            batch: list[Document] = []
            batch_bytes = in_shard_bytes = 0
            for document in read_piece(piece, contents, field, skip_bad, bad, renderer):
                batch.append(document)
                batch_bytes += len(document)
                in_shard_bytes += len(document)
                # Bytes of text are counted and not tokens, so that shards depend on the documents alone.
                is_shard = in_shard_bytes >= shard_bytes
                if is_shard or batch_bytes >= BATCH_BYTES or len(batch) == BATCH_DOCUMENTS:
                    yield DocumentBatch(number, batch, (), is_shard, False)
                    batch, batch_bytes = [], 0
                    in_shard_bytes = 0 if is_shard else in_shard_bytes
            # Even an empty last batch is passed on: it tells the writer that the piece is complete.
            yield DocumentBatch(number, batch, tuple(bad), True, True)


def prefetch(items: Generator[Out], depth: int) -> Generator[Out]:
    """Yield the items of a generator that a thread runs up to `depth` items ahead. Close it or exhaust it."""
    with Prefetcher(items, depth) as prefetcher:
        yield from prefetcher


def map_in_order(function: Callable[[In], Out], items: Generator[In], num_threads: int) -> Generator[Out]:
    """Yield `function(item)` for each item, in order, computed on several threads. Close it or exhaust it."""
    waiting: deque[Future[Out]] = deque()
    with contextlib.closing(items), ThreadPoolExecutor(num_threads, thread_name_prefix="encode") as pool:
        for item in items:
            waiting.append(pool.submit(function, item))
            # Bounds the memory: a slow writer stops the reading.
            if len(waiting) > _BATCHES_AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
