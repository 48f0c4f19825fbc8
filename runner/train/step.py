"""Optimizer step and validation step: pure functions without I/O.

The loss of a step is the mean over the real target tokens of its whole global batch. Every micro-batch contributes a
sum divided by that one count, so that the split into micro-batches, devices and hosts changes the loss by rounding
only; a mean of means would give a micro-batch with few target tokens the weight of one with many. Gradients are
accumulated in float32, whatever the type of the parameters. Frozen parameters get no gradient; the optimizer sees zeros
for them.

`padding_mask` marks the real target tokens, and `loss_weight`, if the data have it, weighs them. Their total is known
before `forward` is called, so the loss of each micro-batch is divided by it immediately. A forward that counts targets
itself returns their number as meta `target_count` or `token_count`; then the sums are divided at the end. Its meta
`statistics` are summed (see `runner.train.state`), and so are `sums` (see `runner.metrics.meta`); other meta is that of
the last micro-batch. In a batch of arrays each real example is a target, unless `forward` counts them.

A step whose batch has no target updates nothing: parameters, variables, moments, averages and auxiliary states are
unchanged, and only `step` and the counts of schedules advance (`skip_step`). A batch can lack targets only if the data
have target weights. The host sees the weights in the batch, so such a step does not run the compiled train step. If
`forward` counts targets itself, the count is known only on the device, which then selects between the old and the new
state. An update is also conditional if an auxiliary state has a `judge` (`runner.train.features.stability`).

A step can be replayed (`runner.train.replay`): the same program computes the gradients with each data shard on another
device, and returns digests of them, before any sum over shards. The update is then applied only if both computations
agree.

There are two ways to sum over micro-batches (see `runner.parallel.reduction`): gradient accumulation with one gradient
all-reduce over `data` per step, and a reduction whose order of additions does not depend on the number of devices
(`train.same_bits_devices`).

Shape legend: S accumulation steps (micro-batches), B examples, T sequence length, N data shards whose gradients are
computed separately (`reduction.list_gradient_shards`), L arrays of gradients.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax import lax

from runner.checkpoint.leaves import find_form_problems, make_strongly_typed
from runner.errors import InvalidError, StateError, format_place
from runner.metrics.meta import (
    GRAD_NORM,
    LEARNING_RATE,
    REPLAY_DIGESTS,
    SUMS,
    TARGET_COUNT,
    TOKEN_COUNT,
    Meta,
    accumulate_sums,
    replace_sums_by_means,
    validate_forward,
)
from runner.optim.groups import fill_frozen_gradients, split_frozen
from runner.optim.library import find_injected_rate
from runner.optim.transforms import compute_gradient_point
from runner.parallel import reduction
from runner.train.auxiliary import (
    AuxiliaryState,
    Scalars,
    StepObservation,
    StepOutcome,
    compare_halves,
    judge_update,
    update_auxiliary,
)
from runner.train.loss import make_uncounted_error, target_weights, validate_fields_read
from runner.train.optimizer import count_step
from runner.train.replay import COMPARE, UPDATE, ReplayInputs, compute_digests
from runner.train.state import (
    STATISTICS,
    VARIABLES,
    TrainState,
    UpdateVariables,
    bind_variables,
    drop_statistics,
    gather_params,
    get_moment_specs,
    get_variables,
    keep_variables,
    make_params_merger,
    replace_variables,
    shard_like_moments,
    sum_statistics,
    validate_no_gradient,
)

Batch = dict[str, jax.Array]
# (apply_fn, params, micro-batch, key of the step or None) -> (loss_sum, meta); no key: deterministic.
# A micro-batch holds the fields that the data declare, such as x, y and padding_mask (B, T), and example (B): the index
# of each example in the step.
Forward = Callable[[Callable[..., Any], Any, Batch, jax.Array | None], tuple[jax.Array, dict[str, jax.Array]]]
Norms = Literal["none", "groups", "parameters"]
Rounding = Literal["nearest", "stochastic"]
# Folded into the key of a step for rounding. Indices of examples, which are folded into it too, are far smaller.
_ROUNDING_KEY = 0x726F756E


@dataclass(frozen=True)
class StepOptions:
    """Settings of a train step that follow from the job's class and config."""

    # Pure function that makes the next variables from the statistics of the step.
    update_variables: UpdateVariables = keep_variables
    auxiliary_states: Sequence[AuxiliaryState] = ()  # auxiliary states that the step updates after the optimizer
    rounding: Rounding = "nearest"  # rounding of bfloat16 parameters after their update in float32
    norms: Norms = "none"  # norms of gradients and parameters that the step adds to its meta
    # Number of groups of micro-batches whose sums have a fixed order, for any number of devices
    # (`train.same_bits_devices`); None: the usual order.
    num_groups: int | None = None
    replay: ReplayInputs | None = None  # inputs of a step that can be replayed; None: it cannot


