"""Auxiliary train state: branches of the state that features and hooks keep, such as averages and counters.

An auxiliary state is a pytree below `riders` of the train state, by name; it is saved, restored, compared and
fingerprinted like every leaf. A leaf with the name and the shape of a parameter is sharded like that parameter, all
other leaves are replicated. A job without auxiliary states has no such leaf, and its compiled program contains no code
for them.

An auxiliary state with an `update` changes in every step, inside the compiled program, after the optimizer. One with a
`judge` decides whether the update of a step is applied (`runner.train.features.stability`). The step passes an
auxiliary state without `update` and `judge` through unchanged; code on the host, such as hooks, may replace it between
two steps.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from runner.errors import InvalidError

EMA = "ema"  # branch of the averages of weights, which checkpoints and evaluators name
Scalars = dict[str, jax.Array]  # metrics of one step by name


@dataclass(frozen=True)
class HalfBatchGradients:
    """Statistics of the gradients over the two halves of a global batch, by the order of its examples."""

    squares: jax.Array  # squared norm of the mean gradient of each half; float32[2]
    product: jax.Array  # scalar product of the two mean gradients
    counts: jax.Array  # total target weight (number of real target tokens) of each half; float32[2]


@dataclass(frozen=True)
class StepObservation:
    """Traced values of a step that auxiliary states are updated from."""

    step: jax.Array  # completed steps, this one included; int32
    params: Any  # parameters after the step, in the type in which they are stored
    grads: Any  # gradients of the mean loss over the whole batch, float32, before clipping
    loss: jax.Array  # mean over the whole batch; float32
    meta: Mapping[str, jax.Array]  # what `forward` returned, as the step returns it
    # Statistics of the halves of the batch, only if an auxiliary state has `needs_halves`.
    halves: HalfBatchGradients | None = None


@dataclass(frozen=True)
class StepOutcome:
    """Traced values of a step that decide whether its update is applied."""

    loss: jax.Array  # mean over the whole batch; float32
    grad_norm: jax.Array  # of all gradients, before clipping; float32
    has_target: jax.Array  # False if the batch turned out to have no target
    step: jax.Array | int  # completed steps, this one included; int32


@dataclass(frozen=True)
class AuxiliaryState:
    """One auxiliary pytree of the train state and its update. The functions are pure.

    Attributes:
        name: branch of the pytree below `riders` of the train state.
        init: function from the parameters to the pytree before the first step, called again when a run begins with the
            weights of another one. It returns arrays of its own, because the step donates them.
        update: function from (pytree, observation of the step) to (next pytree, scalars for the step's metrics), of the
            same shapes and types; None: steps leave it alone.
        judge: function from (pytree, outcome of the step) to (True if the update of the step is applied, next pytree,
            scalars for the step's metrics), of the same shapes and types. The next pytree is kept in either case. If
            the update is not applied, the rest of the train state is unchanged, except for the counts of steps.
        needs_halves: True if `update` reads the gradients of both halves of the batch, which costs the memory of one
            more gradient and needs an even number of micro-batches.
    """

    name: str
    init: Callable[[Any], Any]
    update: Callable[[Any, StepObservation], tuple[Any, Scalars]] | None = None
    judge: Callable[[Any, StepOutcome], tuple[jax.Array, Any, Scalars]] | None = None
    needs_halves: bool = False


def init_auxiliary(auxiliary_states: Sequence[AuxiliaryState], params: Any) -> Any:
    """Return the initial pytrees by name. Raises `InvalidError` if two auxiliary states have the same name."""
    for name, count in Counter(each.name for each in auxiliary_states).items():
        if count > 1:
            raise InvalidError(f"{count} auxiliary states of the job are called {name!r}; give each its own name")
    return {each.name: each.init(params) for each in auxiliary_states}


def update_auxiliary(
    auxiliary_states: Sequence[AuxiliaryState], before: Any, observation: StepObservation
) -> tuple[Any, Scalars]:
    """Return (pytrees by name after a step, scalars for its metrics). To be traced."""
    after = dict(before)
    scalars: Scalars = {}
    for each in auxiliary_states:
        if each.update is not None:
            after[each.name], own_scalars = each.update(before[each.name], observation)
            scalars |= own_scalars
    return after, scalars


def judge_update(
    auxiliary_states: Sequence[AuxiliaryState], before: Any, outcome: StepOutcome
) -> tuple[jax.Array, Any, Scalars]:
    """Return (True if all states with a `judge` accept the update, their next pytrees by name, scalars). To be traced.

    A step whose update is not accepted is counted, but leaves the rest of the train state unchanged.
    """
    is_accepted = jnp.bool_(True)
    after: dict[str, Any] = {}
    scalars: Scalars = {}
    for each in auxiliary_states:
        if each.judge is not None:
            is_own_accepted, after[each.name], own_scalars = each.judge(before[each.name], outcome)
            is_accepted, scalars = is_accepted & is_own_accepted, scalars | own_scalars
    return is_accepted, after, scalars


def validate_auxiliary(auxiliary_states: Sequence[AuxiliaryState], before: Any, after: Any) -> None:
    """Raise `InvalidError` if a traced step returns an auxiliary state with an `update` or a `judge` unchanged.

    A custom `train_step` of an experiment may forget to call `update_auxiliary` or `judge_update`.
    """
    for each in auxiliary_states:
        pairs = list(zip(jax.tree.leaves(before[each.name]), jax.tree.leaves(after.get(each.name)), strict=False))
        if (each.update or each.judge) and pairs and all(old is new for old, new in pairs):
            function = "judge_update" if each.update is None else "update_auxiliary"
            raise InvalidError(
                f"train_step of the job leaves riders.{each.name} as it is; call BaseTrainer.train_step, or "
                f"{function} of runner.train.auxiliary after the optimizer"
            )


def compare_halves(first: Any, both: Any, counts: jax.Array, divisor: jax.Array | None) -> HalfBatchGradients:
    """Return the statistics of two halves of a batch, from gradients summed over the first half, and over both.

    `counts` is the total target weight of each half, float32[2], and `divisor` the number by which the summed losses
    were divided; None if they were not.
    """
    # Counts of 0, of a half that holds only padding, would give NaN; `tiny` keeps the division finite.
    second = jax.tree.map(jnp.subtract, both, first)
    shares = jnp.maximum(counts, jnp.finfo(jnp.float32).tiny) / (1.0 if divisor is None else divisor)
    products = [
        jax.tree.reduce(jnp.add, jax.tree.map(jnp.vdot, *pair))
        for pair in [(first, first), (second, second), (first, second)]
    ]
    squares = jnp.stack(products[:2]) / shares**2
    return HalfBatchGradients(squares, products[2] / (shares[0] * shares[1]), counts)
