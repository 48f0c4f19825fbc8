"""Values of a user's code and their form in a row of metrics: the meta that `forward` returns, and other metrics.

Step metadata ("meta") is a dictionary by name of the values that `forward` may return besides the loss. Each value is
that of the last micro-batch, and of the last shard along `data`:

- a scalar: a real number or a bool;
- a list: an array of one axis with at most `LIST_MAX` numbers;
- a `Histogram`, which `histogram` computes on the device from an array of any size.

The name `sums` holds a dictionary of sums over the real tokens of a micro-batch, scalars or lists. They are accumulated
over all micro-batches in float32 and divided by the number of tokens of the step, so that the split of the batch
changes them only by rounding. A pair (sum, weight) is divided by the sum of its own weights instead. A mean with
weight 0 is null in the row.

Metrics that an evaluator returns, or that a job passes to `log_metrics`, are values on the host. `parse_metrics` checks
them, and converts them to the values of a row.

Shape legend: K bins.
"""

import math
import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from runner.errors import InvalidError

SUMS, GRAD_NORM, TOKEN_COUNT = "sums", "grad_norm", "token_count"
TARGET_COUNT = "target_count"  # other name under which `forward` may return the token count
ACCURACY = "accuracy"  # among the sums of an evaluation: weight of the targets that are predicted correctly
# With a stability policy: updates skipped so far, and those skipped one after another up to this step.
SKIPPED_UPDATES, CONSECUTIVE_SKIPS = "skipped_updates", "consecutive_skips"
# Roll-backs so far, and steps with a high loss one after another up to this step.
ROLL_BACKS, HIGH_LOSS_STEPS = "roll_backs", "high_loss_steps"
REPLAY_DIGESTS = "replay_digests"  # digests of the gradients of a step that can be replayed; never in a row
LIST_MAX = 64
TEXT_MAX_CHARACTERS = 1 << 14
_KEY_MAX_CHARACTERS = 200
_METRICS_MAX = 1000  # of one evaluator
BINS_MAX = 1024
_EXACT_INT_MAX = 1 << 63  # larger integers become floats, which every reader of JSON knows
_KEY = re.compile(r"[\w.-]+(/[\w.-]+)+")
_RESERVED_PREFIXES = ("train/", "perf/", "data/")
LEARNING_RATE = "learning_rate"
RESERVED_NAMES = ("loss", "loss_mean", LEARNING_RATE, "tokens")  # the runner's own names below `train/`
_REQUIREMENT = f"a row needs a scalar, such as a mean, an array of one axis of 1 to {LIST_MAX} numbers, or a histogram"
_SUM_REQUIREMENT = "needs a sum over the targets of the micro-batch, or a pair (sum, weight), of numbers"
_NUMBERS = bool | int | float | np.generic | np.ndarray | jax.Array | jax.ShapeDtypeStruct

Meta = Mapping[str, Any]
RowValue = float | int | str | list[float | None] | dict[str, list[float]] | None


@struct.dataclass
class Histogram:
    """Counts of values in K bins; bin k extends from `edges[k]` to `edges[k + 1]`."""

    counts: jax.Array  # (K,)
    edges: jax.Array  # (K + 1,)


def histogram(values: jax.Array, bins: int = 32) -> Histogram:
    """Return the histogram of all finite values of an array, in bins of equal width from the lowest to the highest."""
    flat = jnp.ravel(values).astype(jnp.float32)
    is_finite = jnp.isfinite(flat)
    low = jnp.min(jnp.where(is_finite, flat, jnp.inf), initial=jnp.inf)
    high = jnp.max(jnp.where(is_finite, flat, -jnp.inf), initial=-jnp.inf)
    # Without a finite value the bins begin at 0, and equal values still get bins of positive width.
    low, high = jnp.where(low <= high, low, 0.0), jnp.where(low <= high, high, 0.0)
    high = jnp.where(low < high, high, low + 1.0)
    counts, edges = jnp.histogram(jnp.where(is_finite, flat, low), bins, (low, high), weights=is_finite)
    return Histogram(counts.astype(jnp.int32), edges)


# On the device.


def accumulate_sums(meta: Mapping[str, Any], is_stacked: bool) -> Meta:
    """Return the `sums` of all micro-batches, or nothing if `meta` has none.

    With `is_stacked` the first axis of each leaf is the micro-batches; else `meta` is that of a single one.
    """
    if SUMS not in meta:
        return {}
    if not isinstance(meta[SUMS], Mapping):
        kind = _describe(meta[SUMS])
        raise InvalidError(f"forward returns {kind} as meta {SUMS!r}; return a dictionary of sums by name")

    def accumulate(leaf: Any) -> jax.Array:
        # Sums of narrow types would lose small terms.
        wide = jnp.asarray(leaf, jnp.float32)
        return jnp.sum(wide, axis=0) if is_stacked else wide

    return {SUMS: jax.tree.map(accumulate, dict(meta[SUMS]))}


