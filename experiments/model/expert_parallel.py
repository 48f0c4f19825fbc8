"""Expert parallelism: tokens are sent to the devices of their experts (dispatch), processed, and sent back (combine).

The module owns everything that crosses devices between the router and the residual stream, inside one `shard_map` over
the whole mesh. It knows no router, and of an expert only its function. Statements about the axis `expert` hold for
whatever mesh axes a job's rules shard experts over, provided that they shard the examples too. If they do not, or if
there is only one example, each device computes its own experts for all tokens, and only sums are communicated.

Each device has M tokens: its own, and those of its neighbours over `tensor`, which hold other columns of the same
experts, and from which tokens are all-gathered first. Sums over the columns are reduce-scattered back to the sharding
of the stream. Tokens of other sequences, and of other shards of a sequence, travel independently over `expert`, among e
devices. There are two forms of the exchange; sizes are those of one device and layer:

- Fixed slots, where an expert takes at most C tokens of a sequence (`capacity_factor`), and sequences are not sharded:
  one dense all-to-all of (E, B * C, D) for the dispatch and one for the combine, and as many in the backward pass. That
  many slots are sent, stored and multiplied whatever the router does: `capacity_factor` times the assignments.
- Rounds, where no token is dropped, and where shards of a sequence share a capacity, which any one shard may use up. A
  round has a window of c slots for each pair of devices. c is the smaller of 5/4 of the mean, A / e, and of the most
  that one device can send to another, M * min(K, E / e). Tokens that do not fit it go in a further round. An even
  load takes one round. If all tokens go to the experts of one device, it takes at most 4/5 * e * min(K, E / e) / K
  rounds, and as many times the bytes and the time. The memory is that of one round whatever the router does: e * c
  slots, 5/4 of the assignments, of width D three times (sent, received, by expert), and their hidden layers. In the
  backward pass it is twice that, and the gradients of the device's experts in float32. The backward pass sends tokens
  again and recomputes the round, so that the forward pass keeps nothing of it: three exchanges backward instead of two.

In rounds, TPUs send only the filled part of a window, by `lax.ragged_all_to_all`. On other platforms `lax.all_to_all`
sends whole windows: XLA has no ragged one for CPU, and not reliably for GPU.

A gate travels with its token and is applied inside the expert. So the backward pass needs no result of an expert at
home. Between tokens and slots every array is gathered, and never scattered (`grouped_matmul`).

Matrices that are sharded over devices with other tokens (fsdp) are gathered, by expert first (`_gather_weights`), and
gathered again in the backward pass: a device keeps only its shard. They are gathered here and not by the partitioner,
so that their gradients are reduce-scattered; the partitioner would all-reduce them. If matmuls are in 8 bits, shards
are quantised before they are gathered (`_gather_and_multiply_in_8_bits`).

Shape legend: as in `grouped_matmul`; B sequences and T positions at hand, F width of the hidden layer, R slots
received, W slots sent, S slots of one window, G devices of a group (e above), L experts of a device.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jax.tree_util import Partial
from jax.typing import DTypeLike

from experiments.model.grouped_matmul import (
    BATCHED,
    GroupedMatmul,
    GroupLayout,
    Multiply,
    apply_grouped,
    combine,
    dispatch,
    dispatch_weights,
    find_tokens,
    make_layout,
    rank_assignments,
)
from experiments.model.layers import num_devices
from experiments.model.quantised import TYPES, Quantised, quantise
from runner.config import MatmulType
from runner.parallel.mesh import list_axes

Axes = tuple[str, ...]  # of the mesh
Weights = Sequence[jax.Array]
# (joined matrices in the form that `multiply` takes, (P, D), gates (P), multiply) -> (P, D), each slot by its expert
Expert = Callable[[Sequence[Any], jax.Array, jax.Array, Multiply], jax.Array]

_WINDOW_MULTIPLE = 8  # the slots of a window are a multiple of this


@dataclass(frozen=True)
class ExpertLayer:
    """Static description of a layer's experts."""

    expert: Expert
    num_experts: int
    capacity: int | None  # most tokens that an expert takes of a sequence of `length`; None is no limit
    length: int  # length of a whole sequence
    platform: str  # platform that the program is compiled for
    matmul: MatmulType = "compute"  # type of the operands of matmuls

    def max_tokens(self, num_sequences: int, num_positions: int) -> int | None:
        """Return the most tokens that an expert takes of these sequences; None if they are shards or have no limit."""
        return None if self.capacity is None or num_positions < self.length else num_sequences * self.capacity


