"""GPT-2 as published: pre-LayerNorm, learned positions, tied embedding, tanh-approximated GELU, biases.

Owns the architecture and the logical name of every parameter axis. Knows no mesh, optimizer or data: names become
mesh axes by the rules of the caller, and without rules every annotation is a no-op.

Tokens are flattened to two dimensions before each matmul where that is faster (see `experiments.model.platform`).

Shape legend: B batch, T sequence, S positions of a cache, L layers, V vocabulary, D width, M = 4 D width of the MLP,
N heads, H = D / N width of a head, I and O input and output of any dense layer.

GPT-2 in Hugging Face's files: the tensors of `GPT2LMHeadModel`, and its `config.json`.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from pydantic import Field, NonNegativeFloat, PositiveInt, model_validator

from experiments.model.attention import cached_attention, causal_attention
from experiments.model.layers import (
    INIT_STDDEV,
    Dense,
    FromHeads,
    LayerNorm,
    ToHeads,
    cut,
    flat,
    gelu,
    in_rows,
    in_stream,
    kept_in_stream,
    rematerialised,
    with_axes,
)
from experiments.model.platform import kept
from experiments.model.vocabulary import EmbeddingNoise, loss_sum_of, rows_at, unembed
from runner import BaseTrainer
from runner.config import ContextParallelMethod, MemoryConfig, ModelConfig, TrainerConfig
from runner.huggingface.mapping import Family, TensorPiece
from runner.spec import Auto
from runner.storage import JsonObject
from runner.train.flops import Flops, Sizing, compute_transformer_flops, compute_transformer_sizing, list_memory_choices
from runner.train.loss import document_arguments, target_weights
from runner.train.setup import TrainSetup
from runner.train.step import Batch

_ALONE = {
    "transformer.wte.weight": "embedding",
    "transformer.wpe.weight": "positions",
    "transformer.ln_f.weight": "final_norm.scale",
    "transformer.ln_f.bias": "final_norm.bias",
}
_NORMS = {"ln_1": "attention_norm", "ln_2": "mlp_norm"}
_DENSE = {"attn.c_proj": "attention_out", "mlp.c_fc": "mlp_in", "mlp.c_proj": "mlp_out"}
_MASKS = (".attn.bias", ".attn.masked_bias")  # which older files hold beside the weights
# What moves no tensor's shape, and what a config.json that leaves it out means.
_DEFAULTS = {
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": True,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
}
_SAME = {"gelu_pytorch_tanh": "gelu_new"}


@dataclass(frozen=True)
class GPT2Files(Family):
    """Of one model: its sizes. Kernels are (in, out) in both, and query, key and value one tensor in the files."""

    layers: int
    heads: int
    width: int
    vocabulary_size: int
    positions: int
    dropout: float

    def pieces(self) -> list[TensorPiece]:
        """See `Family`."""
        found = [TensorPiece(tensor, leaf) for tensor, leaf in _ALONE.items()]
        for layer in range(self.layers):
            prefix, index = f"transformer.h.{layer}", (layer,)
            for tensor, leaf in _NORMS.items():
                found.append(TensorPiece(f"{prefix}.{tensor}.weight", f"blocks.{leaf}.scale", index))
                found.append(TensorPiece(f"{prefix}.{tensor}.bias", f"blocks.{leaf}.bias", index))
            for number, leaf in enumerate(("query", "key", "value")):
                start, stop = number * self.width, (number + 1) * self.width
                for name, kind, axis in (("weight", "kernel", 1), ("bias", "bias", 0)):
                    part = (axis, start, stop)
                    found.append(TensorPiece(f"{prefix}.attn.c_attn.{name}", f"blocks.{leaf}.{kind}", index, part=part))
            for tensor, leaf in _DENSE.items():
                found.append(TensorPiece(f"{prefix}.{tensor}.weight", f"blocks.{leaf}.kernel", index))
                found.append(TensorPiece(f"{prefix}.{tensor}.bias", f"blocks.{leaf}.bias", index))
        return found

    def config(self) -> JsonObject:
        """See `Family`. No token begins or ends a text, as far as the model knows."""
        sizes = {"n_layer": self.layers, "n_head": self.heads, "n_embd": self.width, "n_positions": self.positions}
        dropped = dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), self.dropout) | {"attn_pdrop": 0.0}
        ends = {"bos_token_id": None, "eos_token_id": None}
        named = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}
        return {**named, "vocab_size": self.vocabulary_size, **sizes, **_DEFAULTS, **dropped, **ends}

    def differences(self, config: Mapping[str, Any]) -> list[str]:
        """See `Family`."""
        needed = {"model_type": "gpt2", "n_head": self.heads, **_DEFAULTS}
        found = {key: config.get(key, _DEFAULTS.get(key)) for key in needed}
        return [
            f"{key}: got {found[key]!r}, the model needs {value!r}"
            for key, value in needed.items()
            if _SAME.get(str(found[key]), found[key]) != value
        ]

    def known_as(self, tensor: str) -> str | None:
        """See `Family`. The files of OpenAI's release leave `transformer.` out; the head is the embedding again."""
        if tensor.endswith(_MASKS) or tensor == "lm_head.weight":
            return None
        return tensor if tensor.startswith("transformer.") else f"transformer.{tensor}"


