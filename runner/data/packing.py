"""Packing of a range of tokens into examples (sequences of T positions).

Each position holds an input token and, as its target, the token after it. There are three ways to pack:

- `TokenWindows`: windows of T + 1 tokens, regardless of documents. Neighbouring windows share one token, which is a
  target of the first and an input of the second.
- `PackedDocuments`: several whole documents in an example; attention does not cross from one document to another.
- `PaddedDocuments`: one document in an example, the rest of it padding.

With the last two, every token whose successor belongs to the same document is an input of exactly one example. A
document that is longer than T is split, and each part counts as a document. The last token of a document is only a
target, never an input.

A *span* is a part of a document as (position of its first input, number of inputs), both int64. This module reads token
ids and document ends. It does not depend on steps; the order of the examples is made by `sampling`.
"""

import functools
import hashlib
import heapq
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol

import numpy as np
from numpy.typing import DTypeLike

from runner.data.sampling import LocalShuffle, ShuffledOrder, TokenSplit
from runner.data.source import Source
from runner.storage import run_in_parallel

Sequences = dict[str, np.ndarray]  # by field, of shape (number of examples, *shape of the field)


@dataclass(frozen=True)
class FieldSpec:
    """Array of a batch."""

    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]  # shape of the array of one example: (T,) for tokens
    padding: float = 0  # value of its elements in an example that is padding


Fields = Mapping[str, FieldSpec]
TokenDtypes = Mapping[str, DTypeLike]  # dtypes of values per token, by field

TOKEN_DTYPES: TokenDtypes = {"x": np.int32, "y": np.int32, "padding_mask": np.bool_}
DOCUMENT_DTYPES: TokenDtypes = {**TOKEN_DTYPES, "segment": np.int32, "position": np.int32}
BLOCK_POSITIONS = 1 << 19  # positions in all examples of a block; the documents of a block are packed together
BLOCK_EXAMPLES_MIN = 64
# Tokens of a block as a percentage of its positions. The free positions let nearly all documents stay whole.
_BLOCK_FILL_PERCENT = 99.5
# A plan is evicted when it was not used during _PLAN_ROUNDS * (number of cached plans) requests. It must be that long,
# because a batch slot that draws from several blocks uses each of them only now and then.
_PLAN_ROUNDS = 16
PLANS_BYTES_MAX = 1 << 30


def describe_fields(fields: Fields) -> str:
    """Return names, dtypes and shapes of arrays, for messages: `image float32 28x28, label int32`."""
    return ", ".join(
        f"{name} {field.dtype} {'x'.join(map(str, field.shape))}".rstrip() for name, field in sorted(fields.items())
    )


def make_token_fields(dtypes: TokenDtypes, sequence_length: int) -> Fields:
    """Return the fields of examples with one value per token, or a vector where a dtype has a shape."""
    found = {name: np.dtype(dtype) for name, dtype in dtypes.items()}
    return {name: FieldSpec(dtype.base, (sequence_length, *dtype.shape)) for name, dtype in found.items()}


class Examples(Protocol):
    """Examples of one range of tokens, or of a data set of arrays. Immutable, and safe to read from several threads."""

    @property
    def fields(self) -> Fields:
        """Arrays of an example by name."""

    @property
    def num_examples(self) -> int:
        """Number of examples in one epoch."""

    @property
    def fingerprint(self) -> str:
        """Digest of the assignment of tokens to examples; empty for `TokenWindows`, which the split determines."""

    def read(self, indices: np.ndarray) -> Sequences:
        """Return the examples with these indices, each field of shape (len(indices), *shape of the field)."""

    def get_spans(self, index: int) -> np.ndarray:
        """Return the spans of tokens that an example holds, in order, of shape (n, 2); (0, 2) if it has no tokens."""

    def make_order(self, seed: int, batch_examples: Fraction) -> Sequence[int]:
        """Return the endless order, with every index once in each epoch. A step takes `batch_examples` on average."""