@dataclass(frozen=True)
class _ExpertSharding:
    """Mesh axes over which tokens and experts are sharded."""

    batch: Axes  # of tokens, as in the residual stream; so are positions
    positions: Axes
    experts: Axes  # of the experts' matrices; so are widths, and columns, those of the hidden layer
    widths: Axes
    columns: Axes

    @property
    def gather_axes(self) -> Axes:
        """Axes along which devices have other positions, and other columns of the same experts."""
        return tuple(axis for axis in self.positions if axis in self.columns and num_devices((axis,)) > 1)

    @property
    def reduce_axes(self) -> Axes:
        """Axes along which devices have the same tokens, and other columns or experts."""
        token_axes = (*self.batch, *self.positions)
        axes = (*self.experts, *self.columns)
        return tuple(axis for axis in axes if axis not in token_axes and num_devices((axis,)) > 1)

    @property
    def exchange_axes(self) -> Axes:
        """Axes over which tokens travel: devices have other tokens, and other experts."""
        return () if set(self.experts) & set(self.reduce_axes) else self.experts


class _RoutedTokens(NamedTuple):
    """Tokens of a device with their routing."""

    x: jax.Array  # (M, D)
    experts: jax.Array  # (M, K)
    gates: jax.Array  # (M, K)
    is_kept: jax.Array  # (M, K), bool


def get_token_axes(num_sequences: int, num_positions: int) -> tuple[Axes, Axes]:
    """Return the mesh axes that shard the sequences and the positions of tokens in the residual stream."""
    (batch,), (stream,), (positions,) = (
        _get_mesh_axes((name,), size)
        for name, size in (("batch", num_sequences), ("stream", num_positions), ("sequence", num_positions))
    )
    return batch, stream or positions


def _get_mesh_axes(names: tuple[str, ...], *sizes: int) -> list[Axes]:
    """Return the mesh axes of logical axes of these sizes; none for a size that they do not divide."""
    spec = nn.logical_to_mesh_axes(names) or [None] * len(sizes)
    found = [list_axes(entry) for entry in spec]
    return [axes if size % num_devices(axes) == 0 else () for axes, size in zip(found, sizes, strict=True)]