def train_step(
    forward: Forward,
    state: TrainState,
    batch: Batch,
    key: jax.Array,
    accumulate_steps: int,
    options: StepOptions | None = None,
) -> tuple[TrainState, jax.Array, dict[str, jax.Array]]:
    """Make one optimizer step over a global batch: arrays (S, B, ...) by name, as the data declare them.

    Returns:
        (state, loss, meta). `loss` is the mean over the real target tokens of the batch. `meta` holds `grad_norm`
        (before clipping), the norms of `options.norms`, scalars of variables and auxiliary states, the means of
        `sums`, the total `token_count` if `forward` counts, and whatever else `forward` returned for the last
        micro-batch (for the last data-parallel part of it, where `data` shards it). With `options.replay` it also holds
        the digests of the gradients as `REPLAY_DIGESTS`, uint32 (N, L).

    Raises:
        InvalidError: `forward` does not read a field that the data declare, or neither the data nor `forward` give the
            number of real target tokens.
    """
    options = StepOptions() if options is None else options
    forward = _rename_target_count(forward)
    S, _ = _get_leading_shape(batch)
    assert accumulate_steps == S, f"batch has S={S}, not {accumulate_steps}"
    # These checks run while the step is traced, so they cost nothing in a training step.
    variables = get_variables(state)
    validate_no_gradient(variables)
    before = state
    params = make_params_merger(state)(state.params)
    validate_fields_read(forward, bind_variables(state.apply_fn, variables), params, batch, key)
    needs_halves = any(each.needs_halves for each in options.auxiliary_states)
    if needs_halves and S % 2:
        raise InvalidError(
            f"an auxiliary state compares both halves of a batch of {S} micro-batches; use an even number"
        )

    # 1. Loss and gradients over all micro-batches.
    if options.num_groups is None:
        loss, grads, meta, halves, digests = _compute_gradients(
            forward, state, batch, key, accumulate_steps, needs_halves, options.replay
        )
        params_for_norms = state.params
    else:
        loss, grads, meta, digests = _compute_gradients_in_order(
            forward, options.num_groups, state, batch, key, options.replay
        )
        halves = None  # the config excludes the noise scale with same_bits_devices
        grads = reduction.replicate(grads)
        # The order of the sums in a norm depends on the sharding, so norms are computed on replicated arrays.
        params_for_norms = state.params if options.norms == "none" else reduction.replicate_flat(state.params)

    # 2. Variables without gradient.
    if STATISTICS in meta:
        changed, scalars = options.update_variables(variables, meta[STATISTICS])
        meta = drop_statistics(meta) | scalars
        state = replace_variables(state, changed) if variables else state

    # 3. The decision of auxiliary states on the update, before the optimizer, so that no new state waits for it.
    own_meta = {GRAD_NORM: optax.tree.norm(grads)} | compute_norms(grads, params_for_norms, options.norms)
    is_applied: jax.Array | None = None
    judged: Any = {}
    if any(each.judge for each in options.auxiliary_states):
        has_target = meta[TOKEN_COUNT] > 0 if TOKEN_COUNT in meta else jnp.bool_(True)
        outcome = StepOutcome(loss, own_meta[GRAD_NORM], has_target, before.step + 1)
        is_accepted, judged, scalars = judge_update(options.auxiliary_states, before.riders, outcome)
        is_applied, own_meta = has_target & is_accepted, own_meta | scalars

    if taken := sorted({*own_meta} & {*meta}):
        raise InvalidError(f"forward returns {taken[0]!r} as meta, which is a reserved name; use another")

    # 4. The optimizer, which sees float32 gradients.
    def apply_update(state: TrainState) -> tuple[TrainState, Scalars]:
        if options.rounding == "nearest":
            state = state.apply_gradients(grads=grads)
        else:
            state = apply_gradients_stochastically(state, grads, key)

        # 5. Auxiliary states. They come last, because averages of weights take the new parameters.
        scalars: Scalars = {}
        if options.auxiliary_states:
            observation = StepObservation(jnp.asarray(state.step), state.params, grads, loss, meta, halves)
            after, scalars = update_auxiliary(options.auxiliary_states, state.riders, observation)
            state = state.replace(riders=after)
        return state, scalars

    def complete_step(state: TrainState) -> tuple[TrainState, Scalars]:
        if is_applied is None:
            state, scalars = apply_update(state)
        else:
            state, scalars = _apply_conditionally(is_applied, apply_update, state, _count_step(before))
        # 6. A step that turns out to have no target.
        if is_applied is None and TOKEN_COUNT in meta:
            state = jax.tree.map(functools.partial(jnp.where, meta[TOKEN_COUNT] > 0), state, _count_step(before))
        if judged:
            state = state.replace(riders={**state.riders, **judged})
        return state, scalars

    if options.replay is None:
        state, scalars = complete_step(state)
    else:
        agrees = jnp.all(digests == options.replay.expected)
        is_completed = (options.replay.action == UPDATE) | ((options.replay.action == COMPARE) & agrees)
        state, scalars = _apply_conditionally(is_completed, complete_step, state, before)
        own_meta[REPLAY_DIGESTS] = digests
    return state, loss, meta | scalars | own_meta


