"""The fused TPU kernel of attention where the positions of a row lie on several devices: keys and values are gathered.

Every device runs the kernel on its own queries, which `row_attention` deals, and leaves out the blocks of keys that no
query of a block may see. Of the forward pass the result and its logs of sums are kept, and not the gathered row, which
the backward pass gathers again: it would fill a device with what all devices have.

Shape legend: B batch, T positions, t those of one device, S those that are gathered, K heads of keys, G heads of
queries for each of them, N = K G, H and W widths of a head.

Which keys a query may see, as the fused TPU kernel asks for it. Imports the kernel, which is slow.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from experiments.model.context_layout import KERNEL_TOKENS, SequenceLayout
from experiments.model.platform import LONG_BLOCK_TOKENS, takes_long_blocks
from experiments.model.ring_attention import dealt, gathered, returned

_EMPTY, _PARTLY, _FULL = (np.array([block]) for block in ([False], [True, False], [True]))


class SequenceMask(splash.Mask):
    """Which keys queries may see that stand at `positions`; keys stand at 0 to `num_keys` - 1.

    The kernel computes masks by itself, from `q_sequence`, and asks this one of each block of T x T only whether it
    sees all of it, some or nothing: so that is all there is in a block of it. Blocks that are written out, as the
    kernel's own masks have them, take half a minute for 131,072 positions.
    """

    def __init__(self, positions: np.ndarray, num_keys: int, window: int | None):
        self.q_sequence, self._num_keys, self._window = positions.astype(np.int32), num_keys, window

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.q_sequence), self._num_keys)

    def mask_function(self, queries: Any, keys: Any) -> Any:
        """Of positions: called by the kernel, too."""
        visible = queries >= keys
        return visible if self._window is None else visible & (queries - keys < self._window)

    def __getitem__(self, index: Any) -> np.ndarray:
        queries, keys = self.q_sequence[index[0]], index[1]  # queries of a block follow each other
        least, most = queries[0] - (keys.stop - 1), queries[-1] - keys.start  # distances
        reach = most + 1 if self._window is None else self._window
        if most < 0 or least >= reach:
            return _EMPTY
        return _FULL if least >= 0 and most < reach else _PARTLY

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SequenceMask) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> tuple[bytes, int, int | None]:
        return self.q_sequence.tobytes(), self._num_keys, self._window


BLOCK_TOKENS = (512, 256, KERNEL_TOKENS)  # by the same measurements as those of whole rows
_KEPT = "row_attention"


def attend(rows: SequenceLayout, q: jax.Array, k: jax.Array, v: jax.Array, *segments: jax.Array) -> jax.Array:
    """Attend from all positions of rows that lie on several devices; returns (B, T, N, W) in the dtype of `v`."""
    is_long = takes_long_blocks(rows.half_tokens, min(rows.length, rows.window or rows.length), q, v)
    kernel = _make_kernel(rows, q.shape[2] // k.shape[2], is_long)
    mesh = jax.sharding.get_abstract_mesh()
    queries = PartitionSpec(None, rows.axes if rows.is_redistributed else None)
    run = jax.shard_map(
        functools.partial(_attend_on_device, rows),
        in_specs=(
            kernel.manual_sharding_spec(NamedSharding(AbstractMesh(mesh.axis_sizes, mesh.axis_names), queries)),
            *[rows.spec] * 3,
            *[rows.ids_spec] * len(segments),
        ),
        out_specs=rows.spec,
        check_vma=False,
    )
    return run(kernel, q, k, v, *segments)


def _make_kernel(rows: SequenceLayout, num_heads: int, is_long: bool) -> Any:
    """Attention of heads (G, t, H) to one head of keys (S, H) and values (S, W), on any of the devices."""
    n, c = rows.num_shards, rows.half_tokens
    if rows.is_redistributed:
        halves = [half for place in range(n) for half in (place, 2 * n - 1 - place)]
        positions, num_keys = (np.array(halves)[:, None] * c + np.arange(c)).reshape(-1), 2 * n * c
    else:  # counted from the first key that is gathered
        positions, num_keys = 2 * c * rows.before + np.arange(2 * c), 2 * c * (rows.before + 1)
    unit = next(size for size in BLOCK_TOKENS if c % size == 0)
    block = LONG_BLOCK_TOKENS if is_long else unit
    sizes = splash.BlockSizes(
        block_q=block,
        block_kv=block,
        block_kv_compute=unit,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_kv_dkv_compute=unit,
        block_q_dq=block,
        block_kv_dq=block,
    )
    return splash.make_splash_mqa(
        splash.MultiHeadMask([SequenceMask(positions, num_keys, rows.window)] * num_heads),
        block_sizes=sizes,
        attn_logits_soft_cap=rows.softcap,
        head_shards=1,
        q_seq_shards=n if rows.is_redistributed else 1,
        residual_checkpoint_name=_KEPT,
    )


def _attend_on_device(rows: SequenceLayout, kernel: Any, *arrays: jax.Array) -> jax.Array:
    @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names(_KEPT), prevent_cse=False)
    def attend(q: jax.Array, k: jax.Array, v: jax.Array, *ids: jax.Array) -> jax.Array:
        B, t, N, H = q.shape
        # The kernel takes no scale. In 16 bits the product is rounded once, and not its factor before.
        q = (q.astype(jnp.float32) * rows.scale).astype(q.dtype)
        q_BxKxGxtxH = dealt(rows, q).reshape(B, t, k.shape[2], -1, H).transpose(0, 2, 3, 1, 4)
        keys = [gathered(rows, x).transpose(0, 2, 1, 3) for x in (k, v)]
        segments = _segments(rows, q.shape[:2], ids)
        of_row = jax.vmap(kernel, in_axes=(0, 0, 0, *[None] * len(segments)))
        out_BxKxGxtxW = jax.vmap(of_row)(q_BxKxGxtxH, *keys, *segments)
        out = out_BxKxGxtxW.transpose(0, 3, 1, 2, 4).reshape(B, 2, rows.half_tokens, N, -1)
        return returned(rows, out)

    return attend(*arrays)


def _segments(rows: SequenceLayout, shape: tuple[int, ...], ids: tuple[jax.Array, ...]) -> list[splash.SegmentIds]:
    """Of queries and of keys; of keys that no row has a segment that nobody else has. None where all is one segment."""
    if rows.is_redistributed and not ids:
        return []
    if ids:
        of_queries, of_keys = dealt(rows, ids[0]).reshape(shape), gathered(rows, ids[0])
    else:
        of_queries, of_keys = (jnp.zeros((shape[0], part * shape[1]), jnp.int32) for part in (1, rows.before + 1))
    if not rows.is_redistributed:
        first = (jax.lax.axis_index(rows.axes) - rows.before) * shape[1]
        of_keys = jnp.where(first + jnp.arange(of_keys.shape[1]) < 0, -1, of_keys)
    return [splash.SegmentIds(of_queries, of_keys)]
