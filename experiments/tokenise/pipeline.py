"""Reading, encoding and writing at the same time: what each makes is ready before the next asks for it.

One thread fetches files of buckets, one reads documents, two encode (while the library works for one of them on all
cores, the other turns its ids into arrays), and whoever iterates writes. What comes out, and its order, depends on
none of that.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from experiments.tokenise.chat import ChatReader, Dialogue, Renderer, mark
from experiments.tokenise.documents import BadRecord, Document, Piece, documents, fetch
from runner.data.batches import Prefetcher
from runner.data.corpus_index import COMPLETION_DTYPE
from runner.data.tokenizers import BatchTokenizer
from runner.errors import DataError

BATCH_BYTES = 4 << 20  # enough for all cores of a large host
BATCH_DOCUMENTS = 16384
_NUM_ENCODERS = 2
_NUM_FETCHERS = 8
_BATCHES_AHEAD = 8

In = TypeVar("In")
Out = TypeVar("Out")


@dataclass(frozen=True)
class DocumentBatch:
    """Neighbouring documents of one piece. `ends_shard`, `ends_piece`: what ends after the last of them."""

    piece: int
    documents: list[Document]
    bad: tuple[BadRecord, ...]
    ends_shard: bool
    ends_piece: bool


@dataclass(frozen=True)
class EncodedBatch:
    """The tokens of a batch: `ids` of all its documents, and in `ends` how many of them lie before each one's end.

    Of dialogues `answers` says of each token whether it is of an answer; None of other documents.
    """

    batch: DocumentBatch
    ids: np.ndarray
    ends: np.ndarray
    num_left_out: int  # documents without tokens
    answers: np.ndarray | None = None
    num_dropped: int = 0  # dialogues that were too long, or that had no answer left
    num_cut: int = 0


def encoded(
    pieces: Iterable[tuple[int, Piece]],
    tokenizer: BatchTokenizer,
    separator: int | None,
    field: str,
    shard_bytes: int,
    skip_bad: int,
    chat: ChatReader | None = None,
) -> Generator[EncodedBatch]:
    """The tokens of the numbered pieces, in order. Close it, or exhaust it. Raises `DataError`."""
    fetched = ahead(_fetch_all(pieces), 1)
    batches = ahead(_batches(fetched, field, shard_bytes, skip_bad, chat), _BATCHES_AHEAD)
    if chat is not None:
        return mapped(lambda batch: encode_dialogues(batch, tokenizer, separator, chat), batches, _NUM_ENCODERS)
    return mapped(lambda batch: encode(batch, tokenizer, separator), batches, _NUM_ENCODERS)


def encode(batch: DocumentBatch, tokenizer: BatchTokenizer, separator: int | None) -> EncodedBatch:
    """A document that has no tokens and no separator is left out: a corpus cannot hold it."""
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
    """As `encode`, with the tokens of answers marked. One that is too long, or has no answer left, is left out."""
    dialogues = [document for document in batch.documents if isinstance(document, Dialogue)]
    found = tokenizer.encode_spans([dialogue.text for dialogue in dialogues]) if dialogues else []
    marked = [
        mark(dialogue, ids, spans, separator, chat.max_tokens)
        for dialogue, (ids, spans) in zip(dialogues, found, strict=True)
    ]
    kept = [one for one in marked if not one.is_cut or (chat.is_cut and one.marks.any())]
    held = [one for one in kept if len(one.ids)]
    ids = np.concatenate([np.empty(0, tokenizer.dtype), *(one.ids for one in held)])
    answers = np.concatenate([np.empty(0, COMPLETION_DTYPE), *(one.marks for one in held)])
    ends = np.cumsum(np.array([len(one.ids) for one in held], np.int64))
    num_cut = sum(one.is_cut for one in held)
    return EncodedBatch(batch, ids, ends, len(kept) - len(held), answers, len(marked) - len(kept), num_cut)


def piece_documents(
    piece: Piece,
    contents: Sequence[bytes | None],
    field: str,
    skip_bad: int,
    bad: list[BadRecord],
    renderer: Renderer | None = None,
) -> Generator[Document]:
    """The documents of a piece; what is bad is put into `bad`. Raises `DataError` where that is too much."""
    for part, content in zip(piece, contents, strict=True):
        for document in documents(part, content, field, renderer):
            if not isinstance(document, BadRecord):
                yield document
                continue
            bad.append(document)
            if len(bad) > skip_bad:
                raise DataError(too_many(str(document), len(bad), skip_bad))


def too_many(first: str, num_bad: int, skip_bad: int) -> str:
    """The message for more bad lines than are allowed."""
    return first if skip_bad == 0 else f"{first}; that makes {num_bad}, config.skip_bad allows {skip_bad}"


def fetch_piece(piece: Piece) -> list[bytes | None]:
    """The contents of a piece's files, as far as they are in a bucket."""
    with ThreadPoolExecutor(_NUM_FETCHERS, thread_name_prefix="fetch") as pool:
        return list(pool.map(fetch, piece))


def _fetch_all(pieces: Iterable[tuple[int, Piece]]) -> Generator[tuple[int, Piece, list[bytes | None]]]:
    for number, piece in pieces:
        yield number, piece, fetch_piece(piece)


def _batches(
    pieces: Generator[tuple[int, Piece, list[bytes | None]]],
    field: str,
    shard_bytes: int,
    skip_bad: int,
    chat: ChatReader | None,
) -> Generator[DocumentBatch]:
    """Cut by documents alone, so that the same shards come out of the same piece."""
    rendering = contextlib.nullcontext() if chat is None else Renderer(chat.template)
    with contextlib.closing(pieces), rendering as renderer:
        for number, piece, contents in pieces:
            bad: list[BadRecord] = []
            batch: list[Document] = []
            batch_bytes = in_shard_bytes = 0
            for document in piece_documents(piece, contents, field, skip_bad, bad, renderer):
                batch.append(document)
                batch_bytes += len(document)
                in_shard_bytes += len(document)
                is_shard = in_shard_bytes >= shard_bytes
                if is_shard or batch_bytes >= BATCH_BYTES or len(batch) == BATCH_DOCUMENTS:
                    yield DocumentBatch(number, batch, (), is_shard, False)
                    batch, batch_bytes = [], 0
                    in_shard_bytes = 0 if is_shard else in_shard_bytes
            yield DocumentBatch(number, batch, tuple(bad), True, True)


def ahead(items: Generator[Out], depth: int) -> Generator[Out]:
    """The same items, made in a thread up to `depth` before they are asked for. Close it, or exhaust it."""
    with Prefetcher(items, depth) as made:
        yield from made


def mapped(function: Callable[[In], Out], items: Generator[In], num_threads: int) -> Generator[Out]:
    """`function` of each item, in order, on several threads. Close it, or exhaust it."""
    waiting: deque[Future[Out]] = deque()
    with contextlib.closing(items), ThreadPoolExecutor(num_threads, thread_name_prefix="encode") as pool:
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) > _BATCHES_AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
