"""Data sets of arrays: a class of the user's own whose examples are dicts of NumPy arrays, such as images and labels.

`data.source: module:Class` names it; it is called with the keys of `data.options`. The class has `__len__` and
`__getitem__(index)`, which returns a dict of arrays or numbers. A data set is immutable: an index has the same example
on every host and in every attempt. Two attributes are optional: `fingerprint`, a text that identifies the data, and
`padding`, the value by field of the padding examples at the end of a validation set (0 by default).

The first example declares the fields; all others must have the same names, dtypes and shapes. 64-bit numbers are
converted to 32 bits, because JAX computes in 32 bits by default.
"""

import collections
import contextlib
import errno
import functools
import hashlib
import itertools
import json
import math
import signal
import socket
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Protocol

import jax
import numpy as np

from runner.console import warn
from runner.data.packing import FieldSpec, Sequences
from runner.data.sampling import ShuffledOrder
from runner.data.source import Source, bind_options
from runner.errors import DataError, InvalidError, RetryableError, RunnerError, format_error
from runner.spec import load_attribute
from runner.storage import run_in_parallel

if TYPE_CHECKING:
    from runner.config import TokenSource

_PADDING_MASK = "padding_mask"  # True for a real example
_RESERVED_FIELDS = (_PADDING_MASK, "example", "loss_weight")
_LENGTH_MAX = 1 << 48  # a data set that repeats itself has a length near the largest integer
ALONE_SECONDS = 0.005  # of reading on one thread, after which others help
_METHODS = ("__len__", "__getitem__")
SLOW_SECONDS = 10.0  # for one example, above which a run warns
_SHOWN_SECONDS = 1.0  # of a read, from which on the report of a hang names it
_SAMPLE_EXAMPLES = 16  # in the fingerprint
# Of a network or of a remote disk, which may answer again.
_PASSING = (errno.EIO, errno.ESTALE, errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN)

# Examples that are being read in this process: number of the call -> (class and index, start by the monotonic clock).
_reads_in_progress: dict[int, tuple[str, float]] = {}
_call_numbers = itertools.count()


class RandomAccessExamples(Protocol):
    """Data set of the user's own. `__getitem__` is called from several threads at once."""

    def __len__(self) -> int:
        """Return the number of examples."""

    def __getitem__(self, index: int, /) -> Mapping[str, Any]:
        """Return an example as arrays or numbers by field."""


def describe_slowest_read() -> str:
    """Return the example that has been read for longest, and for how long; empty if all are fast. Any thread."""
    # A copy of the dictionary is atomic, while other threads add to it and remove from it.
    reads = list(_reads_in_progress.copy().values())
    name, since_seconds = min(reads, key=lambda read: read[1], default=("", math.inf))
    seconds = time.monotonic() - since_seconds
    return f"{name} has been read for {seconds:.0f} s" if seconds > _SHOWN_SECONDS else ""


def make_read_error(error: BaseException, text: str) -> RunnerError:
    """Return the error for an exception of a user's data set: retryable if a network or a remote disk caused it."""
    cause: BaseException | None = error
    while cause is not None:
        # Libraries raise OSError without a number for broken files, so only errors with a number are of a network or a
        # disk.
        is_of_network = isinstance(cause, RetryableError | ConnectionError | TimeoutError | socket.gaierror)
        if is_of_network or getattr(cause, "errno", None) in _PASSING:
            return RetryableError(f"{text} raised {format_error(error)}")
        cause = cause.__cause__ or cause.__context__
    return DataError(f"{text} raised {format_error(error)}")


@contextlib.contextmanager
def _translate_user_errors(text: str) -> Iterator[None]:
    """Turn whatever the code of a user's data set raises into the error for it. `text` says what has raised.

    This includes `GeneratorExit` and `StopIteration`, which generators would take for their own end, and `SystemExit`.
    """
    try:
        yield
    except BaseException as error:
        # Without a handler of our own, such as in a notebook, Ctrl-C raises this in the main thread.
        is_ctrl_c = isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread()
        if is_ctrl_c and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            raise
        raise make_read_error(error, text) from error


