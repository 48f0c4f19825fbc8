"""Causal attention, in the form that is fast on the platform the program is compiled for.

Owns the choice between implementations and nothing else: no parameters, no dropout, no model. Every form computes
softmax(cap(q k^T scale)) v over past and present positions, with the softmax in float32. `FORMS` says which forms a
platform has, and what each can do.

- Grouped queries: K heads of keys and values serve N heads of queries, N / K neighbours each. Keys are never repeated
  in a device's memory.
- `window`: how many positions a query sees, its own included; None is all of its past.
- `softcap`: a score s becomes softcap tanh(s / softcap), before what may not be seen is masked.
- `scale`: what scores are multiplied by; None is 1 / sqrt(H).
- `segments_BxT` (int32), where a row holds several documents, numbers them: 1, 2, ... in a row, 0 is padding. Then
  every form attends within a segment alone. Padding attends to padding: each position sees itself at least, so that
  all values are finite, and no real position ever sees padding. Without segments the program is that of rows which are
  one document.

Shape legend: B batch, T sequence, N heads of queries, K heads of keys and values, H width of a head of queries and
keys, W width of a head of values, Q queries of one block, S keys that a block of queries sees, or those of a cache.
"""

import functools
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any, Literal, NamedTuple, TypedDict, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from experiments.model.context_layout import factor_of, rows_on_devices
from experiments.model.layers import cut, num_devices, num_shards, row_parts
from experiments.model.platform import (
    KEPT,
    LONG_BLOCK_TOKENS,
    fast_memory_bytes,
    for_tpus,
    in_order,
    platform,
    takes_long_blocks,
)
from experiments.model.ring_attention import attend_to_rows
from experiments.model.rotary import Pairs, Rotation, rotate
from experiments.model.tpu_attention import LANES, LONG_STEP
from runner.config import ContextParallelMethod
from runner.errors import InvalidError

AXES = ("batch", "sequence", "heads", "head_dim")
ROW_AXES = ("batch", "row", "heads", "head_dim")  # where a device attends to rows of which it has every position
MAX_BLOCKS = 8
MIN_BLOCK_TOKENS = 64
TPU_BLOCK_TOKENS = (512, 256, 128)


class AttentionOptions(TypedDict):
    """What attention is asked for beside queries, keys and values."""

    window: int | None
    softcap: float | None
    scale: float | None


class BlockSizes(NamedTuple):
    """Positions of a row that a TPU's kernel takes at once."""

    multiple: int  # to which the row is padded, and of whose keys scores are computed at once
    read: int


def causal_attention(
    q_BxTxNxH: jax.Array,
    k_BxTxKxH: jax.Array,
    v_BxTxKxW: jax.Array,
    segments_BxT: jax.Array | None = None,
    rotation: Rotation | None = None,
    pairs: Pairs = "halves",
    *,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    row_attention: ContextParallelMethod = "auto",
) -> jax.Array:
    """Attend from every position to itself and the past of its segment; returns (B, T, N, W) in the dtype of `v`.

    The platform is that of the mesh (`jax.set_mesh`), so that compiling ahead of time for a TPU on a machine without
    one takes the TPU's kernel; without a mesh, the one that the program is lowered for. Under a mesh with logical axis
    rules, batch and heads may be sharded; heads of keys need not divide over the devices that heads of queries do. So
    may positions: then `row_attention` says how keys come to queries (`memory.row_attention`), if every device has two
    halves of as many positions; other rows, which training refuses, every device attends to whole.
    Queries and keys are turned first, if there is a `rotation`: by a kernel that can, as it reads them.
    Raises `InvalidError` for sizes and options that no form can serve.
    """
    _check(q_BxTxNxH, k_BxTxKxH, v_BxTxKxW, window, softcap)
    if window is not None and window >= q_BxTxNxH.shape[1]:
        window = None
    options: AttentionOptions = {"window": window, "softcap": softcap, "scale": scale}
    turning = None if rotation is None or pairs != "halves" else _form_that_turns(q_BxTxNxH, v_BxTxKxW, softcap)
    if rotation is not None and turning is None:
        q_BxTxNxH, k_BxTxKxH = (rotate(x, rotation, pairs) for x in (q_BxTxNxH, k_BxTxKxH))
    k_BxTxKxH, v_BxTxKxW = (_spread_over_mesh(x, q_BxTxNxH.shape[2]) for x in (k_BxTxKxH, v_BxTxKxW))
    arrays = (q_BxTxNxH, k_BxTxKxH, v_BxTxKxW, *(() if segments_BxT is None else (segments_BxT,)))
    if turning is not None:
        return turning.attend(*arrays, rotation=rotation, **options)
    rows = rows_on_devices(q_BxTxNxH, k_BxTxKxH, v_BxTxKxW, row_attention, **options)
    if rows is not None:
        attend = for_tpus("experiments.model.context_splash").attend if rows.has_kernel else attend_to_rows
        return cast(jax.Array, attend(rows, *arrays))
    forms = {name: functools.partial(_first_of(name, arrays, softcap).attend, **options) for name in FORMS}
    if (here := platform()) is not None:
        return forms.get("cuda" if here == "gpu" else here, forms["default"])(*arrays)
    return jax.lax.platform_dependent(*arrays, **forms)


