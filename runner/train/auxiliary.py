"""Auxiliary train state: averages of weights, the gradient-noise scale, counters of hooks.

An auxiliary state is a pytree below `riders` of the train state, by name; it is saved, restored, compared and
fingerprinted like every leaf. A leaf with the name and the shape of a parameter is sharded like that parameter, all
other leaves are replicated. A job without auxiliary states has no such leaf, and its compiled program contains no code
for them.

An auxiliary state with an `update` changes in every step, inside the compiled program, after the optimizer. One with a
`judge` decides whether the update of a step is applied (see `runner.train.stability`). The step passes an auxiliary
state without `update` and `judge` through unchanged; code on the host, such as hooks, may replace it between two steps.

**Exponential moving averages** (`make_ema`) are float32 and start as a copy of the parameters. A step computes
`average + (1 - decay) * (parameter - average)`, in this form, so that the average of constant parameters stays
bit-identical to them.

**Gradient-noise scale** (`make_noise_scale`): the batch size, in tokens, above which more data per step gains little
(McCandlish et al. 2018, https://arxiv.org/abs/1812.06162, appendix A). The expected squared norm of a gradient over n
tokens is |G|^2 + tr / n, with G the gradient over all data and tr the trace of its covariance for one token; two batch
sizes determine both, and their ratio tr / |G|^2 is the scale. The two batch sizes used here are the global batch and
each of its two halves, in the order of its examples, so that the result does not depend on devices or micro-batches.
The formulas of the paper then become

    |G|^2 = g1 . g2,    tr = mean of n_i (|g_i|^2 - g1 . g2),    g_i the mean gradient over the n_i tokens of half i.

A single estimate is very noisy, so both are averaged over steps before they are divided.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from runner.errors import InvalidError

EMA, NOISE_SCALE = "ema", "noise_scale"
Scalars = dict[str, jax.Array]  # metrics of one step by name


@dataclass(frozen=True)
class HalfBatchGradients:
    """Statistics of the gradients over the two halves of a global batch, by the order of its examples.

    Attributes:
        squares: squared norm of the mean gradient of each half; float32[2].
        product: scalar product of the two mean gradients.
        counts: total target weight (number of real target tokens) of each half; float32[2].
    """

    squares: jax.Array
    product: jax.Array
    counts: jax.Array


@dataclass(frozen=True)
class StepObservation:
    """Traced values of a step that auxiliary states are updated from.

    Attributes:
        step: completed steps, this one included; int32.
        params: parameters after the step, in the type in which they are stored.
        grads: gradients of the mean loss over the whole batch, float32, before clipping.
        halves: statistics of the halves of the batch, only if an auxiliary state has `needs_halves`.
    """

    step: jax.Array
    params: Any
    grads: Any
    halves: HalfBatchGradients | None = None


@dataclass(frozen=True)
class StepOutcome:
    """Traced values of a step that decide whether its update is applied.

    Attributes:
        loss: mean loss over the whole batch; float32.
        grad_norm: global norm of the gradients before clipping; float32.
        has_target: False if the batch turned out to have no target.
        step: completed steps, this one included; int32.
    """

    loss: jax.Array
    grad_norm: jax.Array
    has_target: jax.Array
    step: jax.Array | int


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


def make_ema(decays: Sequence[float], names: Sequence[float] | None = None) -> AuxiliaryState:
    """Return averages with these decays in (0, 1): `average + (1 - decay) * (parameter - average)` in each step.

    `names` are the decays in the names of the averages, by default `decays`.
    """
    by_name = dict(zip(map(str, names or decays), decays, strict=False))

    def copy(param: jax.Array) -> jax.Array:
        return jnp.array(param, jnp.float32, copy=True)  # parameters and averages are both donated to the step

    def init(params: Any) -> Any:
        return {name: jax.tree.map(copy, params) for name in by_name}

    def update(averages: Any, observation: StepObservation) -> tuple[Any, Scalars]:
        def move(average: jax.Array, param: jax.Array, share: float) -> jax.Array:
            return average + jnp.float32(share) * (param.astype(jnp.float32) - average)

        return {
            name: jax.tree.map(
                lambda average, param, share=1 - decay: move(average, param, share),
                averages[name],
                observation.params,
            )
            for name, decay in by_name.items()
        }, {}

    return AuxiliaryState(EMA, init, update)


def make_noise_scale(decay: float) -> AuxiliaryState:
    """Return running averages with this decay; their ratio, if positive, is the metric `noise_scale` in tokens."""

    def init(params: Any) -> Any:
        return {"square": jnp.zeros((), jnp.float32), "trace": jnp.zeros((), jnp.float32)}

    def update(averages: Any, observation: StepObservation) -> tuple[Any, Scalars]:
        halves = observation.halves
        assert halves is not None, "an auxiliary state with needs_halves gets them"
        trace = jnp.mean(halves.counts * (halves.squares - halves.product))
        estimates = {"square": halves.product, "trace": trace}
        is_known = jnp.all(halves.counts > 0)  # a half that holds only padding has no gradient

        def move(average: jax.Array, value: jax.Array) -> jax.Array:
            return jnp.where(is_known, average + jnp.float32(1 - decay) * (value - average), average)

        after = jax.tree.map(move, averages, estimates)
        scale = after["trace"] / after["square"]
        return after, {NOISE_SCALE: jnp.where((after["square"] > 0) & (scale > 0), scale, jnp.nan)}

    return AuxiliaryState(NOISE_SCALE, init, update, needs_halves=True)


def compare_halves(first: Any, both: Any, counts: jax.Array, divisor: jax.Array | None) -> HalfBatchGradients:
    """Return the statistics of two halves of a batch.

    Args:
        first: gradients summed over the first half.
        both: gradients summed over both halves.
        counts: total target weight of each half; float32[2].
        divisor: number by which the summed losses were divided; None if they were not.
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
