"""How a stretch of tokens is cut into examples. Reads token ids and where documents end; knows no order and no step.

An example holds T positions, each with an input token, and the token after it as its target.

- `TokenWindows`    runs of T + 1 tokens, whatever documents they cut: neighbours share one token, a target of the
first and
               an input of the second
- `PackedDocuments`     whole documents side by side: what a position may see ends where its document begins
- `PaddedDocuments`     one document in an example, the rest of it padding

Every position that has a target in its own document stands in exactly one example. A document that is longer than T is
cut, and each part of it begins anew. A document's last token is the target of the one before, and no input.
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

from runner.data.remote import run_in_parallel
from runner.data.sampling import TokenSplit, make_order
from runner.data.source import Source

Sequences = dict[str, np.ndarray]
Fields = Mapping[str, type[np.generic]]

TOKEN_FIELDS: Fields = {"x": np.int32, "y": np.int32, "padding_mask": np.bool_}
DOCUMENT_FIELDS: Fields = {**TOKEN_FIELDS, "segment": np.int32, "position": np.int32}
BLOCK_POSITIONS = 1 << 19  # of the examples that are packed together
BLOCK_EXAMPLES_MIN = 64
BLOCK_FILL_PERCENT = 99.5  # tokens of a block over its positions: the rest lets nearly all documents stay whole
GROUP_BLOCKS = 64  # at least so many give to each stretch of examples
PLAN_ROUNDS = 16  # of asking for all plans that are kept; a row that takes of several blocks skips one for as long
PLANS_BYTES_MAX = 1 << 30


class Examples(Protocol):
    """The examples of one stretch of tokens. Immutable, and safe to read from several threads."""

    @property
    def fields(self) -> Fields:
        """The arrays of an example by name, with their dtypes."""

    @property
    def num_examples(self) -> int:
        """In one epoch."""

    @property
    def fingerprint(self) -> str:
        """Another one where the same tokens are cut in another way; empty for `TokenWindows`."""

    def read(self, numbers: np.ndarray) -> Sequences:
        """The examples of these numbers, each field (number of them, T)."""

    def make_order(self, seed: int, batch_examples: Fraction) -> Sequence[int]:
        """The endless order of training: all numbers once in each epoch, any element of it in O(1).

        `batch_examples` of them are in a step, on average.
        """


class TokenWindows:
    """Runs of T + 1 tokens: neither the documents nor what they say of each other is looked at."""

    fingerprint = ""

    def __init__(self, source: Source, split: TokenSplit):
        self._source, self._split = source, split
        self.fields: Fields = {**TOKEN_FIELDS, **source.fields}
        self.num_examples = split.num_windows

    def read(self, numbers: np.ndarray) -> Sequences:
        """See `Examples`."""
        T = self._split.sequence_length
        starts = self._split.start + np.asarray(numbers, np.int64) * T
        tokens = self._source.read_many(starts, T + 1).astype(np.int32, copy=False)
        rows = {"x": tokens[:, :-1], "y": tokens[:, 1:], "padding_mask": np.ones((len(starts), T), np.bool_)}
        for name, dtype in self._source.fields.items():
            rows[name] = np.zeros((len(starts), T), dtype)
            targets = [(start + 1, start + 1 + T) for start in starts.tolist()]
            for row, found in enumerate(self._source.read_field_ranges(name, targets)):
                rows[name][row] = found
        return rows

    def make_order(self, seed: int, batch_examples: Fraction) -> Sequence[int]:
        """See `Examples`."""
        return make_order(self.num_examples, seed=seed)


class _Documents:
    """What `PackedDocuments` and `PaddedDocuments` share: examples made of pieces of documents.

    A piece is its first input and its number of inputs; the target of each input is the token after it.
    """

    num_examples: int

    def __init__(self, source: Source, split: TokenSplit):
        self._source, self._split = source, split
        self.fields: Fields = {**DOCUMENT_FIELDS, **source.fields}

    def pieces(self, number: int) -> np.ndarray:
        """The pieces that an example holds, in order: (n, 2)."""
        raise NotImplementedError

    def _sample(self) -> list[int]:
        """Some of the examples, from the first to the last."""
        return np.linspace(0, self.num_examples - 1, min(self.num_examples, 16)).astype(np.int64).tolist()

    @functools.cached_property
    def fingerprint(self) -> str:
        """Of what some of the examples hold, from the first to the last: see `Examples`."""
        held = [[*map(tuple, self.pieces(number).tolist())] for number in self._sample()]
        return hashlib.sha256(repr((type(self).__name__, self.num_examples, held)).encode()).hexdigest()

    def read(self, numbers: np.ndarray) -> Sequences:
        """See `Examples`. Padding is 0 in every field."""
        return self._fill([self.pieces(int(number)) for number in numbers])

    def _fill(self, held: Sequence[np.ndarray]) -> Sequences:
        """Rows of the pieces that each holds."""
        T = self._split.sequence_length
        rows = {name: np.zeros((len(held), T), dtype) for name, dtype in self.fields.items()}
        if not sum(map(len, held)):
            return rows
        starts, lengths = np.concatenate(held).T
        stops = starts + lengths
        tokens = self._source.read_ranges(list(zip(starts.tolist(), (stops + 1).tolist(), strict=True)))
        # A row is filled from its start on: what is real of it takes the inputs of its pieces one after the other.
        is_real = rows["padding_mask"]
        is_real[:] = np.arange(T) < np.array([pieces[:, 1].sum() for pieces in held])[:, None]
        rows["x"][is_real] = np.concatenate([ids[:-1] for ids in tokens])
        rows["y"][is_real] = np.concatenate([ids[1:] for ids in tokens])
        segments = np.concatenate([np.arange(1, len(pieces) + 1) for pieces in held])
        rows["segment"][is_real] = np.repeat(segments, lengths)
        rows["position"][is_real] = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        targets = list(zip((starts + 1).tolist(), (stops + 1).tolist(), strict=True))
        for name in self._source.fields:
            rows[name][is_real] = np.concatenate(self._source.read_field_ranges(name, targets))
        return rows


@dataclass(frozen=True)
class PackingPlan:
    """What the rows of a block hold: row r the pieces `bounds[r] .. bounds[r + 1]` of `pieces`, (n, 2)."""

    pieces: np.ndarray
    bounds: np.ndarray

    def __getitem__(self, row: int) -> np.ndarray:
        return self.pieces[self.bounds[row] : self.bounds[row + 1]]

    @property
    def num_bytes(self) -> int:
        return int(self.pieces.nbytes + self.bounds.nbytes)


class PackingPlanCache:
    """The plans of blocks in use: 16 bytes a document, 14 KB where documents have 700 tokens.

    A plan goes when all that are kept could have been asked for `PLAN_ROUNDS` times since it was: what stays are the
    blocks of the rows of this host, and no more than `PLANS_BYTES_MAX`. Safe to use from several threads.
    """

    def __init__(self, make: Callable[[int], PackingPlan]):
        self._make, self._changing = make, threading.Lock()
        self._kept: OrderedDict[int, tuple[int, PackingPlan]] = (
            OrderedDict()
        )  # by block, with when it was asked for last
        self._num_asked = self._num_bytes = 0

    def __getitem__(self, block: int) -> PackingPlan:
        with self._changing:
            _, plan = self._kept.get(block, (0, None))
        made = plan or self._make(block)
        with self._changing:
            self._num_asked += 1
            _, before = self._kept.pop(block, (0, None))
            self._kept[block] = self._num_asked, made
            self._num_bytes += made.num_bytes - (before.num_bytes if before else 0)
            while self._is_oldest_to_go():
                self._num_bytes -= self._kept.popitem(last=False)[1][1].num_bytes
        return made

    def __len__(self) -> int:
        return len(self._kept)

    def _is_oldest_to_go(self) -> bool:
        asked, _ = next(iter(self._kept.values()))
        is_stale = self._num_asked - asked > PLAN_ROUNDS * len(self._kept)
        return is_stale or (self._num_bytes > PLANS_BYTES_MAX and len(self._kept) > 1)


class PackedDocuments(_Documents):
    """Several whole documents in an example, by best fit among the documents of one block of tokens.

    A block is nearly as many tokens as its examples have positions, so all of it fits, and what an example holds
    depends on its number alone. How much is padding is known beforehand: that little, and a position for each document.
    """

    def __init__(self, source: Source, split: TokenSplit):
        super().__init__(source, split)
        T = split.sequence_length
        self._block_examples = max(BLOCK_EXAMPLES_MIN, BLOCK_POSITIONS // T)
        self._block_tokens = _filled(self._block_examples * T)
        self._num_whole_blocks, rest = divmod(split.num_tokens, self._block_tokens)
        self._rest_examples = next(count for count in range(self._block_examples + 1) if _filled(count * T) >= rest)
        self.num_examples = self._num_whole_blocks * self._block_examples + self._rest_examples
        self._plans = PackingPlanCache(self._make_plan)
        if not any(len(self.pieces(number)) for number in self._sample()):
            self.num_examples = 0  # documents of one token alone: all would be padding

    def read(self, numbers: np.ndarray) -> Sequences:
        """See `Examples`. Of a bucket all blocks are asked for at a time where their documents end."""
        blocks, places = np.divmod(np.asarray(numbers, np.int64), self._block_examples)
        wanted = np.unique(blocks).tolist()
        acts = [functools.partial(self._plans.__getitem__, block) for block in wanted]
        is_waiting = self._source.bytes_fetched_per_token
        plans = dict(zip(wanted, run_in_parallel(acts) if is_waiting else [act() for act in acts], strict=True))
        return self._fill([plans[block][place] for block, place in zip(blocks.tolist(), places.tolist(), strict=True)])

    def pieces(self, number: int) -> np.ndarray:
        """See `_Documents`."""
        block, place = divmod(number, self._block_examples)
        return self._plans[block][place]

    def _make_plan(self, block: int) -> PackingPlan:
        end = self._split.start + self._split.num_tokens
        start = self._split.start + block * self._block_tokens
        stop = min(start + self._block_tokens, end)
        ends = self._source.document_ends(start, stop)
        # The last input of a document that goes on in the next block has its target there, and is an input here.
        is_cut = stop < end and stop not in ends
        num_examples = self._block_examples if block < self._num_whole_blocks else self._rest_examples
        return pack_spans(find_spans(start, stop + is_cut, ends), num_examples, self._split.sequence_length)

    def make_order(self, seed: int, batch_examples: Fraction) -> "LocalShuffle":
        """See `Examples`, and `LocalShuffle`: a host packs a block once in an epoch, and not once for each example."""
        return LocalShuffle(self.num_examples, self._block_examples, batch_examples, seed)


class LocalShuffle(Sequence[int]):
    """Endless, all numbers once in each epoch, and near each other where a step has them in the same row.

    Blocks are shuffled, and put into groups: as many to each row of a step as make `GROUP_BLOCKS` at least. A group is
    given to the rows from the first to the last: row 0 of all its steps has the first examples, and so on. So a host
    reads the blocks of its own rows, and no others, however many hosts there are. The examples of a row's blocks are
    shuffled. What is left of an epoch is a smaller group, and a last block that is not whole is at its end.

    A step has `batch_examples` of these, which is no whole number where other sources give to it too: then example p is
    that much in row p modulo `batch_examples`.
    """

    def __init__(self, num_examples: int, block_examples: int, batch_examples: Fraction, seed: int):
        self.batch_examples = batch_examples
        self._num_examples, self._block_examples, self._seed = num_examples, block_examples, seed
        self._num_blocks = num_examples // block_examples
        num_rows = max(1, round(batch_examples))
        row_blocks = -(-GROUP_BLOCKS // num_rows)
        self._row_examples = row_blocks * block_examples
        self._group_examples = num_rows * self._row_examples
        blocks = make_order(max(self._num_blocks, 1), seed=seed)
        self._block = functools.lru_cache(maxsize=num_rows * row_blocks)(
            lambda epoch, place: blocks[epoch * self._num_blocks + place]
        )
        # All of them together take 8 bytes for each example of a group.
        self._shuffled = functools.lru_cache(maxsize=num_rows)(functools.partial(make_permutation, seed))

    def __len__(self) -> int:
        return self._num_examples

    def __getitem__(self, index: int) -> int:  # type: ignore[override]
        epoch, place = divmod(index, self._num_examples)
        group, place = divmod(place, self._group_examples)
        first = group * self._group_examples
        size = min(self._group_examples, self._num_examples - first)
        row, place = divmod(self._rank(index - place, size, place), self._row_examples)
        begin = row * self._row_examples
        place = int(self._shuffled(epoch, group, row, min(self._row_examples, size - begin))[place])
        block, within = divmod(first + begin + place, self._block_examples)
        if block < self._num_blocks:
            block = self._block(epoch, block)
        return block * self._block_examples + within

    def _rank(self, first: int, size: int, place: int) -> int:
        """How many of the examples `first .. first + size` are in a row before that of `first + place`.

        Those of its own row count where they come before it.
        """
        rows, scale = self.batch_examples.as_integer_ratio()  # in units of 1 / scale
        begin, row = first * scale % rows, (first + place) * scale % rows
        # x mod n < r where floor(x / n) and floor((x - r) / n) differ.
        before = floor_sum(size, rows, scale, begin) - floor_sum(size, rows, scale, begin - row + rows) + size
        return before + place // rows


def floor_sum(count: int, divisor: int, factor: int, offset: int) -> int:
    """The sum of `(factor * i + offset) // divisor` over `i < count`, in O(log divisor); none is negative."""
    total = 0
    while count:
        total += count * (count - 1) // 2 * (factor // divisor) + count * (offset // divisor)
        factor, offset = factor % divisor, offset % divisor
        # What is left counts the points below a line; with the axes exchanged there are fewer columns.
        count, offset = divmod(factor * count + offset, divisor)
        factor, divisor = divisor, factor
    return total


def make_permutation(seed: int, epoch: int, group: int, row: int, size: int) -> np.ndarray:
    """The numbers below `size` in an order of their own for each row of each group, in every version of numpy."""
    key = hashlib.sha256(f"{seed} {epoch} {group} {row}".encode()).digest()
    return np.argsort(np.random.Philox(key=np.frombuffer(key[:16], "<u8")).random_raw(size), kind="stable")


class PaddedDocuments(_Documents):
    """One document, or a part of a longer one, in an example. The ends of all documents are read at the start."""

    def __init__(self, source: Source, split: TokenSplit):
        super().__init__(source, split)
        T, stop = split.sequence_length, split.start + split.num_tokens
        self._runs = find_spans(split.start, stop, source.document_ends(split.start, stop))
        self._ends = np.cumsum(-(-self._runs[:, 1] // T))  # of the examples of each run
        self.num_examples = int(self._ends[-1]) if len(self._ends) else 0

    def pieces(self, number: int) -> np.ndarray:
        """See `_Documents`."""
        run = int(np.searchsorted(self._ends, number, side="right"))
        done = (number - int(self._ends[run - 1] if run else 0)) * self._split.sequence_length
        start, length = self._runs[run].tolist()
        return np.array([[start + done, min(length - done, self._split.sequence_length)]])

    def make_order(self, seed: int, batch_examples: Fraction) -> Sequence[int]:
        """See `Examples`."""
        return make_order(self.num_examples, seed=seed)


PACKINGS: Mapping[str, Callable[[Source, TokenSplit], Examples]] = {
    "concatenate": TokenWindows,
    "documents": PackedDocuments,
    "pad": PaddedDocuments,
}


def _filled(num_positions: int) -> int:
    return int(num_positions * BLOCK_FILL_PERCENT / 100)


def find_spans(start: int, stop: int, ends: np.ndarray) -> np.ndarray:
    """The documents of positions `start .. stop` as (first input, number of inputs), (n, 2); none has no input.

    `ends` are the positions at which documents end. What `start` and `stop` cut is a document here.
    """
    edges = np.unique(np.concatenate([[start], ends[(ends > start) & (ends < stop)], [stop]]))
    lengths = np.diff(edges) - 1
    return np.stack([edges[:-1], lengths], axis=1)[lengths > 0]


def pack_spans(runs: np.ndarray, num_rows: int, capacity: int) -> PackingPlan:
    """Put runs (first input, number of inputs) into rows of `capacity` inputs: what each row holds, in order.

    Runs that are longer than a row are cut into rows, and what is left of them goes on. The longest goes first, into
    the row where it leaves the least space; what fits nowhere is cut into the rows with the most space. The runs must
    not hold more than all rows.
    """
    num_whole = runs[:, 1] // capacity
    first = int(num_whole.sum())
    places = np.arange(first) - np.repeat(np.cumsum(num_whole) - num_whole, num_whole)
    starts = np.repeat(runs[:, 0], num_whole) + places * capacity
    whole = np.stack([np.arange(first), starts, np.full(first, capacity)], axis=1)
    rests = runs + num_whole[:, None] * [capacity, -capacity]
    rests = rests[rests[:, 1] > 0]
    rests = rests[np.lexsort((rests[:, 0], -rests[:, 1]))]
    held = np.concatenate([whole, _best_fit(rests, range(first, num_rows), capacity)])
    held = held[np.lexsort((held[:, 1], held[:, 0]))]
    return PackingPlan(held[:, 1:].copy(), np.searchsorted(held[:, 0], np.arange(num_rows + 1)).astype(np.int32))


def _best_fit(runs: np.ndarray, rows: range, capacity: int) -> np.ndarray:
    """Put runs, the longest first, into empty rows: (row, first input, number of inputs), in any order, (n, 3)."""
    spaces: dict[int, list[int]] = {capacity: list(rows)}  # the rows of each space, the lowest first: a heap
    is_there = 1 << capacity if rows else 0  # bit s: some row has the space s
    taken: list[int] = []
    misfits: list[int] = []
    for index, length in enumerate(runs[:, 1].tolist()):
        fitting = is_there >> length
        if not fitting:
            misfits.append(index)
            continue
        space = length + (fitting & -fitting).bit_length() - 1
        row = heapq.heappop(spaces[space])
        if not spaces[space]:
            is_there ^= 1 << space
        if space > length:
            heapq.heappush(spaces.setdefault(space - length, []), row)
            is_there |= 1 << space - length
        taken.append(row)
    fit = np.delete(runs, misfits, axis=0)
    cut = _cut_into([(-space, row) for space, held in spaces.items() for row in held], runs[misfits].tolist())
    return np.concatenate([np.column_stack([np.array(taken, np.int64), fit]), np.array(cut, np.int64).reshape(-1, 3)])


def _cut_into(widest: list[tuple[int, int]], runs: Sequence[Sequence[int]]) -> list[tuple[int, int, int]]:
    """Cut each run so that it fills what is left in the rows with the most space: (row, first input, their number).

    `widest` holds (minus the space, row).
    """
    heapq.heapify(widest)
    cut = []
    for start, length in runs:
        while length:
            space, row = heapq.heappop(widest)
            taken = min(length, -space)
            cut.append((row, start, taken))
            start, length = start + taken, length - taken
            if taken < -space:
                heapq.heappush(widest, (space + taken, row))
    return cut
