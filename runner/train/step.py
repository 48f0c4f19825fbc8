"""The optimizer step and the validation step, pure. Knows no host, no file, no spec.

The loss of a step is the mean over the real target tokens of its whole global batch. Every micro-batch contributes a
sum divided by that one count, so the split into micro-batches, devices and hosts moves it by rounding alone; a mean of
means would weigh a short micro-batch like a long one. Gradients are added up in float32 whatever the parameters are.
Of frozen parameters none is computed: to the optimizer theirs are zeros.

What is a real token `padding_mask` says, and what it counts for `loss_weight` where the data has that, before `forward`
is called: each share of the loss is divided by all of them at once. A forward that counts others returns as meta
`token_count` how many; then the sum is divided at the end. Its meta `statistics` are added up, see `variables`, and so
are `sums`, see `meta`.

Shape legend: S accumulation steps, B examples, T sequence length.

Norms of gradients and parameters, for rows: of all, and of each group of parameters. Pure.

A group is what lies below a top-level module, by its path (`groups`), or one parameter (`parameters`).

How a new parameter becomes one of a narrow type, where the sum with its update is float32. Pure.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax import lax

from runner.errors import InvalidError
from runner.metrics.meta import GRAD_NORM, SUMS, TOKEN_COUNT, Meta, accumulate_sums, replace_sums_by_means
from runner.optim.groups import fill_frozen_gradients, split_frozen
from runner.optim.transforms import compute_gradient_point
from runner.parallel import reduction
from runner.train.loss import make_uncounted_error, target_weights, validate_fields_read
from runner.train.state import (
    STATISTICS,
    VARIABLES,
    AuxiliaryState,
    StepObservation,
    TrainState,
    UpdateVariables,
    bind_variables,
    compare_halves,
    drop_statistics,
    get_variables,
    keep_variables,
    make_params_merger,
    replace_variables,
    sum_statistics,
    update_auxiliary,
    validate_no_gradient,
)

Norms = Literal["none", "groups", "parameters"]
Rounding = Literal["nearest", "stochastic"]


def norms_of_job(job_class: Any) -> Norms:
    """What the config of a job's class asks for; none of a class that belongs to no job."""
    config = getattr(job_class, "config", None)
    return "none" if config is None else config.metrics.norms


def compute_norms(grads: Any, params: Any, norms: Norms) -> dict[str, jax.Array]:
    """`param_norm`, and `grad_norm/<group>` and `param_norm/<group>` of each; nothing if `norms` is `none`."""
    if norms == "none":
        return {}
    found = {"param_norm": optax.tree.norm(_in_float32(params))}
    for kind, tree in {"grad_norm": grads, "param_norm": params}.items():
        for group, leaves in _groups(tree, norms).items():
            found[f"{kind}/{group}"] = optax.tree.norm(_in_float32(leaves))
    return found