def compute_sharded_experts(
    x_BxTxD: jax.Array,
    experts_BxTxK: jax.Array,
    gates_BxTxK: jax.Array,
    is_kept_BxTxK: jax.Array,
    weights: Weights,
    biases: Weights,
    layer: ExpertLayer,
) -> jax.Array:
    """Return the weighted sum of the outputs of each token's experts, (B, T, D), under the caller's mesh.

    All arrays are whole. `weights` are matrices stacked by experts, of which the last one has the hidden layer in its
    second axis, all others in their third. `biases` are those of the hidden layer, (E, 1, F) for each matrix into it,
    or none.
    """
    D = x_BxTxD.shape[2]
    token_axes = get_token_axes(*x_BxTxD.shape[:2])
    sharding = _ExpertSharding(*token_axes, *_get_mesh_axes(("expert", "embed", "mlp"), *weights[0].shape))
    if set(sharding.experts) & set(sharding.reduce_axes) and set(sharding.experts) & {*token_axes[0], *token_axes[1]}:
        # Tokens would have to travel over one of the experts' axes and not over another. This is rare, and every device
        # then has all experts.
        sharding = replace(sharding, experts=())

    def compute(
        x: jax.Array, experts: jax.Array, gates: jax.Array, kept: jax.Array, weights: Any, biases: Any
    ) -> jax.Array:
        leaves = [_all_gather(leaf, sharding.gather_axes, 1) for leaf in (x, experts, gates, kept)]
        shards = join_matrices(weights, biases)
        b, t, _ = leaves[0].shape
        max_tokens = layer.max_tokens(b, t)
        tokens = _RoutedTokens(*(leaf.reshape(b * t, -1) for leaf in leaves))
        if num_devices(sharding.experts) == 1:
            y_MxD = _compute_local(layer, max_tokens, 0, sharding, shards, tokens)
        elif not sharding.exchange_axes:
            first = lax.axis_index(sharding.experts) * weights[0].shape[0]
            y_MxD = _compute_local(layer, max_tokens, first, sharding, shards, tokens)
        elif max_tokens is not None:
            y_MxD = _exchange_fixed_slots(layer, max_tokens, sharding, shards, tokens)
        else:
            y_MxD = _exchange_in_rounds(layer, sharding, shards, tokens)
        y_BxTxD = y_MxD.reshape(b, t, D)
        if sharding.gather_axes:
            y_BxTxD = lax.psum_scatter(y_BxTxD, sharding.gather_axes, scatter_dimension=1, tiled=True)
        return lax.psum(y_BxTxD, sharding.reduce_axes) if sharding.reduce_axes else y_BxTxD

    if sharding.gather_axes:
        # The backward pass keeps everything except the gathered tokens, which it gathers again.
        compute = jax.checkpoint(
            compute, policy=lambda primitive, *_, **__: primitive is not lax.all_gather_p, prevent_cse=False
        )
    # Axes with one device are named too: gradients are summed over all axes that are not.
    tokens = PartitionSpec(sharding.batch, sharding.positions)
    into = PartitionSpec(sharding.experts, sharding.widths, sharding.columns)
    out = PartitionSpec(sharding.experts, sharding.columns, sharding.widths)
    bias = PartitionSpec(sharding.experts, None, sharding.columns)
    in_specs = (tokens, tokens, tokens, tokens, [*[into] * (len(weights) - 1), out], [bias] * len(biases))
    run = jax.shard_map(compute, in_specs=in_specs, out_specs=tokens, check_vma=False)
    return run(x_BxTxD, experts_BxTxK, gates_BxTxK, is_kept_BxTxK, [*weights], [*biases])


def _all_gather(leaf: jax.Array, axes: Axes, axis: int) -> jax.Array:
    return lax.all_gather(leaf, axes, axis=axis, tiled=True) if num_devices(axes) > 1 else leaf


def _all_to_all(x_WxD: jax.Array, axes: Axes) -> jax.Array:
    """Send an equal number of slots to each device of the group, and return those that each has sent."""
    return lax.all_to_all(x_WxD, axes, split_axis=0, concat_axis=0, tiled=True)


# Matrices of the experts, of which a device has a shard.


def join_matrices(weights: Weights, biases: Weights = ()) -> list[jax.Array]:
    """Return the matrices into the hidden layer as one, (E, D, F) or (E, D, 2 F), the one out of it, and any biases.

    One product then makes both halves of the hidden layer, and one product the gradient of the tokens. The biases of
    the hidden layer, (E, 1, F), are joined likewise.
    """
    *into, out = weights
    return [jnp.concatenate(into, axis=2), out, *([jnp.concatenate(biases, axis=2)] if biases else [])]


def _gather_weights(shard: jax.Array, axes: Axes, axis: int | None) -> jax.Array:
    """Return whole matrices of a device's experts from its shard along `axis`, which is sharded over the mesh `axes`.

    Biases are sharded along none (`axis` is None).

    If their number allows it, devices first redistribute the experts among themselves. The shards that are then
    gathered are whole experts, contiguous in memory, and need not be moved again.
    """
    if axis is None or num_devices(axes) == 1:
        return shard
    if shard.shape[0] % num_devices(axes):
        return _all_gather(shard, axes, axis)
    return _all_gather(lax.all_to_all(shard, axes, split_axis=0, concat_axis=axis, tiled=True), axes, 0)


class _WeightShard(NamedTuple):
    """Shard of the matrices of a device's experts, and the axis that is sharded; None if it is whole."""

    weights: jax.Array
    axis: int | None


def _make_shards(weights: Weights) -> list[_WeightShard]:
    """Return joined matrices as shards: the width is the second axis of those into the hidden layer, else the third."""
    return [_WeightShard(leaf, axis) for leaf, axis in zip(weights, (1, 2, None), strict=False)]