class ArraySource:
    """Data set of the user's own, each of whose examples is validated when it is read. Thread-safe.

    `fields` are the arrays of an example, without the padding mask. `fingerprint` is a digest of the fields, the
    length, the user's fingerprint and a sample of the examples.
    """

    vocabulary_size = bytes_fetched_per_token = bytes_copied = 0

    def __init__(self, examples: RandomAccessExamples, name: str, class_name: str):
        """Read a sample of the examples. Raises DataError if one is invalid, or differs when it is read again."""
        self._examples, self.name, self._class_name = examples, name, class_name
        self._has_warned = False
        self.fields: dict[str, FieldSpec] = {}  # empty until the first example is read, which declares them
        self._length = self._get_length()
        if not self._length:
            raise DataError(f"{name}: is empty: it holds 0 examples")
        if self._length > _LENGTH_MAX:
            raise DataError(f"{name}: has {self._length:,} examples; leave out repeat: a run repeats its data itself")
        aliased = self._load(0)
        first = {field: array.copy() for field, array in aliased.items()}
        with _translate_user_errors(f"{name}: padding"):
            padding: Any = getattr(examples, "padding", {})
            padding = dict(padding.items()) if isinstance(padding, Mapping) else padding
        if not isinstance(padding, dict) or not all(
            isinstance(value, int | float | np.number | np.bool_) for value in padding.values()
        ):
            raise DataError(f"{name}: padding is {padding!r}; needs a dict with a number by field")
        if unknown := sorted({*padding} - {*first}):
            raise DataError(f"{name}: padding names {unknown[0]}, and its examples hold {', '.join(first)}")
        for field, array in first.items():
            value = padding.get(field, 0)
            with np.errstate(all="ignore"):
                held = np.asarray(value).astype(array.dtype)
            if (array.dtype.kind in "biu" and held != value) or (np.isfinite(value) and not np.isfinite(held)):
                raise DataError(f"{name}: padding of {field} is {value!r}, which is no {array.dtype}")
            self.fields[field] = FieldSpec(array.dtype, array.shape, float(value))
        indices = np.unique(np.linspace(0, self._length - 1, _SAMPLE_EXAMPLES).astype(np.int64))
        sample = self.read(indices)
        if any(first[field].tobytes() != array.tobytes() for field, array in aliased.items()):
            raise DataError(f"{name}: example 0 is overwritten when another one is read; return a copy of its arrays")
        # If examples are random, a batch cannot be made a second time.
        if any(sample[field][0].tobytes() != array.tobytes() for field, array in first.items()):
            raise DataError(
                f"{name}: example 0 has other values when it is read again; derive random numbers from the index"
            )
        self._user_fingerprint = self._get_user_fingerprint()
        declared = {field: [str(spec.dtype), spec.shape] for field, spec in self.fields.items()}
        digest = hashlib.sha256(json.dumps([self._user_fingerprint, self._length, declared], sort_keys=True).encode())
        for field, arrays in sorted(sample.items()):
            digest.update(field.encode() + arrays.tobytes())
        self.fingerprint = digest.hexdigest()

    def __len__(self) -> int:
        return self._length

    def check(self) -> None:
        """Raise DataError if the length or the user's fingerprint has changed, RetryableError if the storage fails."""
        if self._get_length() != self._length or self._get_user_fingerprint() != self._user_fingerprint:
            raise DataError(
                f"{self.name}: its fingerprint or length changed since the job started; its examples must never change"
            )

    def validate_vocabulary(self, size: int) -> None:
        """Do nothing: arrays are not token ids."""

    def _get_length(self) -> int:
        with _translate_user_errors(f"{self.name}: __len__"):
            return len(self._examples)

    def _get_user_fingerprint(self) -> str:
        examples = self._examples
        with _translate_user_errors(f"{self.name}: fingerprint"):
            # Do not treat a property that raises as a missing fingerprint.
            has_own = hasattr(type(examples), "fingerprint") or "fingerprint" in getattr(examples, "__dict__", {})
            fingerprint: object = getattr(examples, "fingerprint") if has_own else ""  # noqa: B009
        if not isinstance(fingerprint, str):
            raise DataError(f"{self.name}: fingerprint is {fingerprint!r}; needs a text")
        return fingerprint

    def read(self, indices: np.ndarray) -> Sequences:
        """Return the examples with these indices, read on several threads unless they are read fast.

        Raises DataError that names an example unlike the first one, RetryableError if the storage does not answer.
        """
        began, left = time.monotonic(), collections.deque(enumerate(np.asarray(indices).tolist()))
        arrays = {name: np.empty((len(left), *field.shape), field.dtype) for name, field in self.fields.items()}

        def load_into(row: int, index: int) -> None:
            # Copied at once, because the data set may reuse the memory of an example for the next one.
            for name, array in self._load(index).items():
                arrays[name][row] = array

        # Threads that compute in Python slow each other down, so fast reads are done on this thread.
        while left and time.monotonic() - began < ALONE_SECONDS:
            load_into(*left.popleft())
        run_in_parallel([functools.partial(load_into, *place) for place in left])
        return arrays

    def _load(self, index: int) -> dict[str, np.ndarray]:
        """Return one example, validated; the first one is compared with nothing."""
        call, began = next(_call_numbers), time.monotonic()
        _reads_in_progress[call] = f"example {index} of {self._class_name}", began
        example: Any
        try:
            with _translate_user_errors(f"{self.name}: example {index}: __getitem__"):
                example = self._examples[index]
            # An example may be a mapping of the user's own, whose fields are read only now.
            with _translate_user_errors(f"{self.name}: example {index}: items"):
                example = dict(example.items()) if isinstance(example, Mapping) else example
        finally:
            del _reads_in_progress[call]
        seconds = time.monotonic() - began
        if seconds > SLOW_SECONDS and not self._has_warned:
            self._has_warned = True
            warn(f"{self.name}: example {index} took {seconds:.0f} s to read; steps wait for their slowest example")
        declared = self.fields
        if not isinstance(example, dict) or not example:
            found = "empty" if isinstance(example, dict) else _describe(example)
            raise self._make_error(index, f"is {found}, needs a dict of arrays by field")
        if not declared and (taken := [name for name in _RESERVED_FIELDS if name in example]):
            raise self._make_error(index, f"has the reserved field {taken[0]}; rename it")
        if declared and {*example} != {*declared}:
            missing, other = sorted({*declared} - {*example}), sorted(map(str, {*example} - {*declared}))
            found = f"has no {missing[0]}" if missing else f"has the field {other[0]}"
            raise self._make_error(index, f"{found}, and the first example holds {', '.join(declared)}")
        arrays = {}
        for name, value in example.items():
            array = self._convert(index, name, value)
            if declared and (array.dtype, array.shape) != (declared[name].dtype, declared[name].shape):
                first = f"{declared[name].dtype} of shape {declared[name].shape}"
                found = f"{array.dtype} of shape {array.shape}"
                raise self._make_error(index, f"{name} is {found}, and that of the first example is {first}")
            arrays[name] = array
        return arrays

    def _convert(self, index: int, name: object, value: object) -> np.ndarray:
        """Return a value of an example as an array of a type that devices have."""
        if not isinstance(name, str) or not name.isidentifier():
            raise self._make_error(index, f"has a field named {name!r}; use a name of letters, digits and _")
        if not isinstance(value, np.ndarray | np.generic | bool | int | float):
            raise self._make_error(index, f"{name} is {_describe(value)}, needs an array or a number")
        with _translate_user_errors(f"{self.name}: example {index}: {name}"):
            array = np.asarray(value)
        is_number = jax.dtypes.issubdtype(array.dtype, np.number) or array.dtype == np.bool_
        if not is_number or array.dtype.kind in "cm" or (array.dtype.kind == "f" and array.dtype.itemsize > 8):
            raise self._make_error(index, f"{name} is {array.dtype}, needs integers, real numbers or booleans")
        with np.errstate(over="ignore"):
            narrow = array.astype(jax.dtypes.canonicalize_dtype(array.dtype.newbyteorder("=")), copy=False)
        if narrow.dtype != array.dtype:
            is_lost = narrow != array if array.dtype.kind in "iu" else np.isinf(narrow) & np.isfinite(array)
            if is_lost.any():
                reason = f"{name} holds {array.dtype} beyond {narrow.dtype}, the widest of a device"
                raise self._make_error(index, reason)
        return narrow

    def _make_error(self, index: int, reason: str) -> DataError:
        return DataError(f"{self.name}: example {index}: {reason}")


