"""LoRA (arXiv 2106.09685): small matrices A and B are trained, and the model's own parameters stand still beside them.

The parameters of the state are A and B of each target, float32, named like it: optimizer, clip, decay and averages see
nothing else. The model's own are its variable `base`, which no gradient moves and of which there are no moments. Each
micro-batch sees `base + alpha / rank * A @ B`. B is zero at the beginning, so the first step is that of the base. What
looks at weights is shown the sum, in the form and the types of the model's own parameters.
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from runner.checkpoint.weight_names import BASE, LORA_A, LORA_B, AdapterMerge, merge_params
from runner.config import AdapterConfig
from runner.errors import InvalidError
from runner.optim.groups import Parameter, describe_parameters, list_nearest_names
from runner.train.auxiliary import EMA
from runner.train.state import PARAMS, VARIABLES, TrainState, drop_params, get_merge, get_variables, get_weights

_KEY = 2**32 - 1  # folded into the run's key for A: no step has this number
_NUM_NAMED = 3


def _is_matrix(parameter: Parameter) -> bool:
    return len(parameter.shape) - parameter.num_stack_axes == 2


def make_merge(rule: AdapterConfig, compute: str) -> AdapterMerge:
    """How the adapter of a config merges in a step that computes in the type `compute`."""
    return AdapterMerge(rule.alpha / rule.rank, compute)


def make_abstract_adapter(boxed: Any, rule: AdapterConfig) -> Any:
    """Abstract A and B with their logical axis names, from those of the model's parameters.

    Raises `InvalidError` for a target that fits nothing, or no matrix.
    """
    tree: Any = {}
    known = {leaf.name: (path, leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(describe_parameters(boxed))}
    for name in _targets([leaf for _, leaf in known.values()], rule.targets):
        path, leaf = known[name]
        branch = functools.reduce(lambda branch, key: branch.setdefault(key.key, {}), path, tree)
        stacked, (rows, columns) = leaf.shape[:-2], leaf.shape[-2:]
        names, (of_rows, of_columns) = leaf.axes[:-2], leaf.axes[-2:]
        branch[LORA_A] = _boxed((*stacked, rows, rule.rank), (*names, of_rows, None))
        branch[LORA_B] = _boxed((*stacked, rule.rank, columns), (*names, None, of_columns))
    return tree


def _boxed(shape: tuple[int, ...], axes: tuple[str | None, ...]) -> Any:
    return nn.LogicallyPartitioned(jax.ShapeDtypeStruct(shape, jnp.float32), names=axes)


def _targets(leaves: Sequence[Parameter], patterns: Sequence[str]) -> list[str]:
    """The matrices that patterns fit, by their own names or by that of the module whose parameters they are."""
    found: set[str] = set()
    for pattern in patterns:
        by_module = [
            leaf for leaf in leaves if (module := leaf.name.rpartition(".")[0]) and fnmatchcase(module, pattern)
        ]
        by_name = [leaf for leaf in leaves if fnmatchcase(leaf.name, pattern) and leaf not in by_module]
        matrices = [leaf for leaf in leaves if _is_matrix(leaf)]
        near = ", ".join(list_nearest_names(pattern.replace("*", ""), matrices)[:_NUM_NAMED])
        if not by_module and not by_name:
            raise InvalidError(
                f"config.adapter.targets: {pattern!r} fits no parameter; the nearest matrices are {near}"
            )
        wrong = [leaf for leaf in by_name if not _is_matrix(leaf)]
        fitting = [leaf for leaf in (*by_module, *by_name) if _is_matrix(leaf)]
        if wrong or not fitting:
            leaf = (wrong or by_module)[0]
            own = list(leaf.shape[leaf.num_stack_axes :])
            raise InvalidError(
                f"config.adapter.targets: {pattern!r} fits {leaf.name}, which is no matrix: its shape is {own}; needs "
                f"matrices, such as {near}"
            )
        found |= {leaf.name for leaf in fitting}
    return [leaf.name for leaf in leaves if leaf.name in found]


def init_adapter(boxed: Any, key: jax.Array) -> Any:
    """A and B at step 0: A uniform within 1 / sqrt(in), as PEFT's (Kaiming's with a = sqrt(5)), B zero. Pure."""
    own = jax.random.fold_in(key, _KEY)
    paths, structure = jax.tree_util.tree_flatten_with_path(nn.unbox(boxed))
    leaves = []
    for number, (path, leaf) in enumerate(paths):
        bound = 1 / math.sqrt(leaf.shape[-2]) if path[-1].key == LORA_A else 0.0
        draw = functools.partial(jax.random.uniform, minval=-bound, maxval=bound)
        leaves.append(draw(jax.random.fold_in(own, number), leaf.shape) if bound else jnp.zeros(leaf.shape))
    return jax.tree.unflatten(structure, leaves)


def combine_with_base(variables: Mapping[str, Any], adapter: Any) -> Any:
    """A model's variables, or what is known of them, with the adapter as its parameters, and its own as the base.

    Raises `InvalidError` if the model has a collection of that name itself.
    """
    if BASE in variables:
        raise InvalidError(f"config.adapter: the model has variables called {BASE!r} itself; give them another name")
    return {**drop_params(variables), BASE: variables[PARAMS], PARAMS: adapter}


# What looks at weights.


def merge_adapter(state: TrainState) -> TrainState:
    """A state, which may be abstract, whose parameters are the model's own; averages and moments are left out."""
    if get_merge(state) is None:
        return state
    return state.replace(
        params=_merged(state, state.params), variables=get_variables(state), merge=None, riders={}, opt_state=()
    )