class TokenWindows:
    """Windows of T + 1 tokens, which may cross the ends of documents."""

    fingerprint = ""

    def __init__(self, source: Source, split: TokenSplit):
        self._source, self._split = source, split
        self.fields = make_token_fields({**TOKEN_DTYPES, **source.fields}, split.sequence_length)
        self.num_examples = split.num_windows

    @property
    def num_left_out(self) -> int:
        """Number of tokens at the end that fill no window."""
        return max(0, self._split.num_tokens - 1 - self.num_examples * self._split.sequence_length)

    def get_spans(self, index: int) -> np.ndarray:
        """Return the inputs of a window as one span, which may hold parts of several documents."""
        T = self._split.sequence_length
        return np.array([[self._split.start + index * T, T]])

    def read(self, indices: np.ndarray) -> Sequences:
        """Read the windows, and the additional fields of their targets."""
        T = self._split.sequence_length
        starts = self._split.start + np.asarray(indices, np.int64) * T
        # One read gives inputs and targets, which are views of the same array, shifted by one token.
        tokens = self._source.read_many(starts, T + 1).astype(np.int32, copy=False)
        sequences = {"x": tokens[:, :-1], "y": tokens[:, 1:], "padding_mask": np.ones((len(starts), T), np.bool_)}
        for name, dtype in self._source.fields.items():
            sequences[name] = np.zeros((len(starts), T), dtype)
            # Additional fields belong to the target of a position, hence the shift by one.
            targets = [(start + 1, start + 1 + T) for start in starts.tolist()]
            for index, values in enumerate(self._source.read_field_ranges(name, targets)):
                sequences[name][index] = values
        return sequences

    def make_order(self, seed: int, batch_examples: Fraction) -> Sequence[int]:
        """Return a shuffle of all windows, the same for every batch size."""
        return ShuffledOrder(self.num_examples, seed)


class _DocumentExamples:
    """Base of `PackedDocuments` and `PaddedDocuments`: examples that are made of spans of documents."""

    num_examples: int

    def __init__(self, source: Source, split: TokenSplit):
        self._source, self._split = source, split
        self.fields = make_token_fields({**DOCUMENT_DTYPES, **source.fields}, split.sequence_length)

    def get_spans(self, index: int) -> np.ndarray:
        """Return the spans that an example holds, in order, of shape (n, 2)."""
        raise NotImplementedError

    def _sample_indices(self) -> list[int]:
        return np.linspace(0, self.num_examples - 1, min(self.num_examples, 16)).astype(np.int64).tolist()

    @functools.cached_property
    def fingerprint(self) -> str:
        """Digest of the spans of a sample of examples. All spans of packed documents would need all document ends."""
        sample = [[*map(tuple, self.get_spans(index).tolist())] for index in self._sample_indices()]
        return hashlib.sha256(repr((type(self).__name__, self.num_examples, sample)).encode()).hexdigest()

    def read(self, indices: np.ndarray) -> Sequences:
        """Read the spans of the examples, and pad each sequence with 0 in every field."""
        return self._fill([self.get_spans(int(index)) for index in indices])

    def _fill(self, spans_of_examples: Sequence[np.ndarray]) -> Sequences:
        T, num_examples = self._split.sequence_length, len(spans_of_examples)
        sequences = {name: np.zeros((num_examples, *field.shape), field.dtype) for name, field in self.fields.items()}
        if not sum(map(len, spans_of_examples)):
            return sequences
        starts, lengths = np.concatenate(spans_of_examples).T
        stops = starts + lengths
        # A span reads one token more than it has inputs: the target of its last input.
        tokens = self._source.read_ranges(list(zip(starts.tolist(), (stops + 1).tolist(), strict=True)))
        # Padding is at the end of each sequence. Boolean indexing is row-major, so one assignment copies the
        # concatenated spans of all examples to their positions.
        is_real = sequences["padding_mask"]
        is_real[:] = np.arange(T) < np.array([spans[:, 1].sum() for spans in spans_of_examples])[:, None]
        sequences["x"][is_real] = np.concatenate([ids[:-1] for ids in tokens])
        sequences["y"][is_real] = np.concatenate([ids[1:] for ids in tokens])
        segments = np.concatenate([np.arange(1, len(spans) + 1) for spans in spans_of_examples])
        sequences["segment"][is_real] = np.repeat(segments, lengths)
        sequences["position"][is_real] = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        targets = list(zip((starts + 1).tolist(), (stops + 1).tolist(), strict=True))
        for name in self._source.fields:
            sequences[name][is_real] = np.concatenate(self._source.read_field_ranges(name, targets))
        return sequences


@dataclass(frozen=True)
class PackingPlan:
    """Assignment of spans to the examples of a block: example r holds `spans[bounds[r] : bounds[r + 1]]`."""

    spans: np.ndarray
    bounds: np.ndarray

    def __getitem__(self, example: int) -> np.ndarray:
        return self.spans[self.bounds[example] : self.bounds[example + 1]]

    @property
    def num_bytes(self) -> int:
        """Size of the plan in memory."""
        return int(self.spans.nbytes + self.bounds.nbytes)