def _apply_conditionally(
    is_applied: jax.Array, apply_update: Callable[[TrainState], Any], state: TrainState, skipped: TrainState
) -> tuple[TrainState, Scalars]:
    """Return (state, scalars) of `apply_update` if `is_applied`, else `skipped` with NaN for each scalar.

    A conditional keeps the update in a computation of its own, so that XLA compiles it to the same bits as without a
    condition; a select would be fused into it.
    """
    shapes = jax.eval_shape(apply_update, state)[1]
    unknown = {name: jnp.full(shape.shape, jnp.nan, jnp.float32) for name, shape in shapes.items()}

    def apply(state: TrainState, skipped: TrainState) -> tuple[TrainState, Scalars]:
        after, scalars = apply_update(state)
        after = make_strongly_typed(after)
        if problems := find_form_problems(after, state):
            raise StateError(
                f"train_step must return a state of the same leaves, shapes and types as it takes{problems}"
            )
        return after, {name: jnp.asarray(scalar, jnp.float32) for name, scalar in scalars.items()}

    found: tuple[TrainState, Scalars] = lax.cond(
        is_applied, apply, lambda _, skipped: (skipped, unknown), state, skipped
    )
    return found


def skip_step(
    state: TrainState, schedule: optax.Schedule | None, auxiliary_states: Sequence[AuxiliaryState] = ()
) -> tuple[TrainState, jax.Array, Meta]:
    """Make a step over a batch without a target. Returns the same as `train_step`, with a `token_count` of 0. Pure."""
    rate = None if schedule is None else jnp.asarray(schedule(state.step), jnp.float32)
    after, zero = _count_step(state), jnp.float32(0)
    rate = find_injected_rate(after.opt_state) if rate is None else rate
    rates = {} if rate is None else {LEARNING_RATE: rate}
    if any(each.judge for each in auxiliary_states):
        outcome = StepOutcome(zero, zero, jnp.bool_(False), after.step)
        _, judged, scalars = judge_update(auxiliary_states, state.riders, outcome)
        after, rates = after.replace(riders={**after.riders, **judged}), rates | scalars
    return after, zero, {GRAD_NORM: zero, TOKEN_COUNT: zero, **rates}


