"""Leaves of a state: which ones can be saved, and the form in which they are stored.

A leaf must come back with its shape, its element type and its bits; a state with a leaf that could not is refused
before anything is committed. Three kinds need care:

- A weakly typed leaf (`jnp.asarray(1.1)`) comes back strongly typed, and the next product would have another type. So
  the state is made strongly typed at its init, and a leaf that becomes weak later is refused.
- A random key is stored as its words.
- A leaf without elements has no bytes: nothing is stored, and it is made anew.
"""

import collections
import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from runner.checkpoint.fingerprint import describe_leaves, list_leaf_names
from runner.checkpoint.manifest import LeafShape, Manifest
from runner.errors import InvalidError, ResumeError, StateError

_MAX_LISTED = 8  # problems in one message
_MAX_NAME_BYTES = 200  # of a leaf's dotted path, which becomes part of file names
_KEY_IMPLEMENTATIONS = ("threefry2x32", "rbg", "unsafe_rbg")

Leaves = dict[str, Any]  # by dotted path, in `jax.tree.leaves` order: arrays, or `jax.ShapeDtypeStruct` with shardings


def flatten_with_names(tree: Any) -> Leaves:
    """Return the leaves of a tree by dotted path."""
    return dict(zip(list_leaf_names(tree), jax.tree.leaves(tree), strict=True))


def make_abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    """Return shape, dtype and sharding of an array, which outlive it."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)


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
    """Return the tree that `make` makes, strongly typed, each leaf created in its final sharding.

    Called on every host.

    Args:
        make: pure function.
        abstract: the same tree of abstract leaves with shardings.
    """
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    return jax.jit(lambda: make_strongly_typed(make()), out_shardings=shardings)()


# Which leaves can be saved.


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


def validate_manifest_leaves(manifest: Manifest, abstract: Any, may_hold_more: bool = False) -> None:
    """Raise `ResumeError` if the job's state has other leaves than the checkpoint: its code or spec has changed.

    Args:
        manifest: the checkpoint.
        abstract: the job's state.
        may_hold_more: ignore leaves that only the checkpoint has.
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
        raise ResumeError(f"checkpoint {manifest.name} does not fit this job{format_problems(lines)}")


def format_type(dtype: Any, shape: Iterable[int]) -> str:
    """Return element type and shape for people: `float32[4,2]`."""
    return f"{dtype}[{','.join(map(str, shape))}]"


def format_problems(problems: list[str]) -> str:
    """Return the first problems, each on a new line, to be put after a sentence; an empty text if there are none."""
    more = [f"and {len(problems) - _MAX_LISTED} more"] if len(problems) > _MAX_LISTED else []
    return "".join(f"\n  {problem}" for problem in [*problems[:_MAX_LISTED], *more])


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
        # Orbax gives a key back as a key if it was stored as one.
        if _is_key(leaf) and not _is_key(array):
            found: list[Any] = []  # an abstract key tells its implementation only while it is traced
            jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), leaf)
            return jax.random.wrap_key_data(array, impl=found[0])
        return array

    return {name: decode(arrays.get(name), leaf) for name, leaf in abstract.items()}
