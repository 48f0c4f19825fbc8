"""`Source`: random access to token ids by position. A spec may name a user-defined subclass as `module:Class`."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from runner.errors import DataError


class Source(ABC):
    """One long, immutable sequence of token ids: a position has the same id on every host and in every attempt.

    Instantiated on every host, with the keys of `data.options` as keyword arguments. Its methods are called from
    several threads at once.

    Attributes:
        has_documents: True if `document_ends` is implemented; otherwise only `packing: concatenate` can be used.
        fields: names and dtypes of additional values per token, such as `{"loss_weight": np.float32}`. A batch holds
            them at the position where the token is the target. A dtype with a shape, such as
            `np.dtype((np.float32, 8))`, is that of a vector per token.
        bytes_fetched_per_token: bytes that reading a token transfers over the network; 0 on a local disk.
        bytes_copied: bytes that each host copies to its disk, because the format does not support range reads.
    """

    has_documents: bool = False
    bytes_fetched_per_token: int = 0
    bytes_copied: int = 0
    fields: Mapping[str, DTypeLike] = {}

    @property
    @abstractmethod
    def vocabulary_size(self) -> int:
        """Exclusive upper bound of the ids, which are never negative."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Text that identifies the ids and documents; a run is never resumed with another fingerprint.

        Read at the start and before each save, so it should be cheap.
        """

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of tokens."""

    @abstractmethod
    def read(self, start: int, stop: int) -> np.ndarray:
        """Return the ids of positions `start .. stop` (exclusive) as a 1-D integer array.

        Raises:
            DataError: the data have changed or are invalid.
            OSError: the storage cannot be read.
        """

    def read_many(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Return the ids of `length` positions from each start on, of shape (len(starts), length)."""
        if not len(starts):
            return np.zeros((0, length), np.int32)
        return np.stack(self.read_ranges([(start, start + length) for start in np.asarray(starts).tolist()]))

    def read_ranges(self, ranges: Sequence[tuple[int, int]]) -> list[np.ndarray]:
        """Return the ids of several ranges of positions. Override this to read concurrently, for instance a bucket."""
        return [self.read(start, stop) for start, stop in ranges]

    def read_field(self, name: str, start: int, stop: int) -> np.ndarray:
        """Return the values of one of `fields` at positions `start .. stop`: of its dtype, one after the other."""
        raise NotImplementedError

    def read_field_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[np.ndarray]:
        """Return the values of one of `fields` for several ranges. Override this to read concurrently."""
        return [self.read_field(name, start, stop) for start, stop in ranges]

    def document_ends(self, start: int, stop: int) -> np.ndarray:
        """Return the exclusive ends p of documents with start < p <= stop, in ascending order.

        Called only if `has_documents`. Documents are contiguous: each begins where the previous one ends, and the last
        one ends at `len(self)`.
        """
        raise NotImplementedError

    def check(self) -> None:  # noqa: B027 - most sources cannot change
        """Raise `DataError` if the ids have changed since the job started. Called before each save."""

    def describe_position(self, position: int) -> str:
        """Return a description of a position for error messages."""
        return f"position {position}"

    def validate_vocabulary(self, size: int) -> None:
        """Raise `DataError` if an id is known to be outside a vocabulary of `size` ids."""
        if self.vocabulary_size > size:
            raise DataError(
                f"its ids go up to {self.vocabulary_size - 1:,}, the model's vocabulary is {size:,}; use a vocabulary "
                f"of at least {self.vocabulary_size:,}"
            )


def bind_options(make: Callable[..., Any], options: Mapping[str, Any], where: str, *given: Any) -> None:
    """Raise `DataError` unless `make` takes the values `given` and the keys of `data.options`."""
    # Bound before the call, so that a TypeError inside of it is not mistaken for bad options.
    try:
        inspect.signature(make).bind(*given, **options)
    except (TypeError, ValueError) as error:
        raise DataError(f"{where}: data.options: {error}") from error


def find_invalid_id(ids: np.ndarray, vocabulary_size: int) -> int | None:
    """Return the index of the first id that is negative or outside a vocabulary; None if there is none."""
    is_invalid = (ids < 0) | (ids >= vocabulary_size)
    return int(is_invalid.argmax()) if is_invalid.any() else None


class CheckedSource(Source):
    """Wrapper of a user-defined source that validates every result, with errors that name the source."""

    def __init__(self, source: Source, name: str) -> None:
        self._source, self._name = source, name
        # Both are read once, so that `check` can compare a source that changes with its state at the start.
        self._vocabulary_size = int(source.vocabulary_size)
        self._fingerprint = source.fingerprint
        if not isinstance(self._fingerprint, str) or not self._fingerprint:
            raise self._make_error(f"fingerprint is {self._fingerprint!r}; return a text that is not empty")
        self.has_documents, self.fields = source.has_documents, source.fields
        self.bytes_fetched_per_token, self.bytes_copied = source.bytes_fetched_per_token, source.bytes_copied

    @property
    def vocabulary_size(self) -> int:
        """Vocabulary size that the source stated when it was made."""
        return self._vocabulary_size

    @property
    def fingerprint(self) -> str:
        """Fingerprint that the source stated when it was made."""
        return self._fingerprint

    def __len__(self) -> int:
        return len(self._source)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Read ids, and check their number, type and range."""
        return self._check_ids(self._source.read(start, stop), start, stop)

    def read_ranges(self, ranges: Sequence[tuple[int, int]]) -> list[np.ndarray]:
        """Read several ranges, and check each."""
        found = self._source.read_ranges(ranges)
        if len(found) != len(ranges):
            raise self._make_error(f"read_ranges gave {len(found)} arrays, needs {len(ranges)}")
        return [self._check_ids(ids, *range_) for ids, range_ in zip(found, ranges, strict=True)]

    def _check_ids(self, ids: np.ndarray, start: int, stop: int) -> np.ndarray:
        if not isinstance(ids, np.ndarray) or ids.shape != (stop - start,) or ids.dtype.kind not in "iu":
            given = f"{ids.dtype} of shape {ids.shape}" if isinstance(ids, np.ndarray) else type(ids).__name__
            raise self._make_error(f"read({start}, {stop}) gave {given}, needs an array of {stop - start} integers")
        index = find_invalid_id(ids, self._vocabulary_size)
        if index is not None:
            place = self._source.describe_position(start + index)
            raise self._make_error(f"id {ids[index]} at {place} is outside its vocabulary of {self._vocabulary_size:,}")
        return ids

    def read_field(self, name: str, start: int, stop: int) -> np.ndarray:
        """Read the values of a field, and check their number."""
        values = self._source.read_field(name, start, stop)
        if not isinstance(values, np.ndarray) or values.shape != (stop - start, *np.dtype(self.fields[name]).shape):
            raise self._make_error(f"read_field({name!r}, {start}, {stop}) gave no array of {stop - start} values")
        return values

    def read_field_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[np.ndarray]:
        """Read the values of a field for several ranges, and check their numbers."""
        found = self._source.read_field_ranges(name, ranges)
        shape = np.dtype(self.fields[name]).shape
        if [getattr(values, "shape", None) for values in found] != [(stop - start, *shape) for start, stop in ranges]:
            raise self._make_error(
                f"read_field_ranges({name!r}, ...) must give {len(ranges)} arrays with one value for each position"
            )
        return found

    def document_ends(self, start: int, stop: int) -> np.ndarray:
        """Return the ends of documents as int64, checked to ascend within the range."""
        ends = np.asarray(self._source.document_ends(start, stop))
        if ends.ndim != 1 or not (np.diff(ends) > 0).all() or not ((start < ends) & (ends <= stop)).all():
            raise self._make_error(
                f"document_ends({start}, {stop}) gave {ends[:4].tolist()}..., needs ascending positions above "
                f"{start} and up to {stop}"
            )
        # Positions in large sources exceed 32 bits, so the source's integer type is not kept.
        return ends.astype(np.int64, copy=False)

    def check(self) -> None:
        """Run the source's own check, and compare its fingerprint with that of the start."""
        self._source.check()
        if self._source.fingerprint != self._fingerprint:
            raise self._make_error("its fingerprint changed since the job started; its ids must never change")

    def describe_position(self, position: int) -> str:
        """Return the description that the source gives."""
        return self._source.describe_position(position)

    def _make_error(self, reason: str) -> DataError:
        return DataError(f"{self._name}: {reason}")
