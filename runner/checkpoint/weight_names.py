"""Names of weights in a state: trained parameters, their averages, and the matrices of an adapter.

The average of the parameters with decay 0.999 is called `ema_0.999`; its leaves are `riders.ema.0.999.X`, beside
`params.X`.

In a run that trains an adapter (LoRA, arXiv 2106.09685), the model's own parameters are frozen as `variables.base`, and
`params` holds two matrices for each parameter that is adapted, named like it: `params.X.lora_a` (..., in, rank) and
`params.X.lora_b` (..., rank, out). The weight is `X + alpha / rank * A @ B`; leading axes, as of stacked layers, have
matrices of their own.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from runner.errors import InvalidError
from runner.records import PARAMS
from runner.spec import Trajectory

BASE, LORA_A, LORA_B = "base", "lora_a", "lora_b"
_PARAMS, _BASE = f"{PARAMS}.", f"variables.{BASE}."
_AVERAGE = "riders.ema."  # prefix of an average's leaves: then come its decay and the name in `params`


# Averages.


def list_averages(leaves: Collection[str]) -> list[str]:
    """Return the averages of which every parameter is among the leaves, as `ema_<decay>`, sorted."""
    params = [name.removeprefix(PARAMS) for name in leaves if name.startswith(_PARAMS)]
    # A decay may contain dots, so it is found as that which is left of a name without the name of a parameter.
    prefixes = {name.removesuffix(param) for name in leaves for param in params[:1] if name.endswith(param)}
    averages = [prefix for prefix in prefixes if prefix.startswith(_AVERAGE)]
    whole = [prefix for prefix in averages if all(f"{prefix}{param}" in leaves for param in params)]
    return sorted(f"ema_{prefix.removeprefix(_AVERAGE)}" for prefix in whole)


def validate_weight_name(leaves: Collection[str], weights: str) -> None:
    """Raise `InvalidError`, with the names that exist, if `weights` is neither `params` nor an average."""
    known = [PARAMS, *list_averages(leaves)]
    if weights not in known:
        raise InvalidError(f"got weights {weights!r}, has {', '.join(known)}; needs one of them")


def map_weight_names(weights: str, names: Iterable[str]) -> dict[str, str]:
    """Return, for each leaf, the name of the leaf that takes its place in these weights.

    Args:
        weights: `params` or `ema_<decay>`.
        names: names of leaves; those outside `params` keep their names.
    """
    prefix = _AVERAGE + weights.removeprefix("ema_")
    return {
        name: f"{prefix}.{name.removeprefix(_PARAMS)}" if weights != PARAMS and name.startswith(_PARAMS) else name
        for name in names
    }


# Adapters.


@dataclass(frozen=True)
class AdapterMerge:
    """Sum of a frozen weight and the product of its two matrices.

    Attributes:
        scale: alpha over rank.
        compute: element type that the sum has at least; None for that of the weight.
    """

    scale: float
    compute: str | None = None

    def __call__(self, base: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        """Return `base + scale * a @ b`, computed in float32. Pure."""
        product = jnp.matmul(a.astype(jnp.float32), b.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
        dtype = base.dtype if self.compute is None else jnp.promote_types(base.dtype, self.compute)
        return (base.astype(jnp.float32) + self.scale * product).astype(dtype)


@dataclass(frozen=True)
class AdapterSplit:
    """Leaves of a checkpoint with an adapter, by the names that the model gives its weights.

    Attributes:
        own: name in the manifest of each weight of the model, not merged.
        matrices: names in the manifest of A and B, for each weight that is adapted.
    """

    own: Mapping[str, str]
    matrices: Mapping[str, tuple[str, str]]


def has_adapter(names: Iterable[str]) -> bool:
    """Return True if leaves of these names belong to a run that trains an adapter."""
    return any(name.startswith(_BASE) for name in names)


def find_adapter_merge(identity: Trajectory) -> AdapterMerge | None:
    """Return the merge of a checkpoint's adapter, from the identity in its manifest; None without an adapter."""
    rank, alpha = identity.get("config.adapter.rank"), identity.get("config.adapter.alpha")
    return None if rank is None or alpha is None else AdapterMerge(alpha / rank)


def split_adapter(names: Mapping[str, str]) -> AdapterSplit:
    """Split the weights of a run with an adapter into the model's own weights and the matrices that adapt them.

    Args:
        names: name in the manifest of each weight, by its name as it is trained.
    """
    own = {
        name.replace(_BASE, _PARAMS, 1) if name.startswith(_BASE) else name: saved
        for name, saved in names.items()
        if not name.startswith(_PARAMS)
    }
    suffix_a, suffix_b = f".{LORA_A}", f".{LORA_B}"
    adapted = {name.removesuffix(suffix_a) for name in names if name.startswith(_PARAMS) and name.endswith(suffix_a)}
    matrices = {name: (names[name + suffix_a], names[name + suffix_b]) for name in sorted(adapted)}
    return AdapterSplit(own, matrices)


def merge_params(base: Mapping[str, Any], adapter: Mapping[str, Any], merge: Callable[[Any, Any, Any], Any]) -> Any:
    """Return the model's parameters: `merge(base, a, b)` for each that the adapter names, the others unchanged.

    Args:
        base: nested dictionaries of the frozen parameters.
        adapter: nested dictionaries of the matrices.
        merge: sum of a parameter and its two matrices.
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
