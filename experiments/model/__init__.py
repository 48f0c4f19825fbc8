"""Building blocks of models, and a configurable decoder made of them.

The names below are public: models of your own import them from here, as the page `.github/docs/model.md` shows. Parts
of the loss that come from `runner.train` are exported too. Blocks know no trainer, no sizes of a mesh and no data set.

- `platform`: platform-dependent form of a model
- `grouped_matmul`: matmuls of tokens grouped by expert
- `quantised`: matmuls in 8 bits
- `layers`: projections, norms, the gated MLP, sharding constraints, activation checkpointing
- `rotary`: rotary position embedding
- `context_layout`: arguments of attention; layout of sequences under context parallelism, ring or all-gather
- `expert_parallel`: token exchange between devices that hold different experts
- `moe`: mixture of experts: router, load balancing, layer
- `presets`: published models by name
- `ring_attention`: context-parallel attention in plain JAX, by ring or all-gather
- `context_splash`: context-parallel attention by a TPU kernel on gathered keys
- `config`: configuration of the decoder
- `config_json`: config.json of each family in transformers
- `huggingface`: weights of the decoder in Hugging Face's layout
- `tpu_attention`: fused TPU kernels of causal attention
- `attention`: causal attention, with one implementation per platform
- `attention_layer`: grouped-query and latent attention modules
- `embedding`: token embedding, output head and loss
- `decoder`: the decoder and its trainer
"""

from experiments.model.attention import cached_attention, causal_attention
from experiments.model.embedding import EmbeddingNoise, embed, loss_sum_of, unembed
from experiments.model.layers import Dense, GatedMLP, LayerNorm, RMSNorm, rematerialised, with_axes
from experiments.model.moe import MixtureOfExperts, MoeConfig
from experiments.model.quantised import use_matmul_type
from experiments.model.rotary import Rope, Rotation, rotate, rotation_at
from runner.train.loss import chunked_cross_entropy_sum, cross_entropy_sum, document_arguments, target_weights

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
    "use_matmul_type",
    "with_axes",
]