def cached_attention(
    q_BxTxNxH: jax.Array,
    k_BxSxKxH: jax.Array,
    v_BxSxKxW: jax.Array,
    start: jax.Array | int,
    *,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
) -> jax.Array:
    """Attend from positions `start` to `start` + T - 1 to the keys of a cache; returns (B, T, N, W), the dtype of `v`.

    The keys stand at positions 0 to S - 1, and each query sees those at its own position and before. What lies behind
    is not seen, but must be finite. `start` may be traced. No gradient is asked for.
    """
    _check(q_BxTxNxH, k_BxSxKxH, v_BxSxKxW, window, softcap)
    q_BxNxTxH, k_BxKxSxH, v_BxKxSxW = (x.transpose(0, 2, 1, 3) for x in (q_BxTxNxH, k_BxSxKxH, v_BxSxKxW))
    places_Tx1 = (start + jnp.arange(q_BxTxNxH.shape[1]))[:, None]
    visible_TxS = _visible(places_Tx1, jnp.arange(k_BxSxKxH.shape[1]), window)
    out_BxNxTxW = _attend(q_BxNxTxH, k_BxKxSxH, v_BxKxSxW, visible_TxS, softcap, scale)
    return out_BxNxTxW.transpose(0, 2, 1, 3)


def blocked_attention(
    q_BxTxNxH: jax.Array,
    k_BxTxKxH: jax.Array,
    v_BxTxKxW: jax.Array,
    segments_BxT: jax.Array | None = None,
    *,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
) -> jax.Array:
    """Attend block of queries by block of queries, each to the keys that its queries may see and hardly any others.

    Skips nearly half of the work of a masked square, and with a window what lies left of it. Batch and heads lead, as
    adjacent batch dimensions of plain matmuls: XLA's CPU backend merges them into one, and the partitioner still sees
    them apart and shards both. The backward pass keeps q, k and v alone and computes the weights again, which is faster
    than writing them out and reading them back in a scan over layers.
    """
    T = q_BxTxNxH.shape[1]
    block_tokens = max(MIN_BLOCK_TOKENS, -(-T // MAX_BLOCKS))

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def attend(*arrays: jax.Array) -> jax.Array:
        q_BxNxTxH, k_BxKxTxH, v_BxKxTxW = (x.transpose(0, 2, 1, 3) for x in arrays[:3])
        blocks = []
        for start in range(0, T, block_tokens):
            stop = min(start + block_tokens, T)
            first = 0 if window is None else max(0, start - window + 1)
            visible = _visible(jnp.arange(start, stop)[:, None], jnp.arange(first, stop), window)
            for ids_BxT in arrays[3:]:
                visible &= _same_segment(ids_BxT[:, start:stop], ids_BxT[:, first:stop])  # (B, 1, Q, S)
            keys, values = k_BxKxTxH[:, :, first:stop], v_BxKxTxW[:, :, first:stop]
            blocks.append(_attend(q_BxNxTxH[:, :, start:stop], keys, values, visible, softcap, scale))
        return jnp.concatenate(blocks, axis=2).transpose(0, 2, 1, 3)

    return attend(q_BxTxNxH, k_BxTxKxH, v_BxTxKxW, *(() if segments_BxT is None else (segments_BxT,)))


def xla_attention(
    q_BxTxNxH: jax.Array,
    k_BxTxKxH: jax.Array,
    v_BxTxKxW: jax.Array,
    segments_BxT: jax.Array | None = None,
    *,
    window: int | None = None,
    softcap: None = None,
    scale: float | None = None,
) -> jax.Array:
    """Attend by JAX's own composition of matmuls and a float32 softmax."""
    assert softcap is None
    mask_Bx1xTxT = None if segments_BxT is None else _same_segment(segments_BxT, segments_BxT)
    return _attend_by_jax("xla", q_BxTxNxH, k_BxTxKxH, v_BxTxKxW, mask_Bx1xTxT, window, scale)


def cudnn_attention(
    q_BxTxNxH: jax.Array,
    k_BxTxKxH: jax.Array,
    v_BxTxKxW: jax.Array,
    *,
    window: int | None = None,
    softcap: None = None,
    scale: float | None = None,
) -> jax.Array:
    """Attend by cuDNN's fused kernel."""
    assert softcap is None
    return _attend_by_jax("cudnn", q_BxTxNxH, k_BxTxKxH, v_BxTxKxW, None, window, scale)


def _attend_by_jax(
    implementation: Literal["xla", "cudnn"],
    q_BxTxNxH: jax.Array,
    k_BxTxKxH: jax.Array,
    v_BxTxKxW: jax.Array,
    mask_Bx1xTxT: jax.Array | None,
    window: int | None,
    scale: float | None,
) -> jax.Array:
    """Values become as wide as keys: what is padded of them comes out as zeros, and is left out."""
    width = v_BxTxKxW.shape[3]
    missing = k_BxTxKxH.shape[3] - width
    out_BxTxNxH = jax.nn.dot_product_attention(
        q_BxTxNxH,
        k_BxTxKxH,
        jnp.pad(v_BxTxKxW, ((0, 0), (0, 0), (0, 0), (0, missing))) if missing else v_BxTxKxW,
        mask=mask_Bx1xTxT,
        scale=scale,
        is_causal=True,
        local_window_size=None if window is None else (window - 1, 0),
        implementation=implementation,
    )
    return out_BxTxNxH[..., :width] if missing else out_BxTxNxH


def fused_attention(
    q_BxTxNxH: jax.Array,
    k_BxTxKxH: jax.Array,
    v_BxTxKxW: jax.Array,
    segments_BxT: jax.Array | None = None,
    *,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    rotation: Rotation | None = None,
) -> jax.Array:
    """Attend by the TPU kernels of `tpu_attention`, one of which makes all gradients, and scores once for them."""
    own, block = for_tpus("experiments.model.tpu_attention"), _fused_block_tokens(q_BxTxNxH, v_BxTxKxW)
    kernel = own.Kernel(own.Causal(block, window), factor_of(q_BxTxNxH, scale), softcap, fast_memory_bytes())
    return _attend_on_tpus(kernel.attend, block, q_BxTxNxH, k_BxTxKxH, v_BxTxKxW, segments_BxT, rotation)


def splash_attention(
    q_BxTxNxH: jax.Array,
    k_BxTxKxH: jax.Array,
    v_BxTxKxW: jax.Array,
    segments_BxT: jax.Array | None = None,
    *,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
) -> jax.Array:
    """Attend by JAX's fused TPU kernels, which leave out the blocks of keys that no query of a block may see."""
    splash = for_tpus("jax.experimental.pallas.ops.tpu.splash_attention")
    group = q_BxTxNxH.shape[2] // k_BxTxKxH.shape[2]
    blocks = _splash_block_tokens(q_BxTxNxH.shape[1], window, q_BxTxNxH, v_BxTxKxW)
    factor = factor_of(q_BxTxNxH, scale)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array | None, _: None) -> jax.Array:
        # Rows and heads of keys are axes that the two cores of a chip may share, those of the kernel itself are not.
        kernel = _make_splash_kernel(splash, group, q.shape[2], blocks, window, softcap)
        of_row = jax.vmap(kernel, in_axes=(0, 0, 0, None))
        segments = None if ids is None else splash.SegmentIds(ids, ids)
        q_BxKxGxTxH = _scaled(q, factor).reshape(*k.shape[:2], group, *q.shape[2:])
        out: jax.Array = jax.vmap(of_row)(q_BxKxGxTxH, k, v, segments)
        return out.reshape(*q.shape[:3], -1)

    return _attend_on_tpus(attend, blocks.multiple, q_BxTxNxH, k_BxTxKxH, v_BxTxKxW, segments_BxT, None)


def _attend_on_tpus(
    kernel: Callable[..., jax.Array],
    multiple: int,
    q_BxTxNxH: jax.Array,
    k_BxTxKxH: jax.Array,
    v_BxTxKxW: jax.Array,
    segments_BxT: jax.Array | None,
    rotation: Rotation | None,
) -> jax.Array:
    """Attend by a kernel that takes queries (B, N, T, H), keys and values (B, K, T, ...), segments and angles.

    T is padded to whole blocks: at the end, where no real position sees it. The partitioner cannot split such a kernel,
    so under a mesh each device runs it on its own rows and heads.
    """
    T, angles = q_BxTxNxH.shape[1], None
    if rotation is not None:
        angles = tuple(jnp.concatenate([x, x], axis=-1)[:, :, 0] for x in rotation)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, *positions: Any) -> jax.Array:
        padding = [(0, 0), (0, -T % multiple)]
        q, k, v, *positions = jax.tree.map(
            lambda x: jnp.pad(x, padding + [(0, 0)] * (x.ndim - 2)), (q, k, v, *positions)
        )
        # Heads come before positions first: where they came so, nothing is moved, and the rest joins the matmul before.
        q, k, v = (checkpoint_name(in_order(x.transpose(0, 2, 1, 3)), KEPT) for x in (q, k, v))
        out_BxNxTxW = in_order(kernel(q, k, v, *positions))
        return out_BxNxTxW.transpose(0, 2, 1, 3)[:, :T]

    if not jax.sharding.get_abstract_mesh().empty:
        spec, of_rows = _partition_spec(ROW_AXES), _partition_spec(ROW_AXES[:2])
        of_angles = of_rows if rotation is not None and rotation.cos.shape[0] > 1 else jax.sharding.PartitionSpec()
        in_specs = (spec, spec, spec, of_rows, of_angles)
        attend = jax.shard_map(attend, in_specs=in_specs, out_specs=spec, check_vma=False)
    return attend(q_BxTxNxH, k_BxTxKxH, v_BxTxKxW, segments_BxT, angles)