def _describe(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


class ArrayExamples:
    """Examples `start .. start + num_examples` of a data set of arrays, with a padding mask."""

    fingerprint = ""

    def __init__(self, source: ArraySource, start: int, num_examples: int):
        self._source, self._start, self.num_examples = source, start, num_examples
        self.fields = {**source.fields, _PADDING_MASK: FieldSpec(np.dtype(np.bool_), ())}

    def read(self, indices: np.ndarray) -> Sequences:
        """Read the examples; all of them are real."""
        arrays = self._source.read(self._start + np.asarray(indices, np.int64))
        return {**arrays, _PADDING_MASK: np.ones(len(indices), np.bool_)}

    def get_spans(self, index: int) -> np.ndarray:
        """Return no span."""
        return np.zeros((0, 2), np.int64)

    def make_order(self, seed: int, batch_examples: Fraction) -> ShuffledOrder:
        """Return a shuffle of all examples, the same for every batch size."""
        return ShuffledOrder(self.num_examples, seed)


# Open data sets by class and options, so that stages and validation sets of a run share the memory of one.
_opened: weakref.WeakValueDictionary[tuple[str, int, str], ArraySource] = weakref.WeakValueDictionary()
_opening = threading.Lock()


def _has_method(found: type, method: str) -> bool:
    return callable(getattr(found, method, None))


def _is_data_set_class(found: object) -> bool:
    return isinstance(found, type) and all(_has_method(found, method) for method in _METHODS)


def open_array_source(token_source: "TokenSource") -> ArraySource:
    """Open the data set that `module:Class` names, or use the open one. Called on every host. Raises DataError."""
    name = f"data.source={token_source.source}"
    try:
        make = load_attribute(token_source.source, _is_data_set_class)
    except InvalidError as error:
        raise DataError(f"{name}: {error}") from error
    if isinstance(make, type) and issubclass(make, Source):
        raise DataError(f"{name}: is a Source of tokens, and data.sequence_length is missing; set it")
    # Checked before anything is called: what is named may be any function of the module.
    if not isinstance(make, type):
        raise DataError(f"{name}: is {_describe(make)}; name a class with {' and '.join(_METHODS)}")
    if not _is_data_set_class(make):
        missing = next(method for method in _METHODS if not _has_method(make, method))
        raise DataError(f"{name}: the class has no {missing}; a data set of arrays needs random access")
    bind_options(make, token_source.options, name)
    key = token_source.source, id(make), json.dumps(token_source.options, sort_keys=True)
    with _opening:
        source = _opened.get(key)
        if source is None:
            with _translate_user_errors(f"{name}: opening it"):
                examples = make(**token_source.options)
            if not _is_data_set_class(type(examples)):  # by a `__new__` or a metaclass of its own
                raise DataError(f"{name}: makes {_describe(examples)}; a data set has {' and '.join(_METHODS)}")
            source = _opened[key] = ArraySource(examples, name, token_source.source)
    return source
