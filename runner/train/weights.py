"""Weights of a model in the state that a run trains, as evaluators, hooks and read-only tools get them.

If the run trains an adapter, they are merged, with the structure and the types of the model's own parameters.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import jax
import numpy as np

from runner.checkpoint.leaves import BASE, AdapterMerge, merge_params
from runner.train.auxiliary import EMA
from runner.train.state import PARAMS, RIDERS, VARIABLES, TrainState, get_merge, get_variables, get_weights

DONATED = "it has donated the weights that it was given, which the next step needs; donate a copy of them"


def get_model_state(state: TrainState) -> TrainState:
    """Return the state with the model's own parameters, without averages and moments of an adapter.

    The state may be abstract. Without an adapter it is returned as it is.
    """
    if get_merge(state) is None:
        return state
    return state.replace(
        params=_merge(state, state.params), variables=get_variables(state), merge=None, riders={}, opt_state=()
    )


def get_model_weights(state: TrainState) -> Any:
    """Return the model's parameters, merged if an adapter is trained, and its other variables.

    The merged parameters have the types of the base. The state may be abstract. Called on every host.
    """
    return get_weights(get_model_state(state))


def replace_base(state: TrainState, weights: Mapping[str, Any]) -> TrainState:
    """Return the state at step 0 with a model's weights (`get_model_weights`) as the base of its adapter."""
    if get_merge(state) is None:
        return state.replace(**weights)
    return state.replace(variables={**weights.get(VARIABLES, {}), BASE: weights[PARAMS]})


class LazyMergedWeights(MutableMapping[str, Any]):
    """Weights by name that are merged on first access, since most rows are not evaluated."""

    def __init__(self, make_by_name: Mapping[str, Callable[[], Any]]):
        self._make = {name: functools.cache(make) for name, make in make_by_name.items()}

    def __getitem__(self, name: str) -> Any:
        return self._make[name]()

    def __setitem__(self, name: str, value: Any) -> None:
        self._make[name] = functools.cache(lambda: value)

    def __delitem__(self, name: str) -> None:
        del self._make[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._make)

    def __len__(self) -> int:
        return len(self._make)

    def copy_containers(self) -> "LazyMergedWeights":
        """Return a copy that shares the merged weights, but no mutable container."""
        own = {name: functools.partial(lambda make: copy_containers(make()), make) for name, make in self._make.items()}
        return LazyMergedWeights(own)


def copy_containers(weights: Any) -> Any:
    """Return weights in new containers, for user code, which may write into them.

    JAX arrays are shared, because they are immutable; NumPy arrays are copied.
    """

    def copy(leaf: Any) -> Any:
        if isinstance(leaf, LazyMergedWeights):
            return leaf.copy_containers()
        return leaf.copy() if isinstance(leaf, np.ndarray) else leaf

    return jax.tree.map(copy, weights)


def are_donated(weights: Any) -> bool:
    """Return True if weights were donated to a function (`donate_argnums` of `jax.jit`)."""
    return any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in jax.tree.leaves(weights))


def add_averages(get_own_weights: Callable[[Any], Any], state: Any) -> Any:
    """Return `get_own_weights(state)` with the averages of the state below `ema`, by decay, if it has some.

    Weights and averages of an adapter are merged on first access.
    """
    if get_merge(state) is None:
        auxiliary = getattr(state, RIDERS, {})
        return get_own_weights(state) | ({EMA: auxiliary[EMA]} if EMA in auxiliary else {})
    # Merging costs a matmul per target and the memory of the model for each average, and most rows need no weights.
    variables, averages = get_variables(state), state.riders.get(EMA, {})
    make_by_name: dict[str, Callable[[], Any]] = {PARAMS: lambda: _merge(state, state.params)}
    make_by_name |= {VARIABLES: lambda: variables} if variables else {}
    merged_averages = {decay: functools.partial(_merge, state, params) for decay, params in averages.items()}
    return LazyMergedWeights(make_by_name | ({EMA: lambda: LazyMergedWeights(merged_averages)} if averages else {}))


def _merge(state: TrainState, trained: Any) -> Any:
    """Return the state's base merged with an adapter, each leaf sharded as in the base."""
    assert state.merge is not None
    scale = state.merge.scale

    def merge_leaf(base: Any, a: Any, b: Any) -> Any:
        is_abstract = isinstance(base, jax.ShapeDtypeStruct)
        return base if is_abstract else _compile_merge(scale, base.sharding)(base, a, b)

    return merge_params(state.variables[BASE], trained, merge_leaf)


@functools.lru_cache(maxsize=64)
def _compile_merge(scale: float, sharding: Any) -> Callable[..., jax.Array]:
    """Return a jitted merge; cached, since a new jit object would compile again."""
    return jax.jit(AdapterMerge(scale), out_shardings=sharding)
