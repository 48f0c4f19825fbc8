"""Optimizers and learning-rate schedules by name, as optax objects.

Each optimizer is a function of its config, the per-parameter settings and the schedule. A schedule is a function of the
completed steps: a linear warm-up from 0, and a shape after it.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from runner.errors import InvalidError
from runner.optim.config import OptimizerConfig, ScheduleConfig
from runner.optim.groups import Parameter, ParameterSettings, freeze_parameters, make_parameter_settings, match_patterns
from runner.optim.muon import keep_norms, orthogonalise
from runner.optim.transforms import average_schedule_free, project_low_rank


def make_schedule(name: str, config: ScheduleConfig, peak: float, total_steps: int) -> optax.Schedule:
    """Return the learning rate as a function of completed steps. After `total_steps` it keeps its last value."""
    final, warmup = config.final_learning_rate, config.compute_warmup_steps(total_steps)
    rest = total_steps - warmup

    def cosine_restarts(count: jax.Array) -> jax.Array:
        # The share of the current cycle is computed in whole numbers, so that a restart happens at an exact step.
        share = (count * config.cycles % rest) / rest
        rate = final + (peak - final) * 0.5 * (1 + jnp.cos(jnp.pi * share))
        return jnp.where(jnp.asarray(count) < rest, rate, final)

    def inverse_square_root(count: jax.Array) -> jax.Array:
        # The count begins at the end of the warm-up, where the rate is the peak.
        return peak * jnp.sqrt(warmup / (jnp.maximum(count, 0) + warmup))

    shapes: dict[str, Callable[[], optax.Schedule]] = {
        "constant": lambda: optax.constant_schedule(peak),
        "linear": lambda: optax.linear_schedule(peak, final, rest),
        "cosine": lambda: optax.cosine_decay_schedule(peak, rest, alpha=final / peak),
        "cosine_restarts": lambda: cosine_restarts,
        "polynomial": lambda: optax.polynomial_schedule(peak, final, config.power, rest),
        "wsd": lambda: optax.linear_schedule(peak, final, config.decay_steps or 1, rest - (config.decay_steps or 1)),
        "inverse_square_root": lambda: inverse_square_root,
    }
    shape = shapes[name]()
    # `join_schedules` counts the steps of the second schedule from its boundary on.
    if warmup == 0:
        return shape
    return optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), shape], [warmup])


class SchedulePiece(NamedTuple):
    """Part of a schedule, from one step until the next piece."""

    start: int  # completed steps before it, from which its form counts
    # Shape and its parameters; pieces of equal start and form have equal rates. None: the rate is constant.
    form: tuple[str | float, ...] | None


def list_schedule_pieces(name: str, config: ScheduleConfig, peak: float, total_steps: int) -> list[SchedulePiece]:
    """Return the pieces of the schedule that `make_schedule` makes of these arguments, in order."""
    final, warmup = config.final_learning_rate, config.compute_warmup_steps(total_steps)
    rest, decay = total_steps - warmup, config.decay_steps or 1
    forms: dict[str, tuple[str | float, ...]] = {
        "linear": ("linear", peak, final, rest),
        "cosine": ("cosine", peak, final, rest),
        "cosine_restarts": ("cosine_restarts", peak, final, rest, config.cycles),
        "polynomial": ("polynomial", peak, final, config.power, rest),
        "wsd": ("linear", peak, final, decay),
        "inverse_square_root": ("inverse_square_root", peak, warmup),
    }
    pieces = [SchedulePiece(0, ("warmup", peak, warmup)), SchedulePiece(warmup, forms.get(name))]
    if name == "wsd":
        pieces[1:] = [SchedulePiece(warmup, None), SchedulePiece(total_steps - decay, forms[name])]
    if name not in ("constant", "inverse_square_root"):
        pieces.append(SchedulePiece(total_steps, None))
    # Of pieces with one start only the last has any step.
    return list({piece.start: piece for piece in pieces}.values())


_RATE = "learning_rate"


def find_injected_rate(opt_state: Any) -> jax.Array | None:
    """Return the learning rate that `optax.inject_hyperparams` keeps in an optimizer's state, a float32 scalar.

    It is the rate of the update that led to this state. The result is None for an optimizer without such a state, and
    for one with several rates for groups of parameters. The function can be traced.
    """

    def is_injected(node: Any) -> bool:
        return isinstance(node, optax.InjectHyperparamsState | optax.InjectStatefulHyperparamsState)

    nodes = [node for node in jax.tree.leaves(opt_state, is_leaf=is_injected) if is_injected(node)]
    rates = [node.hyperparams[_RATE] for node in nodes if _RATE in node.hyperparams]
    # Several rates belong to groups of parameters; none of them is the rate of the whole step.
    is_scalar = len(rates) == 1 and jnp.shape(rates[0]) == ()
    return jnp.asarray(rates[0], jnp.float32) if is_scalar else None


_Maker = Callable[[OptimizerConfig, ParameterSettings, optax.Schedule], Any]


def make_optimizer(
    name: str, config: OptimizerConfig, schedule: optax.Schedule, parameters: Any, is_ordered: bool = False
) -> Any:
    """Return the optimizer `name` with gradient clipping and frozen parameters. Raises as `make_parameter_settings`.

    With `is_ordered` the bits of optimizers that support `train.same_bits_devices` do not depend on the device count.
    """
    settings = make_parameter_settings(config, parameters, is_ordered)
    return freeze_parameters(settings.add_clipping(_MAKERS[name](config, settings, schedule)), settings.frozen)


def _make_adamw(config: OptimizerConfig, settings: ParameterSettings, schedule: optax.Schedule) -> Any:
    return optax.chain(
        _make_adam_moments(config), settings.add_weight_decay(), settings.scale_by_learning_rate(schedule)
    )


def _make_adam(config: OptimizerConfig, settings: ParameterSettings, schedule: optax.Schedule) -> Any:
    return optax.chain(
        settings.add_weight_decay(), _make_adam_moments(config), settings.scale_by_learning_rate(schedule)
    )


def _make_lion(config: OptimizerConfig, settings: ParameterSettings, schedule: optax.Schedule) -> Any:
    moments = optax.scale_by_lion(config.b1, config.b2, _get_moment_dtype(config))
    return optax.chain(moments, settings.add_weight_decay(), settings.scale_by_learning_rate(schedule))


def _make_sgd(config: OptimizerConfig, settings: ParameterSettings, schedule: optax.Schedule) -> Any:
    trace = optax.trace(config.momentum, accumulator_dtype=_get_moment_dtype(config))
    return optax.chain(settings.add_weight_decay(), optax.chain(trace, settings.scale_by_learning_rate(schedule)))


def _make_muon(config: OptimizerConfig, settings: ParameterSettings, schedule: optax.Schedule) -> Any:
    """Return Muon or a variant for each matrix of a stack by itself; adamw updates embeddings, logits and vectors."""
    is_matrix = _select_matrices(config, settings.parameters)
    pairs = zip(jax.tree.leaves(settings.parameters), jax.tree.leaves(is_matrix), strict=True)
    matrices = [parameter for parameter, yes in pairs if yes]
    trace = optax.trace(config.momentum, nesterov=True, accumulator_dtype=_get_moment_dtype(config))
    orthogonal = orthogonalise(matrices, config.name, config.b2, config.eps, settings.is_ordered)
    is_on_sphere = config.name == "muonh"
    if is_on_sphere:
        for group in config.groups:
            matched = match_patterns([group.pattern], settings.parameters, "groups") if group.weight_decay else {}
            if matched and not any(jax.tree.leaves(jax.tree.map(lambda yes, on: yes and not on, matched, is_matrix))):
                raise InvalidError(
                    f"groups: weight_decay of {group.pattern!r} has no effect, because muonh keeps the norms of these "
                    "matrices; leave it out"
                )
        decays = jax.tree.map(lambda on, decay: 0.0 if on else decay, is_matrix, settings.decays)
        settings = dataclasses.replace(settings, decays=decays, weight_decay=None)
    return optax.chain(
        optax.masked(optax.chain(trace, orthogonal), is_matrix),
        optax.masked(_make_adam_moments(config), jax.tree.map(lambda yes: not yes, is_matrix)),
        settings.add_weight_decay(),
        settings.scale_by_learning_rate(schedule),
        *([optax.masked(keep_norms(settings.is_ordered), is_matrix)] if is_on_sphere else []),
    )


def _make_galore(config: OptimizerConfig, settings: ParameterSettings, schedule: optax.Schedule) -> Any:
    """Return GaLore for each matrix of a stack by itself; adamw updates embeddings, logits and vectors."""
    is_matrix = _select_matrices(config, settings.parameters)
    every_steps, scale = config.projection_every_steps, config.projection_scale
    moments = project_low_rank(_make_adam_moments(config), is_matrix, config.rank, every_steps, scale)
    return optax.chain(moments, settings.add_weight_decay(), settings.scale_by_learning_rate(schedule))


def _make_schedule_free_adamw(config: OptimizerConfig, settings: ParameterSettings, schedule: optax.Schedule) -> Any:
    """Return schedule-free AdamW.

    It keeps only the second moment, because the average replaces the first. Weight decay is applied to the point where
    the gradient is taken.
    """
    # Bias-corrected as in Adam, with eps added outside of the square root.
    moment = optax.scale_by_rms(config.b2, config.eps, eps_in_sqrt=False, bias_correction=True)
    inner = optax.chain(moment, settings.add_weight_decay(), settings.scale_by_learning_rate(schedule))
    return average_schedule_free(inner, schedule, config.b1)


def _make_adafactor(config: OptimizerConfig, settings: ParameterSettings, schedule: optax.Schedule) -> Any:
    """Return Adafactor with weight decay that is multiplied by the learning rate.

    `optax.adafactor` applies its own weight decay after the learning rate, so that it would not follow the schedule.
    """
    inner = optax.adafactor(schedule)
    # Each distinct weight decay is multiplied by the learning rate once, not once per parameter.
    distinct = sorted({decay for decay in jax.tree.leaves(settings.decays) if decay})
    if not distinct and settings.rates is None:
        return inner

    def update(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        # Read from the state of Adafactor, so that no second counter is needed.
        rate = schedule(state[0].count)  # the first part of the chain counts the updates before this one
        decays = {decay: decay * rate for decay in distinct}
        updates, state = inner.update(grads, state, params)

        def subtract_decay(update: jax.Array, param: jax.Array, decay: float) -> jax.Array:
            return update - decays[decay] * param if decay else update

        return settings.multiply_by_rates(jax.tree.map(subtract_decay, updates, params, settings.decays)), state

    return optax.GradientTransformation(inner.init, update)


_MAKERS: dict[str, _Maker] = {
    # The order of the chain determines where weight decay is added: before the moments for adam and sgd, after them for
    # adamw.
    "adamw": _make_adamw,
    "adam": _make_adam,
    "lion": _make_lion,
    "adafactor": _make_adafactor,
    "sgd": _make_sgd,
    "muon": _make_muon,
    "normuon": _make_muon,
    "muonh": _make_muon,
    "galore": _make_galore,
    "schedule_free_adamw": _make_schedule_free_adamw,
}


def _make_adam_moments(config: OptimizerConfig) -> optax.GradientTransformation:
    return optax.scale_by_adam(config.b1, config.b2, config.eps, mu_dtype=_get_moment_dtype(config))


def _get_moment_dtype(config: OptimizerConfig) -> Any:
    """Return the type of first moments; None for that of the parameters, which the optimizer sees in float32."""
    return jnp.bfloat16 if config.moments == "bfloat16" else None


def _select_matrices(config: OptimizerConfig, parameters: Any) -> Any:
    """Return a tree of bools that are True for the parameters to orthogonalise or project."""
    if config.matrices is not None:
        selected = match_patterns(config.matrices, parameters, "matrices")
        leaves = zip(jax.tree.leaves(parameters), jax.tree.leaves(selected), strict=True)
        if other := next((p for p, yes in leaves if yes and not p.holds_matrices), None):
            raise InvalidError(
                f"matrices: {other.name} of shape {other.shape} is no stack of matrices: all axes before its last two "
                "must be named layers or expert; name other parameters"
            )
        return selected

    # Embeddings and output heads are matrices by shape only: each of their rows belongs to a token or position.
    def is_selected(parameter: Parameter) -> bool:
        return parameter.holds_matrices and parameter.is_matrix and not parameter.is_table

    selected = jax.tree.map(is_selected, parameters)
    if not any(jax.tree.leaves(selected)):
        raise InvalidError(
            f"{config.name} finds no matrix among the parameters except embeddings; name some in matrices"
        )
    return selected


def update_in_float32(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Return `optimizer` applied to float32 copies of the parameters, whatever type they are stored in.

    Its state and updates are therefore float32 from the first step on, as the gradients are. The new parameter is the
    sum of the old one and the update, computed in float32 and rounded to the nearest value of the parameter's type.
    """

    def is_narrow(leaf: jax.Array) -> bool:
        return bool(jnp.issubdtype(leaf.dtype, jnp.floating)) and leaf.dtype.itemsize < 4

    def widen(params: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf.astype(jnp.float32) if is_narrow(leaf) else leaf, params)

    def update(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        return optimizer.update(grads, state, widen(params))

    return optax.GradientTransformation(lambda params: optimizer.init(widen(params)), update)
