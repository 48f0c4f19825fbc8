"""What a leaf of the state may be, and the form in which it is stored. A leaf that could not come back is refused.

A leaf must come back with its shape, its element type and its bits. Three kinds need care:
- a weakly typed one (`jnp.asarray(1.1)`) comes back strongly typed, and the next product would have another type: the
  state begins strong (`make_strongly_typed`), and one that becomes weak on the way is refused;
- a random key is stored as its words;
- a leaf without elements has no bytes: nothing is stored, and it is made anew.

Whether the leaves of a checkpoint are those of a job's state.
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

_MAX_NAMED = 8  # leaves in one message
_MAX_NAME_BYTES = 200  # of a leaf's dotted path, which becomes part of file names

_KEY_IMPLEMENTATIONS = ("threefry2x32", "rbg", "unsafe_rbg")

Leaves = dict[str, Any]  # by dotted path, in the order of `jax.tree.leaves`: arrays, or their shape, dtype and sharding


def flatten_with_names(tree: Any) -> Leaves:
    """The leaves of a tree by dotted path."""
    return dict(zip(list_leaf_names(tree), jax.tree.leaves(tree), strict=True))


def make_abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    """Shape, dtype and sharding of an array, which outlive it."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)


def make_strongly_typed(tree: Any) -> Any:
    """`tree` with every weakly typed leaf made strong: the same dtype, the same bits. To be traced or run."""
    return jax.tree.map(_strong, tree)


def replicate_abstract(shapes: Any) -> Any:
    """Abstract leaves of these shapes and types, of each a copy on every device of the job."""
    copies = NamedSharding(Mesh(np.array(jax.devices()), ("device",)), PartitionSpec())
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=copies), shapes)


def init_sharded(make: Callable[[], Any], abstract: Any) -> Any:
    """What `make` returns, each leaf strongly typed and born with the sharding of its abstract one. On every host."""
    return jax.jit(
        lambda: make_strongly_typed(make()), out_shardings=jax.tree.map(lambda leaf: leaf.sharding, abstract)
    )()


def _strong(leaf: Any) -> Any:
    return leaf if _is_key(leaf) else lax.convert_element_type(leaf, jnp.result_type(leaf))


def validate_leaves(abstract: Any) -> None:
    """Raise `InvalidError` naming the leaves of a state, given by shape and dtype, that could not come back."""
    names = list_leaf_names(abstract)
    if not names:
        raise InvalidError("the state has no leaf: `init` returns nothing that could be saved")
    counts = collections.Counter(names)
    problems = [f"{name}: {count} leaves have this dotted path" for name, count in counts.items() if count > 1]
    for name, leaf in zip(names, jax.tree.leaves(abstract), strict=True):
        problem = _type_problem(leaf)
        if len(name.encode()) > _MAX_NAME_BYTES:
            problem = f"its dotted path has {len(name.encode())} bytes, at most {_MAX_NAME_BYTES} can be kept"
        if problem is not None:
            problems.append(f"{name[:_MAX_NAME_BYTES]}: {problem}")
    if problems:
        raise InvalidError("the state cannot be saved" + format_problems(problems))


def _type_problem(leaf: Any) -> str | None:
    """What is wrong with the element type of an abstract leaf."""
    if _is_key(leaf):
        return None
    try:
        is_known = tensorstore.dtype(leaf.dtype.name) is not None
    except (TypeError, ValueError):
        is_known = False
    if is_known and not _is_narrow(leaf.dtype):
        return None
    return f"{leaf.dtype.name} cannot be saved; keep it in a type of 8 bits or more, and convert it where it is used"


def _is_narrow(dtype: Any) -> bool:
    """Whether several elements share a byte."""
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).bits < 8
    return bool(jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 8)


def validate_leaf_forms(state: Any, abstract: Any, step: int) -> None:
    """Raise `StateError` naming the leaves of `state` that a restore into `abstract` would refuse, or would change."""
    problems = find_form_problems(state, abstract)
    if problems:
        raise StateError(
            f"step {step} is not saved: the state could not be restored in the form that it has now{problems}"
        )


