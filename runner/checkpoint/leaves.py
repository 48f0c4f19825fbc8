"""Leaves of a state: which ones can be saved, the form in which they are stored, and the names of weights among them.

A leaf must come back with its shape, its element type and its bits; a state with a leaf that could not is refused
before anything is committed. Three kinds need care:

- A weakly typed leaf (`jnp.asarray(1.1)`) comes back strongly typed, and the next product would have another type. So
  the state is made strongly typed at its init, and a leaf that becomes weak later is refused.
- A random key is stored as its words.
- A leaf without elements has no bytes: nothing is stored, and it is made again.

Weights are the trained parameters, their averages, and the matrices of an adapter. The average of the parameters with
decay 0.999 is called `ema_0.999`; its leaves are `riders.ema.0.999.X`, beside `params.X`. In a run that trains an
adapter (LoRA, arXiv 2106.09685), the model's own parameters are frozen as `variables.base`, and `params` holds two
matrices for each parameter that is adapted, named like it: `params.X.lora_a` (..., in, rank) and `params.X.lora_b`
(..., rank, out). The weight is `X + alpha / rank * A @ B`; leading axes, as of stacked layers, have matrices of their
own.
"""

import collections
import functools
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from runner.accelerator import HOST_MEMORY
from runner.checkpoint.fingerprint import describe_leaves, list_leaf_names
from runner.checkpoint.manifest import LeafShape, Manifest
from runner.errors import InvalidError, ResumeError, StateError
from runner.spec import PARAMS, Trajectory

_MAX_LISTED = 8  # problems in one message
_MAX_NAME_BYTES = 200  # of a leaf's dotted path, which becomes part of file names
_KEY_IMPLEMENTATIONS = ("threefry2x32", "rbg", "unsafe_rbg")

Leaves = dict[str, Any]  # by dotted path, in `jax.tree.leaves` order: arrays, or `jax.ShapeDtypeStruct` with shardings
BASE, LORA_A, LORA_B = "base", "lora_a", "lora_b"
_PARAMS, _BASE = f"{PARAMS}.", f"variables.{BASE}."
_AVERAGE = "riders.ema."  # prefix of an average's leaves: then come its decay and the name in `params`


def flatten_with_names(tree: Any) -> Leaves:
    """Return the leaves of a tree by dotted path."""
    return dict(zip(list_leaf_names(tree), jax.tree.leaves(tree), strict=True))


