"""Optimizers by name, as optax transformations: each a function of its keys and of how parameters are treated.

The learning rate by completed steps: a linear warm-up from 0, and a shape after it.

The learning rate of an optax object of a job's own, where it keeps that in its state: `optax.inject_hyperparams`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from runner.errors import InvalidError
from runner.optim.config import OptimizerConfig, ScheduleConfig
from runner.optim.groups import Parameter, ParameterSettings, freeze_parameters, make_parameter_settings, match_patterns
from runner.optim.transforms import average_schedule_free, orthogonalise, project_low_rank


def make_schedule(name: str, config: ScheduleConfig, peak: float, total_steps: int) -> optax.Schedule:
    """Return the learning rate as a function of completed steps. After the end it stays what it is there."""
    final, warmup = config.final_learning_rate, config.compute_warmup_steps(total_steps)
    rest = total_steps - warmup
    shapes: dict[str, Callable[[], optax.Schedule]] = {
        "constant": lambda: optax.constant_schedule(peak),
        "linear": lambda: optax.linear_schedule(peak, final, rest),
        "cosine": lambda: optax.cosine_decay_schedule(peak, rest, alpha=final / peak),
        "cosine_restarts": lambda: _cosine_restarts(peak, final, rest, config.cycles),
        "polynomial": lambda: optax.polynomial_schedule(peak, final, config.power, rest),
        "wsd": lambda: optax.linear_schedule(peak, final, config.decay_steps or 1, rest - (config.decay_steps or 1)),
        "inverse_square_root": lambda: _inverse_square_root(peak, warmup),
    }
    shape = shapes[name]()
    if warmup == 0:
        return shape
    return optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), shape], [warmup])


def _cosine_restarts(peak: float, final: float, steps: int, cycles: int) -> optax.Schedule:
    """Half waves from the peak to the end, all of one length."""

    def rate(count: jax.Array) -> jax.Array:
        share = (count * cycles % steps) / steps  # of the cycle at hand, by whole numbers, so that a restart is one
        rate = final + (peak - final) * 0.5 * (1 + jnp.cos(jnp.pi * share))
        return jnp.where(jnp.asarray(count) < steps, rate, final)

    return rate


def _inverse_square_root(peak: float, warmup: int) -> optax.Schedule:
    """The peak at the end of the warm-up, and half of it after four times as many steps."""
    return lambda count: peak * jnp.sqrt(warmup / (jnp.maximum(count, 0) + warmup))


_RATE = "learning_rate"


def find_injected_rate(opt_state: Any) -> jax.Array | None:
    """The rate of the update that this state comes from, a float32 scalar; None if none is kept, or several are.

    To be traced. An optimizer that keeps its rate to itself in a function, or has several by groups, shows none.
    """

    def is_injected(node: Any) -> bool:
        return isinstance(node, optax.InjectHyperparamsState | optax.InjectStatefulHyperparamsState)

    nodes = [node for node in jax.tree.leaves(opt_state, is_leaf=is_injected) if is_injected(node)]
    rates = [node.hyperparams[_RATE] for node in nodes if _RATE in node.hyperparams]
    is_scalar = len(rates) == 1 and jnp.shape(rates[0]) == ()
    return jnp.asarray(rates[0], jnp.float32) if is_scalar else None


_Maker = Callable[[OptimizerConfig, ParameterSettings, optax.Schedule], Any]


def make_optimizer(name: str, config: OptimizerConfig, schedule: optax.Schedule, parameters: Any) -> Any:
    """The whole transformation `name`, behind its clip of the gradient; `parameters` is a tree of `Parameter`.

    Raises `InvalidError` where groups or patterns do not fit the parameters.
    """
    treated = make_parameter_settings(config, parameters)
    return freeze_parameters(treated.clipped(_MAKERS[name](config, treated, schedule)), treated.frozen)


def _adamw(config: OptimizerConfig, treated: ParameterSettings, schedule: optax.Schedule) -> Any:
    return optax.chain(_adam_moments(config), treated.decay(), treated.at_rate(schedule))


def _adam(config: OptimizerConfig, treated: ParameterSettings, schedule: optax.Schedule) -> Any:
    return optax.chain(treated.decay(), _adam_moments(config), treated.at_rate(schedule))


def _lion(config: OptimizerConfig, treated: ParameterSettings, schedule: optax.Schedule) -> Any:
    moments = optax.scale_by_lion(config.b1, config.b2, _type_of_moments(config))
    return optax.chain(moments, treated.decay(), treated.at_rate(schedule))


def _sgd(config: OptimizerConfig, treated: ParameterSettings, schedule: optax.Schedule) -> Any:
    trace = optax.trace(config.momentum, accumulator_dtype=_type_of_moments(config))
    return optax.chain(treated.decay(), optax.chain(trace, treated.at_rate(schedule)))


def _muon(config: OptimizerConfig, treated: ParameterSettings, schedule: optax.Schedule) -> Any:
    """Of a stack each matrix by itself; embeddings, logits and vectors are adamw's."""
    is_matrix = _chosen_matrices(config, treated.parameters)
    trace = optax.trace(config.momentum, nesterov=True, accumulator_dtype=_type_of_moments(config))
    return optax.chain(
        optax.masked(optax.chain(trace, orthogonalise()), is_matrix),
        optax.masked(_adam_moments(config), jax.tree.map(lambda yes: not yes, is_matrix)),
        treated.decay(),
        treated.at_rate(schedule),
    )


def _galore(config: OptimizerConfig, treated: ParameterSettings, schedule: optax.Schedule) -> Any:
    """Of a stack each matrix by itself; embeddings, logits and vectors are adamw's."""
    is_matrix = _chosen_matrices(config, treated.parameters)
    every_steps, scale = config.projection_every_steps, config.projection_scale
    moments = project_low_rank(_adam_moments(config), is_matrix, config.rank, every_steps, scale)
    return optax.chain(moments, treated.decay(), treated.at_rate(schedule))


def _schedule_free_adamw(config: OptimizerConfig, treated: ParameterSettings, schedule: optax.Schedule) -> Any:
    """The second moment alone: the mean has the place of the first. The decay is of where the gradient is taken."""
    moment = optax.scale_by_rms(config.b2, config.eps, eps_in_sqrt=False, bias_correction=True)
    return average_schedule_free(optax.chain(moment, treated.decay(), treated.at_rate(schedule)), schedule, config.b1)


def _adafactor(config: OptimizerConfig, treated: ParameterSettings, schedule: optax.Schedule) -> Any:
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


_MAKERS: dict[str, _Maker] = {
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
        chosen = match_patterns(config.matrices, parameters, "matrices")
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


def update_in_float32(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
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
