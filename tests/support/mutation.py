"""Hooks and evaluators that modify every object they are given, at every depth."""

import contextlib
import dataclasses
from collections.abc import MutableMapping, MutableSequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from runner.hook import Hook, Moment, Observer


def mutate(tree: Any) -> None:
    """Replace every leaf, and add and remove entries, where a container of `tree` lets itself be written to."""
    if isinstance(tree, np.ndarray):
        with contextlib.suppress(ValueError):  # a read-only array
            tree[...] = 1
    elif isinstance(tree, MutableMapping) or hasattr(tree, "keys"):
        own = getattr(tree, "_dict", tree)  # the dict inside a FrozenDict
        for key in list(own):
            mutate(own[key])
            with contextlib.suppress(TypeError):
                own[key] = _make_replacement(own[key])
        with contextlib.suppress(TypeError):
            own["more"] = 1
    elif isinstance(tree, MutableSequence):
        for place, each in enumerate(tree):
            mutate(each)
            tree[place] = _make_replacement(each)
        tree.append(1)
    elif isinstance(tree, tuple):
        for each in tree:
            mutate(each)
    elif dataclasses.is_dataclass(tree):
        for field in dataclasses.fields(tree):
            mutate(getattr(tree, field.name))
            object.__setattr__(tree, field.name, _make_replacement(getattr(tree, field.name)))


def _make_replacement(value: Any) -> Any:
    if isinstance(value, jax.Array):
        return jnp.round(value) + jnp.ones_like(value)
    return 7.0 if isinstance(value, int | float) and not isinstance(value, bool) else value


class MutatingEvaluator:
    """Evaluator that modifies its weights."""

    name = "vandal"

    def evaluate(self, weights: Any, step: int, hosts: Any) -> dict[str, Any]:
        mutate(weights)
        return {"val/vandal": float(step)}


def mutate_moment(hook: Any, moment: Moment) -> None:
    """Modify everything that a moment gives access to."""
    mutate(moment.weights)
    mutate(moment.row)
    mutate(moment.counters)


class MutatingHook(Hook):
    """Hook that modifies its arguments in every call."""

    def init(self) -> Any:
        """Return nested counters."""
        return {"n": np.int32(0), "more": [np.zeros(2, np.int32)]}

    on_start = on_row = on_evaluation = on_checkpoint = on_end = mutate_moment


class MutatingObserver(Observer):
    """Observer that modifies its arguments in every call."""

    on_start = on_row = on_evaluation = on_checkpoint = on_end = mutate_moment