def make_abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    """Return shape, dtype and sharding of an array, which outlive it."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)


def is_on_host(leaf: Any) -> bool:
    """Return True if an array with a sharding, which may be abstract, lies in pinned host memory."""
    return getattr(leaf.sharding, "memory_kind", None) == HOST_MEMORY


def copy_offloaded(leaf: jax.Array) -> jax.Array:
    """Return a copy of an array in pinned host memory; any other array itself.

    A writer reads such an array in place, and on a GPU memory that someone reads cannot be donated to the next step.
    """
    if not is_on_host(leaf):
        return leaf
    copies = [
        jax.device_put(np.array(shard.data), SingleDeviceSharding(shard.device, memory_kind=HOST_MEMORY))
        for shard in leaf.addressable_shards
    ]
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, copies)


def replicate_abstract(shapes: Any) -> Any:
    """Return abstract leaves of these shapes and types, replicated on every device of the job."""
    replicated = NamedSharding(Mesh(np.array(jax.devices()), ("device",)), PartitionSpec())
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=replicated), shapes)


def make_strongly_typed(tree: Any) -> Any:
    """Return `tree` with every weakly typed leaf made strong: same dtype, same bits. May be traced."""
    return jax.tree.map(
        lambda leaf: leaf if _is_key(leaf) else lax.convert_element_type(leaf, jnp.result_type(leaf)), tree
    )


def init_sharded(make: Callable[[], Any], abstract: Any) -> Any:
    """Return the tree that `make`, a pure function, makes, strongly typed, each leaf in the sharding of `abstract`.

    Called on every host.
    """
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    return jax.jit(lambda: make_strongly_typed(make()), out_shardings=shardings)()


# Validation of leaves.


def validate_leaves(abstract: Any) -> None:
    """Raise `InvalidError` that names the leaves of an abstract state that could not be saved and restored."""
    names = list_leaf_names(abstract)
    if not names:
        raise InvalidError("the state has no leaf: `init` returns nothing that could be saved")
    counts = collections.Counter(names)
    problems = [f"{name}: {count} leaves have this dotted path" for name, count in counts.items() if count > 1]
    for name, leaf in zip(names, jax.tree.leaves(abstract), strict=True):
        problem = None if _is_key(leaf) else _find_dtype_problem(leaf.dtype)
        if len(name.encode()) > _MAX_NAME_BYTES:
            problem = f"its dotted path has {len(name.encode())} bytes, at most {_MAX_NAME_BYTES} can be kept"
        if problem is not None:
            problems.append(f"{name[:_MAX_NAME_BYTES]}: {problem}")
    if problems:
        raise InvalidError("the state cannot be saved" + format_problems(problems))


def validate_memory(abstract: Any, device_bytes: int) -> None:
    """Raise `InvalidError` if the devices of this process, each with `device_bytes`, cannot hold an abstract state."""
    needed_bytes = sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize * len(leaf.sharding.addressable_devices)
        for leaf in jax.tree.leaves(abstract)
        if leaf.sharding is not None and not is_on_host(leaf)
    )
    limit_bytes = device_bytes * jax.local_device_count()
    if needed_bytes > limit_bytes:
        raise InvalidError(
            f"the state needs {needed_bytes / 2**30:,.2f} GiB on the devices of a process, and they have "
            f"{limit_bytes / 2**30:,.2f} GiB; make it smaller, or shard it over more devices"
        )


def _find_dtype_problem(dtype: Any) -> str | None:
    try:
        can_be_saved = tensorstore.dtype(dtype.name) is not None
    except (TypeError, ValueError):
        can_be_saved = False
    # Types of less than 8 bits pack several elements into a byte, and the digest reads whole bytes.
    if can_be_saved and jnp.issubdtype(dtype, jnp.integer):
        can_be_saved = jnp.iinfo(dtype).bits >= 8
    elif can_be_saved and jnp.issubdtype(dtype, jnp.floating):
        can_be_saved = jnp.finfo(dtype).bits >= 8
    if can_be_saved:
        return None
    return f"{dtype.name} cannot be saved; keep it in a type of 8 bits or more, and convert it where it is used"


def validate_leaf_forms(state: Any, abstract: Any, step: int) -> None:
    """Raise `StateError` that names the leaves of `state` that a restore into `abstract` would refuse or change."""
    problems = find_form_problems(state, abstract)
    if problems:
        raise StateError(
            f"step {step} is not saved: the state could not be restored in the form that it has now{problems}"
        )


def find_form_problems(state: Any, abstract: Any) -> str:
    """Return a line for each leaf of `state` that has another form than in `abstract`; an empty text if none has.

    `state` may be traced.
    """
    found: Any = jax.tree.structure(state)
    expected: Any = jax.tree.structure(abstract)
    if found == expected:
        problems = list(map(_find_form_problem, jax.tree.leaves(state), jax.tree.leaves(abstract)))
        # This runs at every save for every leaf, so names are computed only if there is a problem.
        if not any(problems):
            return ""
        by_name = zip(list_leaf_names(state), problems, strict=True)
        return format_problems([f"{name}: {problem}" for name, problem in by_name if problem is not None])
    own, other = set(list_leaf_names(state)), set(list_leaf_names(abstract))
    lines = [f"{name}: was not there at the start" for name in sorted(own - other)]
    lines += [f"{name}: was there at the start and is gone" for name in sorted(other - own)]
    return format_problems(lines or [f"the tree was {str(expected)[:200]} and is {str(found)[:200]}"])


def _find_form_problem(leaf: Any, expected: Any) -> str | None:
    if not isinstance(leaf, jax.Array):
        return f"is a {type(leaf).__name__}, not a jax array"
    if not isinstance(leaf, jax.core.Tracer) and leaf.is_deleted():
        return "was donated to a computation, and is gone"
    if leaf.dtype != expected.dtype or leaf.shape != expected.shape:
        return f"was {format_type(expected.dtype, expected.shape)}, is {format_type(leaf.dtype, leaf.shape)}"
    if leaf.aval.weak_type:
        return (
            f"is weakly typed and would come back strong: the next step would compute in another type; "
            f"give it one, as in jnp.asarray(x, jnp.{leaf.dtype.name})"
        )
    return None


def validate_manifest_leaves(
    manifest: Manifest, abstract: Any, may_hold_more: bool = False, max_listed: int = _MAX_LISTED
) -> None:
    """Raise `ResumeError` if the job's state has other leaves than the checkpoint: its code or spec has changed.

    Leaves that only the checkpoint has are ignored if it `may_hold_more`. The message names up to `max_listed` leaves.
    """
    expected = describe_leaves(abstract)
    saved = {name: LeafShape(shape=leaf["shape"], dtype=leaf["dtype"]) for name, leaf in manifest.leaves.items()}
    compared = expected.keys() if may_hold_more else expected.keys() | saved.keys()
    names = sorted(name for name in compared if expected.get(name) != saved.get(name))

    def format_leaf(leaves: dict[str, LeafShape], name: str) -> str:
        return format_type(leaves[name]["dtype"], leaves[name]["shape"]) if name in leaves else "nothing"

    if names:
        lines = [
            f"{name}: checkpoint has {format_leaf(saved, name)}, the job {format_leaf(expected, name)}"
            for name in names
        ]
        raise ResumeError(f"checkpoint {manifest.name} does not fit this job{format_problems(lines, max_listed)}")


def format_type(dtype: Any, shape: Iterable[int]) -> str:
    """Return element type and shape for people: `float32[4,2]`."""
    return f"{dtype}[{','.join(map(str, shape))}]"


def format_problems(problems: list[str], max_listed: int = _MAX_LISTED) -> str:
    """Return the first problems, each on a new line, to be put after a sentence; an empty text if there are none."""
    more = [f"and {len(problems) - max_listed} more"] if len(problems) > max_listed else []
    return "".join(f"\n  {problem}" for problem in [*problems[:max_listed], *more])


def _is_key(leaf: Any) -> bool:
    return bool(jax.dtypes.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key))


def parse_dtype(name: str) -> Any:
    """Return the element type that `str` writes so, including those of random keys. Raises `TypeError`."""
    for implementation in _KEY_IMPLEMENTATIONS:
        key = jax.eval_shape(functools.partial(jax.random.key, 0, impl=implementation))
        if str(key.dtype) == name:
            return key.dtype
    return jnp.dtype(name)


# The form in which leaves are stored.


def encode_leaves(leaves: Leaves) -> Leaves:
    """Return the arrays to store for the leaves of a state; for abstract leaves, the abstract arrays to read."""

    def encode(leaf: Any) -> Any:
        if not _is_key(leaf):
            return leaf
        if isinstance(leaf, jax.Array):
            return jax.random.key_data(leaf)
        words = jax.eval_shape(jax.random.key_data, leaf)
        # The words have one more axis than the key. Its sharding fits nevertheless, since keys are always replicated.
        return jax.ShapeDtypeStruct(words.shape, words.dtype, sharding=leaf.sharding)

    return {name: encode(leaf) for name, leaf in leaves.items() if leaf.size}


def decode_leaves(arrays: Leaves, abstract: Leaves) -> Leaves:
    """Return the leaves of `abstract` from the arrays that were read. Called on every host."""

    def decode(array: Any, leaf: Any) -> jax.Array:
        if leaf.size == 0:
            return jax.jit(lambda: jnp.zeros(leaf.shape, leaf.dtype), out_shardings=leaf.sharding)()
        if _is_key(leaf):
            found: list[Any] = []  # an abstract key tells its implementation only while it is traced
            jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), leaf)
            return jax.random.wrap_key_data(array, impl=found[0])
        return array

    return {name: decode(arrays.get(name), leaf) for name, leaf in abstract.items()}


# Averages.


def validate_weight_name(leaves: Collection[str], weights: str) -> None:
    """Raise `InvalidError`, with the names that exist, if `weights` is neither `params` nor an average.

    An average exists if every parameter of it is among the leaves.
    """
    params = [name.removeprefix(PARAMS) for name in leaves if name.startswith(_PARAMS)]
    # A decay may contain dots, so it is found as that which is left of a name without the name of a parameter.
    prefixes = {name.removesuffix(param) for name in leaves for param in params[:1] if name.endswith(param)}
    averages = [prefix for prefix in prefixes if prefix.startswith(_AVERAGE)]
    whole = [prefix for prefix in averages if all(f"{prefix}{param}" in leaves for param in params)]
    known = [PARAMS, *sorted(f"ema_{prefix.removeprefix(_AVERAGE)}" for prefix in whole)]
    if weights not in known:
        raise InvalidError(f"got weights {weights!r}, has {', '.join(known)}; needs one of them")


def map_weight_names(weights: str, names: Iterable[str]) -> dict[str, str]:
    """Return, for each leaf, the name of the leaf that takes its place in these weights (`params` or `ema_<decay>`).

    Leaves outside `params` keep their names.
    """
    prefix = _AVERAGE + weights.removeprefix("ema_")
    return {
        name: f"{prefix}.{name.removeprefix(_PARAMS)}" if weights != PARAMS and name.startswith(_PARAMS) else name
        for name in names
    }


# Adapters.


@dataclass(frozen=True)
class AdapterMerge:
    """Sum of a frozen weight and the product of its two matrices."""

    scale: float  # alpha over rank
    compute: str | None = None  # element type that the sum has at least; None for that of the weight

    def __call__(self, base: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        """Return `base + scale * a @ b`, computed in float32. Pure."""
        product = jnp.matmul(a.astype(jnp.float32), b.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
        dtype = base.dtype if self.compute is None else jnp.promote_types(base.dtype, self.compute)
        return (base.astype(jnp.float32) + self.scale * product).astype(dtype)


@dataclass(frozen=True)
class SavedWeights:
    """Leaves of a checkpoint that hold the weights of a model, by the names that the model gives them."""

    names: Mapping[str, str]  # name in the manifest of each weight; if an adapter was trained, of the frozen one
    merge: AdapterMerge = AdapterMerge(0.0)  # of the adapted weights
    # Names in the manifest of A and B, for each weight that is adapted.
    matrices: Mapping[str, tuple[str, str]] = field(default_factory=dict)


def has_frozen_base(names: Iterable[str]) -> bool:
    """Return True if leaves of these names include a frozen base, beside which a run trains an adapter."""
    return any(name.startswith(_BASE) for name in names)


def split_adapter(names: Mapping[str, str], identity: Trajectory) -> SavedWeights:
    """Split the weights of a run with an adapter into the model's own weights and the matrices that adapt them.

    `names` has the name in the manifest of each weight, by its name as it is trained, and `identity` is that of the
    manifest.
    """
    own = {
        name.replace(_BASE, _PARAMS, 1) if name.startswith(_BASE) else name: saved
        for name, saved in names.items()
        if not name.startswith(_PARAMS)
    }
    rank, alpha = identity.get("config.adapter.rank"), identity.get("config.adapter.alpha")
    if rank is None or alpha is None:
        return SavedWeights(own)
    suffix_a, suffix_b = f".{LORA_A}", f".{LORA_B}"
    adapted = {name.removesuffix(suffix_a) for name in names if name.startswith(_PARAMS) and name.endswith(suffix_a)}
    matrices = {name: (names[name + suffix_a], names[name + suffix_b]) for name in sorted(adapted)}
    return SavedWeights(own, AdapterMerge(alpha / rank), matrices)


def merge_params(base: Mapping[str, Any], adapter: Mapping[str, Any], merge: Callable[[Any, Any, Any], Any]) -> Any:
    """Return the model's parameters: `merge(base, a, b)` for each that the adapter names, the others unchanged.

    `base` and `adapter` are nested dictionaries of the frozen parameters and of the matrices.
    """
    merged: Any = {}
    for name, own in base.items():
        matrices = adapter.get(name)
        if matrices is None:
            merged[name] = own
        elif isinstance(own, Mapping):
            merged[name] = merge_params(own, matrices, merge)
        else:
            merged[name] = merge(own, matrices[LORA_A], matrices[LORA_B])
    return merged