def _count_step(state: TrainState) -> TrainState:
    counted: TrainState = state.replace(step=state.step + 1, opt_state=count_step(state.opt_state))
    return counted


def val_step(
    forward: Forward, state: TrainState, batch: Batch, num_groups: int | None = None
) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
    """Evaluate the loss over a batch (S, B, ...), without dropout. Reads no optimizer state.

    `num_groups` is as in `StepOptions`: any number selects the fixed order of sums.

    Returns:
        (loss_sum, token_count, last_meta), sums and not means, so that every token of a validation set weighs the same.
        The count is the total target weight of the batch, or the one that `forward` returns. Meta is that of the last
        micro-batch, except for its `sums`: they are totals, so that the caller can add those of further batches.
    """
    forward = _rename_target_count(forward)
    if num_groups is not None:
        return _val_step_in_order(forward, state, batch)
    apply_fn = bind_variables(state.apply_fn, get_variables(state))
    params = make_params_merger(state)(state.params)

    # One compiled body for all micro-batches keeps the program small, and the logits of one of them in memory.
    def add(carry: tuple[jax.Array, jax.Array], micro: Batch) -> tuple[tuple[jax.Array, jax.Array], Any]:
        loss_sum, meta = forward(apply_fn, params, micro, None)
        count = meta[TOKEN_COUNT] if TOKEN_COUNT in meta else _sum_target_weights(micro)
        return (carry[0] + loss_sum, carry[1] + count), drop_statistics(meta)

    (loss_sum, token_count), metas = lax.scan(add, (jnp.float32(0), jnp.float32(0)), _number_examples(batch))
    last_meta = jax.tree.map(lambda leaf: leaf[-1], metas)
    return loss_sum, token_count, last_meta | accumulate_sums(metas, is_stacked=True)


def _val_step_in_order(
    forward: Forward, state: TrainState, batch: Batch
) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
    """Evaluate as `val_step`, with all sums in an order that does not depend on the number of devices."""
    num_devices = reduction.count_batch_devices()

    def on_device(whole: tuple[Any, Any], batch: Batch) -> tuple[jax.Array, jax.Array, Meta]:
        here = _replace_arrays(state, *whole)
        apply_fn, params = bind_variables(here.apply_fn, get_variables(here)), make_params_merger(here)(here.params)

        def evaluate_micro_batch(_: None, micro: Batch) -> tuple[None, Any]:
            # Barriers, as in `_compute_gradients_in_order`.
            params_here, micro = lax.optimization_barrier((params, micro))
            loss_sum, meta = lax.optimization_barrier(forward(apply_fn, params_here, micro, None))
            count = meta[TOKEN_COUNT] if TOKEN_COUNT in meta else _sum_target_weights(micro)
            return None, (loss_sum, count, drop_statistics(meta))

        _, outputs = lax.scan(evaluate_micro_batch, None, batch)
        losses_S, counts_S, metas = reduction.gather_micro_batches(outputs, num_devices)
        last_meta = jax.tree.map(lambda leaf: leaf[-1], metas)
        return jnp.sum(losses_S), jnp.sum(counts_S), {**last_meta, **accumulate_sums(metas, is_stacked=True)}

    return reduction.run_per_batch_shard(
        on_device, (state.params, getattr(state, VARIABLES, {})), _number_examples(batch)
    )