LAYER_NORM_EPSILON = 1e-5

Cache = dict[str, jax.Array]  # keys and values of what was read before: (L, B, S, N, H), of one layer without L


class GPTConfig(ModelConfig):
    """Sizes of a GPT-2, and how its layers are compiled.

    `layer_loop: scan` compiles one layer and loops over it: compile time does not grow with depth, which is what very
    deep models want. `unroll` compiles every layer in line: compile time grows with depth, and a step saves nothing
    by slices of stacks, which is a few hundredths of it on a CPU, and on a TPU 3 to 20% by its compiler's estimates
    and some of its memory. Both hold the same parameters, with all layers stacked, so a checkpoint of one is a
    checkpoint of the other.
    """

    layers: PositiveInt = Field(description="Transformer blocks.")
    heads: PositiveInt = Field(
        description="Attention heads; must divide width. Where topology.mesh.tensor does not divide them, devices hold "
        "more of them than their share."
    )
    width: PositiveInt = Field(description="Width of the residual stream.")
    dropout: float = Field(default=0.0, ge=0, lt=1, description="Share of embedding and branch outputs zeroed.")
    neftune_alpha: NonNegativeFloat = Field(default=0.0, description="NEFTune noise in training, its paper's alpha.")
    vocabulary_size: PositiveInt | Auto = Field(default="auto", description="auto takes the data set's.")
    layer_loop: Literal["scan", "unroll"] = Field(default="scan", description="Compile one layer, or each of them.")

    @model_validator(mode="after")
    def _heads_divide_width(self) -> "GPTConfig":
        if self.width % self.heads:
            raise ValueError(
                f"width={self.width} does not divide over heads={self.heads}; use a multiple of {self.heads}"
            )
        return self


class Dropout(nn.Module):
    """Dropout whose mask is each example's own: drawn from the step's key and the example's place in the step.

    So how a step is split into micro-batches, devices and hosts changes no mask.
    """

    rate: float
    deterministic: bool

    @nn.compact
    def __call__(self, x_BxTxD: jax.Array, examples_B: jax.Array) -> jax.Array:
        if self.deterministic or self.rate == 0:
            return x_BxTxD
        keys_B = jax.vmap(jax.random.fold_in, (None, 0))(self.make_rng("dropout"), examples_B)
        draw = jax.vmap(lambda key: jax.random.bernoulli(key, 1 - self.rate, x_BxTxD.shape[1:]))
        return jnp.where(draw(keys_B), x_BxTxD / (1 - self.rate), 0)


