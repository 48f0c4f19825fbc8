"""Experts cut over devices: tokens travel to the devices of their experts, are computed there, and travel back.

Owns what crosses devices between a router and the residual stream, inside one `shard_map` over the whole mesh. Knows no
router, and of experts their function alone. What is said of the axis `expert` holds for whatever axes a job's rules
cut experts over, if they cut the examples too; where they do not, or one row is all there is, each device computes its
own experts for all tokens, and nothing travels but sums.

Each device has M tokens, after those of its neighbours over `tensor`, which hold other columns of the same experts,
were gathered; sums over the columns are scattered back as the stream lies. Tokens of other rows, and of other parts of
a row, travel on their own over `expert`, among e devices. What is sent and held, a device and layer:

- `fixed`, where an expert takes at most C tokens of a row (`capacity_factor`), and rows are whole: one dense
  all-to-all of (E, B * C, D) there, and one back; backward again one each way. That many slots are sent, held and
  multiplied whatever the router does: `capacity_factor` times the assignments.
- `rounds`, where no token is dropped, and where parts of a row share a capacity, of which then any part may take all:
  a window of c slots for each pair of devices, c the smaller of 5/4 of the mean A / e and of what one device can send
  another at all, M * min(K, E / e). What a window cannot hold goes in a further round. Even load: one round. All tokens
  to the experts of one device: at most 4/5 * e * min(K, E / e) / K rounds, so many times the bytes and the time.
  Memory is that of one round whatever the router does: e * c slots, 5/4 of the assignments, of width D three times
  (sent, come, by expert), and their hidden layers; in the backward pass twice that, and the gradients of the experts at
  hand in float32. It sends tokens again and computes again what the round held, so that nothing of it is kept from the
  forward pass: three ways backward instead of two.

In rounds, TPUs send by `lax.ragged_all_to_all` what fills a window, and elsewhere, where XLA has no such thing (CPU) or
not for sure (GPU), `lax.all_to_all` sends the windows whole.

A gate travels with its token and is multiplied where the expert is; so no result is needed at home in the backward
pass. Between tokens and slots all is gathered, and never scattered (`grouped`).

Matrices that are cut over devices with other tokens are gathered, by expert first (`_whole`), and gathered again in the
backward pass: of them a device keeps its part alone. They are gathered here, and not by the partitioner, so that their
gradients are scattered: it would sum them up whole on every device first.

Shape legend: as in `grouped`; B rows and T positions at hand, R slots received, W slots sent, G devices of a group (e
above), L experts of a device.
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

from experiments.model.grouped_matmul import (
    GroupLayout,
    Matmul,
    Multiply,
    batched_matmul,
    collect,
    dispatch,
    grouped,
    in_slots,
    lay_out,
    ranked,
)
from experiments.model.layers import num_devices
from runner.parallel.mesh import list_axes

Axes = tuple[str, ...]  # of the mesh
Weights = Sequence[jax.Array]
# (joined matrices as `multiply` takes them, (P, D), gates (P), multiply) -> (P, D), each slot by its own expert
Expert = Callable[[Sequence[Any], jax.Array, jax.Array, Multiply], jax.Array]

_TILE = 8  # slots of a window are a multiple of it


class RoutedTokens(NamedTuple):
    """The tokens of a device, and what a router says of them."""

    x: jax.Array  # (M, D)
    experts: jax.Array  # (M, K)
    gates: jax.Array  # (M, K)
    kept: jax.Array  # (M, K), bool


def token_axes(num_rows: int, num_positions: int) -> tuple[Axes, Axes]:
    """The mesh axes that cut the rows and the positions of tokens, as the residual stream lies."""
    (rows,), (stream,), (positions,) = (
        _mesh_axes(name, size)
        for name, size in (("batch", num_rows), ("stream", num_positions), ("sequence", num_positions))
    )
    return rows, stream or positions


def _mesh_axes(names: str | tuple[str, ...], *sizes: int) -> list[Axes]:
    """The mesh axes of logical axes of so many elements; none where they do not divide them."""
    spec = nn.logical_to_mesh_axes((names,) if isinstance(names, str) else names) or [None] * len(sizes)
    found = [list_axes(entry) for entry in spec]
    return [axes if size % num_devices(axes) == 0 else () for axes, size in zip(found, sizes, strict=True)]


@dataclass(frozen=True)
class ExchangeForm:
    """What is known of a layer before any token is.

    Attributes:
        expert: the function of an expert.
        num_experts: of the layer.
        capacity: most tokens that an expert takes of a row of `length`; None: all.
        length: of whole rows.
        platform: that computes.
    """

    expert: Expert
    num_experts: int
    capacity: int | None
    length: int
    platform: str

    def most_rows(self, num_rows: int, num_positions: int) -> int | None:
        """Most tokens that an expert takes of these rows, where that is known and few."""
        return None if self.capacity is None or num_positions < self.length else num_rows * self.capacity


@dataclass(frozen=True)
class MeshCuts:
    """The mesh axes that cut tokens, experts and their columns.

    Attributes:
        rows, positions: of the tokens, as the residual stream lies.
        experts, widths, columns: of the experts' matrices, as they are kept; columns are those of the hidden layer.
    """

    rows: Axes
    positions: Axes
    experts: Axes
    widths: Axes
    columns: Axes

    @property
    def gathered(self) -> Axes:
        """Whose devices have other positions, and other columns of the same experts."""
        return tuple(axis for axis in self.positions if axis in self.columns and num_devices((axis,)) > 1)

    @property
    def summed(self) -> Axes:
        """Whose devices have the same tokens, and other columns or experts."""
        own = (*self.rows, *self.positions)
        return tuple(axis for axis in (*self.experts, *self.columns) if axis not in own and num_devices((axis,)) > 1)

    @property
    def exchanged(self) -> Axes:
        """Over which tokens travel: whose devices have other tokens, and other experts."""
        return () if set(self.experts) & set(self.summed) else self.experts


def compute_cut(
    x_BxTxD: jax.Array,
    experts_BxTxK: jax.Array,
    gates_BxTxK: jax.Array,
    kept_BxTxK: jax.Array,
    weights: Weights,
    form: ExchangeForm,
) -> jax.Array:
    """Return the weighted sum of what each token's experts make of it, (B, T, D), under a mesh.

    `weights` are stacked experts first; the last one has the columns of the hidden layer in its second axis, all others
    in their third.
    """
    D, cuts = x_BxTxD.shape[2], _cuts_of(x_BxTxD.shape, weights[0].shape)

    def compute(x: jax.Array, experts: jax.Array, gates: jax.Array, kept: jax.Array, *weights: Any) -> jax.Array:
        found = [_gathered(leaf, cuts.gathered, 1) for leaf in (x, experts, gates, kept)]
        parts = joined(weights)
        b, t, _ = found[0].shape
        most_rows = form.most_rows(b, t)
        tokens = RoutedTokens(*(leaf.reshape(b * t, -1) for leaf in found))
        if num_devices(cuts.experts) == 1:
            y_MxD = _at_home(form, most_rows, 0, cuts.widths, parts, tokens)
        elif not cuts.exchanged:
            first = lax.axis_index(cuts.experts) * weights[0].shape[0]
            y_MxD = _at_home(form, most_rows, first, cuts.widths, parts, tokens)
        elif most_rows is not None:
            y_MxD = _in_fixed_slots(form, most_rows, cuts, parts, tokens)
        else:
            y_MxD = _in_rounds(form, cuts, parts, tokens)
        y_BxTxD = y_MxD.reshape(b, t, D)
        if cuts.gathered:
            y_BxTxD = lax.psum_scatter(y_BxTxD, cuts.gathered, scatter_dimension=1, tiled=True)
        return lax.psum(y_BxTxD, cuts.summed) if cuts.summed else y_BxTxD

    if cuts.gathered:  # tokens, which the backward pass gathers again
        compute = jax.checkpoint(compute, policy=_is_no_gather, prevent_cse=False)
    # Axes of one device are named too: over all that are not, gradients are summed.
    tokens = PartitionSpec(cuts.rows, cuts.positions)
    into = PartitionSpec(cuts.experts, cuts.widths, cuts.columns)
    out = PartitionSpec(cuts.experts, cuts.columns, cuts.widths)
    in_specs = (tokens, tokens, tokens, tokens, *[into] * (len(weights) - 1), out)
    spread = jax.shard_map(compute, in_specs=in_specs, out_specs=tokens, check_vma=False)
    return spread(x_BxTxD, experts_BxTxK, gates_BxTxK, kept_BxTxK, *weights)


def _cuts_of(tokens: tuple[int, ...], matrices: tuple[int, ...]) -> MeshCuts:
    """The cuts of tokens (B, T, D) and experts (E, D, F)."""
    cuts = MeshCuts(*token_axes(*tokens[:2]), *_mesh_axes(("expert", "embed", "mlp"), *matrices))
    is_mixed = set(cuts.experts) & set(cuts.summed) and set(cuts.experts) & {*cuts.rows, *cuts.positions}
    # Of one axis tokens would have to travel, and of another not: then every device has all experts, which is rare.
    return replace(cuts, experts=()) if is_mixed else cuts


def _is_no_gather(primitive: Any, *_: Any, **__: Any) -> bool:
    """What the backward pass finds of the forward pass: all but what it can gather again."""
    return primitive is not lax.all_gather_p


def _gathered(leaf: jax.Array, axes: Axes, axis: int) -> jax.Array:
    return lax.all_gather(leaf, axes, axis=axis, tiled=True) if num_devices(axes) > 1 else leaf


def joined(weights: Weights) -> list[jax.Array]:
    """The matrices into the hidden layer as one, (E, D, F) or (E, D, 2 F), and the one out of it.

    One product of the tokens then makes both halves, and one the gradient of the tokens.
    """
    *into, out = weights
    return [jnp.concatenate(into, axis=2), out]


def _whole(part: jax.Array, axes: Axes, axis: int) -> jax.Array:
    """Matrices of the experts at hand, of each of which this device has a part along `axis`.

    Devices first deal out the experts among themselves, where their number allows it: what is gathered then lies in
    memory as it came, one expert after the other, and need not be moved again.
    """
    if num_devices(axes) == 1:
        return part
    if part.shape[0] % num_devices(axes):
        return _gathered(part, axes, axis)
    return _gathered(lax.all_to_all(part, axes, split_axis=0, concat_axis=axis, tiled=True), axes, 0)


class ExpertPart(NamedTuple):
    """What a device has of the matrices of its experts, and the axis that is cut over others."""

    weights: jax.Array
    axis: int


def _parts(weights: Weights) -> list[ExpertPart]:
    """Of joined matrices: their width is the second axis of those into the hidden layer, the third of that out."""
    return [ExpertPart(leaf, axis) for leaf, axis in zip(weights, (1, 2), strict=True)]


def _by_parts(form: ExchangeForm, axes: Axes, parts: Weights) -> Callable[[jax.Array, jax.Array, Matmul], jax.Array]:
    """The function of the experts of which the devices along `axes` have a part each."""

    def apply(x_PxD: jax.Array, gates_P: jax.Array, matmul: Matmul) -> jax.Array:
        def multiply(x_PxI: jax.Array, part: ExpertPart) -> jax.Array:
            return _multiply(axes, part.axis, matmul, x_PxI, part.weights)

        return form.expert(_parts(parts), x_PxD, gates_P, multiply)

    return apply


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _multiply(axes: Axes, axis: int, matmul: Matmul, x_PxI: jax.Array, part: jax.Array) -> jax.Array:
    """`matmul` by what is gathered of `part`."""
    found: jax.Array = matmul(x_PxI, _whole(part, axes, axis))
    return found


def _multiply_forward(
    axes: Axes, axis: int, matmul: Matmul, x_PxI: jax.Array, part: jax.Array
) -> tuple[jax.Array, Any]:
    return _multiply(axes, axis, matmul, x_PxI, part), (matmul, x_PxI, part)


def _multiply_backward(axes: Axes, axis: int, kept: Any, dy_PxO: jax.Array) -> tuple[None, jax.Array, jax.Array]:
    matmul, x_PxI, part = kept
    whole, scatter = jax.vjp(lambda part: _whole(part, axes, axis), part)
    _, pull_back = jax.vjp(matmul, x_PxI, whole)
    dx_PxI, dwhole = pull_back(dy_PxO)
    (dpart,) = scatter(dwhole)
    return None, dx_PxI, dpart


_multiply.defvjp(_multiply_forward, _multiply_backward)


def _at_home(
    form: ExchangeForm,
    most_rows: int | None,
    first: int | jax.Array,
    axes: Axes,
    parts: Weights,
    tokens: RoutedTokens,
) -> jax.Array:
    """What the experts at hand, the number `first` and those behind it, make of the tokens at hand.

    Of each the devices along `axes` have a part.
    """
    num_here = parts[0].shape[0]
    experts_MxK = tokens.experts - first
    return grouped(
        tokens.x,
        experts_MxK,
        tokens.gates,
        tokens.kept & (experts_MxK >= 0) & (experts_MxK < num_here),
        _by_parts(form, axes, parts),
        num_experts=num_here,
        most_rows=most_rows,
        platform=form.platform,
    )


def _in_fixed_slots(
    form: ExchangeForm,
    most_rows: int,
    cuts: MeshCuts,
    parts: Weights,
    tokens: RoutedTokens,
) -> jax.Array:
    """So many slots for each expert, whether they are filled or not."""
    num_here, D, axes = parts[0].shape[0], tokens.x.shape[1], cuts.exchanged
    rank_MxK, _ = ranked(tokens.experts, tokens.kept, form.num_experts)
    num_slots = form.num_experts * most_rows
    layout = lay_out(jnp.where(tokens.kept, tokens.experts * most_rows + rank_MxK, num_slots), num_slots)

    def there(sent_PxD: jax.Array) -> jax.Array:
        came_GxLxSxD = _exchanged(sent_PxD, axes).reshape(-1, num_here, most_rows, sent_PxD.shape[1])
        return came_GxLxSxD.swapaxes(0, 1).reshape(num_slots, -1)

    x_RxD, gates_Rx1 = there(dispatch(tokens.x, layout)), there(in_slots(tokens.gates, layout)[:, None])
    y_RxD = _by_parts(form, cuts.widths, parts)(x_RxD, gates_Rx1[:, 0], Partial(batched_matmul))
    y_GxLxSxD = y_RxD.reshape(num_here, -1, most_rows, D).swapaxes(0, 1)
    return collect(_exchanged(y_GxLxSxD.reshape(num_slots, D), axes), layout)


def _exchanged(x_WxD: jax.Array, axes: Axes) -> jax.Array:
    """As many slots for each device of the group sent to it, and in return those that each has for this one."""
    return lax.all_to_all(x_WxD, axes, split_axis=0, concat_axis=0, tiled=True)


class Traffic(NamedTuple):
    """Who sends how much to whom. All integers."""

    slots: jax.Array  # (M, K): place of an assignment among those of this device, expert by expert; A: it has none
    assignments: jax.Array  # (A): in these places
    sent: jax.Array  # (G): to each device
    came: jax.Array  # (G, L): from each device, for each expert here
    num_rounds: jax.Array  # the same on all devices of the group


def _in_rounds(
    form: ExchangeForm,
    cuts: MeshCuts,
    parts: Weights,
    tokens: RoutedTokens,
) -> jax.Array:
    """All that is kept, in as many rounds as it takes."""
    num_here, (M, K), axes = parts[0].shape[0], tokens.experts.shape, cuts.exchanged
    num_devices = form.num_experts // num_here
    window = window_slots(M, K, num_here, num_devices)
    rank_MxK, counts_E = ranked(tokens.experts, tokens.kept, form.num_experts)
    starts_E = jnp.cumsum(counts_E) - counts_E
    layout = lay_out(jnp.where(tokens.kept, starts_E[tokens.experts] + rank_MxK, M * K), M * K)
    sent_G = jnp.sum(counts_E.reshape(num_devices, num_here), axis=1)
    came_GxL = _exchanged(counts_E, axes).reshape(num_devices, num_here)
    num_rounds = lax.pmax(-(-jnp.max(sent_G) // window), axes)
    traffic = Traffic(*layout, sent_G, came_GxL, num_rounds)
    return _all_rounds(ExchangeRounds(form, axes, cuts.widths, window), tokens.x, tokens.gates, tuple(parts), traffic)


def window_slots(num_tokens: int, experts_per_token: int, num_here: int, num_devices: int) -> int:
    """Slots that a device has in a round for what it sends to another one."""
    most = num_tokens * min(experts_per_token, num_here)
    mean = num_tokens * experts_per_token / num_devices
    return _TILE * math.ceil(min(most, 1.25 * mean) / _TILE)


class ExchangeRounds(NamedTuple):
    """How tokens travel."""

    form: ExchangeForm
    axes: Axes  # of the group
    widths: Axes  # over which matrices are cut
    window: int  # its slots


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _all_rounds(
    rounds: ExchangeRounds, x_MxD: jax.Array, gates_MxK: jax.Array, parts: tuple[jax.Array, ...], traffic: Traffic
) -> jax.Array:
    weights = _both_whole(rounds.widths, parts)

    def add(number: jax.Array, sum_MxD: jax.Array) -> jax.Array:
        return sum_MxD + _round(rounds, traffic, number, x_MxD, gates_MxK, weights).astype(jnp.float32)

    sum_MxD = lax.fori_loop(0, traffic.num_rounds, add, jnp.zeros(x_MxD.shape, jnp.float32))
    return sum_MxD.astype(x_MxD.dtype)


def _both_whole(axes: Axes, parts: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    return tuple(_whole(part.weights, axes, part.axis) for part in _parts(parts))


def _all_rounds_forward(rounds: ExchangeRounds, *arrays: Any) -> tuple[jax.Array, Any]:
    return _all_rounds(rounds, *arrays), arrays


def _all_rounds_backward(rounds: ExchangeRounds, kept: Any, dy_MxD: jax.Array) -> tuple[Any, Any, Any, None]:
    x_MxD, gates_MxK, parts, traffic = kept
    weights, scatter = jax.vjp(functools.partial(_both_whole, rounds.widths), parts)
    inputs = x_MxD, gates_MxK, weights

    def add(number: jax.Array, sums: Any) -> Any:
        _, pull_back = jax.vjp(functools.partial(_round, rounds, traffic, number), *inputs)
        return jax.tree.map(lambda total, part: total + part.astype(jnp.float32), sums, pull_back(dy_MxD))

    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), inputs)
    sums = lax.fori_loop(0, traffic.num_rounds, add, zeros)
    dx_MxD, dgates_MxK, dweights = jax.tree.map(lambda total, leaf: total.astype(leaf.dtype), sums, inputs)
    return dx_MxD, dgates_MxK, *scatter(dweights), None


_all_rounds.defvjp(_all_rounds_forward, _all_rounds_backward)


def _round(
    rounds: ExchangeRounds,
    traffic: Traffic,
    number: jax.Array,
    x_MxD: jax.Array,
    gates_MxK: jax.Array,
    weights: tuple[jax.Array, ...],
) -> jax.Array:
    """What the tokens in one window of each pair of devices add to their sums, (M, D)."""
    form, axes, _, window = rounds
    num_here = traffic.came.shape[1]
    first = number * window
    layout = _in_windows(traffic, first, window)
    came_G = jnp.sum(traffic.came, axis=1)
    sent_G, came_G = (jnp.clip(count_G - first, 0, window) for count_G in (traffic.sent, came_G))
    swap = functools.partial(_swapped, axes, form.platform == "tpu")
    x_RxD = swap(dispatch(x_MxD, layout), sent_G, came_G)
    gates_RxK = _exchanged(in_slots(gates_MxK, layout)[:, None], axes)
    # Of what a device sends, expert by expert, this window begins at `first`.
    place_S = first + jnp.arange(window)
    ends_GxL = jnp.cumsum(traffic.came, axis=1)
    expert_Rx1 = jnp.sum(place_S[:, None] >= ends_GxL[:, None], axis=-1, dtype=jnp.int32).reshape(-1, 1)
    y_RxD = grouped(
        x_RxD,
        expert_Rx1,
        gates_RxK,
        expert_Rx1 < num_here,
        functools.partial(form.expert, weights),
        num_experts=num_here,
        most_rows=None,
        platform=form.platform,
    )
    return collect(swap(y_RxD, came_G, sent_G), layout)


def _in_windows(traffic: Traffic, first: jax.Array, window: int) -> GroupLayout:
    """Where assignments lie in windows, one behind the other, that begin at `first` of what goes to each device."""
    num_devices = traffic.sent.size
    starts_G = jnp.cumsum(traffic.sent) - traffic.sent + first
    ends_G = jnp.cumsum(traffic.sent)
    place_GxS = starts_G[:, None] + jnp.arange(window)
    num_assignments = traffic.slots.size
    found_GxS = traffic.assignments.at[place_GxS].get(mode="fill", fill_value=num_assignments)
    assignments_W = jnp.where(place_GxS < ends_G[:, None], found_GxS, num_assignments).reshape(-1)
    # The device of an assignment is the one in whose share it lies; what has no place lies behind all shares.
    device_MxK = jnp.sum(traffic.slots[..., None] >= ends_G, axis=-1, dtype=jnp.int32)
    in_window_MxK = traffic.slots - starts_G.at[device_MxK].get(mode="fill", fill_value=0)
    is_here_MxK = (device_MxK < num_devices) & (in_window_MxK >= 0) & (in_window_MxK < window)
    slots_MxK = jnp.where(is_here_MxK, device_MxK * window + in_window_MxK, num_devices * window)
    return GroupLayout(slots_MxK, assignments_W)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _swapped(axes: Axes, is_ragged: bool, x_WxD: jax.Array, sent_G: jax.Array, came_G: jax.Array) -> jax.Array:
    """Windows sent, of each so many slots from its start, for those that came; what was not sent is anything."""
    if not is_ragged:
        return _exchanged(x_WxD, axes)
    window = x_WxD.shape[0] // sent_G.size
    starts_G = window * jnp.arange(sent_G.size)
    own_G = jnp.full(sent_G.size, window * lax.axis_index(axes))
    into_WxD = lax.empty(x_WxD.shape, x_WxD.dtype)
    return lax.ragged_all_to_all(x_WxD, into_WxD, starts_G, sent_G, own_G, came_G, axis_name=axes)


def _swapped_forward(
    axes: Axes, is_ragged: bool, x_WxD: jax.Array, sent_G: jax.Array, came_G: jax.Array
) -> tuple[jax.Array, Any]:
    return _swapped(axes, is_ragged, x_WxD, sent_G, came_G), (sent_G, came_G)


def _swapped_backward(axes: Axes, is_ragged: bool, kept: Any, dx_WxD: jax.Array) -> tuple[jax.Array, None, None]:
    sent_G, came_G = kept
    return _swapped(axes, is_ragged, dx_WxD, came_G, sent_G), None, None


_swapped.defvjp(_swapped_forward, _swapped_backward)