def _groups(tree: Any, norms: Norms) -> dict[str, list[jax.Array]]:
    groups: dict[str, list[jax.Array]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        own = path if norms == "parameters" else path[:1]
        groups.setdefault(jax.tree_util.keystr(own, simple=True, separator="/"), []).append(leaf)
    return groups


def _in_float32(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree)


NEAREST: Rounding = "nearest"
_ROUNDING = 0x726F756E  # folded into the key of the step: numbers of examples and of leaves are far below


def apply_gradients_stochastically(state: Any, grads: Any, key: jax.Array) -> Any:
    """`state.apply_gradients`, but that parameters of bfloat16 are rounded stochastically.

    `key` is that of the step. A leaf draws from its own, by its place among the parameters, one number for each of its
    elements: the bits depend on no mesh. All other types are as ever.
    """
    updates, opt_state = state.tx.update(grads, state.opt_state, state.params)
    key = jax.random.fold_in(key, _ROUNDING)
    params, structure = jax.tree.flatten(state.params)
    found = [
        round_stochastically(param.astype(jnp.float32) + update, jax.random.fold_in(key, number))
        if param.dtype == jnp.bfloat16
        else optax.apply_updates(param, update)
        for number, (param, update) in enumerate(zip(params, jax.tree.leaves(updates), strict=True))
    ]
    return state.replace(step=state.step + 1, params=jax.tree.unflatten(structure, found), opt_state=opt_state)


def round_stochastically(values: jax.Array, key: jax.Array) -> jax.Array:
    """Each of `values`, float32, as one of the two nearest bfloat16, so that the mean over keys is the value.

    The lower half of a word is how far the value is from the one towards zero, in 1/65536 of the way to the other: with
    16 random bits added, it carries into the upper half just as often. What is not finite is as ever.
    """
    words = lax.bitcast_convert_type(values, jnp.uint32)
    carried = words + jax.random.bits(key, values.shape, jnp.uint16).astype(jnp.uint32)
    rounded = lax.bitcast_convert_type((carried >> 16).astype(jnp.uint16), jnp.bfloat16)
    return jnp.where(jnp.isfinite(values), rounded, values.astype(jnp.bfloat16))


Batch = dict[str, jax.Array]
# (apply_fn, params, micro-batch, key of the step or None) -> (loss_sum, meta); no key = deterministic.
# A micro-batch holds what the data declares, such as x, y and padding_mask (B, T), and example (B): the place of each
# example in the step.
Forward = Callable[[Callable[..., Any], Any, Batch, jax.Array | None], tuple[jax.Array, dict[str, jax.Array]]]


def _numbered(batch: Batch) -> Batch:
    """`batch` with `example` (S, B): the place of each example in the step, whatever the split."""
    S, B = _leading_shape(batch)
    return batch | {"example": jnp.arange(S * B).reshape(S, B)}


def _leading_shape(batch: Batch) -> tuple[int, int]:
    """(S, B) of a batch, whatever its fields are."""
    S, B, *_ = next(iter(batch.values())).shape
    return S, B


def _count(batch: Batch) -> jax.Array:
    """What all targets of a batch count for together."""
    return jnp.sum(target_weights(batch), dtype=jnp.float32)


def _divisor(batch: Batch, count: jax.Array) -> jax.Array:
    """`count`, and 1 where it is 0: of nothing but padding the loss is 0. Weights may add up to less than 1."""
    return jnp.where(count > 0, count, 1.0) if "loss_weight" in batch else jnp.maximum(count, 1.0)


def _gradient_of(
    forward: Forward, state: TrainState, params: Any, batch: Batch, key: jax.Array, num_tokens: jax.Array | None
) -> tuple[Callable[[Any, Batch], Any], Any]:
    """What computes ((loss, meta), float32 gradients) of a micro-batch of `batch` at `params`, and what is trained."""
    apply_fn, of_model = bind_variables(state.apply_fn, get_variables(state)), make_params_merger(state)
    trained, whole = split_frozen(params, state.opt_state)

    def share_of_loss(trained: Any, micro: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
        loss_sum, meta = forward(apply_fn, of_model(whole(trained)), micro, key)
        if TOKEN_COUNT in meta:
            return loss_sum, meta
        if num_tokens is None:
            raise make_uncounted_error(batch)
        return loss_sum / num_tokens, meta

    def value_and_grad(trained: Any, micro: Batch) -> Any:
        found, grads = jax.value_and_grad(share_of_loss, has_aux=True)(trained, micro)
        return found, jax.tree.map(lambda grad: grad.astype(jnp.float32), grads)

    return value_and_grad, trained


def _zeros_of(trained: Any) -> Any:
    return jax.tree.map(lambda param: jnp.zeros(param.shape, jnp.float32), trained)


def _gradients(
    forward: Forward, state: TrainState, batch: Batch, key: jax.Array, num_steps: int, needs_halves: bool
) -> tuple[Any, ...]:
    """Loss, float32 gradients, the last micro-batch's meta, over a batch of (S, B, T), and what its halves have shown.

    Of the meta, `token_count`, `statistics` and the means of `sums` are of all micro-batches. Halves are None unless
    `needs_halves`. Of the parts of micro-batches that lie along `data` all sums are taken once, see `data_sum`.
    """
    num_tokens = _divisor(batch, _count(batch)) if "padding_mask" in batch else None
    params = compute_gradient_point(state.params, state.opt_state)

    def on_part(whole: tuple[Any, Any, jax.Array, jax.Array | None], batch: Batch) -> tuple[Any, ...]:
        params, variables, key, num_tokens = whole
        here = _at(state, params, variables)
        value_and_grad, trained = _gradient_of(forward, here, params, batch, key, num_tokens)
        (loss, grads), metas, before = _added_up(value_and_grad, trained, batch, num_steps, needs_halves)
        last_meta = metas if num_steps == 1 else jax.tree.map(lambda leaf: leaf[-1], metas)
        halves = (before, _counts_of_halves(batch, metas)) if needs_halves else None
        return (loss, grads, _totals(metas, num_steps), halves), _of_one(last_meta)

    whole = params, getattr(state, VARIABLES, {}), key, num_tokens
    (loss, grads, totals, halves), last_meta = reduction.run_per_data_shard(on_part, whole, _numbered(batch))
    if halves is not None:
        halves = compare_halves(halves[0], grads, halves[1], None if TOKEN_COUNT in totals else num_tokens)
    return *_divided(batch, loss, fill_frozen_gradients(grads, params), {**last_meta, **totals}, num_tokens), halves


def _added_up(value_and_grad: Any, trained: Any, batch: Batch, num_steps: int, needs_halves: bool) -> tuple[Any, ...]:
    """Loss and gradients of all micro-batches, the meta of each (of one alone no axis), half of the gradients."""
    if num_steps == 1:
        (loss, meta), grads = value_and_grad(trained, jax.tree.map(lambda leaf: leaf[0], batch))
        return (loss, grads), meta, None

    def accumulate(carry: tuple[jax.Array, Any], micro: Batch) -> tuple[tuple[jax.Array, Any], Any]:
        (loss, meta), grads = value_and_grad(trained, micro)
        return (carry[0] + loss, jax.tree.map(jnp.add, carry[1], grads)), meta

    zeros = jnp.float32(0), _zeros_of(trained)
    sums, metas, before = _accumulated(accumulate, zeros, batch, num_steps // 2 if needs_halves else 0)
    return sums, metas, before[1]


def _gradients_in_order(
    forward: Forward, num_groups: int, state: TrainState, batch: Batch, key: jax.Array
) -> tuple[jax.Array, Any, Meta]:
    """As `_gradients`, with all sums in the order of `fixed_order`, whatever number of devices there is."""
    S, _ = _leading_shape(batch)
    params = compute_gradient_point(state.params, state.opt_state)
    num_devices = reduction.count_batch_devices()

    def on_device(whole: tuple[Any, Any, jax.Array], batch: Batch) -> tuple[jax.Array, Any, Meta]:
        params, variables, key = whole
        here = _at(state, params, variables)
        counts_S = (
            reduction.gather_micro_batches(jax.vmap(_count)(batch), num_devices) if "padding_mask" in batch else None
        )
        num_tokens = None if counts_S is None else _divisor(batch, jnp.sum(counts_S))
        value_and_grad, trained = _gradient_of(forward, here, params, batch, key, num_tokens)

        def accumulate(sums: Any, micro: Batch) -> tuple[Any, Any]:
            # By itself: what is compiled for it must not depend on what stands around it.
            (loss, meta), grads = lax.optimization_barrier(value_and_grad(*lax.optimization_barrier((trained, micro))))
            return jax.tree.map(jnp.add, sums, grads), (loss, meta)

        zeros = _zeros_of(trained)
        add_group = functools.partial(lax.scan, accumulate, zeros)
        grads, (losses_S, metas) = reduction.sum_gradients(add_group, batch, zeros, num_groups, num_devices)
        last_meta = {**jax.tree.map(lambda leaf: leaf[-1], metas), **_totals(metas, num_steps=0)}
        return _divided(batch, jnp.sum(losses_S), fill_frozen_gradients(grads, params), last_meta, num_tokens)

    assert S % num_groups == 0, f"{S} micro-batches make up no {num_groups} groups"
    whole = params, getattr(state, VARIABLES, {}), key
    return reduction.run_per_batch_shard(on_device, whole, _numbered(batch))


def _accumulated(accumulate: Any, zeros: Any, batch: Batch, half: int) -> tuple[Any, Any, Any]:
    """The sums over all micro-batches, what each has given, and the sums over the first `half` of them, if any."""
    if not half:
        sums, metas = lax.scan(accumulate, zeros, batch)
        return sums, metas, zeros
    before, metas = lax.scan(accumulate, zeros, jax.tree.map(lambda leaf: leaf[:half], batch))
    sums, others = lax.scan(accumulate, before, jax.tree.map(lambda leaf: leaf[half:], batch))
    return sums, jax.tree.map(lambda one, other: jnp.concatenate([one, other]), metas, others), before


def _counts_of_halves(batch: Batch, metas: Any) -> jax.Array:
    """What the targets of each half of the micro-batches count for: float32[2]."""
    counts = metas[TOKEN_COUNT] if TOKEN_COUNT in metas else jax.vmap(_count)(batch)
    return jnp.sum(counts.reshape(2, -1), axis=1, dtype=jnp.float32)


def _totals(metas: Any, num_steps: int) -> Meta:
    """What of the meta is added up over the micro-batches; of one alone they are no axis of their own."""
    counts = {TOKEN_COUNT: jnp.sum(metas[TOKEN_COUNT], dtype=jnp.float32)} if TOKEN_COUNT in metas else {}
    return {**counts, **sum_statistics(metas, num_steps), **accumulate_sums(metas, is_stacked=num_steps != 1)}


def _of_one(meta: Meta) -> Meta:
    """What of the meta is of one micro-batch alone, and not added up."""
    return {name: value for name, value in meta.items() if name not in (TOKEN_COUNT, STATISTICS, SUMS)}


def _divided(
    batch: Batch, loss: jax.Array, grads: Any, meta: Meta, num_tokens: jax.Array | None
) -> tuple[jax.Array, Any, Meta]:
    """Sums over their own `token_count` as means, if the meta has that of all micro-batches; else all as it is."""
    if TOKEN_COUNT not in meta:
        return loss, grads, replace_sums_by_means(meta, num_tokens)
    divisor = _divisor(batch, meta[TOKEN_COUNT])
    return loss / divisor, jax.tree.map(lambda grad: grad / divisor, grads), replace_sums_by_means(meta, divisor)


def _at(state: TrainState, params: Any, variables: Any) -> TrainState:
    """`state` with other arrays in place of its own. Of `opt_state`, which is as it was, none is read here."""
    return state.replace(params=params, **({VARIABLES: variables} if hasattr(state, VARIABLES) else {}))


@dataclass(frozen=True)
class StepOptions:
    """Settings of a train step besides its gradients.

    Attributes:
        update_variables: function from (variables, summed statistics) to (next variables, scalars for the row).
        auxiliary_states: auxiliary states that the step updates after the optimizer.
        rounding: rounding of bfloat16 parameters after their update in float32.
        norms: norms of gradients and parameters in the meta of the step.
        num_groups: number of micro-batch groups of a deterministic reduction; None: the usual reduction.
    """

    update_variables: UpdateVariables = keep_variables
    auxiliary_states: Sequence[AuxiliaryState] = ()
    rounding: Rounding = NEAREST
    norms: Norms = "none"
    num_groups: int | None = None


def train_step(
    forward: Forward,
    state: TrainState,
    batch: Batch,
    key: jax.Array,
    accumulate_steps: int,
    options: StepOptions | None = None,
) -> tuple[TrainState, jax.Array, dict[str, jax.Array]]:
    """One optimizer step over a global batch of (S, B, T) arrays: (state, loss, meta).

    `loss` is the mean over the real target tokens of the whole batch; `meta` holds `grad_norm` (before clipping) and
    what `forward` returned of the last micro-batch, where `data` cuts that of its last part, but for `token_count`,
    which is of all, and for `statistics`, of whose total `update_variables` makes the next variables and more scalars;
    of `sums` the means. `riders` see the step last, and add theirs. `rounding` of bfloat16 parameters is `nearest` or
    `stochastic`. With `norms` it holds those of gradients and parameters (before the update), see `norm`. With
    `num_groups` all sums are in the order of `fixed_order`. Raises `InvalidError` if `forward` does not read a field
    that the data declares, or if nothing says how many targets are real.
    """
    options = StepOptions() if options is None else options
    riders, norms, num_groups = options.auxiliary_states, options.norms, options.num_groups
    S, _ = _leading_shape(batch)
    assert accumulate_steps == S, f"batch has S={S}, not {accumulate_steps}"
    variables = get_variables(state)
    validate_no_gradient(variables)
    params = make_params_merger(state)(state.params)
    validate_fields_read(forward, bind_variables(state.apply_fn, variables), params, batch, key)
    needs_halves = any(rider.needs_halves for rider in riders)
    if needs_halves and S % 2:
        raise InvalidError(f"a rider sees both halves of a batch, and its micro-batches are {S}; needs an even number")
    if num_groups is None:
        loss, grads, meta, halves = _gradients(forward, state, batch, key, accumulate_steps, needs_halves)
    else:
        (loss, grads, meta), halves = _gradients_in_order(forward, num_groups, state, batch, key), None
        grads = reduction.replicate(grads)
    if STATISTICS in meta:
        changed, scalars = options.update_variables(variables, meta[STATISTICS])
        meta = drop_statistics(meta) | scalars
        state = replace_variables(state, changed) if variables else state
    seen = state.params if num_groups is None or norms == "none" else reduction.replicate_flat(state.params)
    own = {GRAD_NORM: optax.tree.norm(grads)} | compute_norms(grads, seen, norms)
    if taken := sorted({*own} & {*meta}):
        raise InvalidError(f"forward returns {taken[0]!r} as meta, a name of the runner's own; use another")
    is_nearest = options.rounding == NEAREST
    state = state.apply_gradients(grads=grads) if is_nearest else apply_gradients_stochastically(state, grads, key)
    if riders:
        after, scalars = update_auxiliary(
            riders, state.riders, StepObservation(jnp.asarray(state.step), state.params, grads, halves)
        )
        state, meta = state.replace(riders=after), meta | scalars
    return state, loss, meta | own


def val_step(
    forward: Forward, state: TrainState, batch: Batch, num_groups: int | None = None
) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
    """Validation over (S, B, T): (loss_sum, token_count, last_meta); sums, so that every token weighs the same.

    Of the meta, `sums` are those of all micro-batches, not divided yet: there are more batches to come.

    The tokens are those of `padding_mask`, by their weights where there are any, or those that `forward` has counted.
    With `num_groups` all sums are in the order of `fixed_order`.
    """
    if num_groups is not None:
        return _val_step_in_order(forward, state, batch)
    apply_fn = bind_variables(state.apply_fn, get_variables(state))
    params = make_params_merger(state)(state.params)

    def add(carry: tuple[jax.Array, jax.Array], micro: Batch) -> tuple[tuple[jax.Array, jax.Array], Any]:
        loss_sum, meta = forward(apply_fn, params, micro, None)
        count = meta[TOKEN_COUNT] if TOKEN_COUNT in meta else _count(micro)
        return (carry[0] + loss_sum, carry[1] + count), drop_statistics(meta)

    (loss_sum, token_count), metas = lax.scan(add, (jnp.float32(0), jnp.float32(0)), _numbered(batch))
    last_meta = jax.tree.map(lambda leaf: leaf[-1], metas)
    return loss_sum, token_count, last_meta | accumulate_sums(metas, is_stacked=True)


def _val_step_in_order(
    forward: Forward, state: TrainState, batch: Batch
) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
    num_devices = reduction.count_batch_devices()

    def on_device(whole: tuple[Any, Any], batch: Batch) -> tuple[jax.Array, jax.Array, Meta]:
        here = _at(state, *whole)
        apply_fn, params = bind_variables(here.apply_fn, get_variables(here)), make_params_merger(here)(here.params)

        def one(_: None, micro: Batch) -> tuple[None, Any]:
            params_here, micro = lax.optimization_barrier((params, micro))
            loss_sum, meta = lax.optimization_barrier(forward(apply_fn, params_here, micro, None))
            count = meta[TOKEN_COUNT] if TOKEN_COUNT in meta else _count(micro)
            return None, (loss_sum, count, drop_statistics(meta))

        _, found = lax.scan(one, None, batch)
        losses_S, counts_S, metas = reduction.gather_micro_batches(found, num_devices)
        last_meta = jax.tree.map(lambda leaf: leaf[-1], metas)
        return jnp.sum(losses_S), jnp.sum(counts_S), {**last_meta, **accumulate_sums(metas, is_stacked=True)}

    return reduction.run_per_batch_shard(on_device, (state.params, getattr(state, VARIABLES, {})), _numbered(batch))
