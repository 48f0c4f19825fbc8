"""Models, and the blocks that a model of one's own is made of, which can be imported from here.


A loss's parts of `runner.train` can be imported from here too. Blocks know no trainer, no mesh's sizes and no data set.

- `platform`: The form of a model: what is arranged in another way on each platform, though it computes the same
- `grouped_matmul`: Matmuls of tokens that are grouped by expert, in the form that is fast on the platform. Knows no r
- `layers`: Parts that models here are made of: projections, norms, the gated MLP, and what the backward pass fi
- `context_layout`: How rows lie on devices whose positions are cut, and what each device has to do of their attention
- `expert_parallel`: Experts cut over devices: tokens travel to the devices of their experts, are computed there, and
- `moe`: Mixture of experts: a router that chooses a few of many MLPs for each token, how they are kept in ba
- `presets`: Published models by name: the keys of `config.model` that describe each, as its config.json has them
- `ring_attention`: Causal attention where the positions of every row lie on several devices, in order
- `context_splash`: The fused TPU kernel of attention where the positions of a row lie on several devices: keys and va
- `rotary`: Rotary positions: queries and keys turned by angles that grow with the position (Su et al., 2021)
- `config`: The keys of a decoder, and which layers it has. Owns no arithmetic of a model
- `dialects`: The config.json of a decoder in the words of each family of transformers: written, and read back
- `huggingface`: A decoder in Hugging Face's layout: which tensor is which parameter, and of which family it is
- `tpu_attention`: The fused TPU kernels of causal attention over rows that a device has whole. Imports Pallas, which
- `attention`: Causal attention, in the form that is fast on the platform the program is compiled for
- `attention_layer`: The attention of a layer, from projections in to the projection out: grouped heads, or heads made
- `vocabulary`: From hidden states to the summed loss: logits, whole or by chunks of positions
- `decoder`: One decoder for today's open families, by config: Llama, Qwen, Mistral, Gemma, OLMo and those built
"""

from experiments.model.attention import cached_attention, causal_attention
from experiments.model.layers import Dense, GatedMLP, LayerNorm, RMSNorm, rematerialised, with_axes
from experiments.model.moe import MixtureOfExperts, MoeConfig
from experiments.model.rotary import Rope, Rotation, rotate, rotation_at
from experiments.model.vocabulary import EmbeddingNoise, embed, loss_sum_of, unembed
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
    "with_axes",
]