def get_model_weights(state: TrainState) -> Any:
    """The model's parameters, merged where an adapter is trained, and its other variables. The state may be abstract.

    The sum is in the types of the base. Called on every host.
    """
    return get_weights(merge_adapter(state))


def replace_base(state: TrainState, weights: Mapping[str, Any]) -> TrainState:
    """A state at step 0 begun with a model's weights, as `get_model_weights` gives them: an adapter's base."""
    if get_merge(state) is None:
        return state.replace(**weights)
    return state.replace(variables={**weights.get(VARIABLES, {}), BASE: weights[PARAMS]})


class LazyMergedWeights(Mapping[str, Any]):
    """Weights by name, each merged when it is first asked for: most rows are evaluated by nobody."""

    def __init__(self, made: Mapping[str, Callable[[], Any]]):
        self._made = {name: functools.cache(make) for name, make in made.items()}

    def __getitem__(self, name: str) -> Any:
        return self._made[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._made)

    def __len__(self) -> int:
        return len(self._made)


def make_lazy_weights(state: TrainState) -> Mapping[str, Any]:
    """Return the model weights of a state with an adapter, and its averages below `ema`, merged on first access."""
    variables, averages = get_variables(state), state.riders.get(EMA, {})
    made: dict[str, Callable[[], Any]] = {PARAMS: lambda: _merged(state, state.params)}
    made |= {VARIABLES: lambda: variables} if variables else {}
    merged_averages = {decay: functools.partial(_merged, state, params) for decay, params in averages.items()}
    return LazyMergedWeights(made | ({EMA: lambda: LazyMergedWeights(merged_averages)} if averages else {}))


def _merged(state: TrainState, adapter: Any) -> Any:
    """The model's parameters by the state's base and this adapter, each lying as in the base."""
    assert state.merge is not None
    scale = state.merge.scale
    return merge_params(state.variables[BASE], adapter, lambda base, a, b: _merge_one(scale, base, a, b))


def _merge_one(scale: float, base: Any, a: Any, b: Any) -> Any:
    return base if isinstance(base, jax.ShapeDtypeStruct) else _merger(scale, base.sharding)(base, a, b)


@functools.lru_cache(maxsize=64)
def _merger(scale: float, sharding: Any) -> Callable[..., jax.Array]:
    return jax.jit(AdapterMerge(scale), out_shardings=sharding)
