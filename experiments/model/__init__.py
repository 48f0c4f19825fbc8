"""Models, and the blocks that a model of one's own is made of, which can be imported from here.

- `preset`           published models by name
- `rotary`           rotary positions
- `config`           the keys of a decoder
- `row_layout`       how rows lie that several devices share, and what each has to do of their attention
- `row_exchange`     what goes between those devices
- `row_attention`    attention to such rows, in blocks of plain matmuls
- `row_mask`         which keys a query may see, as the TPU's kernel asks for it
- `row_splash`       the TPU's kernel for rows that several devices share
- `tpu_walk`         which queries and keys of a row the TPU's kernels take together
- `tpu_attention`    the TPU's kernels for rows that a device has whole
- `attention`        causal attention, in the form that is fast on each platform
- `scatter`          gradients of matrices whose columns are cut, scattered
- `norm`             layer norm and RMS norm, with their gradients
- `blocks`           projections, modules of norms, the gated MLP, what is kept for the backward pass
- `lookup`           from tokens to rows of an embedding
- `loss`             from hidden states to the summed loss, by the tokens of each device
- `noise`            noise on embeddings in training
- `grouped`          matmuls of tokens that are grouped by expert
- `moe`              mixture of experts: routing, balancing, counts
- `dialect`          the config.json of a decoder in the words of each family of transformers
- `hugging_face`     which tensor of Hugging Face's files is which parameter of a decoder
- `layer_attention`  projections, cache and attention of a layer, with grouped heads or heads of latents
- `decoder`          one decoder for today's open families, and the job that trains it

A loss's parts of `runner.train` can be imported from here too. Blocks know no trainer, no mesh's sizes and no data set.
"""

from experiments.model.attention import cached_attention, causal_attention
from experiments.model.blocks import (
    Dense,
    GatedMLP,
    LayerNorm,
    RMSNorm,
    rematerialised,
    with_axes,
)
from experiments.model.lookup import embed
from experiments.model.loss import loss_sum_of, unembed
from experiments.model.moe import MixtureOfExperts, MoeConfig
from experiments.model.noise import EmbeddingNoise
from experiments.model.rotary import Rope, Rotation, rotate, rotation_at
from runner.train.fields import document_arguments, target_weights
from runner.train.loss import chunked_cross_entropy_sum, cross_entropy_sum

__all__ = [
    "Dense",
    "EmbeddingNoise",
    "GatedMLP",
    "LayerNorm",
    "MixtureOfExperts",
    "MoeConfig",
    "RMSNorm",
    "Rope",
    "Rotation",
    "cached_attention",
    "causal_attention",
    "chunked_cross_entropy_sum",
    "cross_entropy_sum",
    "document_arguments",
    "embed",
    "loss_sum_of",
    "rematerialised",
    "rotate",
    "rotation_at",
    "target_weights",
    "unembed",
    "with_axes",
]