# Gradients.


def _compute_gradients(
    forward: Forward,
    state: TrainState,
    batch: Batch,
    key: jax.Array,
    num_steps: int,
    needs_halves: bool,
    replay: ReplayInputs | None,
) -> tuple[Any, ...]:
    """Return (loss, float32 gradients, meta, statistics of the halves, digests (N, L)) of a batch (S, B, T).

    Statistics of the halves are None unless `needs_halves`, and so are the digests without `replay`. Each data-parallel
    part accumulates its own gradients over all micro-batches; they are all-reduced over `data` once, at the end
    (`reduction.run_per_data_shard`).
    """
    num_tokens = _make_divisor(batch, _sum_target_weights(batch)) if "padding_mask" in batch else None
    # Schedule-free optimizers take the gradient at another point than the averaged parameters.
    params = compute_gradient_point(state.params, state.opt_state)

    specs = get_moment_specs(state)
    if specs is not None:
        specs = split_frozen(specs, state.opt_state)[0]
    # Where the partitioner reduces gradients, it is told that a device needs no more than its part of them.
    is_scattered = specs is not None and reduction.count_gradient_shards() == 1

    def on_part(whole: tuple[Any, Any, jax.Array, jax.Array | None], batch: Batch) -> tuple[Any, ...]:
        params, variables, key, num_tokens = whole
        here = _replace_arrays(state, params, variables)
        value_and_whole_grad, trained = _make_gradient_function(forward, here, params, batch, key, num_tokens)

        def value_and_grad(trained: Any, micro: Batch) -> Any:
            found, grads = value_and_whole_grad(trained, micro)
            return found, jax.tree.map(lax.with_sharding_constraint, grads, specs) if is_scattered else grads

        def accumulate(carry: tuple[jax.Array, Any], micro: Batch) -> tuple[tuple[jax.Array, Any], Any]:
            (loss, meta), grads = value_and_grad(trained, micro)
            return (carry[0] + loss, jax.tree.map(jnp.add, carry[1], grads)), meta

        first_half = None  # (loss, gradients) summed over the first half of the micro-batches
        # A single micro-batch needs no scan, and no zeros to which its gradients are added.
        if num_steps == 1:
            (loss, metas), grads = value_and_grad(trained, jax.tree.map(lambda leaf: leaf[0], batch))
        elif not needs_halves:
            zeros = jnp.float32(0), _make_zeros(trained)
            (loss, grads), metas = lax.scan(accumulate, zeros, batch)
        else:
            # The sums over the first half are kept, and the scan over the second half starts from them, so that the
            # total has the same additions in the same order as without halves.
            half = num_steps // 2
            zeros = jnp.float32(0), _make_zeros(trained)
            first_half, metas = lax.scan(accumulate, zeros, jax.tree.map(lambda leaf: leaf[:half], batch))
            (loss, grads), others = lax.scan(accumulate, first_half, jax.tree.map(lambda leaf: leaf[half:], batch))
            metas = jax.tree.map(lambda one, other: jnp.concatenate([one, other]), metas, others)

        halves = None
        if first_half is not None:
            counts = metas[TOKEN_COUNT] if TOKEN_COUNT in metas else jax.vmap(_sum_target_weights)(batch)
            halves = first_half[1], jnp.sum(counts.reshape(2, -1), axis=1, dtype=jnp.float32)
        last_meta = metas if num_steps == 1 else jax.tree.map(lambda leaf: leaf[-1], metas)
        # Meta that is summed over micro-batches is added below as a total.
        summed = (TOKEN_COUNT, STATISTICS, SUMS)
        last_meta = {name: value for name, value in last_meta.items() if name not in summed}
        # The first item is summed over data-parallel parts, the second is taken from the last of them.
        own = None if replay is None else compute_digests(grads)
        return (loss, grads, _sum_meta(metas, num_steps), halves), last_meta, own

    whole, numbered = (params, getattr(state, VARIABLES, {}), key, num_tokens), _number_examples(batch)
    if replay is not None:
        numbered = reduction.rotate_shards(numbered, replay.shift, 1, reduction.count_gradient_shards())
    (loss, grads, totals, halves), last_meta, digests = reduction.run_per_data_shard(
        on_part, whole, numbered, None if specs is None else (None, specs, None, None)
    )
    if specs is not None:
        # Before anything else reads them, so that XLA need not all-reduce whole gradients.
        grads = jax.tree.map(lax.with_sharding_constraint, grads, specs)
    if replay is not None:
        digests = jnp.roll(digests, -replay.shift, axis=0)
    if halves is not None:
        halves = compare_halves(halves[0], grads, halves[1], None if TOKEN_COUNT in totals else num_tokens)
    meta = {**last_meta, **totals}
    return *_divide_by_token_count(batch, loss, fill_frozen_gradients(grads, params), meta, num_tokens), halves, digests


