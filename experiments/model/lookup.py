"""From tokens to their rows of an embedding, and where the embedding's gradient goes.

Each device looks up whole rows: a lookup in rows cut by fsdp would come out cut by width where it is needed cut by
batch, and the partitioner bridges that by gathering the whole batch. Backwards each device adds up the gradient of its
own tokens, and the sum is scattered (`whole_on_each`), where the partitioner would sum all rows up on every device.

Shape legend: B batch, T sequence, V vocabulary, D width.
"""

import jax
from jax.sharding import PartitionSpec

from experiments.model.blocks import cut, cuts_of, in_stream
from experiments.model.scatter import cutting, whole_on_each


def embed(embedding_VxD: jax.Array, tokens_BxT: jax.Array) -> jax.Array:
    """Return the rows of an embedding at these tokens, (B, T, D), as the residual stream lies."""
    return in_stream(rows_at(embedding_VxD, tokens_BxT))


def rows_at(table_VxD: jax.Array, tokens_BxT: jax.Array) -> jax.Array:
    """Return the rows of a table, whose axes are "vocab" and "embed", at these tokens: (B, T, D)."""
    of_table = cuts_of(table_VxD.shape, "vocab", "embed")
    of_tokens = cuts_of(tokens_BxT.shape, "batch", "sequence")
    if of_table is None or of_tokens is None or not _is_scattered(of_table, of_tokens):
        return cut(table_VxD, "vocab", "embed_act")[tokens_BxT]
    of_batch, of_row = map(cutting, of_tokens)
    axes = (*of_batch, *of_row)

    def on_device(whole_1xDxV: jax.Array, tokens_BxT: jax.Array) -> jax.Array:
        return whole_1xDxV[0].T[tokens_BxT]

    specs, of_rows = (PartitionSpec(axes), PartitionSpec(of_batch, of_row)), PartitionSpec(of_batch, of_row)
    return jax.shard_map(on_device, in_specs=specs, out_specs=of_rows)(
        whole_on_each(table_VxD, of_table, axes), tokens_BxT
    )


def _is_scattered(of_table: PartitionSpec, of_tokens: PartitionSpec) -> bool:
    """Whether a table is cut by width alone, over axes along which no two devices have the same tokens."""
    rows, width = map(cutting, of_table)
    differ = {axis for entry in of_tokens for axis in cutting(entry)}
    return bool(width) and not rows and differ.issuperset(width)