class Block(nn.Module):
    """One layer: attention and MLP, each on a normalised copy of the residual stream and added back to it."""

    config: GPTConfig
    deterministic: bool
    param_dtype: DTypeLike
    compute_dtype: DTypeLike
    row_attention: ContextParallelMethod = "auto"

    @nn.compact
    def __call__(
        self,
        x_BxTxD: jax.Array,
        examples_B: jax.Array,
        segments_BxT: jax.Array | None,
        cache: Cache | None,
        start: jax.Array | None,
    ) -> tuple[jax.Array, Cache | None]:
        B, T, D = x_BxTxD.shape
        N = self.config.heads
        residual_stddev = INIT_STDDEV / math.sqrt(2 * self.config.layers)
        dropout = functools.partial(Dropout(self.config.dropout, self.deterministic), examples_B=examples_B)

        # Flattened once for the three that read it, so that the backward pass keeps one copy and not three.
        h_BTxD = flat(in_rows(self._layer_norm("attention_norm")(x_BxTxD)))
        precision = self.param_dtype, self.compute_dtype
        q_BxTxNxH, k_BxTxNxH, v_BxTxNxH = (
            ToHeads(D, ("embed", "heads"), INIT_STDDEV, *precision, True, N, name=name)(h_BTxD, (B, T))
            for name in ("query", "key", "value")
        )
        if cache is None:
            qkv = (q_BxTxNxH, k_BxTxNxH, v_BxTxNxH)
            a_BxTxNxH = causal_attention(*qkv, segments_BxT, row_attention=self.row_attention)
        else:
            assert start is not None, "a cache is read from a position on"
            new = {"key": k_BxTxNxH, "value": v_BxTxNxH}
            cache = {name: lax.dynamic_update_slice_in_dim(cache[name], new[name], start, axis=1) for name in new}
            a_BxTxNxH = cached_attention(q_BxTxNxH, cache["key"], cache["value"], start)
        out = FromHeads(D, ("heads", "embed"), residual_stddev, *precision, name="attention_out")
        x_BxTxD = kept_in_stream(x_BxTxD + dropout(in_stream(out(a_BxTxNxH))))

        h_BTxD = flat(in_rows(self._layer_norm("mlp_norm")(x_BxTxD)))
        h_BxTxM = self._dense("mlp_in", 4 * D, ("embed", "mlp"))(h_BTxD).reshape(B, T, 4 * D)
        h_BxTxM = gelu(kept(cut(h_BxTxM, "batch", "sequence", "mlp")))
        h_BTxD = self._dense("mlp_out", D, ("mlp", "embed"), residual_stddev)(flat(h_BxTxM))
        return in_stream(x_BxTxD + dropout(in_stream(h_BTxD.reshape(B, T, D)))), cache

    def _dense(self, name: str, features: int, axes: tuple[str, str], stddev: float = INIT_STDDEV) -> Dense:
        return Dense(features, axes, stddev, self.param_dtype, self.compute_dtype, name=name)

    def _layer_norm(self, name: str) -> LayerNorm:
        return LayerNorm(LAYER_NORM_EPSILON, self.param_dtype, self.compute_dtype, name=name)