class PackingPlanCache:
    """Least-recently-used cache of the plans of blocks. Thread-safe.

    A plan takes 16 bytes a document: 14 KB for a block with documents of 700 tokens. A plan is evicted when it was not
    used during the last `_PLAN_ROUNDS` requests for each cached plan, or when all plans exceed `PLANS_BYTES_MAX`. The
    blocks of this host's batch slots therefore stay cached.
    """

    def __init__(self, make_plan: Callable[[int], PackingPlan]):
        self._make_plan, self._lock = make_plan, threading.Lock()
        # Plans by block, each with the number of its last request; the least recently used one stands first.
        self._plans: OrderedDict[int, tuple[int, PackingPlan]] = OrderedDict()
        self._num_requests = self._num_bytes = 0

    def __getitem__(self, block: int) -> PackingPlan:
        with self._lock:
            _, cached = self._plans.get(block, (0, None))
        # Made outside the lock, because it may wait for a bucket. Two threads may then make the same plan.
        plan = cached or self._make_plan(block)
        with self._lock:
            self._num_requests += 1
            _, previous = self._plans.pop(block, (0, None))
            self._plans[block] = self._num_requests, plan
            self._num_bytes += plan.num_bytes - (previous.num_bytes if previous else 0)
            while True:
                last_request, oldest = next(iter(self._plans.values()))
                is_stale = self._num_requests - last_request > _PLAN_ROUNDS * len(self._plans)
                if not is_stale and (self._num_bytes <= PLANS_BYTES_MAX or len(self._plans) == 1):
                    return plan
                self._plans.popitem(last=False)
                self._num_bytes -= oldest.num_bytes

    def __len__(self) -> int:
        return len(self._plans)