def make_expert(
    expert: Expert, matmul_type: MatmulType, widths: Axes, columns: Axes, shards: Weights
) -> Callable[[jax.Array, jax.Array, GroupedMatmul], jax.Array]:
    """Return the function of experts whose matrices are sharded over the axes `widths`, and the hidden layer `columns`.

    `shards` are matrices as `join_matrices` returns them. They are gathered over `widths`, and not over `columns`.
    Matmuls of biases always have the compute type.
    """

    def apply(x_PxD: jax.Array, gates_P: jax.Array, matmul: GroupedMatmul) -> jax.Array:
        def multiply(x_PxI: jax.Array, shard: _WeightShard) -> jax.Array:
            if matmul_type == "compute" or shard.axis is None:
                if not widths:
                    return matmul(x_PxI, shard.weights)
                return _gather_and_multiply(widths, shard.axis, matmul.multiply, x_PxI, shard.weights)
            form = _EightBitForm(matmul_type, widths, columns, shard.axis)
            tokens = matmul.tokens if shard.axis == 1 else None
            return _gather_and_multiply_in_8_bits(form, matmul._replace(tokens=None), tokens, x_PxI, shard.weights)

        return expert(_make_shards(shards), x_PxD, gates_P, multiply)

    return apply


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gather_and_multiply(
    axes: Axes, axis: int | None, matmul: Partial, x_PxI: jax.Array, shard: jax.Array
) -> jax.Array:
    """Multiply by gathered matrices, which are gathered again in the backward pass."""
    product: jax.Array = matmul(x_PxI, _gather_weights(shard, axes, axis))
    return product


def _gather_and_multiply_backward(
    axes: Axes, axis: int | None, residuals: Any, dy_PxO: jax.Array
) -> tuple[None, jax.Array, jax.Array]:
    matmul, x_PxI, shard = residuals
    whole, scatter = jax.vjp(lambda shard: _gather_weights(shard, axes, axis), shard)
    _, pull_back = jax.vjp(matmul, x_PxI, whole)
    dx_PxI, dwhole = pull_back(dy_PxO)
    (dshard,) = scatter(dwhole)
    return None, dx_PxI, dshard


_gather_and_multiply.defvjp(
    lambda axes, axis, *arrays: (_gather_and_multiply(axes, axis, *arrays), arrays), _gather_and_multiply_backward
)


class _EightBitForm(NamedTuple):
    """Static description of a matmul of experts from operands in 8 bits."""

    matmul: MatmulType
    widths: Axes  # mesh axes over which the residual stream is sharded
    columns: Axes  # mesh axes over which the hidden layer is sharded
    axis: int  # axis of the matrices that is the residual stream; 3 - axis is the hidden layer

    def quantise_slots(self, x_PxI: jax.Array, contracted: int, dtype: DTypeLike) -> Quantised:
        """Return operands of a product along the axis `contracted` of the matrices in 8 bits."""
        axes = self.columns if contracted != self.axis and num_devices(self.columns) > 1 else ()
        return quantise(x_PxI, (1,), dtype, axes)

    def gather_weights(self, shard: jax.Array, contracted: int) -> Quantised:
        """Return whole matrices in 8 bits, with a scale that is shared along the axis `contracted`."""
        shared_axes = self.widths if contracted == self.axis else self.columns
        dtype = TYPES[self.matmul].forward
        values, scale = quantise(shard, (contracted,), dtype, shared_axes if num_devices(shared_axes) > 1 else ())
        # Collectives of floats in 8 bits do not exist everywhere.
        whole = _gather_weights(lax.bitcast_convert_type(values, jnp.int8), self.widths, self.axis)
        if contracted != self.axis:
            scale = _gather_weights(scale, self.widths, self.axis)
        return Quantised(lax.bitcast_convert_type(whole, dtype), scale)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gather_and_multiply_in_8_bits(
    form: _EightBitForm, matmul: GroupedMatmul, tokens: Quantised | None, x_PxI: jax.Array, shard: jax.Array
) -> jax.Array:
    """Multiply from operands in 8 bits, by the recipe of `quantised`.

    If `matmul` has a layout, tokens and the gradients of their results are quantised once for each token, and not for
    each of its experts. For that, the product with the matrices out of the hidden layer is combined into the sum over
    the experts of each token here, and the result is (M, O).

    `tokens` is `x` in 8 bits; None to quantise it here.
    """
    if tokens is None:
        tokens = form.quantise_slots(x_PxI, 1, TYPES[form.matmul].forward)
    y_PxO: jax.Array = matmul.multiply_in_8_bits(tokens, form.gather_weights(shard, 1), x_PxI.dtype)
    return y_PxO if matmul.layout is None or form.axis == 1 else combine(y_PxO, matmul.layout)


