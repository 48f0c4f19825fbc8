"""NEFTune: noise on embeddings in training (Jain et al., 2023, arXiv 2310.05914). Owns no parameters and no model.

Shape legend: B batch, T sequence, D width.
"""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp


class EmbeddingNoise(nn.Module):
    """Adds to each embedding uniform noise of at most `alpha` / sqrt(T D), where not `deterministic`.

    T is the length of the row. An example's noise is drawn from the step's key "dropout" and the example's place in the
    step: how a step is split into micro-batches, devices and hosts changes none of it, and nor does a kill. With an
    `alpha` of 0 nothing is drawn. Call it once in a model, under a name of its own.
    """

    alpha: float
    deterministic: bool

    @nn.compact
    def __call__(self, x_BxTxD: jax.Array, examples_B: jax.Array | None = None) -> jax.Array:
        """`examples_B` is `batch["example"]`, the place of each example in the step; None: 0, 1, 2 ..."""
        if self.deterministic or self.alpha == 0:
            return x_BxTxD
        B, T, D = x_BxTxD.shape
        examples_B = jnp.arange(B) if examples_B is None else examples_B
        bound = self.alpha / math.sqrt(T * D)
        keys_B = jax.vmap(jax.random.fold_in, (None, 0))(self.make_rng("dropout"), examples_B)
        draw = jax.vmap(lambda key: jax.random.uniform(key, (T, D), jnp.float32, -bound, bound))
        return x_BxTxD + draw(keys_B).astype(x_BxTxD.dtype)
