"""What `forward` may return beside the loss, its meta, and how a row of metrics holds it. Knows no model and no file.

By name, each of the last micro-batch, and where `data` cuts that of its last part:

- a scalar: a real number, or a bool;
- a list: an array of one axis, of at most `LIST_MAX` numbers;
- a `Histogram`, which `histogram` makes of an array of any size on the device.

Besides, `sums` is a dictionary of sums over the real tokens of a micro-batch, scalars or lists. They are added up over
all micro-batches in float32 and divided by the tokens of all, so that no split of the batch moves them but by rounding.
A pair (sum, weight) is divided by the sum of its own weights instead. What is divided by nothing is null in the row.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from runner.errors import InvalidError

SUMS, GRAD_NORM, TOKEN_COUNT = "sums", "grad_norm", "token_count"
LIST_MAX = 64
_NAMES_OF_THE_RUNNER = ("loss", "loss_mean", "learning_rate", "tokens")  # in a row, below `train/`
_NEEDS = f"a row needs a scalar, such as a mean, an array of one axis of 1 to {LIST_MAX} numbers, or a histogram"

Meta = Mapping[str, Any]
RowValue = float | int | list[Any] | dict[str, list[Any]] | None


@struct.dataclass
class Histogram:
    """How many values lie in each of K bins; bin k is from `edges[k]` to `edges[k + 1]`."""

    counts: jax.Array  # (K,)
    edges: jax.Array  # (K + 1,)


def histogram(values: jax.Array, bins: int = 32) -> Histogram:
    """The histogram of all finite values of an array, in bins of one width from the lowest to the highest. Pure."""
    flat = jnp.ravel(values).astype(jnp.float32)
    is_finite = jnp.isfinite(flat)
    low = jnp.min(jnp.where(is_finite, flat, jnp.inf), initial=jnp.inf)
    high = jnp.max(jnp.where(is_finite, flat, -jnp.inf), initial=-jnp.inf)
    low, high = jnp.where(low <= high, low, 0.0), jnp.where(low <= high, high, 0.0)
    high = jnp.where(low < high, high, low + 1.0)
    counts, edges = jnp.histogram(jnp.where(is_finite, flat, low), bins, (low, high), weights=is_finite)
    return Histogram(counts.astype(jnp.int32), edges)


# On the device.


def accumulate_sums(meta: Mapping[str, Any], is_stacked: bool) -> Meta:
    """The `sums` of all micro-batches, if `meta` has any; stacked, they are the first axis of each leaf."""
    if SUMS not in meta:
        return {}
    if not isinstance(meta[SUMS], Mapping):
        raise InvalidError(f"forward returns as meta {SUMS!r} {_kind(meta[SUMS])}, needs a dictionary of sums by name")

    def added(leaf: Any) -> jax.Array:
        wide = jnp.asarray(leaf, jnp.float32)
        return jnp.sum(wide, axis=0) if is_stacked else wide

    return {SUMS: jax.tree.map(added, dict(meta[SUMS]))}


def compute_means(sums: Mapping[str, Any], token_count: Any) -> Meta:
    """Each sum divided by the tokens, or by its own weight; NaN where that is 0. Of device arrays, or of numbers."""

    def mean(total: Any, weight: Any) -> Any:
        weight = jnp.asarray(weight, jnp.float32)
        return jnp.where(weight > 0, total / jnp.where(weight > 0, weight, 1.0), jnp.nan)

    return {
        name: mean(*given) if isinstance(given, tuple) else mean(given, token_count) for name, given in sums.items()
    }


def replace_sums_by_means(meta: Mapping[str, Any], token_count: Any) -> Meta:
    """`meta` with the means in the place of `sums`. Raises `InvalidError` if a name is there already."""
    if SUMS not in meta:
        return dict(meta)
    if twice := sorted({*meta} & {*meta[SUMS]}):
        raise InvalidError(f"forward returns {twice[0]!r} as meta and among its {SUMS}; use two names")
    rest = {name: value for name, value in meta.items() if name != SUMS}
    return {**rest, **compute_means(meta[SUMS], token_count)}


# Where the step is traced.


def validate_meta(meta: Any, reserved: tuple[str, ...] = _NAMES_OF_THE_RUNNER) -> None:
    """Raise `InvalidError` if a row cannot hold the meta of a step; `reserved` are names that it must not have."""
    if not isinstance(meta, Mapping):
        raise InvalidError(f"a step's meta is a {type(meta).__name__}, needs a dictionary of scalars by name")
    for name, value in meta.items():
        if name in reserved:
            raise InvalidError(f"a step returns {name!r} as meta, a name of the runner's own; use another")
        if not is_loggable(value):
            raise InvalidError(f"a step returns {name!r} as meta, {_kind(value)}; {_NEEDS}")


def is_loggable(value: Any) -> bool:
    """Whether a row can hold this value of meta, which may be a tracer."""
    if isinstance(value, Histogram):
        return True
    if not isinstance(value, bool | int | float | np.generic | np.ndarray | jax.Array | jax.ShapeDtypeStruct):
        return False
    shape = jnp.shape(value) if not isinstance(value, jax.ShapeDtypeStruct) else value.shape
    dtype = jnp.result_type(value)
    is_small = len(shape) == 0 or (len(shape) == 1 and 0 < shape[0] <= LIST_MAX)
    return is_small and any(jnp.issubdtype(dtype, kind) for kind in (jnp.bool_, jnp.integer, jnp.floating))


def _kind(value: Any) -> str:
    if isinstance(value, np.ndarray | jax.Array | jax.ShapeDtypeStruct):
        return f"{value.dtype} of shape {value.shape}"
    return f"a {type(value).__name__}"


# On the host.


def to_finite(value: Any) -> float | None:
    """A number as a row holds it: JSON has no NaN."""
    return float(value) if math.isfinite(value) else None


def to_row_value(value: Any) -> RowValue:
    """A value of meta, fetched from the device, as a row holds it; what is not finite is null."""
    if isinstance(value, Histogram):
        return {"counts": np.asarray(value.counts).tolist(), "edges": np.asarray(value.edges).tolist()}
    if np.ndim(value) == 1:
        return [to_finite(each) for each in np.asarray(value, np.float64)]
    return to_finite(value)


def find_bins(value: Any) -> tuple[list[float], list[float]] | None:
    """Counts and edges of what a row holds as a histogram, or of the numbers of a list; None of anything else."""
    if isinstance(value, dict):
        return (value["counts"], value["edges"]) if {*value} == {"counts", "edges"} else None
    numbers = [each for each in value if each is not None] if isinstance(value, list) else []
    if not numbers:
        return None
    counts, edges = np.histogram(np.asarray(numbers, np.float64), bins=min(len(numbers), 32))
    return counts.astype(float).tolist(), edges.tolist()
