"""Grouped matmul: tokens grouped by expert, in the form that is fast on the platform. No router is involved.

Assignments of tokens to experts are placed expert by expert in P slots, multiplied, and combined token by token. There
are three layouts:

- `batched`: every expert has the same number of slots, and one batch of matmuls multiplies them. For a fixed capacity.
- `blocked`: the slots of an expert begin at a multiple of a block, and a loop multiplies each block by its one expert.
  The only wasted work is the rest of each expert's last block. On CPU and GPU, where `jax.lax.ragged_dot` multiplies
  all slots by all experts.
- `ragged`: no gaps. On TPU, by `jax.lax.ragged_dot`. For its gradients libtpu would multiply all slots for each expert,
  and copy all matrices to transpose them, so the backward pass calls JAX's megablox kernels. Those have no operands in
  8 bits, so `ragged_matmul_in_8_bits` is a kernel of ours, with the same tiles.

Each has a form for operands in 8 bits (`quantised`). The scales of an expert's columns are applied to the sums block by
block, where the expert is known: an array of a scale for each slot and column would be as large as the result.

The weight of an assignment is applied at the hidden layer of its expert, so the backward pass needs no result of one.
Between tokens and slots every array is gathered, in the backward pass too, and never scattered.

Shape legend: M tokens, K experts of a token, A = M * K assignments, E experts, P slots, N blocks of slots, b slots of a
block, V visits of tiles of slots, D width, I and O input and output of one matmul.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.tree_util import Partial
from jax.typing import DTypeLike

from experiments.model.platform import import_for_tpu
from experiments.model.quantised import TYPES, Quantised, get_accumulator, quantise
from runner.config import MatmulType
from runner.train.kernel_check import KernelCase, KernelTrial, get_kernel_use

KERNEL = "ragged_matmul"  # name of the kernels in their test
KERNEL_IN_8_BITS = "ragged_matmul_in_8_bits"
MIN_BLOCK, MAX_BLOCK = 8, 256
KERNEL_SLOTS = 128  # the megablox kernel needs a multiple of this number of slots
MAX_KERNEL_COLUMNS = 1024  # of either operand in one tile of the kernel
Multiply = Callable[[jax.Array, Any], jax.Array]  # (P, I) by experts in any form -> (P, O)


class GroupedMatmul(NamedTuple):
    """Matmul of slots by the expert of each, in the form of a layout."""

    multiply: Partial  # ((P, I), (E, I, O)) -> (P, O) in the dtype of both. It holds a layout's integer arrays.
    # The same for `Quantised` operands, scales (P, 1) and (E, 1, O). The third argument is the dtype of the result.
    # With `is_transposed`: ((P, O), (E, I, O)) -> (P, I), with scales (P, 1) and (E, I, 1).
    multiply_in_8_bits: Partial
    # The token of each slot in 8 bits; None if tokens are not quantised before `dispatch`.
    tokens: Quantised | None = None
    # Layout of the slots if the caller must apply `combine` to its last product; else None.
    layout: "GroupLayout | None" = None

    def __call__(self, x_PxI: jax.Array, w_ExIxO: jax.Array) -> jax.Array:
        """Return (P, O), in the type of both operands."""
        product: jax.Array = self.multiply(x_PxI, w_ExIxO)
        return product

    def differentiate_weights(self, x_PxI: jax.Array, dy_PxO: jax.Array, num_experts: int) -> jax.Array:
        """Return the gradient of weights (E, I, O), in the type of the operands."""
        shape = num_experts, x_PxI.shape[1], dy_PxO.shape[1]
        # The product is linear in the weights, so their values are not used.
        _, pull_back = jax.vjp(functools.partial(self.multiply, x_PxI), jnp.zeros(shape, x_PxI.dtype))
        (dw_ExIxO,) = pull_back(dy_PxO)
        return dw_ExIxO


class GroupLayout(NamedTuple):
    """Slots of assignments, and the inverse."""

    slots: jax.Array  # (M, K); P for an assignment without a slot
    assignments: jax.Array  # (P); A for an empty slot


def apply_grouped(
    x_MxD: jax.Array,
    experts_MxK: jax.Array,
    weights_MxK: jax.Array,
    is_kept_MxK: jax.Array,
    apply: Callable[[jax.Array, jax.Array, GroupedMatmul], jax.Array],
    *,
    num_experts: int,
    most_tokens: int | None,
    platform: str,
    matmul_type: MatmulType = "compute",
) -> jax.Array:
    """Return for every token the weighted sum of its experts' outputs, (M, D), in the dtype of `x`.

    Args:
        x_MxD: tokens.
        experts_MxK: experts of each token.
        weights_MxK: weight of each assignment.
        is_kept_MxK: assignments to compute; the others contribute nothing.
        apply: the experts' function `apply(x_PxD, weights_P, matmul)` of the tokens in their slots, times the weights.
            If `matmul` has a layout, it returns the sums (M, D).
        num_experts: number of experts.
        most_tokens: upper bound for the tokens of one expert, if there is a useful one.
        platform: platform that the program is compiled for.
        matmul_type: type of the operands of `apply`'s matmuls.
    """
    kernels = (KERNEL,) if matmul_type == "compute" else (KERNEL, KERNEL_IN_8_BITS)
    rank_MxK, counts_E = rank_assignments(experts_MxK, is_kept_MxK, num_experts)
    if most_tokens is not None:
        num_slots, starts_E = num_experts * most_tokens, jnp.arange(num_experts) * most_tokens
        matmul = BATCHED
    elif platform == "tpu" and all(map(get_kernel_use().is_allowed, kernels)):
        num_slots, starts_E = experts_MxK.size, jnp.cumsum(counts_E) - counts_E
        matmul = GroupedMatmul(Partial(ragged_matmul, counts_E), Partial(ragged_matmul_in_8_bits, counts_E))
    else:
        block = choose_block(experts_MxK.size, num_experts)
        # Enough blocks for the worst distribution, in which every expert's last block has a single token.
        num_blocks = (experts_MxK.size + num_experts * (block - 1)) // block
        ends_E = jnp.cumsum(-(-counts_E // block))
        expert_N = jnp.sum(jnp.arange(num_blocks)[:, None] >= ends_E[:-1], axis=1, dtype=jnp.int32)
        num_slots, starts_E = num_blocks * block, block * (ends_E + counts_E // -block)
        blocks = expert_N, ends_E[-1]
        matmul = GroupedMatmul(
            Partial(functools.partial(blocked_matmul, block), *blocks),
            Partial(functools.partial(blocked_matmul_in_8_bits, block), *blocks),
        )
    layout = make_layout(jnp.where(is_kept_MxK, starts_E[experts_MxK] + rank_MxK, num_slots), num_slots)
    if matmul_type != "compute":
        # Tokens are quantised once, and not for each of their experts; so is the gradient of the result.
        tokens = quantise(lax.stop_gradient(x_MxD), (1,), TYPES[matmul_type].forward)
        tokens = Quantised(*(leaf[find_tokens(layout)] for leaf in tokens))
        matmul = matmul._replace(tokens=tokens, layout=layout)
        return apply(dispatch(x_MxD, layout), dispatch_weights(weights_MxK, layout), matmul)
    return combine(apply(dispatch(x_MxD, layout), dispatch_weights(weights_MxK, layout), matmul), layout)


def rank_assignments(experts_MxK: jax.Array, is_kept_MxK: jax.Array, num_experts: int) -> tuple[jax.Array, jax.Array]:
    """Return the rank of each assignment among those of its expert, (M, K), and the number of each expert's, (E)."""
    is_chosen_MxKxE = (experts_MxK[..., None] == jnp.arange(num_experts)) & is_kept_MxK[..., None]
    place_MxE = jnp.cumsum(jnp.any(is_chosen_MxKxE, axis=1), axis=0, dtype=jnp.int32)
    return jnp.sum(jnp.where(is_chosen_MxKxE, place_MxE[:, None] - 1, 0), axis=-1), place_MxE[-1]