class PackedDocuments(_DocumentExamples):
    """Several whole documents in an example, packed by best fit within one block of tokens.

    All blocks but the last have the same number of tokens and examples, so the index of an example determines its
    block, and the content of an example is found without packing the blocks before it. The tokens of a block take
    `_BLOCK_FILL_PERCENT` of the positions of its examples, so they always fit.
    """

    def __init__(self, source: Source, split: TokenSplit):
        super().__init__(source, split)
        T = split.sequence_length
        self._block_examples = max(BLOCK_EXAMPLES_MIN, BLOCK_POSITIONS // T)
        self._block_tokens = _count_packed_tokens(self._block_examples * T)
        self._num_whole_blocks, rest = divmod(split.num_tokens, self._block_tokens)
        # The last block is smaller: it takes the fewest examples that hold the rest of the tokens.
        self._rest_examples = next(
            count for count in range(self._block_examples + 1) if _count_packed_tokens(count * T) >= rest
        )
        self.num_examples = self._num_whole_blocks * self._block_examples + self._rest_examples
        self._plans = PackingPlanCache(self._make_plan)
        if not any(len(self.get_spans(index)) for index in self._sample_indices()):
            self.num_examples = 0  # every document has a single token, so all examples would be padding

    def read(self, indices: np.ndarray) -> Sequences:
        """Plan the blocks of the examples, concurrently if the source is in a bucket, and read the spans."""
        blocks, offsets = np.divmod(np.asarray(indices, np.int64), self._block_examples)
        wanted = np.unique(blocks).tolist()
        calls = [functools.partial(self._plans.__getitem__, block) for block in wanted]
        is_remote = self._source.bytes_fetched_per_token
        plans = dict(zip(wanted, run_in_parallel(calls) if is_remote else [call() for call in calls], strict=True))
        return self._fill(
            [plans[block][offset] for block, offset in zip(blocks.tolist(), offsets.tolist(), strict=True)]
        )

    def get_spans(self, index: int) -> np.ndarray:
        """Return the spans that the plan of the block assigns to an example."""
        block, offset = divmod(index, self._block_examples)
        return self._plans[block][offset]

    def _make_plan(self, block: int) -> PackingPlan:
        end = self._split.start + self._split.num_tokens
        start = self._split.start + block * self._block_tokens
        stop = min(start + self._block_tokens, end)
        ends = self._source.document_ends(start, stop)
        # If a document continues in the next block, the last token of this block is an input here, and its target is
        # the first token of the next block.
        is_cut = stop < end and stop not in ends
        num_examples = self._block_examples if block < self._num_whole_blocks else self._rest_examples
        return pack_spans(find_spans(start, stop + is_cut, ends), num_examples, self._split.sequence_length)

    def make_order(self, seed: int, batch_examples: Fraction) -> LocalShuffle:
        """Return an order with locality: a host packs each block once in an epoch, not once for each example."""
        return LocalShuffle(self.num_examples, self._block_examples, batch_examples, seed)


class PaddedDocuments(_DocumentExamples):
    """One document, or a part of a long one, in an example. The ends of all documents are read at the start."""

    def __init__(self, source: Source, split: TokenSplit):
        super().__init__(source, split)
        T, stop = split.sequence_length, split.start + split.num_tokens
        self._spans = find_spans(split.start, stop, source.document_ends(split.start, stop))
        # Number of examples up to and including each document, which takes ceil(length / T) examples.
        self._example_ends = np.cumsum(-(-self._spans[:, 1] // T))
        self.num_examples = int(self._example_ends[-1]) if len(self._example_ends) else 0

    def get_spans(self, index: int) -> np.ndarray:
        """Return the span of one document, or of a part of a long one."""
        T = self._split.sequence_length
        document = int(np.searchsorted(self._example_ends, index, side="right"))
        offset = (index - int(self._example_ends[document - 1] if document else 0)) * T
        start, length = self._spans[document].tolist()
        return np.array([[start + offset, min(length - offset, T)]])

    def make_order(self, seed: int, batch_examples: Fraction) -> Sequence[int]:
        """Return a shuffle of all examples, the same for every batch size."""
        return ShuffledOrder(self.num_examples, seed)


PACKINGS: Mapping[str, Callable[[Source, TokenSplit], Examples]] = {
    "concatenate": TokenWindows,
    "documents": PackedDocuments,
    "pad": PaddedDocuments,
}


def _count_packed_tokens(num_positions: int) -> int:
    return int(num_positions * _BLOCK_FILL_PERCENT / 100)


def find_spans(start: int, stop: int, ends: np.ndarray) -> np.ndarray:
    """Return the documents in positions `start .. stop` as spans of shape (n, 2), without empty spans.

    `ends` are the exclusive ends of documents. A part of a document at `start` or `stop` counts as a document.
    """
    edges = np.unique(np.concatenate([[start], ends[(ends > start) & (ends < stop)], [stop]]))
    # The last token of a document has no target within the document, so a document of n tokens has n - 1 inputs.
    lengths = np.diff(edges) - 1
    return np.stack([edges[:-1], lengths], axis=1)[lengths > 0]


def pack_spans(spans: np.ndarray, num_examples: int, capacity: int) -> PackingPlan:
    """Pack spans into examples of `capacity` positions, best fit decreasing.

    Spans longer than an example fill whole examples first, and their remainders are packed like the other spans. The
    longest span goes first, into the example where it leaves the least space. Spans that fit nowhere are split over the
    examples with the most space. All spans together must not exceed the capacity of all examples.
    """
    # Row (example, first input, number of inputs) for each example that a part of a long span fills.
    num_whole = spans[:, 1] // capacity
    num_filled = int(num_whole.sum())
    parts = np.arange(num_filled) - np.repeat(np.cumsum(num_whole) - num_whole, num_whole)
    starts = np.repeat(spans[:, 0], num_whole) + parts * capacity
    whole = np.stack([np.arange(num_filled), starts, np.full(num_filled, capacity)], axis=1)
    remainders = spans + num_whole[:, None] * [capacity, -capacity]
    remainders = remainders[remainders[:, 1] > 0]
    # Ties are broken by position, so that the result depends only on the documents.
    remainders = remainders[np.lexsort((remainders[:, 0], -remainders[:, 1]))]
    packed = np.concatenate([whole, _best_fit(remainders, range(num_filled, num_examples), capacity)])
    # Within an example the spans keep the order of the corpus.
    packed = packed[np.lexsort((packed[:, 1], packed[:, 0]))]
    bounds = np.searchsorted(packed[:, 0], np.arange(num_examples + 1)).astype(np.int32)
    return PackingPlan(packed[:, 1:].copy(), bounds)


def _best_fit(spans: np.ndarray, examples: range, capacity: int) -> np.ndarray:
    """Return placements (example, first input, number of inputs) of spans, longest first, in empty examples: (n, 3)."""
    by_space: dict[int, list[int]] = {capacity: list(examples)}  # heap of the examples with so many free positions
    # Bit s is set while some example has exactly s free positions. The lowest set bit at or above the length of a span
    # is then the best fit.
    available = 1 << capacity if examples else 0
    chosen: list[int] = []
    misfits: list[int] = []
    for index, length in enumerate(spans[:, 1].tolist()):
        fitting = available >> length
        if not fitting:
            misfits.append(index)
            continue
        space = length + (fitting & -fitting).bit_length() - 1
        example = heapq.heappop(by_space[space])
        if not by_space[space]:
            available ^= 1 << space
        if space > length:
            heapq.heappush(by_space.setdefault(space - length, []), example)
            available |= 1 << space - length
        chosen.append(example)

    # Each misfit is split so that its parts fill the examples with the most free positions.
    emptiest = [(-space, example) for space, examples_left in by_space.items() for example in examples_left]
    heapq.heapify(emptiest)
    parts = []
    for start, length in spans[misfits].tolist():
        while length:
            negative_space, example = heapq.heappop(emptiest)  # heapq has no max-heap, so the space is negated
            taken = min(length, -negative_space)
            parts.append((example, start, taken))
            start, length = start + taken, length - taken
            if taken < -negative_space:
                heapq.heappush(emptiest, (negative_space + taken, example))
    fit = np.delete(spans, misfits, axis=0)
    placed = np.column_stack([np.array(chosen, np.int64), fit])
    return np.concatenate([placed, np.array(parts, np.int64).reshape(-1, 3)])