def compute_means(sums: Mapping[str, Any], token_count: Any) -> Meta:
    """Return each sum divided by the tokens or by its own weight; NaN if that is 0. For device arrays or numbers."""

    def divide(total: Any, weight: Any) -> Any:
        weight = jnp.asarray(weight, jnp.float32)
        return jnp.where(weight > 0, total / jnp.where(weight > 0, weight, 1.0), jnp.nan)

    return {
        name: divide(*given) if isinstance(given, tuple) else divide(given, token_count) for name, given in sums.items()
    }


def replace_sums_by_means(meta: Mapping[str, Any], token_count: Any) -> Meta:
    """Return `meta` with means in place of `sums`. Raises `InvalidError` if a name is in both."""
    if SUMS not in meta:
        return dict(meta)
    if twice := sorted({*meta} & {*meta[SUMS]}):
        raise InvalidError(f"forward returns {twice[0]!r} as meta and among its {SUMS}; use two names")
    rest = {name: value for name, value in meta.items() if name != SUMS}
    return {**rest, **compute_means(meta[SUMS], token_count)}


# While the step is traced.


def validate_forward(returned: Any) -> None:
    """Raise `InvalidError` unless `forward` returns a loss and a dictionary of numbers and arrays."""
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise InvalidError(f"returns {_describe(returned)}; return the summed loss and a dictionary: loss_sum, {{}}")
    _, meta = returned
    if not isinstance(meta, Mapping):
        raise InvalidError(f"returns {_describe(meta)} as meta; return a dictionary of scalars by name")
    for name, value in meta[SUMS].items() if isinstance(meta.get(SUMS), Mapping) else ():
        terms = value if isinstance(value, tuple) and len(value) == 2 else (value,)
        if not all(map(_is_numeric, terms)):
            given = next(_describe(term) for term in terms if not _is_numeric(term))
            raise InvalidError(f"returns {name!r} among its {SUMS}, {given}; {_SUM_REQUIREMENT}")
    for name, value in meta.items():
        if not all(_is_numeric(leaf) for leaf in jax.tree.leaves(value, is_leaf=lambda leaf: leaf is None)):
            raise InvalidError(f"returns {name!r} as meta, {_describe(value)}; {_REQUIREMENT}")


def validate_meta(meta: Any, reserved: tuple[str, ...] = RESERVED_NAMES) -> None:
    """Raise `InvalidError` if the meta of a step has a reserved name, or a value that a row does not hold.

    The leaves may be tracers.
    """
    if not isinstance(meta, Mapping):
        raise InvalidError(f"a step returns a {type(meta).__name__} as meta; return a dictionary of scalars by name")
    for name, value in meta.items():
        if name in reserved:
            raise InvalidError(f"a step returns {name!r} as meta, which is a reserved name; use another")
        fits = isinstance(value, Histogram)
        if _is_numeric(value):
            # Checked on shapes and types only, since the value may be a tracer.
            shape = value.shape if isinstance(value, jax.ShapeDtypeStruct) else jnp.shape(value)
            is_small = len(shape) == 0 or (len(shape) == 1 and 0 < shape[0] <= LIST_MAX)
            kinds, dtype = (jnp.bool_, jnp.integer, jnp.floating), jnp.result_type(value)
            fits = is_small and any(jnp.issubdtype(dtype, kind) for kind in kinds)
        if not fits:
            raise InvalidError(f"a step returns {name!r} as meta, {_describe(value)}; {_REQUIREMENT}")


def _is_numeric(value: Any) -> bool:
    """Return True for a number, an array or the shape of one, whose type is neither text nor an object."""
    kind = getattr(getattr(value, "dtype", None), "kind", "f")
    return isinstance(value, _NUMBERS) and kind not in "USOMm"


def _describe(value: Any) -> str:
    if isinstance(value, np.ndarray | jax.Array | jax.ShapeDtypeStruct):
        return f"{value.dtype} of shape {value.shape}"
    return f"a {type(value).__name__}"


# On the host.


def to_finite(value: Any) -> float | None:
    """Return a number for a row. JSON has no NaN and no infinity, so these become None."""
    return float(value) if math.isfinite(value) else None


def to_row_value(value: Any) -> RowValue:
    """Return a value of meta, already fetched from the device, for a row. Values that are not finite become None."""
    if isinstance(value, Histogram):
        bins = {"counts": np.asarray(value.counts), "edges": np.asarray(value.edges)}
        is_finite = all(np.isfinite(numbers).all() for numbers in bins.values())
        return {name: numbers.tolist() for name, numbers in bins.items()} if is_finite else None
    if np.ndim(value) == 1:
        return [to_finite(each) for each in np.asarray(value, np.float64)]
    return to_finite(value)


