"""Concurrent fetching, reading and encoding of pieces.

One thread fetches files from buckets, one reads documents, two encode (while the tokenizer library uses all cores for
one batch, the other thread converts ids to arrays), and the caller writes. The result and its order do not depend on
the timing of the threads.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from experiments.tokenise.documents import (
    BadRecord,
    ChatReader,
    Document,
    DocumentsDigest,
    DocumentSet,
    Piece,
    fetch_small,
    find_documents,
    read_documents,
    shuffle_indices,
    start_renderer,
)
from runner.data.batches import Prefetcher
from runner.data.chat import Dialogue, Renderer, mark_tokens
from runner.data.corpus_index import COMPLETION_DTYPE
from runner.data.tokenizers import BatchTokenizer
from runner.errors import DataError, EncodeError

BATCH_BYTES = 4 << 20  # enough to occupy all cores of a large host
BATCH_DOCUMENTS = 16384
_NUM_ENCODERS = 2
_NUM_FETCHERS = 8
_BATCHES_AHEAD = 8

In = TypeVar("In")
Out = TypeVar("Out")


@dataclass(frozen=True)
class _DocumentBatch:
    """Consecutive documents of one piece."""

    piece: int
    documents: list[Document]
    numbers: list[int]  # number of each document in its piece, from 0 in reading order
    bad: tuple[BadRecord, ...]  # lines and rows of the piece without a text; in its last batch only
    ends_shard: bool  # True if a shard ends after the last document
    ends_piece: bool  # True if the piece ends after the last document
    num_duplicates: int = 0  # number of documents of the piece that were left out as duplicates; in its last batch only
    # Digest of all documents of the piece, those that were left out included; in its last batch only, and "" if its
    # files cannot change.
    digest: str = ""


@dataclass(frozen=True)
class EncodedBatch:
    """Tokens of a batch of documents."""

    batch: _DocumentBatch
    ids: np.ndarray  # token ids of all documents, (number of tokens,)
    ends: np.ndarray  # end of each document in `ids`, (number of documents,)
    num_left_out: int  # number of documents without tokens
    # Mark of each completion token, as `ids`; None if the documents are not dialogues.
    completions: np.ndarray | None = None
    num_dropped: int = 0  # number of dialogues dropped because they were too long or had no completion left
    num_cut: int = 0  # number of dialogues whose end was cut off
    bad: tuple[BadRecord, ...] = ()  # documents that the tokenizer cannot encode


@dataclass(frozen=True)
class EncodingOptions:
    """Everything on which the tokens of a piece depend besides files and tokenizer."""

    field: str  # key or column that holds the text
    shard_bytes: int  # bytes of text in a shard
    skip_bad: int = 0  # maximum number of bad lines and documents
    begin: int | None = None  # id that begins every document
    separator: int | None = None  # id that ends every document
    chat: ChatReader | None = None  # reader of dialogues; None if documents are plain text
    seed: int | None = None  # seed of the order of documents in a shard; None for reading order
    duplicates: DocumentSet | None = None  # documents to leave out


def encode_pieces(
    pieces: Sequence[tuple[int, Piece]], tokenizer: BatchTokenizer, options: EncodingOptions
) -> Generator[EncodedBatch]:
    """Yield the tokens of numbered pieces, in order. The caller must close the generator or exhaust it.

    Raises:
        DataError: a file cannot be read, or a piece has more than `skip_bad` bad lines.
    """
    parts = dict(pieces)
    fetched = prefetch(((number, piece, fetch_piece(piece)) for number, piece in pieces), 1)
    batches = prefetch(_read_batches(fetched, options), _BATCHES_AHEAD)
    encode = _encode_texts if options.chat is None else _encode_dialogues
    return _map_in_order(lambda batch: encode(batch, parts[batch.piece], tokenizer, options), batches, _NUM_ENCODERS)


def _encode_texts(
    batch: _DocumentBatch, piece: Piece, tokenizer: BatchTokenizer, options: EncodingOptions
) -> EncodedBatch:
    """Encode documents of text.

    A document without tokens and without a separator is left out, because a corpus cannot contain it.
    """
    begin, separator = options.begin, options.separator
    found, bad = _encode_all(batch, piece, tokenizer.encode_batch, batch.documents, options)
    found = [ids for ids in found if ids is not None]
    num_documents, tail = len(found), 0 if separator is None else 1
    if separator is None:
        found = [ids for ids in found if len(ids)]
    if begin is not None:
        first = np.array([begin], tokenizer.dtype)
        # A text may begin with the token itself, which is then not repeated.
        found = [ids if ids[:1].tolist() == [begin] else np.concatenate([first, ids]) for ids in found]
    lengths = np.array([len(ids) + tail for ids in found], np.int64)
    if separator is not None:
        end = np.array([separator], tokenizer.dtype)
        found = [array for ids in found for array in (ids, end)]
    ids = np.concatenate(found) if found else np.empty(0, tokenizer.dtype)
    return EncodedBatch(batch, ids, np.cumsum(lengths), num_documents - len(lengths), bad=bad)


def _encode_dialogues(
    batch: _DocumentBatch, piece: Piece, tokenizer: BatchTokenizer, options: EncodingOptions
) -> EncodedBatch:
    """Encode dialogues and mark their completion tokens. Long dialogues are cut or dropped as the options say."""
    assert options.chat is not None
    chat, dialogues = options.chat, [document for document in batch.documents if isinstance(document, Dialogue)]
    texts = [dialogue.text for dialogue in dialogues]
    encoded, bad = _encode_all(batch, piece, tokenizer.encode_spans, texts, options)
    marked = [
        mark_tokens(dialogue, found[0], found[1], options.begin, options.separator, chat.max_tokens)
        for dialogue, found in zip(dialogues, encoded, strict=True)
        if found is not None
    ]
    # A dialogue that was cut before its first completion token has no token that counts in the loss.
    kept = [tokens for tokens in marked if not tokens.is_cut or (chat.cuts_longer and tokens.marks.any())]
    # A document without tokens would be an empty range, which the index of a corpus does not have.
    full = [tokens for tokens in kept if len(tokens.ids)]
    ids = np.concatenate([np.empty(0, tokenizer.dtype), *(tokens.ids for tokens in full)])
    completions = np.concatenate([np.empty(0, COMPLETION_DTYPE), *(tokens.marks for tokens in full)])
    ends = np.cumsum(np.array([len(tokens.ids) for tokens in full], np.int64))
    num_cut = sum(tokens.is_cut for tokens in full)
    return EncodedBatch(batch, ids, ends, len(kept) - len(full), completions, len(marked) - len(kept), num_cut, bad)


def _encode_all(
    batch: _DocumentBatch,
    piece: Piece,
    encode: Callable[[Any], list[Any]],
    texts: Sequence[Any],
    options: EncodingOptions,
) -> tuple[list[Any], tuple[BadRecord, ...]]:
    """Encode the texts of a batch, and return None in place of each that cannot be encoded, and where these are.

    Raises:
        DataError: they are more than `skip_bad`.
    """
    with contextlib.suppress(EncodeError):
        return encode(texts) if texts else [], ()
    # The library does not report the text on which it failed, so each is encoded separately.
    found: list[Any] = []
    problems: dict[int, str] = {}
    for index, text in enumerate(texts):
        try:
            found += encode([text])
        except EncodeError as error:
            found.append(None)
            problems[index] = str(error)
    failed = sorted(problems, key=lambda index: batch.numbers[index])
    with start_renderer(options.chat) as renderer:
        places = find_documents(piece, [batch.numbers[index] for index in failed], options.field, renderer)
    bad = tuple(BadRecord(place, problems[index]) for place, index in zip(places, failed, strict=True))
    if len(bad) > options.skip_bad:
        raise DataError(format_too_many(str(bad[0]), len(bad), options.skip_bad))
    return found, bad


def read_piece(
    piece: Piece,
    field: str,
    skip_bad: int,
    bad: list[BadRecord],
    renderer: Renderer | None = None,
    contents: Sequence[bytes | None] | None = None,
) -> Generator[Document]:
    """Yield the documents of a piece, and append bad records to `bad`. Raises `DataError` for more than `skip_bad`.

    `contents` is the result of `fetch_piece` if that was called before.
    """
    for part, content in zip(piece, fetch_piece(piece) if contents is None else contents, strict=True):
        for document in read_documents(part, content, field, renderer):
            if not isinstance(document, BadRecord):
                yield document
                continue
            bad.append(document)
            if len(bad) > skip_bad:
                raise DataError(format_too_many(str(document), len(bad), skip_bad))


def format_too_many(first: str, num_bad: int, skip_bad: int) -> str:
    """Format the message for more bad lines than are allowed."""
    if skip_bad == 0:
        return f"{first}; to leave out such documents set skip_bad to the most that may be skipped"
    return f"{first}; {num_bad} bad lines so far, skip_bad allows {skip_bad}"


def fetch_piece(piece: Piece) -> list[bytes | None]:
    """Fetch the small files of a piece that are in a bucket, concurrently; None for each other file."""
    with ThreadPoolExecutor(_NUM_FETCHERS, thread_name_prefix="fetch") as pool:
        return list(pool.map(fetch_small, piece))


def _read_batches(
    pieces: Generator[tuple[int, Piece, list[bytes | None]]], options: EncodingOptions
) -> Generator[_DocumentBatch]:
    """Yield the documents in batches. With a seed the documents of one shard are in memory.

    The shards of a piece depend only on its documents, so a piece that is processed again gives the same shards.
    """
    with contextlib.closing(pieces), start_renderer(options.chat) as renderer:
        for number, piece, contents in pieces:
            bad: list[BadRecord] = []
            held: list[tuple[int, Document]] = []
            held_bytes = in_shard_bytes = num_shards = num_duplicates = 0
            digest = DocumentsDigest() if any(part.file.has_mutable_content for part in piece) else None
            documents = read_piece(piece, options.field, options.skip_bad, bad, renderer, contents)
            for index, document in enumerate(documents):
                if digest is not None:
                    digest.add(document)
                if options.duplicates is not None and options.duplicates.contains(number, index):
                    num_duplicates += 1
                    continue
                held.append((index, document))
                held_bytes += len(document)
                in_shard_bytes += len(document)
                # Bytes of text are counted instead of tokens, so that shards depend only on the documents.
                is_shard = in_shard_bytes >= options.shard_bytes
                is_batch = held_bytes >= BATCH_BYTES or len(held) == BATCH_DOCUMENTS
                if is_shard or (is_batch and options.seed is None):
                    yield from _cut_batches(number, held, options.seed, num_shards, is_shard)
                    held, held_bytes, num_shards = [], 0, num_shards + is_shard
                    in_shard_bytes = 0 if is_shard else in_shard_bytes
            yield from _cut_batches(number, held, options.seed, num_shards, False)
            # Even an empty last batch is passed on, because it tells the writer that the piece is complete.
            found = "" if digest is None else digest.hexdigest()
            yield _DocumentBatch(number, [], [], tuple(bad), True, True, num_duplicates, found)


def _cut_batches(
    piece: int, held: list[tuple[int, Document]], seed: int | None, shard: int, ends_shard: bool
) -> Iterator[_DocumentBatch]:
    """Yield documents in batches, in the order that the seed gives them if there is one."""
    if seed is not None:
        held = [held[index] for index in shuffle_indices(len(held), seed, piece, shard)]
    start = size_bytes = 0
    for stop, (_, document) in enumerate(held, start=1):
        size_bytes += len(document)
        if stop == len(held) or size_bytes >= BATCH_BYTES or stop - start == BATCH_DOCUMENTS:
            numbers, documents = zip(*held[start:stop], strict=True)
            yield _DocumentBatch(piece, list(documents), list(numbers), (), ends_shard and stop == len(held), False)
            start, size_bytes = stop, 0


def prefetch(items: Generator[Out], depth: int) -> Generator[Out]:
    """Yield the items of a generator that a thread runs up to `depth` items ahead. Close it or exhaust it."""
    with contextlib.closing(Prefetcher(items, depth)) as prefetcher:
        yield from prefetcher


def _map_in_order(function: Callable[[In], Out], items: Generator[In], num_threads: int) -> Generator[Out]:
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