def _scaled(x: jax.Array, factor: float) -> jax.Array:
    """`x` times a factor, in its own dtype; the product is rounded once, and not the factor before.

    A power of two rounds nothing, and so needs no wider type on the way, which keeps it out of the matmul before.
    """
    if math.frexp(factor)[0] == 0.5:
        return x * jnp.asarray(factor, x.dtype)
    return (x.astype(jnp.float32) * factor).astype(x.dtype)


def _make_splash_kernel(
    splash: ModuleType, num_heads: int, length: int, blocks: BlockSizes, window: int | None, softcap: float | None
) -> Callable[..., jax.Array]:
    """Attention of heads (G, T, H) to one head of keys (T, H) and values (T, W), over a row that is padded."""
    multiple, block = blocks
    mask = for_tpus("experiments.model.context_splash").SequenceMask(np.arange(length), length, window)
    names = ("block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq")
    sizes = splash.BlockSizes(
        **dict.fromkeys(names, block), **dict.fromkeys(("block_kv_compute", "block_kv_dkv_compute"), multiple)
    )
    kernel: Callable[..., jax.Array] = splash.make_splash_mqa(
        splash.MultiHeadMask([mask] * num_heads),
        block_sizes=sizes,
        attn_logits_soft_cap=softcap,
        head_shards=1,
        q_seq_shards=1,
        residual_checkpoint_name=KEPT,
    )
    return kernel


