"""The state of a run that trains an adapter (LoRA, arXiv 2106.09685): how its leaves are called, and how they merge.

The model's own parameters stand still as `variables.base`, and `params` holds two matrices for each of those that are
adapted, named like it: `params.X.lora_a` (..., in, rank) and `params.X.lora_b` (..., rank, out). The weight is
`X + alpha / rank * A @ B`; axes in front, as of stacked layers, have matrices of their own.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from runner.spec import Trajectory

BASE, A, B = "base", "lora_a", "lora_b"
_PARAMS, _BASE = "params.", f"variables.{BASE}."


@dataclass(frozen=True)
class Merge:
    """How two matrices and the weight that they adapt make the model's.

    Attributes:
        scale: alpha over rank.
        compute: the type that the sum has at least; None: that of the weight.
    """

    scale: float
    compute: str | None = None

    def __call__(self, base: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        """`base + scale * a @ b`, made in float32. Pure."""
        product = jnp.matmul(a.astype(jnp.float32), b.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
        dtype = base.dtype if self.compute is None else jnp.promote_types(base.dtype, self.compute)
        return (base.astype(jnp.float32) + self.scale * product).astype(dtype)


def merged(base: Mapping[str, Any], adapter: Mapping[str, Any], merge: Any) -> Any:
    """The model's parameters: `merge(base, a, b)` of each that the nested `adapter` names, the others as they are."""
    found: Any = {}
    for name, own in base.items():
        matrices = adapter.get(name)
        if matrices is None:
            found[name] = own
        elif isinstance(own, Mapping):
            found[name] = merged(own, matrices, merge)
        else:
            found[name] = merge(own, matrices[A], matrices[B])
    return found


def merge_of(identity: Trajectory) -> Merge | None:
    """How the adapter of a checkpoint merges, by what its manifest says of the trajectory; None: it has no adapter."""
    rank, alpha = identity.get("config.adapter.rank"), identity.get("config.adapter.alpha")
    return None if rank is None or alpha is None else Merge(alpha / rank)


@dataclass(frozen=True)
class Split:
    """The leaves of a checkpoint with an adapter, by the model's names of them.

    Attributes:
        own: the name in the manifest of each leaf of the model's weights, not merged.
        matrices: the names there of A and B of those that are adapted.
    """

    own: Mapping[str, str]
    matrices: Mapping[str, tuple[str, str]]


def split(names: Mapping[str, str]) -> Split:
    """Part weights as they are trained, name -> name in the manifest, into the model's and what adapts them."""
    own = {
        name.replace(_BASE, _PARAMS, 1) if name.startswith(_BASE) else name: saved
        for name, saved in names.items()
        if not name.startswith(_PARAMS)
    }
    pairs = {name.removesuffix(f".{A}") for name in names if name.startswith(_PARAMS) and name.endswith(f".{A}")}
    return Split(own, {name: (names[f"{name}.{A}"], names[f"{name}.{B}"]) for name in sorted(pairs)})


def is_adapted(names: Iterable[str]) -> bool:
    """Whether leaves by these dotted names are those of a run that trains an adapter."""
    return any(name.startswith(_BASE) for name in names)
