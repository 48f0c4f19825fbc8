"""LoRA adapters (arXiv 2106.09685): small matrices A and B are trained beside the frozen parameters of the model.

The parameters of the train state are A and B of each target, float32, below the target's name: optimizer, clipping,
weight decay and averages apply to them alone. The model's own parameters are the variables `base` of the train state,
without gradients or moments. Each micro-batch is computed with `base + alpha / rank * A @ B`. B is initialised to zero,
so the first step computes the same outputs as the base. `weights` merges them for read-only tools.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from runner.checkpoint.leaves import BASE, LORA_A, LORA_B
from runner.config import AdapterConfig
from runner.errors import InvalidError
from runner.optim.groups import Parameter, describe_parameters, format_nearest_names
from runner.train.state import PARAMS, drop_params

_INIT_KEY = 2**32 - 1  # folded into the run's key for A; no step has this number


def make_abstract_adapter(boxed: Any, config: AdapterConfig) -> Any:
    """Return abstract A and B with their logical axis names, from the boxed parameters of the model.

    Raises `InvalidError` for a target that matches no matrix.
    """

    def box(shape: tuple[int, ...], axes: tuple[str | None, ...]) -> Any:
        return nn.LogicallyPartitioned(jax.ShapeDtypeStruct(shape, jnp.float32), names=axes)

    tree: Any = {}
    known = {leaf.name: (path, leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(describe_parameters(boxed))}
    for name in _match_targets([leaf for _, leaf in known.values()], config.targets):
        path, leaf = known[name]
        branch = functools.reduce(lambda branch, key: branch.setdefault(key.key, {}), path, tree)
        # Axes of stacked layers or experts come first; each element of a stack has an adapter of its own.
        stacked, (rows, columns) = leaf.shape[:-2], leaf.shape[-2:]
        stack_axes, (row_axis, column_axis) = leaf.axes[:-2], leaf.axes[-2:]
        branch[LORA_A] = box((*stacked, rows, config.rank), (*stack_axes, row_axis, None))
        branch[LORA_B] = box((*stacked, config.rank, columns), (*stack_axes, None, column_axis))
    return tree


def _match_targets(leaves: Sequence[Parameter], patterns: Sequence[str]) -> list[str]:
    """Return the names of the matrices that match, by their own names or by that of the module that holds them."""

    def is_matrix(parameter: Parameter) -> bool:
        return len(parameter.shape) - parameter.num_stack_axes == 2

    found: set[str] = set()
    for pattern in patterns:
        by_module = [
            leaf for leaf in leaves if (module := leaf.name.rpartition(".")[0]) and fnmatchcase(module, pattern)
        ]
        by_name = [leaf for leaf in leaves if fnmatchcase(leaf.name, pattern) and leaf not in by_module]
        matrices = [leaf for leaf in leaves if is_matrix(leaf)]
        near = format_nearest_names(pattern, matrices)
        if not by_module and not by_name:
            raise InvalidError(f"config.adapter.targets: {pattern!r} matches no parameter; the matrices are {near}")
        # A module may hold vectors besides its matrices (a bias), but it is a mistake to name a vector as a target.
        wrong = [leaf for leaf in by_name if not is_matrix(leaf)]
        fitting = [leaf for leaf in (*by_module, *by_name) if is_matrix(leaf)]
        if wrong or not fitting:
            leaf = (wrong or by_module)[0]
            shape = list(leaf.shape[leaf.num_stack_axes :])
            raise InvalidError(
                f"config.adapter.targets: {pattern!r} fits {leaf.name}, which is no matrix: its shape is {shape}; "
                f"needs matrices, such as {near}"
            )
        found |= {leaf.name for leaf in fitting}
    return [leaf.name for leaf in leaves if leaf.name in found]


def init_adapter(boxed: Any, key: jax.Array) -> Any:
    """Return A and B at step 0. Pure.

    A is uniform within 1 / sqrt(in), as in PEFT (Kaiming's initialisation with a = sqrt(5)), B is zero.
    """
    own_key = jax.random.fold_in(key, _INIT_KEY)
    paths, structure = jax.tree_util.tree_flatten_with_path(nn.unbox(boxed))
    # A key per leaf by its index, so that a matrix does not depend on the shapes of others.
    leaves = []
    for number, (path, leaf) in enumerate(paths):
        bound = 1 / math.sqrt(leaf.shape[-2]) if path[-1].key == LORA_A else 0.0
        draw = functools.partial(jax.random.uniform, minval=-bound, maxval=bound)
        leaves.append(draw(jax.random.fold_in(own_key, number), leaf.shape) if bound else jnp.zeros(leaf.shape))
    return jax.tree.unflatten(structure, leaves)


def combine_with_base(variables: Mapping[str, Any], adapter: Any) -> Any:
    """Return variables (or shapes, or shardings) with the adapter as `params` and the model's `params` as `base`.

    Raises `InvalidError` if the model has a collection called `base` itself.
    """
    if BASE in variables:
        raise InvalidError(f"config.adapter: the model has variables called {BASE!r} itself; give them another name")
    return {**drop_params(variables), BASE: variables[PARAMS], PARAMS: adapter}