def _cudnn_takes(q_BxTxNxH: jax.Array, _: jax.Array) -> bool:
    """Ask the GPU at hand, as tracing the form does, too: without one the form cannot be offered."""
    if jax.default_backend() != "gpu" or "cuda" not in jax.local_devices()[0].client.platform_version:
        return False
    head_width = q_BxTxNxH.shape[3]
    is_hopper_or_later = float(jax.local_devices()[0].compute_capability) >= 9
    return head_width % 8 == 0 and head_width <= (256 if is_hopper_or_later else 128)


class AttentionImplementation(NamedTuple):
    """A form of attention, and what it can do. Grouped heads, windows and scales are for all of them."""

    attend: Callable[..., jax.Array]
    dtypes: tuple[DTypeLike, ...] = ()  # none named: all
    softcap: bool = True
    segments: bool = True
    wide_values: bool = True  # values that are wider than keys; narrower ones are for all
    fits: Callable[[jax.Array, jax.Array], bool] = lambda *_: True  # queries, and values
    length_multiple: int = 1  # up to which a row is padded; by more than an eighth of it none is
    turns: bool = False  # takes a rotation
    divides_over_mesh: bool = False  # rows and heads must: a kernel that the partitioner cannot split


# By platform, the fastest first; the last of each can do everything. With segments cuDNN would take a mask as a bias of
# all T x T scores, JAX then asks it for that bias's gradient too, and together with that gradient not every GPU has an
# algorithm that gives the same bits twice.
BLOCKS = AttentionImplementation(blocked_attention)
XLA = AttentionImplementation(xla_attention, softcap=False, wide_values=False)
CUDNN = XLA._replace(attend=cudnn_attention, dtypes=(jnp.bfloat16, jnp.float16), segments=False, fits=_cudnn_takes)
SPLASH = AttentionImplementation(splash_attention, length_multiple=LANES, divides_over_mesh=True)
FUSED = SPLASH._replace(
    attend=fused_attention,
    dtypes=(jnp.bfloat16, jnp.float32),
    fits=lambda q, v: _fused_block_tokens(q, v) > 0,
    turns=True,
)
FORMS: dict[str, tuple[AttentionImplementation, ...]] = {
    "cpu": (BLOCKS,),
    "cuda": (CUDNN, XLA._replace(dtypes=(jnp.float32,)), BLOCKS),
    "tpu": (FUSED, SPLASH, XLA, BLOCKS),
    "default": (XLA, BLOCKS),
}


