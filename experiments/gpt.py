"""GPT-2 as published: pre-LayerNorm, learned positions, tied embedding, tanh-approximated GELU, biases.

Owns the architecture and the logical name of every parameter axis. Knows no mesh, optimizer or data: names become
mesh axes by the rules of the caller, and without rules every annotation is a no-op.

Tokens are flattened to two dimensions before each matmul, which runs three times faster on a CPU than a batch of
them, and still shards over batch.

Shape legend: B batch, T sequence, V vocabulary, D width, M = 4 D width of the MLP, N heads, H = D / N width of a head,
I and O input and output of any dense layer.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.nn.initializers import Initializer
from jax.typing import DTypeLike
from pydantic import Field, PositiveInt, model_validator

from experiments.attention import causal_attention
from runner import BaseTrainer
from runner.config import MemoryConfig, ModelConfig, TrainerConfig
from runner.spec import Auto
from runner.train.blueprint import Blueprint
from runner.train.fields import document_arguments, target_weights
from runner.train.flops import Flops, Sizing, transformer_flops
from runner.train.loss import chunked_cross_entropy_sum, cross_entropy_sum
from runner.train.step import Batch

INIT_STDDEV = 0.02
LAYER_NORM_EPSILON = 1e-5


class GPTConfig(ModelConfig):
    """Sizes of a GPT-2, and how its layers are compiled.

    `layer_loop: scan` compiles one layer and loops over it: compile time does not grow with depth, which is what deep
    models and pods want. `unroll` compiles every layer in line: compile time grows with depth, and the compiler may
    gain from seeing past a layer's end (a few hundredths of a step on a CPU). Both hold the same parameters, with all
    layers stacked, so a checkpoint of one is a checkpoint of the other.
    """

    layers: PositiveInt = Field(description="Transformer blocks.")
    heads: PositiveInt = Field(description="Attention heads; must divide width.")
    width: PositiveInt = Field(description="Width of the residual stream.")
    dropout: float = Field(default=0.0, ge=0, lt=1, description="Share of embedding and branch outputs zeroed.")
    vocabulary_size: PositiveInt | Auto = Field(default="auto", description="auto takes the data set's.")
    layer_loop: Literal["scan", "unroll"] = Field(default="scan", description="Compile one layer, or each of them.")

    @model_validator(mode="after")
    def _heads_divide_width(self) -> "GPTConfig":
        if self.width % self.heads:
            raise ValueError(
                f"width={self.width} does not divide over heads={self.heads}; use a multiple of {self.heads}"
            )
        return self


class Dense(nn.Module):
    """Matmul and bias.

    Kernels and biases stay as flat as they are multiplied: heads and their width are one axis, so that what has two
    axes is a matrix, and what has one is not.
    """

    features: int
    axes: tuple[str, str]
    stddev: float
    param_dtype: DTypeLike
    compute_dtype: DTypeLike

    @nn.compact
    def __call__(self, x_BTxI: jax.Array) -> jax.Array:
        kernel_init = with_axes(nn.initializers.normal(self.stddev), *self.axes)
        bias_init = with_axes(nn.initializers.zeros, self.axes[1])
        kernel_IxO = self.param("kernel", kernel_init, (x_BTxI.shape[1], self.features), self.param_dtype)
        bias_O = self.param("bias", bias_init, (self.features,), self.param_dtype)
        return x_BTxI @ kernel_IxO.astype(self.compute_dtype) + bias_O.astype(self.compute_dtype)


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

    @nn.compact
    def __call__(
        self, x_BxTxD: jax.Array, examples_B: jax.Array, segments_BxT: jax.Array | None
    ) -> tuple[jax.Array, None]:
        B, T, D = x_BxTxD.shape
        N, H = self.config.heads, D // self.config.heads
        residual_stddev = INIT_STDDEV / math.sqrt(2 * self.config.layers)
        dropout = functools.partial(Dropout(self.config.dropout, self.deterministic), examples_B=examples_B)

        # Flattened once for the three that read it, so that the backward pass keeps one copy and not three.
        h_BTxD = self._layer_norm("attention_norm")(x_BxTxD).reshape(B * T, D)
        q_BxTxNxH, k_BxTxNxH, v_BxTxNxH = (
            nn.with_logical_constraint(
                self._dense(name, D, ("embed", "heads"))(h_BTxD).reshape(B, T, N, H),
                ("batch", "sequence", "heads", "head_dim"),
            )
            for name in ("query", "key", "value")
        )
        a_BTxD = causal_attention(q_BxTxNxH, k_BxTxNxH, v_BxTxNxH, segments_BxT).reshape(B * T, D)
        a_BTxD = self._dense("attention_out", D, ("heads", "embed"), residual_stddev)(a_BTxD)
        x_BxTxD += dropout(a_BTxD.reshape(B, T, D))
        x_BxTxD = nn.with_logical_constraint(x_BxTxD, ("batch", "sequence", "embed_act"))

        h_BTxD = self._layer_norm("mlp_norm")(x_BxTxD).reshape(B * T, D)
        h_BxTxM = self._dense("mlp_in", 4 * D, ("embed", "mlp"))(h_BTxD).reshape(B, T, 4 * D)
        h_BxTxM = gelu(nn.with_logical_constraint(h_BxTxM, ("batch", "sequence", "mlp")))
        h_BTxD = self._dense("mlp_out", D, ("mlp", "embed"), residual_stddev)(h_BxTxM.reshape(B * T, 4 * D))
        x_BxTxD += dropout(h_BTxD.reshape(B, T, D))
        return nn.with_logical_constraint(x_BxTxD, ("batch", "sequence", "embed_act")), None

    def _dense(self, name: str, features: int, axes: tuple[str, str], stddev: float = INIT_STDDEV) -> Dense:
        return Dense(features, axes, stddev, self.param_dtype, self.compute_dtype, name=name)

    def _layer_norm(self, name: str) -> nn.LayerNorm:
        return make_layer_norm(name, self.param_dtype, self.compute_dtype)


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
        deterministic: bool,
    ) -> jax.Array:
        """Return logits (B, T, V) of the next token, in `compute_dtype`; needs a "dropout" key unless deterministic.

        With `targets`, (y_BxT, weight_BxT), it is the summed cross entropy that is returned, for which not all logits
        need ever exist (`memory.loss_chunk_positions`). `examples_B` says where in the step each example stands;
        dropout depends on that and not on the split. `segments` and `positions` (B, T) are those of rows that hold
        several documents: attention stays within a segment (see `experiments.attention`), and a token has the
        position embedding of its place in its document; without them, of its place in the row.
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

        # Whole rows on every device that looks tokens up: a lookup in rows cut by fsdp would come out cut by width
        # where it is needed cut by batch, and the partitioner bridges that by gathering the whole batch.
        embedding_VxD = nn.with_logical_constraint(embedding_VxD, ("vocab", "embed_act"))
        positions_TxD = nn.with_logical_constraint(positions_TxD, ("sequence", "embed_act"))
        x_BxTxD = embedding_VxD[tokens_BxT] + (positions_TxD[:T] if positions is None else positions_TxD[positions])
        x_BxTxD = nn.with_logical_constraint(x_BxTxD, ("batch", "sequence", "embed_act"))
        x_BxTxD = Dropout(self.config.dropout, deterministic)(x_BxTxD, examples_B)
        blocks = nn.scan(
            self._remat(Block),
            variable_axes={"params": 0},
            in_axes=nn.broadcast,
            split_rngs={"params": True, "dropout": True},
            length=self.config.layers,
            unroll=1 if self.config.layer_loop == "scan" else self.config.layers,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )(self.config, deterministic, self.param_dtype, self.compute_dtype, name="blocks")
        x_BxTxD, _ = blocks(x_BxTxD, examples_B, segments)
        x_BxTxD = make_layer_norm("final_norm", self.param_dtype, self.compute_dtype)(x_BxTxD)

        return unembed(embedding_VxD, x_BxTxD) if targets is None else self._loss_sum(embedding_VxD, x_BxTxD, *targets)

    def _loss_sum(
        self, embedding_VxD: jax.Array, x_BxTxD: jax.Array, y_BxT: jax.Array, weight_BxT: jax.Array
    ) -> jax.Array:
        chunk = self.memory.loss_chunk_positions
        if chunk is None:
            return cross_entropy_sum(unembed(embedding_VxD, x_BxTxD), y_BxT, weight_BxT)[0]
        return chunked_cross_entropy_sum(unembed, embedding_VxD, x_BxTxD, y_BxT, weight_BxT, chunk_positions=chunk)[0]

    def _remat(self, block: type[Block]) -> type[Block]:
        """`block`, keeping what `memory.remat` says of what it computes."""
        if self.memory.remat == "none":
            return block
        policies = {"dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable, "layers": None}
        # In a loop the backward pass is a loop of its own. In line, only a barrier keeps the compiler from finding the
        # forward pass's results equal to what is computed again, and from keeping them; the CPU's compiler then still
        # moves things to where they save nothing.
        is_in_line = self.config.layer_loop == "unroll"
        return nn.remat(block, prevent_cse=is_in_line, policy=policies[self.memory.remat])


def unembed(embedding_VxD: jax.Array, x_BxTxD: jax.Array) -> jax.Array:
    """Return logits (B, T, V) of normalised hidden states, by the tied embedding."""
    B, T, D = x_BxTxD.shape
    logits_BxTxV = (x_BxTxD.reshape(B * T, D) @ embedding_VxD.T).reshape(B, T, -1)
    return nn.with_logical_constraint(logits_BxTxV, ("batch", "sequence", "vocab"))


def with_axes(init: Initializer, *axes: str) -> Callable[..., jax.Array]:
    """Return `init` with a logical name for every axis of what it makes."""
    return nn.with_logical_partitioning(init, axes)  # type: ignore[return-value]


@functools.partial(jax.checkpoint, prevent_cse=False)
def gelu(x: jax.Array) -> jax.Array:
    """Return GELU by tanh, keeping only `x` for the backward pass."""
    return nn.gelu(x, approximate=True)


def make_layer_norm(name: str, param_dtype: DTypeLike, compute_dtype: DTypeLike) -> nn.LayerNorm:
    """Return a layer norm that works in float32, hands on `compute_dtype` and keeps only its input for backward."""
    return nn.remat(nn.LayerNorm, prevent_cse=False)(
        epsilon=LAYER_NORM_EPSILON,
        dtype=compute_dtype,
        param_dtype=param_dtype,
        scale_init=with_axes(nn.initializers.ones, "embed"),
        bias_init=with_axes(nn.initializers.zeros, "embed"),
        use_fast_variance=False,
        name=name,
    )


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

    def flops_per_token(self, blueprint: Blueprint) -> Flops:
        """By formula: causal attention as half of its square, whose scores every fused form computes again.

        Of rows that hold several documents that is an upper bound: within a row no form leaves out other documents.
        """
        model, memory = self.config.model, self.config.memory
        return transformer_flops(
            layers=model.layers,
            layer_parameters=12 * model.width**2,
            output_parameters=self.vocabulary_size * model.width,
            attention_width=model.width,
            attended_keys=self.config.data.sequence_length / 2,
            remat=memory.remat,
            last_parameters=4 * model.width**2,
            is_loss_recomputed=memory.loss_chunk_positions is not None,
        )

    def sizing(self, tensor: int) -> Sizing:
        """By formula. In units of D a layer keeps its input, two normalised copies and the stream between, whole; and
        q, k, v, attention's result and 4 + 4 of the hidden layer before and after its GELU, cut by heads or columns.
        """
        model, memory, length = self.config.model, self.config.memory, self.config.data.sequence_length
        itemsize = jnp.dtype(self.config.precision.compute).itemsize
        whole = 4 + 12 / tensor
        kept = {"none": whole, "dots": 3 + 7 / tensor, "layers": 1.0}[memory.remat]
        layers = itemsize * model.width * (model.layers * kept + whole)
        logits = self.vocabulary_size * (itemsize + 4) * (memory.loss_chunk_positions or length) / length / tensor
        reductions = 6 if memory.remat == "layers" else 4  # of each layer's attention and MLP, in each pass
        return Sizing(layers + logits, reductions * model.layers * model.width * itemsize)

    def search_space(self) -> dict[str, tuple[Any, ...]]:
        """What is kept, and whether the loss is computed in chunks."""
        length = self.config.data.sequence_length
        chunk = max(size for size in range(1, 513) if length % size == 0)
        return {
            "config.memory.remat": ("none", "dots", "layers"),
            "config.memory.loss_chunk_positions": (None, chunk),
        }

    @classmethod
    def forward(
        cls, apply_fn: Any, params: Any, batch: Batch, key: jax.Array | None
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Summed cross entropy, with each example's own dropout."""
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