class GPT(nn.Module):
    """GPT-2 over at most `sequence_length` tokens.

    Parameters are kept in `param_dtype`; matmuls run in `compute_dtype`, layer norms and softmax in float32.
    """

    config: GPTConfig
    vocabulary_size: int
    sequence_length: int
    param_dtype: DTypeLike = jnp.float32
    compute_dtype: DTypeLike = jnp.float32
    memory: MemoryConfig = MemoryConfig()

    @nn.compact
    def __call__(
        self,
        tokens_BxT: jax.Array,
        examples_B: jax.Array | None = None,
        targets: tuple[jax.Array, jax.Array] | None = None,
        *,
        segments: jax.Array | None = None,
        positions: jax.Array | None = None,
        cache: Cache | None = None,
        start: jax.Array | None = None,
        deterministic: bool,
    ) -> Any:
        """Return logits (B, T, V) of the next token, in `compute_dtype`; needs a "dropout" key unless deterministic.

        With `targets`, (y_BxT, weight_BxT), it is the summed cross entropy that is returned, for which not all logits
        need ever exist (`memory.loss_chunk_positions`). `examples_B` says where in the step each example stands;
        dropout and noise depend on that, not on the split. `segments` and `positions` (B, T) are those of rows that
        hold several documents: attention stays within a segment (see `experiments.model.attention`), a token has the
        position embedding of its place in its document; without them, of its place in the row.

        With `cache` (see `init_cache`) the tokens stand at positions `start` .. `start + T - 1` (int32 scalar), behind
        those that it has; it is (logits, the cache with theirs) that is returned.
        """
        B, T = tokens_BxT.shape
        examples_B = jnp.arange(B) if examples_B is None else examples_B
        D, V = self.config.width, self.vocabulary_size
        embedding_init = with_axes(nn.initializers.normal(INIT_STDDEV), "vocab", "embed")
        positions_init = with_axes(nn.initializers.normal(INIT_STDDEV), "positions", "embed")
        embedding_VxD = self.param("embedding", embedding_init, (V, D), self.param_dtype).astype(self.compute_dtype)
        positions_TxD = self.param("positions", positions_init, (self.sequence_length, D), self.param_dtype).astype(
            self.compute_dtype
        )
        positions_TxD = cut(positions_TxD, "positions", "embed_act")  # as `rows_at` has the embedding
        if start is not None:
            positions = start + jnp.arange(T)
        x_BxTxD = rows_at(embedding_VxD, tokens_BxT)
        x_BxTxD += positions_TxD[:T] if positions is None else positions_TxD[positions]
        x_BxTxD = self._with_noise(x_BxTxD, examples_B, deterministic)
        x_BxTxD = Dropout(self.config.dropout, deterministic)(x_BxTxD, examples_B)
        x_BxTxD, cache = self._blocks(deterministic)(x_BxTxD, examples_B, segments, cache, start)
        x_BxTxD = LayerNorm(LAYER_NORM_EPSILON, self.param_dtype, self.compute_dtype, name="final_norm")(x_BxTxD)

        if targets is not None:
            chunk = self.memory.loss_chunk_positions
            return loss_sum_of(unembed, embedding_VxD, x_BxTxD, targets, chunk_positions=chunk)
        logits_BxTxV = unembed(embedding_VxD, x_BxTxD)
        return logits_BxTxV if cache is None else (logits_BxTxV, cache)

    def _with_noise(self, x_BxTxD: jax.Array, examples_B: jax.Array, deterministic: bool) -> jax.Array:
        noise = EmbeddingNoise(self.config.neftune_alpha, deterministic, name="embedding_noise")
        return in_stream(noise(in_stream(x_BxTxD), examples_B))

    @nn.nowrap
    def init_cache(self, batch: int, length: int, dtype: DTypeLike) -> Cache:
        """An empty cache of `length` positions for rows that are read bit by bit."""
        N = self.config.heads
        shape = (self.config.layers, batch, length, N, self.config.width // N)
        return {"key": jnp.zeros(shape, dtype), "value": jnp.zeros(shape, dtype)}

    def _blocks(self, deterministic: bool) -> Any:
        """All layers, as one that is called once: `(x, examples, segments, cache, start) -> (x, cache)`."""
        return nn.scan(
            self._remat(Block),
            variable_axes={"params": 0},
            in_axes=(nn.broadcast, nn.broadcast, 0, nn.broadcast),
            split_rngs={"params": True, "dropout": True},
            length=self.config.layers,
            unroll=1 if self.config.layer_loop == "scan" else self.config.layers,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )(
            self.config,
            deterministic,
            self.param_dtype,
            self.compute_dtype,
            self.memory.row_attention,
            name="blocks",
        )

    def _remat(self, block: type[Block]) -> type[nn.Module]:
        return rematerialised(block, self.memory.remat, is_in_line=self.config.layer_loop == "unroll")


class PretrainGPT(BaseTrainer):
    """Trains a GPT-2 on the next token."""

    Config = TrainerConfig[GPTConfig]

    def model(self) -> GPT:
        """The GPT that the spec describes."""
        config, precision = self.config, self.config.precision
        return GPT(
            config.model,
            self.vocabulary_size,
            config.data.sequence_length,
            precision.params,
            precision.compute,
            config.memory,
        )

    def family(self) -> GPT2Files:
        """As `transformers` has it."""
        model, length = self.config.model, self.config.data.sequence_length
        return GPT2Files(model.layers, model.heads, model.width, self.vocabulary_size, length, model.dropout)

    def flops_per_token(self, train_setup: TrainSetup) -> Flops:
        """By formula: causal attention as half of its square, whose scores every fused form computes again.

        Of rows that hold several documents that is an upper bound: within a row no form leaves out other documents.
        """
        model, memory = self.config.model, self.config.memory
        return compute_transformer_flops(
            layers=model.layers,
            layer_parameters=12 * model.width**2,
            output_parameters=self.vocabulary_size * model.width,
            attention_width=model.width,
            attended_keys=self.config.data.sequence_length / 2,
            remat=memory.remat,
            last_parameters=4 * model.width**2,
        )

    def sizing(self, sizes: Mapping[str, int]) -> Sizing:
        """By formula. In units of D a layer keeps its input and the stream between, cut like that; two normalised
        copies, of whole rows; and q, k, v, attention's result and 4 + 4 of the hidden layer before and after its GELU,
        cut by heads or columns.
        """
        model, tensor = self.config.model, sizes["tensor"]
        return compute_transformer_sizing(
            layers=model.layers,
            width=model.width,
            output_width=self.vocabulary_size,
            sequence_length=self.config.data.sequence_length,
            itemsize=jnp.dtype(self.config.precision.compute).itemsize,
            memory=self.config.memory,
            sizes=sizes,
            kept=model.width * (2 + 14 / tensor),
            kept_of_dots=model.width * 10 / tensor,
            keys_and_values=2 * model.width,
        )

    def search_space(self) -> dict[str, tuple[Any, ...]]:
        """What is kept, and whether the loss is computed in chunks."""
        return list_memory_choices(self.config.data.sequence_length)

    @classmethod
    def forward(
        cls, apply_fn: Any, params: Any, batch: Batch, key: jax.Array | None
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Summed cross entropy, with each example's own dropout and noise."""
        rngs = None if key is None else {"dropout": key}
        targets = batch["y"], target_weights(batch)
        loss_sum = apply_fn(
            {"params": params},
            batch["x"],
            batch["example"],
            targets,
            **document_arguments(apply_fn, batch),
            deterministic=key is None,
            rngs=rngs,
        )
        return loss_sum, {}
