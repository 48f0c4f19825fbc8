"""How a stretch of tokens is cut into examples. Reads token ids and where documents end; knows no order and no step.

An example holds T positions, each with an input token, and the token after it as its target.

- `Windows`    runs of T + 1 tokens, whatever documents they cut: neighbours share one token, a target of the first and
               an input of the second
- `Packed`     whole documents side by side: what a position may see ends where its document begins
- `Padded`     one document in an example, the rest of it padding

Every position that has a target in its own document stands in exactly one example. A document that is longer than T is
cut, and each part of it begins anew. A document's last token is the target of the one before, and no input.
"""

import functools
import hashlib
import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from runner.data.protocol import Source
from runner.data.remote.reader import in_parallel
from runner.data.window import Split, make_order

Rows = dict[str, np.ndarray]
Fields = Mapping[str, type[np.generic]]

TOKEN_FIELDS: Fields = {"x": np.int32, "y": np.int32, "padding_mask": np.bool_}
DOCUMENT_FIELDS: Fields = {**TOKEN_FIELDS, "segment": np.int32, "position": np.int32}
BLOCK_POSITIONS = 1 << 19  # of the examples that are packed together
BLOCK_EXAMPLES_MIN = 64
BLOCK_FILL_PERCENT = 99.5  # tokens of a block over its positions: the rest lets nearly all documents stay whole
GROUP_BLOCKS = 64  # whose examples are shuffled together
PLANS_KEPT = 2 * GROUP_BLOCKS


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
        """Another one where the same tokens are cut in another way; empty for `Windows`."""

    def read(self, numbers: np.ndarray) -> Rows:
        """The examples of these numbers, each field (number of them, T)."""

    def make_order(self, seed: int) -> Sequence[int]:
        """The endless order of training: all numbers once in each epoch, any element of it in O(1)."""


class Windows:
    """Runs of T + 1 tokens: neither the documents nor what they say of each other is looked at."""

    fingerprint = ""

    def __init__(self, source: Source, split: Split):
        self._source, self._split = source, split
        self.fields: Fields = {**TOKEN_FIELDS, **source.fields}
        self.num_examples = split.num_windows

    def read(self, numbers: np.ndarray) -> Rows:
        """See `Examples`."""
        T = self._split.sequence_length
        starts = self._split.start + np.asarray(numbers, np.int64) * T
        tokens = self._source.read_many(starts, T + 1).astype(np.int32, copy=False)
        rows = {"x": tokens[:, :-1], "y": tokens[:, 1:], "padding_mask": np.ones((len(starts), T), np.bool_)}
        for name, dtype in self._source.fields.items():
            rows[name] = np.zeros((len(starts), T), dtype)
            for row, start in enumerate(starts.tolist()):
                rows[name][row] = self._source.read_field(name, start + 1, start + 1 + T)
        return rows

    def make_order(self, seed: int) -> Sequence[int]:
        """See `Examples`."""
        return make_order(self.num_examples, seed=seed)


@dataclass(frozen=True)
class Piece:
    """`length` inputs from position `start` of the source on, and the target of each: the token after it."""

    start: int
    length: int

    @property
    def stop(self) -> int:
        """The position of the last target."""
        return self.start + self.length


class _Documents:
    """What `Packed` and `Padded` share: examples made of pieces of documents."""

    num_examples: int

    def __init__(self, source: Source, split: Split):
        self._source, self._split = source, split
        self.fields: Fields = {**DOCUMENT_FIELDS, **source.fields}

    def pieces(self, number: int) -> list[Piece]:
        """What an example holds, in order."""
        raise NotImplementedError

    def _sample(self) -> list[int]:
        """Some of the examples, from the first to the last."""
        return np.linspace(0, self.num_examples - 1, min(self.num_examples, 16)).astype(np.int64).tolist()

    @functools.cached_property
    def fingerprint(self) -> str:
        """Of what some of the examples hold, from the first to the last: see `Examples`."""
        held = [[(piece.start, piece.length) for piece in self.pieces(number)] for number in self._sample()]
        return hashlib.sha256(repr((type(self).__name__, self.num_examples, held)).encode()).hexdigest()

    def read(self, numbers: np.ndarray) -> Rows:
        """See `Examples`. Padding is 0 in every field."""
        shape = len(numbers), self._split.sequence_length
        rows = {name: np.zeros(shape, dtype) for name, dtype in self.fields.items()}
        held = [self.pieces(int(number)) for number in numbers]
        found = iter(self._source.read_ranges([(piece.start, piece.stop + 1) for pieces in held for piece in pieces]))
        for row, pieces in enumerate(held):
            begin = 0
            for segment, piece in enumerate(pieces, start=1):
                here = {name: field[row, begin : begin + piece.length] for name, field in rows.items()}
                tokens = next(found)
                here["x"][:], here["y"][:], here["padding_mask"][:] = tokens[:-1], tokens[1:], True
                here["segment"][:], here["position"][:] = segment, np.arange(piece.length)
                for name in self._source.fields:
                    here[name][:] = self._source.read_field(name, piece.start + 1, piece.stop + 1)
                begin += piece.length
        return rows


