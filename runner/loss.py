"""Token cross entropy as sums, so that a mean over any split of a batch is exact.

Owns the float32 arithmetic from logits to the summed loss. Knows no model and no mesh.

Shape legend: B batch, T sequence, V vocabulary.
"""

import jax
import jax.numpy as jnp


def cross_entropy_sum(logits_BxTxV: jax.Array, y_BxT: jax.Array, mask_BxT: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sum -log p(y) over the tokens where `mask` is 1; returns (loss_sum, token_count), both float32 scalars.

    The logits may be of any float type and may be sharded over V: the label's logit is picked by comparison, which
    stays on the shard that holds it, and not by a gather.
    """
    logits_BxTxV = logits_BxTxV.astype(jnp.float32)
    mask_BxT = mask_BxT.astype(jnp.float32)
    is_label_BxTxV = jnp.arange(logits_BxTxV.shape[-1]) == y_BxT[..., None]
    label_logit_BxT = jnp.sum(jnp.where(is_label_BxTxV, logits_BxTxV, 0), axis=-1)
    loss_BxT = jax.nn.logsumexp(logits_BxTxV, axis=-1) - label_logit_BxT
    return jnp.sum(loss_BxT * mask_BxT), jnp.sum(mask_BxT)