def _gather_and_multiply_in_8_bits_backward(
    form: _EightBitForm, residuals: Any, dy_PxO: jax.Array
) -> tuple[None, None, jax.Array, jax.Array]:
    matmul, x_PxI, shard = residuals
    dy = form.quantise_slots(dy_PxO, 2, TYPES[form.matmul].gradient)
    if matmul.layout is not None and form.axis == 2:
        dy, dy_PxO = jax.tree.map(lambda leaf: leaf[find_tokens(matmul.layout)], (dy, dy_PxO))
    dx_PxI = matmul.multiply_in_8_bits(dy, form.gather_weights(shard, 2), x_PxI.dtype, is_transposed=True)
    dwhole = matmul.differentiate_weights(x_PxI, dy_PxO, shard.shape[0])
    (dshard,) = jax.linear_transpose(lambda shard: _gather_weights(shard, form.widths, form.axis), shard)(dwhole)
    return None, None, dx_PxI, dshard


_gather_and_multiply_in_8_bits.defvjp(
    lambda form, matmul, tokens, x_PxI, shard: (
        _gather_and_multiply_in_8_bits(form, matmul, tokens, x_PxI, shard),
        (matmul, x_PxI, shard),
    ),
    _gather_and_multiply_in_8_bits_backward,
)


# Without an exchange, and with fixed slots.


def _compute_local(
    layer: ExpertLayer,
    max_tokens: int | None,
    first: int | jax.Array,
    sharding: _ExpertSharding,
    shards: Weights,
    tokens: _RoutedTokens,
) -> jax.Array:
    """Return the weighted sum over a device's own experts, which begin with the number `first`, for its tokens."""
    num_local = shards[0].shape[0]
    experts_MxK = tokens.experts - first
    return apply_grouped(
        tokens.x,
        experts_MxK,
        tokens.gates,
        tokens.is_kept & (experts_MxK >= 0) & (experts_MxK < num_local),
        make_expert(layer.expert, layer.matmul, sharding.widths, sharding.columns, shards),
        num_experts=num_local,
        most_tokens=max_tokens,
        platform=layer.platform,
        matmul_type=layer.matmul,
    )


def _exchange_fixed_slots(
    layer: ExpertLayer, max_tokens: int, sharding: _ExpertSharding, shards: Weights, tokens: _RoutedTokens
) -> jax.Array:
    """Exchange tokens in `max_tokens` slots for each expert, filled or not."""
    num_local, D, axes = shards[0].shape[0], tokens.x.shape[1], sharding.exchange_axes
    rank_MxK, _ = rank_assignments(tokens.experts, tokens.is_kept, layer.num_experts)
    num_slots = layer.num_experts * max_tokens
    layout = make_layout(jnp.where(tokens.is_kept, tokens.experts * max_tokens + rank_MxK, num_slots), num_slots)

    def send(x_PxD: jax.Array) -> jax.Array:
        # Slots arrive by device and are needed by expert.
        received_GxLxSxD = _all_to_all(x_PxD, axes).reshape(-1, num_local, max_tokens, x_PxD.shape[1])
        return received_GxLxSxD.swapaxes(0, 1).reshape(num_slots, -1)

    x_RxD, gates_Rx1 = send(dispatch(tokens.x, layout)), send(dispatch_weights(tokens.gates, layout)[:, None])
    apply = make_expert(layer.expert, layer.matmul, sharding.widths, sharding.columns, shards)
    y_RxD = apply(x_RxD, gates_Rx1[:, 0], BATCHED)
    y_GxLxSxD = y_RxD.reshape(num_local, -1, max_tokens, D).swapaxes(0, 1)
    return combine(_all_to_all(y_GxLxSxD.reshape(num_slots, D), axes), layout)


# In rounds.