def make_layout(slots_MxK: jax.Array, num_slots: int) -> GroupLayout:
    """Return the layout from the slot of each assignment; `num_slots` stands for no slot."""
    assignments = jnp.arange(slots_MxK.size, dtype=jnp.int32)
    empty_P = jnp.full(num_slots, slots_MxK.size, jnp.int32)
    return GroupLayout(slots_MxK, empty_P.at[slots_MxK.reshape(-1)].set(assignments, mode="drop"))


def choose_block(num_assignments: int, num_experts: int) -> int:
    """Return the slots of a block: a power of two, about a quarter of the mean number of tokens of an expert."""
    block = MIN_BLOCK
    while 2 * block <= min(MAX_BLOCK, num_assignments // (4 * num_experts)):
        block *= 2
    return block


# Between tokens and slots. Each gradient is written out as a gather: the derived one would scatter.


@jax.custom_vjp
def dispatch(x_MxD: jax.Array, layout: GroupLayout) -> jax.Array:
    """Return the tokens in their slots, (P, D); an empty slot holds an arbitrary token."""
    return x_MxD[find_tokens(layout)]


dispatch.defvjp(
    lambda x_MxD, layout: (dispatch(x_MxD, layout), layout),
    lambda layout, dx_PxD: (_sum_slots(dx_PxD, layout), None),
)


@jax.custom_vjp
def combine(y_PxD: jax.Array, layout: GroupLayout) -> jax.Array:
    """Return the sum over each token's slots, accumulated in float32, (M, D) in the dtype of `y`.

    The gradient of an empty slot is that of an arbitrary token. It must be multiplied by the slot's weight, which is 0.
    """
    return _sum_slots(y_PxD, layout)


combine.defvjp(
    lambda y_PxD, layout: (combine(y_PxD, layout), layout),
    lambda layout, dy_MxD: (dy_MxD[find_tokens(layout)], None),
)


@jax.custom_vjp
def dispatch_weights(values_MxK: jax.Array, layout: GroupLayout) -> jax.Array:
    """Return the value of each assignment in its slot, (P); 0 in an empty slot."""
    return values_MxK.reshape(-1).at[layout.assignments].get(mode="fill", fill_value=0)


dispatch_weights.defvjp(
    lambda values_MxK, layout: (dispatch_weights(values_MxK, layout), layout),
    lambda layout, dvalues_P: (dvalues_P.at[layout.slots].get(mode="fill", fill_value=0), None),
)


def find_tokens(layout: GroupLayout) -> jax.Array:
    """Return the token of each slot, (P); the last token for an empty slot."""
    return jnp.minimum(layout.assignments // layout.slots.shape[1], layout.slots.shape[0] - 1)


def _sum_slots(x_PxD: jax.Array, layout: GroupLayout) -> jax.Array:
    """Return the sum over each token's slots, (M, D); an assignment without a slot adds nothing."""
    # One gather for each of a token's experts; the compiler fuses their sum.
    total_MxD = jnp.zeros((), jnp.float32)
    for slots_M in layout.slots.T:
        total_MxD += x_PxD.at[slots_M].get(mode="fill", fill_value=0).astype(jnp.float32)
    return total_MxD.astype(x_PxD.dtype)


# Matmuls of the three layouts.


def batched_matmul(x_PxI: jax.Array, w_ExIxO: jax.Array) -> jax.Array:
    """Multiply slots of which every expert has the same number; returns (P, O)."""
    E, I, O = w_ExIxO.shape  # noqa: E741
    return jnp.einsum("epi,eio->epo", x_PxI.reshape(E, -1, I), w_ExIxO).reshape(-1, O)


def batched_matmul_in_8_bits(x: Quantised, w: Quantised, dtype: DTypeLike, *, is_transposed: bool = False) -> jax.Array:
    """Multiply as `GroupedMatmul.multiply_in_8_bits` slots of which every expert has the same number."""
    E, (P, I) = w.values.shape[0], x.values.shape  # noqa: E741
    dimensions = ((2,), (2 if is_transposed else 1,)), ((0,), (0,))
    sums_ExSxO = lax.dot_general(
        x.values.reshape(E, -1, I), w.values, dimensions, preferred_element_type=get_accumulator(x.values.dtype)
    )
    y_ExSxO = sums_ExSxO.astype(jnp.float32) * x.scale.reshape(E, -1, 1) * w.scale.reshape(E, 1, -1)
    return y_ExSxO.astype(dtype).reshape(P, -1)


BATCHED = GroupedMatmul(Partial(batched_matmul), Partial(batched_matmul_in_8_bits))


@jax.custom_vjp
def ragged_matmul(counts_E: jax.Array, x_PxI: jax.Array, w_ExIxO: jax.Array) -> jax.Array:
    """Multiply the first counts_E[0] slots by the first expert, and so on; returns (P, O).

    Slots after those of all experts are zeros, which must not be relied on.
    """
    get_kernel_use().record(_make_case(x_PxI, w_ExIxO))
    return lax.ragged_dot(x_PxI, w_ExIxO, counts_E)


def _ragged_backward(residuals: Any, dy_PxO: jax.Array) -> tuple[None, jax.Array, jax.Array]:
    counts_E, x_PxI, w_ExIxO = residuals
    kernel = import_for_tpu("jax.experimental.pallas.ops.tpu.megablox.gmm")
    num_slots, (_, I, O) = x_PxI.shape[0], w_ExIxO.shape  # noqa: E741
    x_PxI, dy_PxO = (jnp.pad(slots, ((0, -num_slots % KERNEL_SLOTS), (0, 0))) for slots in (x_PxI, dy_PxO))
    tile_P = _choose_tile(x_PxI.shape[0], 512)
    tile_I, tile_O = _choose_tile(I, MAX_KERNEL_COLUMNS), _choose_tile(O, MAX_KERNEL_COLUMNS)
    counts_E = counts_E.astype(jnp.int32)
    # Slots after those of all experts are given to the last one: the kernel would leave them uninitialised.
    all_E = counts_E.at[-1].add(x_PxI.shape[0] - jnp.sum(counts_E))
    dx_PxI = kernel.gmm(dy_PxO, w_ExIxO, all_E, dy_PxO.dtype, (tile_P, tile_O, tile_I), transpose_rhs=True)
    dw_ExIxO = kernel.tgmm(x_PxI.T, dy_PxO, counts_E, w_ExIxO.dtype, (tile_P, tile_I, tile_O))
    return None, dx_PxI[:num_slots], dw_ExIxO


ragged_matmul.defvjp(lambda *arrays: (ragged_matmul(*arrays), arrays), _ragged_backward)


def list_visits(counts_E: jax.Array, num_slots: int, tile: int) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """Return which experts visit which tiles of slots, in the form of megablox's kernels, and the number of visits.

    The arrays, int32, are the first slots of experts and their end (E + 1), and the expert and the tile of each visit.
    A tile is visited by each expert that has slots in it. Megablox computes the same by scatters, which libtpu offloads
    to sparse cores; with those of several matmuls in a step its compiler overflows its stack (0.0.42.1).

    `counts_E` (int32) add up to `num_slots`, which is a multiple of `tile`.
    """
    ends_E = jnp.cumsum(counts_E)
    first_E = (ends_E - counts_E) // tile
    visits_E = jnp.where(counts_E == 0, 0, -(-ends_E // tile) - first_E)
    done_E = jnp.cumsum(visits_E)
    visit_V, last_tile = jnp.arange(num_slots // tile + counts_E.size - 1, dtype=jnp.int32), num_slots // tile - 1
    is_later_VxE = visit_V[:, None] >= done_E
    expert_V = jnp.minimum(jnp.sum(is_later_VxE, axis=1, dtype=jnp.int32), counts_E.size - 1)
    is_own_VxE = expert_V[:, None] == jnp.arange(counts_E.size)
    tile_V = visit_V + jnp.sum(jnp.where(is_own_VxE, first_E - (done_E - visits_E), 0), axis=1, dtype=jnp.int32)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends_E])
    return (starts, expert_V, jnp.minimum(tile_V, last_tile)), done_E[-1]


def ragged_matmul_in_8_bits(
    counts_E: jax.Array, x: Quantised, w: Quantised, dtype: DTypeLike, *, is_transposed: bool = False
) -> jax.Array:
    """Multiply as `GroupedMatmul.multiply_in_8_bits` the first counts_E[0] slots by the first expert, and so on.

    Slots after those of all experts are multiplied by the last one, which must not be relied on.
    """
    get_kernel_use().record(make_8_bit_case(x, w, dtype, is_transposed))
    megablox = import_for_tpu("jax.experimental.pallas.ops.tpu.megablox.gmm")
    pl, pltpu = megablox.pl, megablox.pltpu
    num_slots, accumulator = x.values.shape[0], get_accumulator(x.values.dtype)
    x = Quantised(*(jnp.pad(leaf, ((0, -num_slots % KERNEL_SLOTS), (0, 0))) for leaf in x))
    (P, I), O = x.values.shape, w.values.shape[1 if is_transposed else 2]  # noqa: E741
    tile_P, tile_I, tile_O = (
        _choose_tile(P, 512),
        _choose_tile(I, MAX_KERNEL_COLUMNS),
        _choose_tile(O, MAX_KERNEL_COLUMNS),
    )
    counts_E = counts_E.astype(jnp.int32)
    tiles, num_tiles = list_visits(counts_E.at[-1].add(P - jnp.sum(counts_E)), P, tile_P)
    last = pl.cdiv(I, tile_I) - 1

    def multiply(tiles: Any, x: Any, x_scale: Any, w: Any, w_scale: Any, y: Any, sums: Any) -> None:
        visit, number = pl.program_id(1), pl.program_id(2)

        @pl.when(number == 0)
        def start() -> None:
            sums[...] = jnp.zeros_like(sums)

        # The last tile may reach beyond the contracted axis.
        operands = [x[...], w[...]]
        if I % tile_I:
            for place, axis in enumerate((1, 1 if is_transposed else 0)):
                wide = operands[place].astype(accumulator)
                index = lax.broadcasted_iota(jnp.int32, wide.shape, axis) + number * tile_I
                operands[place] = jnp.where(index < I, wide, 0).astype(operands[place].dtype)
        dimensions = ((1,), (1 if is_transposed else 0,)), ((), ())
        sums[...] += lax.dot_general(operands[0], operands[1], dimensions, preferred_element_type=accumulator)

        @pl.when(number == last)
        def finish() -> None:
            # A tile of slots is visited once for each of its experts.
            is_own = megablox._get_store_mask(grid_id=visit, group_metadata=tiles, tm=tile_P, tn=tile_O)
            scaled = sums[...].astype(jnp.float32) * x_scale[...] * w_scale[...].reshape(1, tile_O)
            y[...] = lax.select(is_own, scaled, y[...].astype(jnp.float32)).astype(dtype)

    # Grid indices: tiles of columns, visits of tiles of slots, tiles of the contracted axis. The arrays of `tiles` are
    # the first slots of experts, and the expert and the tile of slots of each visit.
    weights = (None, tile_O, tile_I) if is_transposed else (None, tile_I, tile_O)
    y_PxO: jax.Array = pl.pallas_call(
        multiply,
        out_shape=jax.ShapeDtypeStruct((P, O), dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            in_specs=[
                pl.BlockSpec((tile_P, tile_I), lambda o, visit, i, tiles: (tiles[2][visit], i)),
                pl.BlockSpec((tile_P, 1), lambda o, visit, i, tiles: (tiles[2][visit], 0)),
                pl.BlockSpec(
                    weights, lambda o, visit, i, tiles: (tiles[1][visit], *((o, i) if is_transposed else (i, o)))
                ),
                pl.BlockSpec((None, 1, tile_O), lambda o, visit, i, tiles: (tiles[1][visit], 0, o)),
            ],
            out_specs=pl.BlockSpec((tile_P, tile_O), lambda o, visit, i, tiles: (tiles[2][visit], o)),
            grid=(pl.cdiv(O, tile_O), num_tiles, last + 1),
            scratch_shapes=[pltpu.VMEM((tile_P, tile_O), accumulator)],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=2 * P * I * O,
            bytes_accessed=P * I * pl.cdiv(O, tile_O) + I * O * tiles[1].size + P * O * jnp.dtype(dtype).itemsize,
            transcendentals=0,
        ),
        name=KERNEL_IN_8_BITS,
    )(tiles, *x, w.values, w.scale.reshape(-1, 1, O))
    return y_PxO[:num_slots]


def _make_case(x_PxI: jax.Array, w_ExIxO: jax.Array) -> KernelCase:
    (P, E, I, O), dtype = _choose_sizes(x_PxI.shape[0], *w_ExIxO.shape), x_PxI.dtype  # noqa: E741

    def make_trial() -> KernelTrial:
        generator = np.random.default_rng(0)
        counts_E = _make_counts(P, E)
        x_PxI, dy_PxO = (generator.normal(size=(P, size)).astype(dtype) for size in (I, O))
        dy_PxO[counts_E.sum() :] = 0
        w_ExIxO = generator.normal(size=(E, I, O)).astype(dtype)

        def run(counts: jax.Array, x: jax.Array, w: jax.Array, dy: jax.Array) -> Any:
            y, pull_back = jax.vjp(functools.partial(ragged_matmul, counts), x, w)
            return y, *pull_back(dy)

        def reference(counts: jax.Array, x: jax.Array, w: jax.Array, dy: jax.Array) -> Any:
            own_PxE = _find_own_slots(counts, P)
            product = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST)
            x, w, dy = (each.astype(jnp.float32) for each in (x, w, dy))
            y = product("pe,pi,eio->po", own_PxE, x, w)
            return y, product("pe,po,eio->pi", own_PxE, dy, w), product("pe,pi,po->eio", own_PxE, x, dy)

        return KernelTrial(run, reference, (counts_E, x_PxI, w_ExIxO, dy_PxO))

    return KernelCase(
        KERNEL,
        "experts",
        "library",
        "a loop over blocks of tokens",
        {"slots": P, "experts": E, "inputs": I, "outputs": O},
        dtype.name,
        make_trial,
        (__file__,),
    )


def make_8_bit_case(x: Quantised, w: Quantised, dtype: DTypeLike, is_transposed: bool) -> KernelCase:
    """Return the case of `ragged_matmul_in_8_bits` for such operands."""
    E, *sizes = w.values.shape
    I, O = sizes[::-1] if is_transposed else sizes  # noqa: E741
    P, E, I, O = _choose_sizes(x.values.shape[0], E, I, O)  # noqa: E741
    types, accumulator = (x.values.dtype, w.values.dtype), get_accumulator(x.values.dtype)

    def make_trial() -> KernelTrial:
        generator = np.random.default_rng(0)
        shapes = (P, I), (E, O, I) if is_transposed else (E, I, O)
        # Standard deviation 20 uses most of the numbers of int8, and none beyond them.
        values = [
            np.clip(np.round(generator.normal(0, 20, shape)), -127, 127).astype(dtype)
            for shape, dtype in zip(shapes, types, strict=True)
        ]
        scales = [generator.uniform(0.01, 0.02, shape).astype(np.float32) for shape in ((P, 1), (E, 1, O))]

        def run(counts: jax.Array, x: jax.Array, x_scale: jax.Array, w: jax.Array, w_scale: jax.Array) -> jax.Array:
            scale = w_scale.reshape(E, O, 1) if is_transposed else w_scale
            found = ragged_matmul_in_8_bits(
                counts, Quantised(x, x_scale), Quantised(w, scale), dtype, is_transposed=is_transposed
            )
            return jnp.where(jnp.arange(P)[:, None] < jnp.sum(counts), found, 0)

        def reference(counts: jax.Array, x: jax.Array, x_scale: jax.Array, w: jax.Array, w_scale: jax.Array) -> Any:
            wide_x, wide_w = x.astype(jnp.float32) * x_scale, w.astype(jnp.float32)
            wide_w = (wide_w.swapaxes(1, 2) if is_transposed else wide_w) * w_scale
            product = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST)
            return product("pe,pi,eio->po", _find_own_slots(counts, P), wide_x, wide_w)

        return KernelTrial(run, reference, (_make_counts(P, E), values[0], scales[0], values[1], scales[1]))

    return KernelCase(
        KERNEL_IN_8_BITS,
        "experts",
        "ours",
        "a loop over blocks of tokens",
        {"slots": P, "experts": E, "inputs": I, "outputs": O, "is_transposed": is_transposed}
        | {"operands": [each.name for each in types], "sums": jnp.dtype(accumulator).name},
        jnp.dtype(dtype).name,
        make_trial,
        (__file__,),
    )


def _choose_sizes(P: int, E: int, I: int, O: int) -> tuple[int, int, int, int]:  # noqa: E741
    """Return slots, experts, inputs and outputs of a case: the same tiles and padding, and few of each."""
    # Two tiles of an axis, or all of it if it has fewer.
    I, O = (min(size, 2 * _choose_tile(size, MAX_KERNEL_COLUMNS)) for size in (I, O))  # noqa: E741
    padded = P + -P % KERNEL_SLOTS
    return min(padded, 2 * _choose_tile(padded, 512)) - -P % KERNEL_SLOTS, min(E, 4), I, O


def _make_counts(num_slots: int, num_experts: int) -> np.ndarray:
    """Return parts of any length, with an expert without a token, and slots that are left over."""
    return (np.array([0.41, 0.0, 0.33, 0.14][:num_experts]) * num_slots).astype(np.int32)


def _find_own_slots(counts_E: jax.Array, num_slots: int) -> jax.Array:
    """Return a float32 matrix (P, E) that is 1 where a slot is one of the expert's, else 0."""
    ends_E, places_Px1 = jnp.cumsum(counts_E), jnp.arange(num_slots)[:, None]
    return ((places_Px1 < ends_E) & (places_Px1 >= ends_E - counts_E)).astype(jnp.float32)


def _choose_tile(size: int, most: int) -> int:
    """Return the largest divisor of an axis that the kernel accepts as a tile."""
    return next((part for part in range(most, 0, -KERNEL_SLOTS) if size % part == 0), min(size, most))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def blocked_matmul(
    block: int, expert_N: jax.Array, num_blocks: jax.Array, x_PxI: jax.Array, w_ExIxO: jax.Array
) -> jax.Array:
    """Multiply each block of slots by its expert in `expert_N`, up to `num_blocks` blocks; returns (P, O)."""

    def multiply(number: jax.Array, y_PxO: jax.Array) -> jax.Array:
        x_bxI = lax.dynamic_slice_in_dim(x_PxI, number * block, block)
        y_bxO = jnp.dot(x_bxI, w_ExIxO[expert_N[number]])
        return lax.dynamic_update_slice_in_dim(y_PxO, y_bxO, number * block, axis=0)

    return lax.fori_loop(0, num_blocks, multiply, jnp.zeros((x_PxI.shape[0], w_ExIxO.shape[2]), x_PxI.dtype))


def _blocked_backward(block: int, residuals: Any, dy_PxO: jax.Array) -> tuple[None, None, jax.Array, jax.Array]:
    expert_N, num_blocks, x_PxI, w_ExIxO = residuals

    def multiply(number: jax.Array, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        dx_PxI, dw_ExIxO = sums
        expert, start = expert_N[number], number * block
        x_bxI, dy_bxO = (lax.dynamic_slice_in_dim(slots, start, block) for slots in (x_PxI, dy_PxO))
        dx_bxI = jnp.dot(dy_bxO, w_ExIxO[expert].T)
        dw_IxO = dw_ExIxO[expert] + jnp.dot(x_bxI.T, dy_bxO, preferred_element_type=jnp.float32)
        return (
            lax.dynamic_update_slice_in_dim(dx_PxI, dx_bxI, start, axis=0),
            lax.dynamic_update_index_in_dim(dw_ExIxO, dw_IxO, expert, axis=0),
        )

    # Gradients of matrices are accumulated over blocks in float32.
    zeros = jnp.zeros_like(x_PxI), jnp.zeros(w_ExIxO.shape, jnp.float32)
    dx_PxI, dw_ExIxO = lax.fori_loop(0, num_blocks, multiply, zeros)
    return None, None, dx_PxI, dw_ExIxO.astype(w_ExIxO.dtype)


blocked_matmul.defvjp(lambda block, *arrays: (blocked_matmul(block, *arrays), arrays), _blocked_backward)


def blocked_matmul_in_8_bits(
    block: int,
    expert_N: jax.Array,
    num_blocks: jax.Array,
    x: Quantised,
    w: Quantised,
    dtype: DTypeLike,
    *,
    is_transposed: bool = False,
) -> jax.Array:
    """Multiply as `GroupedMatmul.multiply_in_8_bits` each block of slots by its expert, up to `num_blocks` blocks."""
    dimensions = ((1,), (1 if is_transposed else 0,)), ((), ())

    def multiply(number: jax.Array, y_PxO: jax.Array) -> jax.Array:
        expert, start = expert_N[number], number * block
        values_bxI, scale_bx1 = (lax.dynamic_slice_in_dim(leaf, start, block) for leaf in x)
        sums_bxO = lax.dot_general(
            values_bxI, w.values[expert], dimensions, preferred_element_type=get_accumulator(values_bxI.dtype)
        )
        y_bxO = sums_bxO.astype(jnp.float32) * scale_bx1 * w.scale[expert].reshape(1, -1)
        return lax.dynamic_update_slice_in_dim(y_PxO, y_bxO.astype(dtype), start, axis=0)

    shape = x.values.shape[0], w.values.shape[1 if is_transposed else 2]
    return lax.fori_loop(0, num_blocks, multiply, jnp.zeros(shape, dtype))