class Packed(_Documents):
    """Several whole documents in an example, by best fit among the documents of one block of tokens.

    A block is nearly as many tokens as its examples have positions, so all of it fits, and what an example holds
    depends on its number alone. How much is padding is known beforehand: that little, and a position for each document.
    """

    def __init__(self, source: Source, split: Split):
        super().__init__(source, split)
        T = split.sequence_length
        self._block_examples = max(BLOCK_EXAMPLES_MIN, BLOCK_POSITIONS // T)
        self._block_tokens = _filled(self._block_examples * T)
        self._num_whole_blocks, rest = divmod(split.num_tokens, self._block_tokens)
        self._rest_examples = next(count for count in range(self._block_examples + 1) if _filled(count * T) >= rest)
        self.num_examples = self._num_whole_blocks * self._block_examples + self._rest_examples
        self._plan: Callable[[int], list[list[Piece]]] = functools.lru_cache(maxsize=PLANS_KEPT)(self._make_plan)
        if not any(map(self.pieces, self._sample())):
            self.num_examples = 0  # documents of one token alone: all would be padding

    def read(self, numbers: np.ndarray) -> Rows:
        """See `Examples`. Of a bucket all blocks are asked for at a time where their documents end."""
        if self._source.bytes_fetched_per_token:
            blocks = np.unique(np.asarray(numbers, np.int64) // self._block_examples)
            in_parallel([functools.partial(self._plan, int(block)) for block in blocks])
        return super().read(numbers)

    def pieces(self, number: int) -> list[Piece]:
        """See `_Documents`."""
        block, place = divmod(number, self._block_examples)
        return self._plan(block)[place]

    def _make_plan(self, block: int) -> list[list[Piece]]:
        end = self._split.start + self._split.num_tokens
        start = self._split.start + block * self._block_tokens
        stop = min(start + self._block_tokens, end)
        ends = self._source.document_ends(start, stop)
        # The last input of a document that goes on in the next block has its target there, and is an input here.
        is_cut = stop < end and stop not in ends
        num_examples = self._block_examples if block < self._num_whole_blocks else self._rest_examples
        return pack(runs_between(start, stop + is_cut, ends), num_examples, self._split.sequence_length)

    def make_order(self, seed: int) -> Sequence[int]:
        """See `Examples`. Blocks are shuffled, and then the examples of `GROUP_BLOCKS` of them at a time.

        So a host packs each block once in an epoch, and not once for each example.
        """
        return GroupedOrder(self.num_examples, self._block_examples, seed)


class GroupedOrder(Sequence[int]):
    """Endless, all numbers once in each epoch: whole blocks in any order, and shuffled within groups of blocks."""

    def __init__(self, num_examples: int, block_examples: int, seed: int):
        self._num_examples, self._block_examples = num_examples, block_examples
        num_blocks = num_examples // block_examples
        self._num_shuffled = num_blocks * block_examples  # a last block that is not whole stays last
        blocks = make_order(max(num_blocks, 1), seed=seed)
        self._block = functools.lru_cache(maxsize=PLANS_KEPT)(lambda epoch, place: blocks[epoch * num_blocks + place])
        self._within = functools.lru_cache(maxsize=4)(functools.partial(permutation, seed))

    def __len__(self) -> int:
        return self._num_examples

    def __getitem__(self, index: int) -> int:  # type: ignore[override]
        epoch, place = divmod(index, self._num_examples)
        group_examples = GROUP_BLOCKS * self._block_examples
        group, place = divmod(place, group_examples)
        first = group * group_examples
        place = first + int(self._within(epoch, group, min(group_examples, self._num_examples - first))[place])
        if place >= self._num_shuffled:
            return place
        block, within = divmod(place, self._block_examples)
        return self._block(epoch, block) * self._block_examples + within


def permutation(seed: int, epoch: int, group: int, size: int) -> np.ndarray:
    """The numbers below `size` in an order of their own for each seed, epoch and group, in every version of numpy."""
    key = hashlib.sha256(f"{seed} {epoch} {group}".encode()).digest()
    return np.argsort(np.random.Philox(key=np.frombuffer(key[:16], "<u8")).random_raw(size), kind="stable")


class Padded(_Documents):
    """One document, or a part of a longer one, in an example. The ends of all documents are read at the start."""

    def __init__(self, source: Source, split: Split):
        super().__init__(source, split)
        T, stop = split.sequence_length, split.start + split.num_tokens
        self._runs = runs_between(split.start, stop, source.document_ends(split.start, stop))
        self._ends = np.cumsum(-(-self._runs[:, 1] // T))  # of the examples of each run
        self.num_examples = int(self._ends[-1]) if len(self._ends) else 0

    def pieces(self, number: int) -> list[Piece]:
        """See `_Documents`."""
        run = int(np.searchsorted(self._ends, number, side="right"))
        done = (number - int(self._ends[run - 1] if run else 0)) * self._split.sequence_length
        start, length = self._runs[run].tolist()
        return [Piece(start + done, min(length - done, self._split.sequence_length))]

    def make_order(self, seed: int) -> Sequence[int]:
        """See `Examples`."""
        return make_order(self.num_examples, seed=seed)


PACKINGS: Mapping[str, Callable[[Source, Split], Examples]] = {
    "concatenate": Windows,
    "documents": Packed,
    "pad": Padded,
}


def _filled(num_positions: int) -> int:
    return int(num_positions * BLOCK_FILL_PERCENT / 100)


def runs_between(start: int, stop: int, ends: np.ndarray) -> np.ndarray:
    """The documents of positions `start .. stop` as (first input, number of inputs), (n, 2); none has no input.

    `ends` are the positions at which documents end. What `start` and `stop` cut is a document here.
    """
    edges = np.unique(np.concatenate([[start], ends[(ends > start) & (ends < stop)], [stop]]))
    lengths = np.diff(edges) - 1
    return np.stack([edges[:-1], lengths], axis=1)[lengths > 0]


def pack(runs: np.ndarray, num_rows: int, capacity: int) -> list[list[Piece]]:
    """Put runs (first input, number of inputs) into rows of `capacity` inputs: what each row holds, in order.

    Runs that are longer than a row are cut into rows, and what is left of them goes on. The longest goes first, into
    the row where it leaves the least space; what fits nowhere is cut into the rows with the most space. The runs must
    not hold more than all rows.
    """
    rows: list[list[Piece]] = []
    rests: list[Piece] = []
    for start, length in runs.tolist():
        whole = length // capacity
        rows += [[Piece(start + row * capacity, capacity)] for row in range(whole)]
        if length % capacity:
            rests.append(Piece(start + whole * capacity, length % capacity))
    rests.sort(key=lambda piece: (-piece.length, piece.start))
    first = len(rows)
    rows += [[] for _ in range(num_rows - first)]
    spaces = [(capacity, row) for row in range(first, num_rows)]
    misfits: list[Piece] = []
    for piece in rests:
        place = bisect_left(spaces, (piece.length, -1))
        if place == len(spaces):
            misfits.append(piece)
            continue
        space, row = spaces.pop(place)
        rows[row].append(piece)
        if space > piece.length:
            insort(spaces, (space - piece.length, row))
    _cut_into(rows, spaces, misfits)
    for held in rows:
        held.sort(key=lambda piece: piece.start)
    return rows


def _cut_into(rows: list[list[Piece]], spaces: list[tuple[int, int]], misfits: list[Piece]) -> None:
    """Cut each piece so that it fills what is left in the rows with the most space."""
    widest = [(-space, row) for space, row in spaces]
    heapq.heapify(widest)
    for piece in misfits:
        start, length = piece.start, piece.length
        while length:
            space, row = heapq.heappop(widest)
            taken = min(length, -space)
            rows[row].append(Piece(start, taken))
            start, length = start + taken, length - taken
            if taken < -space:
                heapq.heappush(widest, (space + taken, row))
