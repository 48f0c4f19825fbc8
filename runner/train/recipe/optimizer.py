"""Optimizers by name, as optax transformations: each a function of its keys and of how parameters are treated."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from runner.errors import InvalidError
from runner.recipe import OptimizerConfig
from runner.train.recipe.average import averaged
from runner.train.recipe.group import Treatment, named, treatment, without
from runner.train.recipe.orthogonal import orthogonal
from runner.train.recipe.parameter import Parameter
from runner.train.recipe.projection import projected

Maker = Callable[[OptimizerConfig, Treatment, optax.Schedule], Any]


def make_optimizer(name: str, config: OptimizerConfig, schedule: optax.Schedule, parameters: Any) -> Any:
    """The whole transformation `name`, behind its clip of the gradient; `parameters` is a tree of `Parameter`.

    Raises `InvalidError` where groups or patterns do not fit the parameters.
    """
    treated = treatment(config, parameters)
    return without(treated.clipped(_MAKERS[name](config, treated, schedule)), treated.frozen)


def _adamw(config: OptimizerConfig, treated: Treatment, schedule: optax.Schedule) -> Any:
    return optax.chain(_adam_moments(config), treated.decay(), treated.at_rate(schedule))


def _adam(config: OptimizerConfig, treated: Treatment, schedule: optax.Schedule) -> Any:
    return optax.chain(treated.decay(), _adam_moments(config), treated.at_rate(schedule))


def _lion(config: OptimizerConfig, treated: Treatment, schedule: optax.Schedule) -> Any:
    moments = optax.scale_by_lion(config.b1, config.b2, _type_of_moments(config))
    return optax.chain(moments, treated.decay(), treated.at_rate(schedule))


def _sgd(config: OptimizerConfig, treated: Treatment, schedule: optax.Schedule) -> Any:
    trace = optax.trace(config.momentum, accumulator_dtype=_type_of_moments(config))
    return optax.chain(treated.decay(), optax.chain(trace, treated.at_rate(schedule)))


def _muon(config: OptimizerConfig, treated: Treatment, schedule: optax.Schedule) -> Any:
    """Of a stack each matrix by itself; embeddings, logits and vectors are adamw's."""
    is_matrix = _chosen_matrices(config, treated.parameters)
    trace = optax.trace(config.momentum, nesterov=True, accumulator_dtype=_type_of_moments(config))
    return optax.chain(
        optax.masked(optax.chain(trace, orthogonal()), is_matrix),
        optax.masked(_adam_moments(config), jax.tree.map(lambda yes: not yes, is_matrix)),
        treated.decay(),
        treated.at_rate(schedule),
    )


def _galore(config: OptimizerConfig, treated: Treatment, schedule: optax.Schedule) -> Any:
    """Of a stack each matrix by itself; embeddings, logits and vectors are adamw's."""
    is_matrix = _chosen_matrices(config, treated.parameters)
    every_steps, scale = config.projection_every_steps, config.projection_scale
    moments = projected(_adam_moments(config), is_matrix, config.rank, every_steps, scale)
    return optax.chain(moments, treated.decay(), treated.at_rate(schedule))


def _schedule_free_adamw(config: OptimizerConfig, treated: Treatment, schedule: optax.Schedule) -> Any:
    """The second moment alone: the mean has the place of the first. The decay is of where the gradient is taken."""
    moment = optax.scale_by_rms(config.b2, config.eps, eps_in_sqrt=False, bias_correction=True)
    return averaged(optax.chain(moment, treated.decay(), treated.at_rate(schedule)), schedule, config.b1)


def _adafactor(config: OptimizerConfig, treated: Treatment, schedule: optax.Schedule) -> Any:
    """Adafactor whose decay is multiplied by the rate: that of optax comes after the rate, and is a share of a step."""
    inner = optax.adafactor(schedule)
    distinct = sorted({decay for decay in jax.tree.leaves(treated.decays) if decay})
    if not distinct and treated.rates is None:
        return inner

    def update(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        rate = schedule(state[0].count)  # the first part of the chain counts the updates before this
        decays = {decay: decay * rate for decay in distinct}
        updates, state = inner.update(grads, state, params)

        def decayed(update: jax.Array, param: jax.Array, decay: float) -> jax.Array:
            return update - decays[decay] * param if decay else update

        return treated.multiplied(jax.tree.map(decayed, updates, params, treated.decays)), state

    return optax.GradientTransformation(inner.init, update)


_MAKERS: dict[str, Maker] = {
    "adamw": _adamw,
    "adam": _adam,
    "lion": _lion,
    "adafactor": _adafactor,
    "sgd": _sgd,
    "muon": _muon,
    "galore": _galore,
    "schedule_free_adamw": _schedule_free_adamw,
}


def _adam_moments(config: OptimizerConfig) -> optax.GradientTransformation:
    return optax.scale_by_adam(config.b1, config.b2, config.eps, mu_dtype=_type_of_moments(config))


def _type_of_moments(config: OptimizerConfig) -> Any:
    """None is that of the parameters as the optimizer sees them, which is float32."""
    return jnp.bfloat16 if config.moments == "bfloat16" else None


def _chosen_matrices(config: OptimizerConfig, parameters: Any) -> Any:
    """A bool for each parameter: whether it is orthogonalised, or projected."""
    if config.matrices is not None:
        chosen = named(config.matrices, parameters, "matrices")
        others = [p for p, yes in zip(jax.tree.leaves(parameters), jax.tree.leaves(chosen), strict=True) if yes]
        if other := next((p for p in others if not p.holds_matrices), None):
            raise InvalidError(
                f"matrices: {other.name} of shape {other.shape} is none, but for axes named layers or expert before "
                "its last two; name others"
            )
        return chosen

    def is_chosen(parameter: Parameter) -> bool:
        return parameter.holds_matrices and parameter.is_matrix and not parameter.is_table

    chosen = jax.tree.map(is_chosen, parameters)
    if not any(jax.tree.leaves(chosen)):
        raise InvalidError(f"{config.name} finds no matrix among the parameters but embeddings; name some by matrices")
    return chosen


def in_float32(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """`optimizer`, shown float32 parameters whatever type they are stored in.

    So its state and its updates are float32 from the first step on, like the gradients. The new parameter is the sum
    of the old one and the update, made in float32 and rounded to the nearest value of the parameter's own type.
    """

    def widened(params: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf.astype(jnp.float32) if _is_narrow(leaf) else leaf, params)

    def update(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        return optimizer.update(grads, state, widened(params))

    return optax.GradientTransformation(lambda params: optimizer.init(widened(params)), update)


def _is_narrow(leaf: jax.Array) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jnp.floating)) and leaf.dtype.itemsize < 4