def _can(form: AttentionImplementation, arrays: tuple[jax.Array, ...], softcap: float | None) -> bool:
    q_BxTxNxH, k_BxTxKxH, v_BxTxKxW = arrays[:3]
    return (
        (not form.dtypes or q_BxTxNxH.dtype in form.dtypes)
        and (form.softcap or softcap is None)
        and (form.segments or len(arrays) == 3)
        and (form.wide_values or v_BxTxKxW.shape[3] <= k_BxTxKxH.shape[3])
        and form.fits(q_BxTxNxH, v_BxTxKxW)
        and _is_worth_padding(q_BxTxNxH.shape[1], form.length_multiple)
        and (not form.divides_over_mesh or _divides_over_mesh(q_BxTxNxH))
    )


def _first_of(platform: str, arrays: tuple[jax.Array, ...], softcap: float | None) -> AttentionImplementation:
    """The form of a platform that is taken."""
    return next(one for one in FORMS[platform] if _can(one, arrays, softcap))


def _form_that_turns(
    q_BxTxNxH: jax.Array, v_BxTxKxW: jax.Array, softcap: float | None
) -> AttentionImplementation | None:
    """The form that turns queries and keys as it reads them, if one is taken; a v4 has no room for it."""
    if platform() != "tpu" or fast_memory_bytes() is None or row_parts() > 1:
        return None
    form = _first_of("tpu", (q_BxTxNxH, q_BxTxNxH, v_BxTxKxW), softcap)
    return form if form.turns else None


def _is_worth_padding(length: int, multiple: int) -> bool:
    return 8 * (-length % multiple) <= length


def _splash_block_tokens(length: int, window: int | None, *heads: jax.Array) -> BlockSizes:
    """The blocks of a row of such queries and values.

    By what libtpu's schedules take on v5e and v5p (`tests/benchmarks/tpu_attention.py`): larger blocks lose less
    between two of them, and leave out less of the square.
    """
    unit = next(size for size in TPU_BLOCK_TOKENS if _is_worth_padding(length, size))
    padded = length + -length % unit
    is_long = takes_long_blocks(padded, min(padded, window or padded), *heads)
    return BlockSizes(unit, LONG_BLOCK_TOKENS if is_long else unit)


def _fused_block_tokens(q_BxTxNxH: jax.Array, v_BxTxKxW: jax.Array) -> int:
    """Positions of a row that `fused_attention` takes at once, to which it is padded; 0 if the row does not fit.

    Shorter blocks cost as much more as libtpu's schedules say (`tests/benchmarks/tpu_attention.py`).
    """
    length, costs = q_BxTxNxH.shape[1], {}
    for block in range(LANES, 1025, LANES):
        if _is_worth_padding(length, block) and _fused_bytes_left(block, q_BxTxNxH, v_BxTxKxW) >= 0:
            costs[block] = (length + -length % block) ** 2 * (1 + 200 / block)
    return min(costs, key=costs.__getitem__, default=0)