def _compute_gradients_in_order(
    forward: Forward, num_groups: int, state: TrainState, batch: Batch, key: jax.Array, replay: ReplayInputs | None
) -> tuple[jax.Array, Any, Meta, jax.Array | None]:
    """Return (loss, float32 gradients, meta, digests (N, L)) of sums whose order is the same on any number of devices.

    Digests are None without `replay`.
    """
    S, _ = _get_leading_shape(batch)
    params = compute_gradient_point(state.params, state.opt_state)
    num_devices = reduction.count_batch_devices()

    def on_device(
        whole: tuple[Any, Any, jax.Array, jax.Array | None], batch: Batch
    ) -> tuple[jax.Array, Any, Meta, jax.Array | None]:
        params, variables, key, shift = whole
        here = _replace_arrays(state, params, variables)
        num_tokens = None
        if "padding_mask" in batch:
            counts_S = reduction.gather_micro_batches(jax.vmap(_sum_target_weights)(batch), num_devices)
            if shift is not None:
                counts_S = jnp.roll(counts_S, -shift * (S // num_devices))
            num_tokens = _make_divisor(batch, jnp.sum(counts_S))
        value_and_grad, trained = _make_gradient_function(forward, here, params, batch, key, num_tokens)

        def accumulate(sums: Any, micro: Batch) -> tuple[Any, Any]:
            # Barriers isolate the micro-batch: its code must not depend on what XLA could fuse around it, which
            # differs between numbers of devices.
            (loss, meta), grads = lax.optimization_barrier(value_and_grad(*lax.optimization_barrier((trained, micro))))
            return jax.tree.map(jnp.add, sums, grads), (loss, meta)

        zeros = _make_zeros(trained)

        def add_group(batch: Batch) -> tuple[Any, Any]:
            grads, (losses, metas) = lax.scan(accumulate, zeros, batch)
            if shift is None:
                return grads, (losses, metas, None)
            digests = compute_digests(grads)
            return grads, (losses, metas, jnp.zeros((losses.size, digests.size), jnp.uint32).at[0].set(digests))

        grads, (losses_S, metas, digests) = reduction.sum_gradients(add_group, batch, zeros, num_groups, num_devices)
        if shift is not None:
            digests = digests.reshape(num_devices, S // num_devices, -1)
            digests = jnp.roll(jnp.sum(digests, axis=1, dtype=jnp.uint32), -shift, axis=0)
        last_meta = {**jax.tree.map(lambda leaf: leaf[-1], metas), **_sum_meta(metas, num_steps=0)}
        divided = _divide_by_token_count(
            batch, jnp.sum(losses_S), fill_frozen_gradients(grads, params), last_meta, num_tokens
        )
        return *divided, digests

    assert S % num_groups == 0, f"{S} micro-batches do not divide into {num_groups} groups"
    numbered, shift = _number_examples(batch), None
    if replay is not None:
        numbered, shift = reduction.rotate_shards(numbered, replay.shift, 0, num_devices), replay.shift
    whole = params, getattr(state, VARIABLES, {}), key, shift
    found: tuple[jax.Array, Any, Meta, jax.Array | None] = reduction.run_per_batch_shard(on_device, whole, numbered)
    return found


def _make_gradient_function(
    forward: Forward, state: TrainState, params: Any, batch: Batch, key: jax.Array, num_tokens: jax.Array | None
) -> tuple[Callable[[Any, Batch], Any], Any]:
    """Return (function, trained parameters).

    The function maps trained parameters and a micro-batch to ((loss, meta), float32 gradients). It closes over the
    frozen parameters, so that no gradient is computed for them.
    """
    apply_fn, merge = bind_variables(state.apply_fn, get_variables(state)), make_params_merger(state)
    trained, add_frozen = split_frozen(params, state.opt_state)

    # Each micro-batch contributes its share of the mean over the whole batch, so that shares only need to be summed.
    def share_of_loss(trained: Any, micro: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
        loss_sum, meta = forward(apply_fn, merge(add_frozen(trained)), micro, key)
        if TOKEN_COUNT in meta:
            return loss_sum, meta
        if num_tokens is None:
            raise InvalidError(f"{format_place(forward)}: {make_uncounted_error(batch)}")
        return loss_sum / num_tokens, meta

    # Cast before accumulation: bfloat16 sums over many micro-batches would lose small gradients.
    def value_and_grad(trained: Any, micro: Batch) -> Any:
        found, grads = jax.value_and_grad(share_of_loss, has_aux=True)(trained, micro)
        return found, jax.tree.map(lambda grad: grad.astype(jnp.float32), grads)

    return value_and_grad, trained


def _make_zeros(trained: Any) -> Any:
    return jax.tree.map(lambda param: jnp.zeros(param.shape, jnp.float32), trained)


def _replace_arrays(state: TrainState, params: Any, variables: Any) -> TrainState:
    """Return the state with the arrays that a shard_map passes in; its optimizer state is not read there."""
    return state.replace(params=params, **({VARIABLES: variables} if hasattr(state, VARIABLES) else {}))


# Batches and meta.


def _rename_target_count(forward: Forward) -> Forward:
    """Return `forward` with the `target_count` of its meta, if there is one, as `token_count`.

    Its errors name file, line and class of a user's own `forward`.
    """

    @functools.wraps(forward)
    def renamed(*arguments: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        try:
            returned = forward(*arguments)
            validate_forward(returned)
        except InvalidError as error:
            raise InvalidError(f"{format_place(forward)}: {error}") from error
        loss_sum, meta = returned
        return loss_sum, {TOKEN_COUNT if name == TARGET_COUNT else name: value for name, value in meta.items()}

    return renamed


def _get_leading_shape(batch: Batch) -> tuple[int, int]:
    S, B, *_ = next(iter(batch.values())).shape
    return S, B


def _number_examples(batch: Batch) -> Batch:
    """Return the batch with `example` (S, B): the index of each example in the step, independent of the split."""
    S, B = _get_leading_shape(batch)
    return batch | {"example": jnp.arange(S * B).reshape(S, B)}


def _sum_target_weights(batch: Batch) -> jax.Array:
    return jnp.sum(target_weights(batch), dtype=jnp.float32)


def _make_divisor(batch: Batch, count: jax.Array) -> jax.Array:
    """Return `count`, or 1 if it is 0, so that a batch of padding has loss 0."""
    # Weights may add up to less than 1, so only counts of tokens may be raised to 1 by `maximum`.
    return jnp.where(count > 0, count, 1.0) if "loss_weight" in batch else jnp.maximum(count, 1.0)


def _sum_meta(metas: Any, num_steps: int) -> Meta:
    """Return the meta that is summed over micro-batches. With `num_steps` 1, leaves have no axis of micro-batches."""
    counts = {TOKEN_COUNT: jnp.sum(metas[TOKEN_COUNT], dtype=jnp.float32)} if TOKEN_COUNT in metas else {}
    return {**counts, **sum_statistics(metas, num_steps), **accumulate_sums(metas, is_stacked=num_steps != 1)}


def _divide_by_token_count(
    batch: Batch, loss: jax.Array, grads: Any, meta: Meta, num_tokens: jax.Array | None
) -> tuple[jax.Array, Any, Meta]:
    """Divide loss and gradients by the `token_count` of the meta; without one they were divided by `num_tokens`."""
    if TOKEN_COUNT not in meta:
        return loss, grads, replace_sums_by_means(meta, num_tokens)
    count = meta[TOKEN_COUNT]
    divisor = _make_divisor(batch, count)
    # A mean over nothing is NaN, which is null in a row.
    return loss / divisor, jax.tree.map(lambda grad: grad / divisor, grads), replace_sums_by_means(meta, count)


# Norms and rounding.


def compute_norms(grads: Any, params: Any, norms: Norms) -> dict[str, jax.Array]:
    """Return `param_norm`, and `grad_norm/<group>` and `param_norm/<group>` of each group; nothing for `none`.

    A group holds all parameters of a top-level module (`groups`), or one parameter (`parameters`).
    """
    if norms == "none":
        return {}
    found = {"param_norm": optax.tree.norm(_cast_to_float32(params))}
    for kind, tree in {"grad_norm": grads, "param_norm": params}.items():
        groups: dict[str, list[jax.Array]] = {}
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            own = path if norms == "parameters" else path[:1]
            groups.setdefault(jax.tree_util.keystr(own, simple=True, separator="/"), []).append(leaf)
        for group, leaves in groups.items():
            found[f"{kind}/{group}"] = optax.tree.norm(_cast_to_float32(leaves))
    return found


def _cast_to_float32(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree)


def apply_gradients_stochastically(state: Any, grads: Any, key: jax.Array) -> Any:
    """Apply gradients as `state.apply_gradients` does, but round bfloat16 parameters stochastically.

    Each leaf draws one number per element from its own key, made of the step's `key` and the leaf's index, so that the
    bits do not depend on the mesh. Parameters of other types are updated as usual.
    """
    own_params = shard_like_moments(state, state.params)
    updates, opt_state = state.tx.update(grads, state.opt_state, own_params)
    updates = shard_like_moments(state, updates)
    key = jax.random.fold_in(key, _ROUNDING_KEY)
    params, structure = jax.tree.flatten(own_params)
    new_params = [
        round_stochastically(param.astype(jnp.float32) + update, jax.random.fold_in(key, number))
        if param.dtype == jnp.bfloat16
        else optax.apply_updates(param, update)
        for number, (param, update) in enumerate(zip(params, jax.tree.leaves(updates), strict=True))
    ]
    gathered = gather_params(state, jax.tree.unflatten(structure, new_params))
    return state.replace(step=state.step + 1, params=gathered, opt_state=opt_state)


def round_stochastically(values: jax.Array, key: jax.Array) -> jax.Array:
    """Round each of the float32 `values` to one of its two bfloat16 neighbours; the mean over keys is the value.

    The lower 16 bits of the word are the distance from the neighbour towards zero, in 1/65536 of the gap. Adding 16
    random bits carries into the upper half with exactly that probability. Infinities and NaNs are converted as usual.
    """
    words = lax.bitcast_convert_type(values, jnp.uint32)
    carried = words + jax.random.bits(key, values.shape, jnp.uint16).astype(jnp.uint32)
    rounded = lax.bitcast_convert_type((carried >> 16).astype(jnp.uint16), jnp.bfloat16)
    return jnp.where(jnp.isfinite(values), rounded, values.astype(jnp.bfloat16))
