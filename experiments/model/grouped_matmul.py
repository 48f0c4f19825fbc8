"""Matmuls of tokens that are grouped by expert, in the form that is fast on the platform. Knows no router.

Assignments of tokens to experts are laid out expert by expert in P slots, multiplied, and added up token by token.
Three layouts:

- `batched`, where no expert gets more than a fixed number of rows: that many slots each, one batch of matmuls.
- `blocked`: slots of an expert begin at a multiple of a block, and a loop multiplies block by block with the one expert
  it belongs to. No work but the rest of the last block of each. On CPU and GPU, where `jax.lax.ragged_dot` multiplies
  all rows by all experts.
- `ragged`: without gaps. On TPU, by `jax.lax.ragged_dot`. Of its gradients libtpu would make one product of all rows
  for each expert, and copy all matrices to turn them: those are JAX's kernels of grouped products.

An assignment's weight is multiplied inside its expert, where the hidden layer is: so the backward pass needs no result
of an expert. Between tokens and slots every array is gathered, in the backward pass too, and never scattered.

Shape legend: M tokens, K experts of a token, A = M * K assignments, E experts, P slots, N blocks of slots, D width, I
and O input and output of one matmul.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.tree_util import Partial

from experiments.model.platform import for_tpus

MIN_BLOCK, MAX_BLOCK = 8, 256
KERNEL_ROWS = 128  # the kernel takes a multiple of them
KERNEL_COLUMNS = 1024  # of either array that a tile of the kernel has, at most
Matmul = Partial  # ((P, I), (E, I, O)) -> (P, O), each slot by its expert; of integers that say whose slots are whose
Multiply = Callable[[jax.Array, Any], jax.Array]  # the same, of experts in whatever form


class GroupLayout(NamedTuple):
    """Where each assignment lies."""

    slots: jax.Array  # (M, K), P of what is not routed
    assignments: jax.Array  # (P), A of a slot that is empty


def grouped(
    x_MxD: jax.Array,
    experts_MxK: jax.Array,
    weights_MxK: jax.Array,
    kept_MxK: jax.Array,
    apply: Callable[[jax.Array, jax.Array, Matmul], jax.Array],
    *,
    num_experts: int,
    most_rows: int | None,
    platform: str,
) -> jax.Array:
    """Return for every token the sum of what its experts make of it, each times its weight: (M, D), of the type of `x`.

    `apply(x_PxD, weights_P, matmul)` is the experts' function of the rows at hand, times their weights. What is not
    kept is not computed, and counts nothing. With `most_rows` no expert may have more rows than that.
    """
    rank_MxK, counts_E = ranked(experts_MxK, kept_MxK, num_experts)
    num_slots, starts_E, matmul = _layout(counts_E, experts_MxK.size, num_experts, most_rows, platform)
    layout = lay_out(jnp.where(kept_MxK, starts_E[experts_MxK] + rank_MxK, num_slots), num_slots)
    return collect(apply(dispatch(x_MxD, layout), in_slots(weights_MxK, layout), matmul), layout)


def ranked(experts_MxK: jax.Array, kept_MxK: jax.Array, num_experts: int) -> tuple[jax.Array, jax.Array]:
    """How many tokens before each are kept by the same expert, (M, K), and by each expert in all, (E)."""
    chosen_MxKxE = (experts_MxK[..., None] == jnp.arange(num_experts)) & kept_MxK[..., None]
    place_MxE = jnp.cumsum(jnp.any(chosen_MxKxE, axis=1), axis=0, dtype=jnp.int32)
    return jnp.sum(jnp.where(chosen_MxKxE, place_MxE[:, None] - 1, 0), axis=-1), place_MxE[-1]


def lay_out(slot_MxK: jax.Array, num_slots: int) -> GroupLayout:
    """The layout of so many slots, from the one of each assignment; `num_slots` is none."""
    assignments = jnp.arange(slot_MxK.size, dtype=jnp.int32)
    empty_P = jnp.full(num_slots, slot_MxK.size, jnp.int32)
    return GroupLayout(slot_MxK, empty_P.at[slot_MxK.reshape(-1)].set(assignments, mode="drop"))


def _layout(
    counts_E: jax.Array, num_assignments: int, num_experts: int, most_rows: int | None, platform: str
) -> tuple[int, jax.Array, Matmul]:
    """Number of slots, the first of each expert, and the matmul of slots by their experts."""
    if most_rows is not None:
        return num_experts * most_rows, jnp.arange(num_experts) * most_rows, Partial(batched_matmul)
    if platform == "tpu":
        return num_assignments, jnp.cumsum(counts_E) - counts_E, Partial(ragged_matmul, counts_E)
    block = block_rows(num_assignments, num_experts)
    num_blocks = (num_assignments + num_experts * (block - 1)) // block
    ends_E = jnp.cumsum(-(-counts_E // block))
    expert_N = jnp.sum(jnp.arange(num_blocks)[:, None] >= ends_E[:-1], axis=1, dtype=jnp.int32)
    starts_E = block * (ends_E + counts_E // -block)
    return num_blocks * block, starts_E, Partial(functools.partial(blocked_matmul, block), expert_N, ends_E[-1])


def block_rows(num_assignments: int, num_experts: int) -> int:
    """Rows of a block: a power of two, about a quarter of what an expert has on average."""
    rows = MIN_BLOCK
    while 2 * rows <= min(MAX_BLOCK, num_assignments // (4 * num_experts)):
        rows *= 2
    return rows


@jax.custom_vjp
def dispatch(x_MxD: jax.Array, layout: GroupLayout) -> jax.Array:
    """The tokens in their slots, (P, D); in an empty slot stands some token."""
    return x_MxD[_token_of_slot(layout)]


def _dispatch_forward(x_MxD: jax.Array, layout: GroupLayout) -> tuple[jax.Array, GroupLayout]:
    return dispatch(x_MxD, layout), layout


def _dispatch_backward(layout: GroupLayout, dx_PxD: jax.Array) -> tuple[jax.Array, None]:
    return _sum_of_slots(dx_PxD, layout), None


dispatch.defvjp(_dispatch_forward, _dispatch_backward)


@jax.custom_vjp
def collect(y_PxD: jax.Array, layout: GroupLayout) -> jax.Array:
    """The sum over each token's slots; in float32, (M, D) in the type of `y`.

    An empty slot gets the gradient of some token: whoever filled it multiplies by its weight, which is nothing.
    """
    return _sum_of_slots(y_PxD, layout)


def _collect_forward(y_PxD: jax.Array, layout: GroupLayout) -> tuple[jax.Array, GroupLayout]:
    return collect(y_PxD, layout), layout


def _collect_backward(layout: GroupLayout, dy_MxD: jax.Array) -> tuple[jax.Array, None]:
    return dy_MxD[_token_of_slot(layout)], None


collect.defvjp(_collect_forward, _collect_backward)


@jax.custom_vjp
def in_slots(values_MxK: jax.Array, layout: GroupLayout) -> jax.Array:
    """What each assignment has, in its slot, (P); in an empty slot nothing."""
    return values_MxK.reshape(-1).at[layout.assignments].get(mode="fill", fill_value=0)


def _in_slots_forward(values_MxK: jax.Array, layout: GroupLayout) -> tuple[jax.Array, GroupLayout]:
    return in_slots(values_MxK, layout), layout


def _in_slots_backward(layout: GroupLayout, dvalues_P: jax.Array) -> tuple[jax.Array, None]:
    return dvalues_P.at[layout.slots].get(mode="fill", fill_value=0), None


in_slots.defvjp(_in_slots_forward, _in_slots_backward)


def _token_of_slot(layout: GroupLayout) -> jax.Array:
    M, K = layout.slots.shape
    return jnp.minimum(layout.assignments // K, M - 1)


def _sum_of_slots(x_PxD: jax.Array, layout: GroupLayout) -> jax.Array:
    """The sum of what stands in each token's slots, (M, D); nothing for what is not routed.

    One gather for each of a token's experts, and all of them added at once.
    """
    total_MxD = jnp.zeros((), jnp.float32)
    for slots_M in layout.slots.T:
        total_MxD += x_PxD.at[slots_M].get(mode="fill", fill_value=0).astype(jnp.float32)
    return total_MxD.astype(x_PxD.dtype)


def batched_matmul(x_PxI: jax.Array, w_ExIxO: jax.Array) -> jax.Array:
    """Each expert by as many slots, (P, O)."""
    E, I, O = w_ExIxO.shape  # noqa: E741
    return jnp.einsum("epi,eio->epo", x_PxI.reshape(E, -1, I), w_ExIxO).reshape(-1, O)


@jax.custom_vjp
def ragged_matmul(counts_E: jax.Array, x_PxI: jax.Array, w_ExIxO: jax.Array) -> jax.Array:
    """So many slots by the first expert, so many by the next, (P, O); zeros in those behind, which nobody may read."""
    return lax.ragged_dot(x_PxI, w_ExIxO, counts_E)


def _ragged_forward(counts_E: jax.Array, x_PxI: jax.Array, w_ExIxO: jax.Array) -> tuple[jax.Array, Any]:
    return ragged_matmul(counts_E, x_PxI, w_ExIxO), (counts_E, x_PxI, w_ExIxO)


def _ragged_backward(kept: Any, dy_PxO: jax.Array) -> tuple[None, jax.Array, jax.Array]:
    counts_E, x_PxI, w_ExIxO = kept
    kernel = for_tpus("jax.experimental.pallas.ops.tpu.megablox.gmm")
    num_slots, (_, I, O) = x_PxI.shape[0], w_ExIxO.shape  # noqa: E741
    x_PxI, dy_PxO = (jnp.pad(rows, ((0, -num_slots % KERNEL_ROWS), (0, 0))) for rows in (x_PxI, dy_PxO))
    tile_rows, tile_I, tile_O = _tile(x_PxI.shape[0], 512), _tile(I, KERNEL_COLUMNS), _tile(O, KERNEL_COLUMNS)
    counts_E = counts_E.astype(jnp.int32)
    # Slots behind those of all experts are the last one's: the kernel would leave them as it finds the memory.
    all_E = counts_E.at[-1].add(x_PxI.shape[0] - jnp.sum(counts_E))
    sizes = tile_rows, tile_O, tile_I
    dx_PxI = kernel.gmm(dy_PxO, w_ExIxO, all_E, dy_PxO.dtype, sizes, transpose_rhs=True)
    dw_ExIxO = kernel.tgmm(x_PxI.T, dy_PxO, counts_E, w_ExIxO.dtype, (tile_rows, tile_I, tile_O))
    return None, dx_PxI[:num_slots], dw_ExIxO


ragged_matmul.defvjp(_ragged_forward, _ragged_backward)


def _tile(size: int, most: int) -> int:
    """The largest part of an axis that divides it and that the kernel takes."""
    fitting = (part for part in range(most, 0, -KERNEL_ROWS) if size % part == 0)
    return next(fitting, min(size, most))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def blocked_matmul(
    block: int, expert_N: jax.Array, num_blocks: jax.Array, x_PxI: jax.Array, w_ExIxO: jax.Array
) -> jax.Array:
    """Each block of slots by the expert that `expert_N` names; of the blocks only the first `num_blocks`. (P, O)"""

    def multiply(number: jax.Array, y_PxO: jax.Array) -> jax.Array:
        x_bxI = lax.dynamic_slice_in_dim(x_PxI, number * block, block)
        y_bxO = jnp.dot(x_bxI, w_ExIxO[expert_N[number]])
        return lax.dynamic_update_slice_in_dim(y_PxO, y_bxO, number * block, axis=0)

    return lax.fori_loop(0, num_blocks, multiply, jnp.zeros((x_PxI.shape[0], w_ExIxO.shape[2]), x_PxI.dtype))


def _blocked_forward(
    block: int, expert_N: jax.Array, num_blocks: jax.Array, x_PxI: jax.Array, w_ExIxO: jax.Array
) -> tuple[jax.Array, Any]:
    return blocked_matmul(block, expert_N, num_blocks, x_PxI, w_ExIxO), (expert_N, num_blocks, x_PxI, w_ExIxO)


def _blocked_backward(block: int, kept: Any, dy_PxO: jax.Array) -> tuple[None, None, jax.Array, jax.Array]:
    expert_N, num_blocks, x_PxI, w_ExIxO = kept

    def multiply(number: jax.Array, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        dx_PxI, dw_ExIxO = sums
        expert, start = expert_N[number], number * block
        x_bxI, dy_bxO = (lax.dynamic_slice_in_dim(rows, start, block) for rows in (x_PxI, dy_PxO))
        dx_bxI = jnp.dot(dy_bxO, w_ExIxO[expert].T)
        dw_IxO = dw_ExIxO[expert] + jnp.dot(x_bxI.T, dy_bxO, preferred_element_type=jnp.float32)
        return (
            lax.dynamic_update_slice_in_dim(dx_PxI, dx_bxI, start, axis=0),
            lax.dynamic_update_index_in_dim(dw_ExIxO, dw_IxO, expert, axis=0),
        )

    zeros = jnp.zeros_like(x_PxI), jnp.zeros(w_ExIxO.shape, jnp.float32)
    dx_PxI, dw_ExIxO = lax.fori_loop(0, num_blocks, multiply, zeros)
    return None, None, dx_PxI, dw_ExIxO.astype(w_ExIxO.dtype)


blocked_matmul.defvjp(_blocked_forward, _blocked_backward)
