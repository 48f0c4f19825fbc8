"""All-gather context parallelism on TPUs: JAX's splash attention kernel on gathered keys and values.

Every device runs the kernel on its own queries, in the zigzag order of `ring_attention`, and skips blocks of keys that
no query of a block may see. The forward pass saves the result and the logarithms of its sums, but not the gathered
keys: they would fill a device with what all devices hold. The backward pass gathers them again.

Importing this module imports the kernel, which takes long; see `platform.import_for_tpu`.

Shape legend: B batch, T positions, t positions of one device, S gathered positions, K heads of keys, G heads of queries
for each of them, N = K G, H and W widths of a head.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from experiments.model.context_layout import AttentionInputs, SequenceLayout
from experiments.model.platform import LONG_BLOCK_TOKENS, SPLASH_BLOCK_TOKENS, uses_long_blocks
from experiments.model.ring_attention import from_zigzag, gather_keys, to_zigzag

_SAVED_NAME = "row_attention"  # checkpoint name of the kernel's residuals
_EMPTY, _PARTIAL, _FULL = (np.array([block]) for block in ([False], [True, False], [True]))


class SequenceMask(splash.Mask):
    """Causal mask of queries at `positions` over keys at positions 0 to `num_keys` - 1.

    The kernel computes masks itself from `q_sequence`. It asks this class of each block only whether all, some or none
    of it is visible, so a block here consists of just that answer. Blocks that are written out, as in the kernel's own
    mask classes, take half a minute for 131,072 positions.
    """

    def __init__(self, positions: np.ndarray, num_keys: int, window: int | None):
        self.q_sequence, self._num_keys, self._window = positions.astype(np.int32), num_keys, window

    @property
    def shape(self) -> tuple[int, ...]:
        """Numbers of queries and keys."""
        return (len(self.q_sequence), self._num_keys)

    def mask_function(self, queries: Any, keys: Any) -> Any:
        """Return True where the query at one position may see the key at another; the kernel calls it too."""
        visible = queries >= keys
        return visible if self._window is None else visible & (queries - keys < self._window)

    def __getitem__(self, index: Any) -> np.ndarray:
        queries, keys = self.q_sequence[index[0]], index[1]  # queries of a block are consecutive
        least, most = queries[0] - (keys.stop - 1), queries[-1] - keys.start  # distances between query and key
        reach = most + 1 if self._window is None else self._window
        if most < 0 or least >= reach:
            return _EMPTY
        return _FULL if least >= 0 and most < reach else _PARTIAL

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SequenceMask) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> tuple[bytes, int, int | None]:
        return self.q_sequence.tobytes(), self._num_keys, self._window


def sharded_splash_attention(layout: SequenceLayout, inputs: AttentionInputs) -> jax.Array:
    """Attend as `ring_attention.sharded_attention` does."""
    num_visible = min(layout.length, layout.options.window or layout.length)
    is_long = uses_long_blocks(layout.half_tokens, num_visible, inputs.q, inputs.v)
    unit = next(size for size in SPLASH_BLOCK_TOKENS if layout.half_tokens % size == 0)
    kernel = make_kernel(
        _make_mask(layout),
        inputs.q.shape[2] // inputs.k.shape[2],
        unit,
        LONG_BLOCK_TOKENS if is_long else unit,
        layout.options.softcap,
        _SAVED_NAME,
        num_shards=layout.num_shards if layout.is_zigzag else 1,
    )
    mesh = jax.sharding.get_abstract_mesh()
    queries = PartitionSpec(None, layout.axes if layout.is_zigzag else None)
    run = jax.shard_map(
        functools.partial(_attend_on_device, layout),
        in_specs=(
            kernel.manual_sharding_spec(NamedSharding(AbstractMesh(mesh.axis_sizes, mesh.axis_names), queries)),
            layout.input_specs,
        ),
        out_specs=layout.spec,
        check_vma=False,
    )
    return run(kernel, inputs)


def _make_mask(layout: SequenceLayout) -> SequenceMask:
    n, c = layout.num_shards, layout.half_tokens
    if layout.is_zigzag:
        halves = [half for place in range(n) for half in (place, 2 * n - 1 - place)]
        positions, num_keys = (np.array(halves)[:, None] * c + np.arange(c)).reshape(-1), 2 * n * c
    else:
        # Positions are counted from the first gathered key, so that all devices share one mask.
        positions = 2 * c * layout.num_preceding + np.arange(2 * c)
        num_keys = 2 * c * (layout.num_preceding + 1)
    return SequenceMask(positions, num_keys, layout.options.window)


def make_kernel(
    mask: SequenceMask,
    num_heads: int,
    computed: int,
    block: int,
    softcap: float | None,
    saved_name: str,
    num_shards: int = 1,
) -> Any:
    """Return attention of heads (G, t, H) to one head of keys (S, H) and values (S, W), for any of the devices.

    Blocks of `block` positions are read at once, and scores of `computed` keys computed at once. `saved_name` is the
    checkpoint name of its residuals, and `num_shards` the number of devices that share the queries of the mask.
    """
    blocks = ("block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq")
    sizes: Any = dict.fromkeys(blocks, block) | dict.fromkeys(("block_kv_compute", "block_kv_dkv_compute"), computed)
    return splash.make_splash_mqa(
        splash.MultiHeadMask([mask] * num_heads),
        block_sizes=splash.BlockSizes(**sizes),
        attn_logits_soft_cap=softcap,
        head_shards=1,
        q_seq_shards=num_shards,
        residual_checkpoint_name=saved_name,
    )


def _attend_on_device(layout: SequenceLayout, kernel: Any, inputs: AttentionInputs) -> jax.Array:
    policy = jax.checkpoint_policies.save_only_these_names(_SAVED_NAME)

    @functools.partial(jax.checkpoint, policy=policy, prevent_cse=False)
    def attend(inputs: AttentionInputs) -> jax.Array:
        q, k, v, ids, _, sinks_N = inputs
        B, t, N, H = q.shape
        # The kernel takes no scale. The product with it is rounded once in 16 bits; the factor itself is not rounded.
        q = (q.astype(jnp.float32) * layout.scale).astype(q.dtype)
        q_BxKxGxtxH = to_zigzag(layout, q).reshape(B, t, k.shape[2], -1, H).transpose(0, 2, 3, 1, 4)
        keys = [gather_keys(layout, x).transpose(0, 2, 1, 3) for x in (k, v)]
        segments = _make_segments(layout, q.shape[:2], ids)
        if sinks_N is None:
            attend_sequence = jax.vmap(kernel, in_axes=(0, 0, 0, *[None] * len(segments)))
            out_BxKxGxtxW = jax.vmap(attend_sequence)(q_BxKxGxtxH, *keys, *segments)
        else:
            sinks_KxG = sinks_N.reshape(k.shape[2], -1)
            attend_sequence = jax.vmap(kernel, in_axes=(0, 0, 0, None, 0))
            attend_sequences = jax.vmap(attend_sequence, in_axes=(0, 0, 0, 0, None))
            out_BxKxGxtxW = attend_sequences(q_BxKxGxtxH, *keys, segments[0] if segments else None, sinks_KxG)
        out = out_BxKxGxtxW.transpose(0, 3, 1, 2, 4).reshape(B, 2, layout.half_tokens, N, -1)
        return from_zigzag(layout, out)

    return attend(inputs)


def _make_segments(layout: SequenceLayout, shape: tuple[int, ...], ids: jax.Array | None) -> list[splash.SegmentIds]:
    """Return segments of queries and keys; none if every key that a device gathers is of one segment.

    Keys that precede a sequence, which the first devices gather as zeros, get a segment that no query has.
    """
    if layout.is_zigzag and ids is None:
        return []
    if ids is not None:
        queries, keys = to_zigzag(layout, ids).reshape(shape), gather_keys(layout, ids)
    else:
        queries, keys = (jnp.zeros((shape[0], parts * shape[1]), jnp.int32) for parts in (1, layout.num_preceding + 1))
    if not layout.is_zigzag:
        first = (jax.lax.axis_index(layout.axes) - layout.num_preceding) * shape[1]
        keys = jnp.where(first + jnp.arange(keys.shape[1]) < 0, -1, keys)
    return [splash.SegmentIds(queries, keys)]
