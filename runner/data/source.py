"""`Source`: tokens by position, from wherever they come. A class of one's own is named in the spec, `module:Class`."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import numpy as np

from runner.errors import DataError


class Source(ABC):
    """One long sequence of token ids, which never changes: a position has the same id on every host, in every attempt.

    Made on every host, with the keys of `data.options` as arguments by name. Read from several threads at once.

    Attributes:
        has_documents: whether `document_ends` tells them; without, a job can read the tokens as one long text alone.
        fields: what it says of each token beside its id, by name with its dtype, such as `{"loss_weight": np.float32}`.
            A batch holds them, where the token is the target.
        bytes_fetched_per_token: what reading a token takes over the network, where it does.
        bytes_copied: what each host keeps on its disk of what cannot be read by ranges.
    """

    has_documents: bool = False
    bytes_fetched_per_token: int = 0
    bytes_copied: int = 0
    fields: Mapping[str, type[np.generic]] = {}

    @property
    @abstractmethod
    def vocabulary_size(self) -> int:
        """Every id is below it, and none is negative."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Another one for other ids or documents: a run that has begun with one is never continued with another.

        Asked at the start and before each save, so it should cost little.
        """

    @abstractmethod
    def __len__(self) -> int:
        """How many tokens there are."""

    @abstractmethod
    def read(self, start: int, stop: int) -> np.ndarray:
        """The ids of positions `start .. stop`: one dimension, integers. Raises `DataError` or `OSError`."""

    def read_many(self, starts: np.ndarray, length: int) -> np.ndarray:
        """The ids of `length` positions from each start on: (number of starts, length)."""
        if not len(starts):
            return np.zeros((0, length), np.int32)
        return np.stack(self.read_ranges([(start, start + length) for start in np.asarray(starts).tolist()]))

    def read_ranges(self, ranges: Sequence[tuple[int, int]]) -> list[np.ndarray]:
        """The ids of several stretches of positions, each from a start to a stop. Replace it where each read waits."""
        return [self.read(start, stop) for start, stop in ranges]

    def read_field(self, name: str, start: int, stop: int) -> np.ndarray:
        """What one of `fields` says of positions `start .. stop`: one dimension, of its dtype."""
        raise NotImplementedError

    def read_field_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[np.ndarray]:
        """What one of `fields` says of several stretches of positions. Replace it where each read waits."""
        return [self.read_field(name, start, stop) for start, stop in ranges]

    def document_ends(self, start: int, stop: int) -> np.ndarray:
        """The positions p with start < p <= stop before which a document ends, ascending; asked if `has_documents`.

        The documents fill the sequence: each begins where the one before it ends, and the last ends at its end.
        """
        raise NotImplementedError

    def check(self) -> None:  # noqa: B027 - most sources cannot change
        """Raise `DataError` if the ids are no longer those that the job began with. Called before each save."""

    def describe_position(self, position: int) -> str:
        """Where a position is, for a message."""
        return f"position {position}"

    def validate_vocabulary(self, size: int) -> None:
        """Raise `DataError` if an id is known to be beyond a vocabulary of `size` ids."""
        if self.vocabulary_size > size:
            raise DataError(
                f"its ids go up to {self.vocabulary_size - 1:,}, the model's vocabulary is {size:,}; use a vocabulary "
                f"of at least {self.vocabulary_size:,}"
            )


def find_invalid_id(ids: np.ndarray, vocabulary_size: int) -> int | None:
    """Where the first id stands that is negative or beyond a vocabulary; None if there is none."""
    is_bad = (ids < 0) | (ids >= vocabulary_size)
    return int(is_bad.argmax()) if is_bad.any() else None


class CheckedSource(Source):
    """A source of somebody else's, with what it gives held against what it promises."""

    def __init__(self, source: Source, name: str) -> None:
        self._source, self._name = source, name
        self._vocabulary_size = int(source.vocabulary_size)
        self._fingerprint = source.fingerprint
        if not isinstance(self._fingerprint, str) or not self._fingerprint:
            raise self._broken(f"fingerprint is {self._fingerprint!r}, needs a text")
        self.has_documents, self.fields = source.has_documents, source.fields
        self.bytes_fetched_per_token, self.bytes_copied = source.bytes_fetched_per_token, source.bytes_copied

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
        return self._looked_at(self._source.read(start, stop), start, stop)

    def read_ranges(self, ranges: Sequence[tuple[int, int]]) -> list[np.ndarray]:
        """See `Source`, and `read`."""
        found = self._source.read_ranges(ranges)
        if len(found) != len(ranges):
            raise self._broken(f"read_ranges gave {len(found)} arrays, needs {len(ranges)}")
        return [self._looked_at(ids, *range_) for ids, range_ in zip(found, ranges, strict=True)]

    def _looked_at(self, found: np.ndarray, start: int, stop: int) -> np.ndarray:
        if not isinstance(found, np.ndarray) or found.shape != (stop - start,) or found.dtype.kind not in "iu":
            what = f"{found.dtype} of shape {found.shape}" if isinstance(found, np.ndarray) else type(found).__name__
            raise self._broken(f"read({start}, {stop}) gave {what}, needs an array of {stop - start} integers")
        place = find_invalid_id(found, self._vocabulary_size)
        if place is not None:
            where = self._source.describe_position(start + place)
            raise self._broken(f"id {found[place]} at {where} is none of its {self._vocabulary_size:,} ids")
        return found

    def read_field(self, name: str, start: int, stop: int) -> np.ndarray:
        """See `Source`."""
        found = self._source.read_field(name, start, stop)
        if not isinstance(found, np.ndarray) or found.shape != (stop - start,):
            raise self._broken(f"read_field({name!r}, {start}, {stop}) gave no array of {stop - start} values")
        return found

    def read_field_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[np.ndarray]:
        """See `Source`."""
        found = self._source.read_field_ranges(name, ranges)
        needs = [(stop - start,) for start, stop in ranges]
        if [getattr(values, "shape", None) for values in found] != needs:
            raise self._broken(
                f"read_field_ranges({name!r}, ...) gave not an array of the values of each of {len(ranges)}"
            )
        return found

    def document_ends(self, start: int, stop: int) -> np.ndarray:
        """See `Source`."""
        ends = np.asarray(self._source.document_ends(start, stop))
        if ends.ndim != 1 or not (np.diff(ends) > 0).all() or not ((start < ends) & (ends <= stop)).all():
            raise self._broken(
                f"document_ends({start}, {stop}) gave {ends[:4].tolist()}..., needs ascending positions above "
                f"{start} and up to {stop}"
            )
        return ends.astype(np.int64, copy=False)

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
