"""Distillation: a GPT-2 learns from the most likely tokens of a teacher, which a corpus holds (Hinton et al., 2015).

Shape legend: B examples, T tokens, K most likely tokens of the teacher, V vocabulary.
"""

from typing import Annotated, Any

import jax
import jax.numpy as jnp
from pydantic import Field, model_validator

from experiments.gpt import GPTConfig, PretrainGPT
from experiments.model.quantised import make_rounding_keys
from runner.config import TrainerConfig
from runner.data.token_files import TEACHER_FIELDS
from runner.errors import InvalidError
from runner.metrics.meta import SUMS
from runner.spec import FrozenModel
from runner.spec.model import Policy
from runner.train.loss import cross_entropy_sum, document_arguments, target_weights
from runner.train.step import Batch


class DistillConfig(FrozenModel):
    """Mixture of the two losses of distillation."""

    weight: Annotated[float, Policy.STAGE] = Field(
        default=0.5, ge=0, le=1, description="Weight of the divergence from the teacher; the rest is cross-entropy."
    )


class DistillTrainerConfig(TrainerConfig[GPTConfig]):
    """Config with the section of the loss."""

    distill: DistillConfig = DistillConfig()

    @model_validator(mode="after")
    def _validate_whole_logits(self) -> "DistillTrainerConfig":
        if self.memory.loss_chunk_positions is not None:
            raise ValueError(
                f"memory.loss_chunk_positions={self.memory.loss_chunk_positions}: the divergence from a teacher is "
                "computed from whole logits; leave it out, or use a smaller micro-batch"
            )
        return self


def compute_divergence(
    logits_BxTxV: jax.Array, log_sum_BxT: jax.Array, teacher_BxTxK: jax.Array, ids_BxTxK: jax.Array
) -> jax.Array:
    """Return the divergence KL(teacher | student) of each token in nats (B, T), float32; 0 without a prediction.

    All tokens other than the teacher's K most likely ones count as one token, whose probability is the sum of theirs.
    `log_sum_BxT` is the logsumexp of all logits of the teacher, infinite for a token without a prediction.
    """
    logits_BxTxV = logits_BxTxV.astype(jnp.float32)
    is_known_BxT = jnp.isfinite(log_sum_BxT)
    log_p_BxTxK = teacher_BxTxK - jnp.where(is_known_BxT, log_sum_BxT, 0)[..., None]
    p_BxTxK, normaliser_BxT = jnp.exp(log_p_BxTxK), jax.nn.logsumexp(logits_BxTxV, axis=-1)
    log_q_BxTxK = jnp.take_along_axis(logits_BxTxV, ids_BxTxK, axis=-1) - normaliser_BxT[..., None]
    divergence_BxT = jnp.sum(p_BxTxK * (log_p_BxTxK - log_q_BxTxK), axis=-1)
    if ids_BxTxK.shape[-1] < logits_BxTxV.shape[-1]:
        # The rest of the student is summed itself, because 1 minus a sum near 1 has few digits and a steep gradient.
        others_BxTxV = jnp.put_along_axis(logits_BxTxV, ids_BxTxK, -jnp.inf, axis=-1, inplace=False)
        log_rest_BxT = jax.nn.logsumexp(others_BxTxV, axis=-1) - normaliser_BxT
        rest_BxT = jnp.maximum(1 - jnp.sum(p_BxTxK, axis=-1), 0)
        divergence_BxT += jax.scipy.special.xlogy(rest_BxT, rest_BxT) - rest_BxT * log_rest_BxT
    return jnp.where(is_known_BxT, divergence_BxT, 0)


class DistillGPT(PretrainGPT):
    """Trainer of a GPT-2 on the next token and on the predictions of a teacher; evaluations have the former alone."""

    Config = DistillTrainerConfig
    config: DistillTrainerConfig

    @classmethod
    def forward(cls, apply_fn: Any, params: Any, batch: Batch, key: jax.Array | None) -> tuple[jax.Array, Any]:
        """Return the weighted sum of cross-entropy and divergence, and the divergence as a metric."""
        if key is None:
            return super().forward(apply_fn, params, batch, key)
        if TEACHER_FIELDS[0] not in batch:
            raise InvalidError(
                "the data hold no predictions of a teacher; set data.options.top_k, see evaluate --save-top-k"
            )
        logits_BxTxV = apply_fn(
            {"params": params},
            batch["x"],
            batch["example"],
            **document_arguments(apply_fn, batch),
            deterministic=False,
            rngs={**make_rounding_keys(cls.config.precision, key), "dropout": key},
        )
        weight_BxT = target_weights(batch).astype(jnp.float32)
        divergence_BxT = compute_divergence(logits_BxTxV, *(batch[name] for name in TEACHER_FIELDS))
        # A token without a prediction, such as the first one of a document, counts by its cross-entropy alone.
        share_BxT = jnp.where(jnp.isfinite(batch[TEACHER_FIELDS[0]]), cls.config.distill.weight, 0.0)
        cross_entropy, _ = cross_entropy_sum(logits_BxTxV, batch["y"], weight_BxT * (1 - share_BxT))
        divergence = jnp.sum(divergence_BxT * weight_BxT)
        loss_sum = cross_entropy + jnp.sum(divergence_BxT * share_BxT * weight_BxT)
        return loss_sum, {SUMS: {"divergence": divergence}}