def _fused_bytes_left(block: int, q_BxTxNxH: jax.Array, v_BxTxKxW: jax.Array) -> int:
    """What `fused_attention` leaves of the fast memory of a TPU, where it takes so many positions at once.

    It has there the gradients of a row's keys and values, two blocks of each of eight arrays, and what it computes of
    the scores of a long step; except on a v4 also the keys of a row that are turned, a block of queries, and two blocks
    of each of four arrays of angles. By what libtpu counts, 2 MiB may come to that.
    """
    length, size, memory = q_BxTxNxH.shape[1], q_BxTxNxH.dtype.itemsize, fast_memory_bytes()
    padded = length + -length % block
    of_head, of_value = (-(-x.shape[3] // LANES) * LANES for x in (q_BxTxNxH, v_BxTxKxW))
    needed = (of_head + of_value) * (4 * padded + 8 * block * size) + 10 * block * min(block, LONG_STEP) + 2**21
    if memory is not None:
        needed += of_head * (size * padded + size * block + 32 * block)
    return (2**24 if memory is None else memory) - needed


def _check(q: jax.Array, k: jax.Array, v: jax.Array, window: int | None, softcap: float | None) -> None:
    num_heads, num_key_heads = q.shape[2], k.shape[2]
    if num_heads % num_key_heads:
        raise InvalidError(
            f"{num_heads} heads of queries do not divide over {num_key_heads} heads of keys and values; "
            f"use a multiple of {num_key_heads}"
        )
    if k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise InvalidError(f"queries {q.shape}, keys {k.shape} and values {v.shape} do not fit each other")
    if window is not None and window < 1:
        raise InvalidError(f"window={window} lets a query see nothing; use 1 or more, or null for all of its past")
    if softcap is not None and softcap <= 0:
        raise InvalidError(f"softcap={softcap} is no bound of a score; use a number above 0, or null for none")


def _attend(
    q_BxNxQxH: jax.Array,
    k_BxKxSxH: jax.Array,
    v_BxKxSxW: jax.Array,
    visible: jax.Array,
    softcap: float | None,
    scale: float | None,
) -> jax.Array:
    """Attend to what is `visible`, (Q, S) or (B, 1, Q, S): the queries of a group are rows of one matmul."""
    B, N, Q, H = q_BxNxQxH.shape
    K = k_BxKxSxH.shape[1]
    rows = (B, K, N // K * Q)
    scores = jnp.einsum("bkrh,bksh->bkrs", q_BxNxQxH.reshape(*rows, H), k_BxKxSxH, preferred_element_type=jnp.float32)
    scores_BxNxQxS = scores.reshape(B, N, Q, -1) / (math.sqrt(H) if scale is None else 1 / scale)
    if softcap is not None:
        scores_BxNxQxS = softcap * jnp.tanh(scores_BxNxQxS / softcap)
    scores_BxNxQxS = jnp.where(visible, scores_BxNxQxS, -jnp.inf)
    weights_BxNxQxS = jax.nn.softmax(scores_BxNxQxS, axis=-1).astype(v_BxKxSxW.dtype)
    out = jnp.einsum("bkrs,bksw->bkrw", weights_BxNxQxS.reshape(*rows, -1), v_BxKxSxW)
    return out.reshape(B, N, Q, -1)


def _visible(places_Qx1: jax.Array, places_S: jax.Array, window: int | None) -> jax.Array:
    """Which keys each query may see: (Q, S)."""
    visible_QxS = places_Qx1 >= places_S
    return visible_QxS if window is None else visible_QxS & (places_Qx1 - places_S < window)


def _same_segment(queries_BxQ: jax.Array, keys_BxS: jax.Array) -> jax.Array:
    """Which queries and keys are of one segment: (B, 1, Q, S)."""
    return (queries_BxQ[:, :, None] == keys_BxS[:, None, :])[:, None]


def _spread_over_mesh(x_BxTxKxH: jax.Array, num_heads: int) -> jax.Array:
    """Keys or values of as many heads as divide over the devices that share the heads of queries.

    Where they do not by themselves each device would hold all of them. So each is repeated as often as there are
    devices that need it, of which each then holds its own alone.
    """
    K = x_BxTxKxH.shape[2]
    number = num_shards("heads")
    if num_heads % number or K % number == 0:
        return x_BxTxKxH
    repeated = jnp.repeat(x_BxTxKxH, math.lcm(K, number) // K, axis=2)
    return cut(repeated, *AXES)


def _divides_over_mesh(q_BxTxNxH: jax.Array) -> bool:
    entries = _partition_spec(ROW_AXES)
    return all(size % num_devices(entry) == 0 for size, entry in zip(q_BxTxNxH.shape, entries, strict=False))


def _partition_spec(axes: tuple[str, ...]) -> jax.sharding.PartitionSpec:
    return nn.logical_to_mesh_axes(axes) or jax.sharding.PartitionSpec()