def find_form_problems(state: Any, abstract: Any) -> str:
    """A line for each leaf of `state`, which may be traced, that has another form than in `abstract`; empty if none."""
    found: Any = jax.tree.structure(state)
    expected: Any = jax.tree.structure(abstract)
    if found == expected:
        problems = list(map(_form_problem, jax.tree.leaves(state), jax.tree.leaves(abstract)))
        if not any(problems):  # at every save, of every leaf: their names are asked for only where one is needed
            return ""
        by_name = zip(list_leaf_names(state), problems, strict=True)
        return format_problems([f"{name}: {problem}" for name, problem in by_name if problem is not None])
    own, other = set(list_leaf_names(state)), set(list_leaf_names(abstract))
    lines = [f"{name}: was not there at the start" for name in sorted(own - other)]
    lines += [f"{name}: was there at the start and is gone" for name in sorted(other - own)]
    return format_problems(lines or [f"the tree was {str(expected)[:200]} and is {str(found)[:200]}"])


def _form_problem(leaf: Any, expected: Any) -> str | None:
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


def format_type(dtype: Any, shape: Iterable[int]) -> str:
    """Element type and shape for people: `float32[4,2]`."""
    return f"{dtype}[{','.join(map(str, shape))}]"


def format_problems(problems: list[str]) -> str:
    """The first of the problems, to be put after a line: each on a line of its own; empty if there are none."""
    more = [f"and {len(problems) - _MAX_NAMED} more"] if len(problems) > _MAX_NAMED else []
    return "".join(f"\n  {problem}" for problem in [*problems[:_MAX_NAMED], *more])


def _is_key(leaf: Any) -> bool:
    return bool(jax.dtypes.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key))


def parse_dtype(name: str) -> Any:
    """The element type that `str` writes so, a random key's too. Raises `TypeError` if there is none."""
    for implementation in _KEY_IMPLEMENTATIONS:
        key = jax.eval_shape(functools.partial(jax.random.key, 0, impl=implementation))
        if str(key.dtype) == name:
            return key.dtype
    return jnp.dtype(name)


# The form in which leaves are stored.


def encode_leaves(leaves: Leaves) -> Leaves:
    """The arrays that a writer is given for the leaves of a state, or a reader is asked for if they are abstract."""
    return {name: _words_of_key(leaf) if _is_key(leaf) else leaf for name, leaf in leaves.items() if leaf.size}


def _words_of_key(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array):
        return jax.random.key_data(leaf)
    words = jax.eval_shape(jax.random.key_data, leaf)
    return jax.ShapeDtypeStruct(words.shape, words.dtype, sharding=leaf.sharding)  # no key is ever cut


def decode_leaves(arrays: Leaves, abstract: Leaves) -> Leaves:
    """The leaves of `abstract` from what a reader has read: orbax gives a key back as one if it was stored as one."""
    return {name: _from_stored(arrays.get(name), leaf) for name, leaf in abstract.items()}


def _from_stored(array: Any, leaf: Any) -> jax.Array:
    if leaf.size == 0:
        return _nothing(leaf)
    if _is_key(leaf) and not _is_key(array):
        return jax.random.wrap_key_data(array, impl=_implementation(leaf))
    return array


def _implementation(leaf: Any) -> Any:
    """The generator that a key, given by shape and dtype, belongs to."""
    found: list[Any] = []
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), leaf)
    return found[0]


def _nothing(leaf: Any) -> jax.Array:
    """An array without elements, like `leaf`. Called on every host."""
    return jax.jit(lambda: jnp.zeros(leaf.shape, leaf.dtype), out_shardings=leaf.sharding)()


def validate_manifest_leaves(manifest: Manifest, abstract: Any, may_hold_more: bool = False) -> None:
    """Raise `ResumeError` if the job's state has other leaves than the checkpoint: its code or spec has changed.

    With `may_hold_more`, leaves that only the checkpoint has are passed over.
    """
    expected = describe_leaves(abstract)
    saved = {name: LeafShape(shape=leaf["shape"], dtype=leaf["dtype"]) for name, leaf in manifest.leaves.items()}
    compared = expected.keys() if may_hold_more else expected.keys() | saved.keys()
    names = sorted(name for name in compared if expected.get(name) != saved.get(name))
    if names:
        lines = [f"{name}: checkpoint has {_leaf(saved, name)}, the job {_leaf(expected, name)}" for name in names]
        raise ResumeError(f"checkpoint {manifest.name} does not fit this job{format_problems(lines)}")


def _leaf(leaves: dict[str, LeafShape], name: str) -> str:
    return format_type(leaves[name]["dtype"], leaves[name]["shape"]) if name in leaves else "nothing"