def find_bins(value: RowValue) -> tuple[list[float], list[float]] | None:
    """Return counts and edges of a histogram in a row, or of the numbers of a list; None for any other value."""
    if isinstance(value, dict):
        return (value["counts"], value["edges"]) if {*value} == {"counts", "edges"} else None
    # A list has no bins, so they are computed from its numbers.
    numbers = [each for each in value if each is not None] if isinstance(value, list) else []
    if not numbers:
        return None
    counts, edges = np.histogram(np.asarray(numbers, np.float64), bins=min(len(numbers), 32))
    return counts.astype(float).tolist(), edges.tolist()


# Metrics that evaluators return, and those of `log_metrics`.


class UnfitMetricsError(ValueError):
    """Metrics of a user's code do not fit into a row."""


def parse_metrics(
    metrics: Any,
    before: Mapping[str, RowValue],
    form: re.Pattern[str] = _KEY,
    reserved: tuple[str, ...] = _RESERVED_PREFIXES,
) -> tuple[dict[str, RowValue], list[str]]:
    """Return the metrics as JSON values, and the keys of those that are not finite: they are null.

    `form` is the form of a key, and `reserved` are prefixes that it must not have.

    Raises `UnfitMetricsError`; what the objects of a user raise is passed on.
    """
    if not isinstance(metrics, Mapping):
        raise UnfitMetricsError(
            f"it returns a {type(metrics).__name__}, needs a dictionary of metrics by their key in a row"
        )
    row: dict[str, _ParsedValue] = {}
    for number, key in enumerate(metrics):
        if number == _METRICS_MAX:
            raise UnfitMetricsError(f"it returns more than {_METRICS_MAX:,} metrics")
        if not (isinstance(key, str) and len(key) <= _KEY_MAX_CHARACTERS and form.fullmatch(key)):
            raise UnfitMetricsError(
                f"it returns a metric named {repr(key)[:_KEY_MAX_CHARACTERS]}, needs a key such as val/accuracy"
            )
        if key.startswith(reserved):
            raise UnfitMetricsError(f"it returns a metric named {key!r}, needs a key such as val/accuracy")
        if key in before:
            raise UnfitMetricsError(f"it returns {key}, which another evaluator has returned")
        try:
            row[key] = _parse_metric(metrics[key])
        except TypeError as error:
            raise UnfitMetricsError(
                f"it returns as {key} {error}; a row needs a number, null, a text of at most {TEXT_MAX_CHARACTERS:,} "
                f"characters, a list of at most {LIST_MAX} numbers, or a histogram of at most {BINS_MAX:,} bins"
            ) from error
    return {key: value.value for key, value in row.items()}, [key for key, value in row.items() if not value.is_finite]


class _ParsedValue(NamedTuple):
    value: RowValue
    is_finite: bool = True


def _parse_metric(value: Any) -> _ParsedValue:
    """Return a metric as a JSON value. Raises `TypeError` with a description of what a row cannot hold."""
    if value is None:
        return _ParsedValue(None)
    if isinstance(value, str):
        if len(value) > TEXT_MAX_CHARACTERS:
            raise TypeError(f"a text of {len(value):,} characters")
        return _ParsedValue(str(value).encode(errors="replace").decode())
    if isinstance(value, list | tuple) and len(value) <= LIST_MAX:
        numbers = [_parse_number(each) for each in value]
        return _ParsedValue([number for number, _ in numbers], all(is_finite for _, is_finite in numbers))
    if isinstance(value, dict) and {*value} == {"counts", "edges"}:
        for each in value.values():
            if not isinstance(each, list | tuple | np.ndarray | jax.Array) or len(each) > BINS_MAX + 1:
                raise TypeError(f"a histogram of a {type(each).__name__}")
        bins: Any = (
            [_parse_number(each)[0] for each in np.asarray(value[name]).tolist()] for name in ("counts", "edges")
        )
        counts, edges = bins
        if len(edges) != len(counts) + 1 or not counts:
            raise TypeError(f"a histogram of {len(counts)} counts and {len(edges)} edges")
        if None in counts or None in edges:
            return _ParsedValue(None, is_finite=False)
        if any(low > high for low, high in pairwise(edges)):
            raise TypeError("a histogram whose edges do not ascend")
        return _ParsedValue({"counts": counts, "edges": edges})
    return _ParsedValue(*_parse_number(value))


def _parse_number(value: Any) -> tuple[float | None, bool]:
    """Return a number as a finite float or int, else None; and True unless it is not finite. None stays None."""
    if value is None:
        return None, True
    is_array = getattr(value, "shape", None) == () and hasattr(value, "__float__") and hasattr(value, "dtype")
    kinds = jnp.bool_, jnp.integer, jnp.floating
    if not (isinstance(value, int | float) or (is_array and any(jnp.issubdtype(value.dtype, kind) for kind in kinds))):
        raise TypeError(f"a {type(value).__name__}")
    if isinstance(value, int) and abs(value) < _EXACT_INT_MAX:
        return int(value), True
    try:
        number = float(value)
    except OverflowError:  # an integer beyond float64
        return None, False
    return (number, True) if math.isfinite(number) else (None, False)
