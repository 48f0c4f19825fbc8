"""`Source`: tokens by position, from wherever they come. A class of one's own is named in the spec, `module:Class`."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from runner.errors import DataError


class Source(ABC):
    """One long sequence of token ids, which never changes: a position has the same id on every host, in every attempt.

    Made on every host, with the keys of `data.options` as arguments by name. Read from several threads at once.
    """

    has_documents: bool = False

    @property
    @abstractmethod
    def vocabulary_size(self) -> int:
        """Every id is below it, and none is negative."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Another one for other ids: a run that has begun with one is never continued with another.

        Asked at the start and before each save, so it should cost little.
        """

    @abstractmethod
    def __len__(self) -> int:
        """How many tokens there are."""

    @abstractmethod
    def read(self, start: int, stop: int) -> np.ndarray:
        """The ids of positions `start .. stop`: one dimension, integers. Raises `DataError` or `OSError`."""

    def read_many(self, starts: Sequence[int] | np.ndarray, length: int) -> np.ndarray:
        """The ids of `length` positions from each of `starts` on: (number of starts, length)."""
        return np.stack([self.read(int(start), int(start) + length) for start in starts])

    def document_ends(self, start: int, stop: int) -> np.ndarray:
        """Positions p, start < p <= stop, at which a document ends, int64, ascending; the last of the source is one.

        A document is what lies between one end and the next. Asked only where `has_documents`.
        """
        raise NotImplementedError

    def check(self) -> None:  # noqa: B027 - most sources cannot change
        """Raise `DataError` if the ids are no longer those that the job began with. Called before each save."""

    def describe_position(self, position: int) -> str:
        """Where a position is, for a message."""
        return f"position {position}"

    def refuse_vocabulary(self, size: int) -> None:
        """Raise `DataError` if an id is known to be beyond a vocabulary of `size` ids."""
        if self.vocabulary_size > size:
            raise DataError(
                f"its ids go up to {self.vocabulary_size - 1:,}, the model's vocabulary is {size:,}; use a vocabulary "
                f"of at least {self.vocabulary_size:,}"
            )


def first_bad(ids: np.ndarray, vocabulary_size: int) -> int | None:
    """Where the first id stands that is negative or beyond a vocabulary; None if there is none."""
    is_bad = (ids < 0) | (ids >= vocabulary_size)
    return int(is_bad.argmax()) if is_bad.any() else None


class Checked(Source):
    """A source of somebody else's, with what it gives held against what it promises."""

    def __init__(self, source: Source, name: str) -> None:
        self._source, self._name = source, name
        self._vocabulary_size = int(source.vocabulary_size)
        self._fingerprint = source.fingerprint
        if not isinstance(self._fingerprint, str) or not self._fingerprint:
            raise self._broken(f"fingerprint is {self._fingerprint!r}, needs a text")

    @property
    def vocabulary_size(self) -> int:
        return self._vocabulary_size

    @property
    def fingerprint(self) -> str:
        return self._fingerprint

    def __len__(self) -> int:
        return len(self._source)

    def read(self, start: int, stop: int) -> np.ndarray:
        """See `Source`. Raises `DataError` naming the position too where an id is beyond the vocabulary."""
        found = self._source.read(start, stop)
        if not isinstance(found, np.ndarray) or found.shape != (stop - start,) or found.dtype.kind not in "iu":
            what = f"{found.dtype} of shape {found.shape}" if isinstance(found, np.ndarray) else type(found).__name__
            raise self._broken(f"read({start}, {stop}) gave {what}, needs an array of {stop - start} integers")
        place = first_bad(found, self._vocabulary_size)
        if place is not None:
            where = self._source.describe_position(start + place)
            raise self._broken(f"id {found[place]} at {where} is none of its {self._vocabulary_size:,} ids")
        return found

    def check(self) -> None:
        """See `Source`: its own check, and its fingerprint."""
        self._source.check()
        if self._source.fingerprint != self._fingerprint:
            raise self._broken("its fingerprint changed since the job started")

    def describe_position(self, position: int) -> str:
        """See `Source`."""
        return self._source.describe_position(position)

    def _broken(self, reason: str) -> DataError:
        return DataError(f"{self._name}: {reason}")
