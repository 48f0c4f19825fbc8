"""The state of a run that trains an adapter (LoRA, arXiv 2106.09685): how its leaves are called, and how they merge.

The model's own parameters stand still as `variables.base`, and `params` holds two matrices for each of those that are
adapted, named like it: `params.X.lora_a` (..., in, rank) and `params.X.lora_b` (..., rank, out). The weight is
`X + alpha / rank * A @ B`; axes in front, as of stacked layers, have matrices of their own.

Averages of the parameters that ride along in a state: what the leaves of a checkpoint call them.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from runner.errors import InvalidError
from runner.records import PARAMS
from runner.spec import Trajectory

_BEGIN = "riders.ema."  # of their names: then the decay, and what `params` has
_PARAMS_AVERAGE = f"{PARAMS}."


def list_averages(leaves: Collection[str]) -> list[str]:
    """Those that are there whole, as `ema_<decay>`."""
    params = [name.removeprefix(PARAMS) for name in leaves if name.startswith(_PARAMS_AVERAGE)]
    begins = {name.removesuffix(param) for name in leaves for param in params[:1] if name.endswith(param)}
    found = [begin for begin in begins if begin.startswith(_BEGIN)]
    whole = [begin for begin in found if all(f"{begin}{param}" in leaves for param in params)]
    return sorted(f"ema_{begin.removeprefix(_BEGIN)}" for begin in whole)


def validate_weight_name(leaves: Collection[str], weights: str) -> None:
    """Raise `InvalidError`, saying which there are, if `weights` are neither those that are trained nor an average."""
    known = [PARAMS, *list_averages(leaves)]
    if weights not in known:
        raise InvalidError(f"got weights {weights!r}, has {', '.join(known)}; needs one of them")


def map_weight_names(weights: str, names: Iterable[str]) -> dict[str, str]:
    """By the names of leaves: what the leaf is called that takes its place in these weights."""
    prefix = _BEGIN + weights.removeprefix("ema_")
    return {
        name: f"{prefix}.{name.removeprefix(_PARAMS)}"
        if weights != PARAMS and name.startswith(_PARAMS_AVERAGE)
        else name
        for name in names
    }


BASE, LORA_A, LORA_B = "base", "lora_a", "lora_b"
_PARAMS, _BASE = "params.", f"variables.{BASE}."


@dataclass(frozen=True)
class AdapterMerge:
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


def merge_params(base: Mapping[str, Any], adapter: Mapping[str, Any], merge: Any) -> Any:
    """The model's parameters: `merge(base, a, b)` of each that the nested `adapter` names, the others as they are."""
    found: Any = {}
    for name, own in base.items():
        matrices = adapter.get(name)
        if matrices is None:
            found[name] = own
        elif isinstance(own, Mapping):
            found[name] = merge_params(own, matrices, merge)
        else:
            found[name] = merge(own, matrices[LORA_A], matrices[LORA_B])
    return found


def find_adapter_merge(identity: Trajectory) -> AdapterMerge | None:
    """How the adapter of a checkpoint merges, by what its manifest says of the trajectory; None: it has no adapter."""
    rank, alpha = identity.get("config.adapter.rank"), identity.get("config.adapter.alpha")
    return None if rank is None or alpha is None else AdapterMerge(alpha / rank)


@dataclass(frozen=True)
class AdapterSplit:
    """The leaves of a checkpoint with an adapter, by the model's names of them.

    Attributes:
        own: the name in the manifest of each leaf of the model's weights, not merged.
        matrices: the names there of A and B of those that are adapted.
    """

    own: Mapping[str, str]
    matrices: Mapping[str, tuple[str, str]]


def split_adapter(names: Mapping[str, str]) -> AdapterSplit:
    """Part weights as they are trained, name -> name in the manifest, into the model's and what adapts them."""
    own = {
        name.replace(_BASE, _PARAMS, 1) if name.startswith(_BASE) else name: saved
        for name, saved in names.items()
        if not name.startswith(_PARAMS)
    }
    pairs = {
        name.removesuffix(f".{LORA_A}") for name in names if name.startswith(_PARAMS) and name.endswith(f".{LORA_A}")
    }
    return AdapterSplit(own, {name: (names[f"{name}.{LORA_A}"], names[f"{name}.{LORA_B}"]) for name in sorted(pairs)})


def has_adapter(names: Iterable[str]) -> bool:
    """Whether leaves by these dotted names are those of a run that trains an adapter."""
    return any(name.startswith(_BASE) for name in names)