class _ExchangeCounts(NamedTuple):
    """Assignments by place, and how many are sent where; all integers."""

    slots: jax.Array  # (M, K): place of an assignment among those of this device, expert by expert; A if it is dropped
    assignments: jax.Array  # (A): assignments by place
    sent: jax.Array  # (G): number sent to each device
    received: jax.Array  # (G, L): number received from each device for each of this device's experts
    num_rounds: jax.Array  # the same on all devices of the group


class _ExchangeRounds(NamedTuple):
    """Static description of the rounds."""

    layer: ExpertLayer
    axes: Axes  # of the group
    sharding: _ExpertSharding
    window: int  # slots of a window


def _exchange_in_rounds(
    layer: ExpertLayer, sharding: _ExpertSharding, shards: Weights, tokens: _RoutedTokens
) -> jax.Array:
    """Exchange all assignments that are kept, in as many rounds as it takes."""
    num_local, (M, K), axes = shards[0].shape[0], tokens.experts.shape, sharding.exchange_axes
    num_group = layer.num_experts // num_local
    window = choose_window(M, K, num_local, num_group)
    rank_MxK, counts_E = rank_assignments(tokens.experts, tokens.is_kept, layer.num_experts)
    starts_E = jnp.cumsum(counts_E) - counts_E
    layout = make_layout(jnp.where(tokens.is_kept, starts_E[tokens.experts] + rank_MxK, M * K), M * K)
    sent_G = jnp.sum(counts_E.reshape(num_group, num_local), axis=1)
    received_GxL = _all_to_all(counts_E, axes).reshape(num_group, num_local)
    # Every device runs as many rounds as the one that needs most: rounds contain collectives.
    num_rounds = lax.pmax(-(-jnp.max(sent_G) // window), axes)
    counts = _ExchangeCounts(*layout, sent_G, received_GxL, num_rounds)
    rounds = _ExchangeRounds(layer, axes, sharding, window)
    return _run_rounds(rounds, tokens.x, tokens.gates, tuple(shards), counts)


def choose_window(num_tokens: int, experts_per_token: int, num_local: int, num_group: int) -> int:
    """Return the slots that a device of a group has in a round for what it sends to one other device."""
    most = num_tokens * min(experts_per_token, num_local)
    mean = num_tokens * experts_per_token / num_group
    return _WINDOW_MULTIPLE * math.ceil(min(most, 1.25 * mean) / _WINDOW_MULTIPLE)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run_rounds(
    rounds: _ExchangeRounds,
    x_MxD: jax.Array,
    gates_MxK: jax.Array,
    shards: tuple[jax.Array, ...],
    counts: _ExchangeCounts,
) -> jax.Array:
    weights = _gather_joined(rounds.sharding.widths, shards)

    def add(number: jax.Array, sum_MxD: jax.Array) -> jax.Array:
        return sum_MxD + _run_round(rounds, counts, number, x_MxD, gates_MxK, weights).astype(jnp.float32)

    sum_MxD = lax.fori_loop(0, counts.num_rounds, add, jnp.zeros(x_MxD.shape, jnp.float32))
    return sum_MxD.astype(x_MxD.dtype)


def _gather_joined(axes: Axes, shards: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    return tuple(_gather_weights(shard.weights, axes, shard.axis) for shard in _make_shards(shards))


def _run_rounds_backward(rounds: _ExchangeRounds, residuals: Any, dy_MxD: jax.Array) -> tuple[Any, Any, Any, None]:
    x_MxD, gates_MxK, shards, counts = residuals
    weights, scatter = jax.vjp(functools.partial(_gather_joined, rounds.sharding.widths), shards)
    inputs = x_MxD, gates_MxK, weights

    def add(number: jax.Array, sums: Any) -> Any:
        _, pull_back = jax.vjp(functools.partial(_run_round, rounds, counts, number), *inputs)
        return jax.tree.map(lambda total, part: total + part.astype(jnp.float32), sums, pull_back(dy_MxD))

    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), inputs)
    sums = lax.fori_loop(0, counts.num_rounds, add, zeros)
    dx_MxD, dgates_MxK, dweights = jax.tree.map(lambda total, leaf: total.astype(leaf.dtype), sums, inputs)
    return dx_MxD, dgates_MxK, *scatter(dweights), None


_run_rounds.defvjp(lambda rounds, *arrays: (_run_rounds(rounds, *arrays), arrays), _run_rounds_backward)


def _run_round(
    rounds: _ExchangeRounds,
    counts: _ExchangeCounts,
    number: jax.Array,
    x_MxD: jax.Array,
    gates_MxK: jax.Array,
    weights: tuple[jax.Array, ...],
) -> jax.Array:
    """Return what the assignments in one window of each pair of devices add to the sums of their tokens, (M, D)."""
    layer, axes, sharding, window = rounds
    num_local = counts.received.shape[1]
    first = number * window
    layout = _make_window_layout(counts, first, window)
    received_G = jnp.sum(counts.received, axis=1)
    sent_G, received_G = (jnp.clip(count_G - first, 0, window) for count_G in (counts.sent, received_G))
    swap = functools.partial(_swap_windows, axes, layer.platform == "tpu")
    x_RxD = swap(dispatch(x_MxD, layout), sent_G, received_G)
    gates_RxK = _all_to_all(dispatch_weights(gates_MxK, layout)[:, None], axes)
    # A device sends its assignments expert by expert, and this window begins at place `first` of them.
    place_S = first + jnp.arange(window)
    ends_GxL = jnp.cumsum(counts.received, axis=1)
    expert_Rx1 = jnp.sum(place_S[:, None] >= ends_GxL[:, None], axis=-1, dtype=jnp.int32).reshape(-1, 1)
    y_RxD = apply_grouped(
        x_RxD,
        expert_Rx1,
        gates_RxK,
        expert_Rx1 < num_local,
        make_expert(layer.expert, layer.matmul, (), sharding.columns, weights),
        num_experts=num_local,
        most_tokens=None,
        platform=layer.platform,
        matmul_type=layer.matmul,
    )
    return combine(swap(y_RxD, received_G, sent_G), layout)


def _make_window_layout(counts: _ExchangeCounts, first: jax.Array, window: int) -> GroupLayout:
    """Return the layout of one window for each device, which begins at place `first` of what that device is sent."""
    num_group = counts.sent.size
    starts_G = jnp.cumsum(counts.sent) - counts.sent + first
    ends_G = jnp.cumsum(counts.sent)
    place_GxS = starts_G[:, None] + jnp.arange(window)
    num_assignments = counts.slots.size
    found_GxS = counts.assignments.at[place_GxS].get(mode="fill", fill_value=num_assignments)
    assignments_W = jnp.where(place_GxS < ends_G[:, None], found_GxS, num_assignments).reshape(-1)
    # An assignment goes to the device whose share holds its place. A dropped one has a place after all shares.
    device_MxK = jnp.sum(counts.slots[..., None] >= ends_G, axis=-1, dtype=jnp.int32)
    in_window_MxK = counts.slots - starts_G.at[device_MxK].get(mode="fill", fill_value=0)
    is_here_MxK = (device_MxK < num_group) & (in_window_MxK >= 0) & (in_window_MxK < window)
    slots_MxK = jnp.where(is_here_MxK, device_MxK * window + in_window_MxK, num_group * window)
    return GroupLayout(slots_MxK, assignments_W)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _swap_windows(axes: Axes, is_ragged: bool, x_WxD: jax.Array, sent_G: jax.Array, received_G: jax.Array) -> jax.Array:
    """Send the first `sent_G` slots of each window, and return the windows received; unsent slots are undefined."""
    if not is_ragged:
        return _all_to_all(x_WxD, axes)
    window = x_WxD.shape[0] // sent_G.size
    starts_G = window * jnp.arange(sent_G.size)
    own_G = jnp.full(sent_G.size, window * lax.axis_index(axes))
    into_WxD = lax.empty(x_WxD.shape, x_WxD.dtype)
    return lax.ragged_all_to_all(x_WxD, into_WxD, starts_G, sent_G, own_G, received_G, axis_name=axes)


def _swap_windows_backward(
    axes: Axes, is_ragged: bool, residuals: Any, dx_WxD: jax.Array
) -> tuple[jax.Array, None, None]:
    sent_G, received_G = residuals
    return _swap_windows(axes, is_ragged, dx_WxD, received_G, sent_G), None, None


_swap_windows.defvjp(
    lambda axes, is_ragged, x_WxD, *counts: (_swap_windows(axes, is_ragged, x_WxD, *counts), counts),
    _swap_windows_backward,
)
