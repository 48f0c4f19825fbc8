"""Grouped matmul: tokens grouped by expert, in the form that is fast on the platform. No router is involved.

Assignments of tokens to experts are placed expert by expert in P slots, multiplied, and combined token by token. There
are three layouts:

- `batched`: every expert has the same number of slots, and one batch of matmuls multiplies them. For a fixed capacity.
- `blocked`: the slots of an expert begin at a multiple of a block, and a loop multiplies each block by its one expert.
  The only wasted work is the rest of each expert's last block. On CPU and GPU, where `jax.lax.ragged_dot` multiplies
  all slots by all experts.
- `ragged`: no gaps. On TPU, by `jax.lax.ragged_dot`. For its gradients libtpu would multiply all slots for each expert,
  and copy all matrices to transpose them, so the backward pass calls JAX's megablox kernels.

The weight of an assignment is applied at the hidden layer of its expert, so the backward pass needs no result of one.
Between tokens and slots every array is gathered, in the backward pass too, and never scattered.

Shape legend: M tokens, K experts of a token, A = M * K assignments, E experts, P slots, N blocks of slots, b slots of a
block, D width, I and O input and output of one matmul.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.tree_util import Partial

from experiments.model.platform import import_for_tpu
from runner.train.kernel_check import KernelCase, KernelTrial, get_kernel_use

KERNEL = "ragged_matmul"  # name of the kernels in their test
MIN_BLOCK, MAX_BLOCK = 8, 256
KERNEL_SLOTS = 128  # the megablox kernel needs a multiple of this number of slots
MAX_KERNEL_COLUMNS = 1024  # of either operand in one tile of the kernel
# ((P, I), (E, I, O)) -> (P, O), each slot by its expert. A `Partial`, because it holds the integer arrays of a layout.
Matmul = Partial
Multiply = Callable[[jax.Array, Any], jax.Array]  # the same with experts in any form


class GroupLayout(NamedTuple):
    """Slots of assignments, and the inverse."""

    slots: jax.Array  # (M, K); P for an assignment without a slot
    assignments: jax.Array  # (P); A for an empty slot


def apply_grouped(
    x_MxD: jax.Array,
    experts_MxK: jax.Array,
    weights_MxK: jax.Array,
    is_kept_MxK: jax.Array,
    apply: Callable[[jax.Array, jax.Array, Matmul], jax.Array],
    *,
    num_experts: int,
    most_tokens: int | None,
    platform: str,
) -> jax.Array:
    """Return for every token the weighted sum of its experts' outputs, (M, D), in the dtype of `x`.

    Args:
        x_MxD: tokens.
        experts_MxK: experts of each token.
        weights_MxK: weight of each assignment.
        is_kept_MxK: assignments to compute; the others contribute nothing.
        apply: the experts' function `apply(x_PxD, weights_P, matmul)` of the tokens in their slots, times the weights.
        num_experts: number of experts.
        most_tokens: upper bound for the tokens of one expert, if there is a useful one.
        platform: platform that the program is compiled for.
    """
    rank_MxK, counts_E = rank_assignments(experts_MxK, is_kept_MxK, num_experts)
    if most_tokens is not None:
        num_slots, starts_E = num_experts * most_tokens, jnp.arange(num_experts) * most_tokens
        matmul = Partial(batched_matmul)
    elif platform == "tpu" and get_kernel_use().is_allowed(KERNEL):
        num_slots, starts_E = experts_MxK.size, jnp.cumsum(counts_E) - counts_E
        matmul = Partial(ragged_matmul, counts_E)
    else:
        block = choose_block(experts_MxK.size, num_experts)
        # Enough blocks for the worst distribution, in which every expert's last block has a single token.
        num_blocks = (experts_MxK.size + num_experts * (block - 1)) // block
        ends_E = jnp.cumsum(-(-counts_E // block))
        expert_N = jnp.sum(jnp.arange(num_blocks)[:, None] >= ends_E[:-1], axis=1, dtype=jnp.int32)
        num_slots, starts_E = num_blocks * block, block * (ends_E + counts_E // -block)
        matmul = Partial(functools.partial(blocked_matmul, block), expert_N, ends_E[-1])
    layout = make_layout(jnp.where(is_kept_MxK, starts_E[experts_MxK] + rank_MxK, num_slots), num_slots)
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
    return x_MxD[_find_tokens(layout)]


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
    lambda layout, dy_MxD: (dy_MxD[_find_tokens(layout)], None),
)


@jax.custom_vjp
def dispatch_weights(values_MxK: jax.Array, layout: GroupLayout) -> jax.Array:
    """Return the value of each assignment in its slot, (P); 0 in an empty slot."""
    return values_MxK.reshape(-1).at[layout.assignments].get(mode="fill", fill_value=0)


dispatch_weights.defvjp(
    lambda values_MxK, layout: (dispatch_weights(values_MxK, layout), layout),
    lambda layout, dvalues_P: (dvalues_P.at[layout.slots].get(mode="fill", fill_value=0), None),
)


def _find_tokens(layout: GroupLayout) -> jax.Array:
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


ragged_matmul.defvjp(
    lambda counts_E, x_PxI, w_ExIxO: (ragged_matmul(counts_E, x_PxI, w_ExIxO), (counts_E, x_PxI, w_ExIxO)),
    _ragged_backward,
)


def _make_case(x_PxI: jax.Array, w_ExIxO: jax.Array) -> KernelCase:
    """Return the case of `ragged_matmul` for such slots and experts, with the same tiles and few of them."""
    E, dtype = min(w_ExIxO.shape[0], 4), x_PxI.dtype
    # Two tiles of the axis, or all of it if it has fewer.
    I, O = (min(size, 2 * _choose_tile(size, MAX_KERNEL_COLUMNS)) for size in w_ExIxO.shape[1:])  # noqa: E741
    padded = x_PxI.shape[0] + -x_PxI.shape[0] % KERNEL_SLOTS
    P = min(padded, 2 * _choose_tile(padded, 512)) - -x_PxI.shape[0] % KERNEL_SLOTS

    def make_trial() -> KernelTrial:
        generator = np.random.default_rng(0)
        # Parts of any length, an expert without a token, and slots that are left over.
        counts_E = (np.array([0.41, 0.0, 0.33, 0.14][:E]) * P).astype(np.int32)
        x_PxI, dy_PxO = (generator.normal(size=(P, size)).astype(dtype) for size in (I, O))
        dy_PxO[counts_E.sum() :] = 0
        w_ExIxO = generator.normal(size=(E, I, O)).astype(dtype)

        def run(counts: jax.Array, x: jax.Array, w: jax.Array, dy: jax.Array) -> Any:
            y, pull_back = jax.vjp(functools.partial(ragged_matmul, counts), x, w)
            return y, *pull_back(dy)

        def reference(counts: jax.Array, x: jax.Array, w: jax.Array, dy: jax.Array) -> Any:
            ends_E = jnp.cumsum(counts)
            places_Px1 = jnp.arange(P)[:, None]
            own_PxE = ((places_Px1 < ends_E) & (places_Px1 >= ends_E - counts)).astype(jnp.float32)
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


def _blocked_forward(
    block: int, expert_N: jax.Array, num_blocks: jax.Array, x_PxI: jax.Array, w_ExIxO: jax.Array
) -> tuple[jax.Array, Any]:
    return blocked_matmul(block, expert_N, num_blocks, x_PxI, w_ExIxO), (expert_N, num_blocks, x_PxI, w_ExIxO)


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


blocked_matmul.defvjp(_blocked_forward, _blocked_backward)
