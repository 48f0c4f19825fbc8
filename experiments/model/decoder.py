"""One decoder for today's open families, by config: Llama, Qwen, Mistral, Gemma, OLMo and those built like them.

Owns the architecture and the logical name of every parameter axis. Knows no mesh, optimizer or data: names become mesh
axes by the rules of the caller, and without rules every annotation is a no-op.

Shape legend: B batch, T sequence, V vocabulary, D width.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from experiments.model.attention_layer import (
    Attention,
    Cache,
    ComputePrecision,
    LatentAttention,
    SequenceInfo,
    empty_cache,
    make_norm,
    residual_stddev,
)
from experiments.model.config import DecoderConfig, DecoderTrainerConfig, LayerKind, Stage, rate_of
from experiments.model.huggingface import DecoderFiles
from experiments.model.layers import INIT_STDDEV, GatedMLP, in_stream, kept_in_stream, rematerialised, with_axes
from experiments.model.moe import BALANCE, MixtureOfExperts, Statistics, next_biases, scalars
from experiments.model.rotary import Rotation, rotation_at
from experiments.model.vocabulary import EmbeddingNoise, embed, loss_sum_of, unembed
from runner import BaseTrainer
from runner.config import ContextParallelMethod, MemoryConfig
from runner.optim.groups import Parameter
from runner.train.flops import (
    NO_EXPERTS,
    ExpertSizing,
    Flops,
    Sizing,
    compute_transformer_flops,
    compute_transformer_sizing,
    list_memory_choices,
)
from runner.train.loss import document_arguments, target_weights
from runner.train.setup import TrainSetup
from runner.train.state import STATISTICS
from runner.train.step import Batch


class Block(nn.Module):
    """One layer: attention and MLP, each added to the residual stream, with norms before, after, or both."""

    config: DecoderConfig
    kind: LayerKind
    precision: ComputePrecision
    is_sparse: bool = False
    row_attention: ContextParallelMethod = "auto"

    @nn.compact
    def __call__(
        self, x_BxTxD: jax.Array, row: SequenceInfo, cache: Any
    ) -> tuple[jax.Array, tuple[Cache | None, Statistics]]:
        form = Attention if self.config.latent is None else LatentAttention
        attention = form(self.config, self.kind, self.precision, self.row_attention, name="attention")
        y_BxTxD, cache = attention(self._norm("attention_norm", "pre", x_BxTxD), row, cache)
        x_BxTxD += self._norm("attention_post_norm", "post", y_BxTxD)
        x_BxTxD = kept_in_stream(x_BxTxD)

        y_BxTxD, statistics = self._mlp(self._norm("mlp_norm", "pre", x_BxTxD), row.real)
        x_BxTxD += self._norm("mlp_post_norm", "post", y_BxTxD)
        return in_stream(x_BxTxD), (cache, statistics)

    def _mlp(self, h_BxTxD: jax.Array, real_BxT: jax.Array) -> tuple[jax.Array, Statistics]:
        """What is added for each token, and what is to be known of how it came about: nothing of an MLP."""
        config, stddev = self.config, residual_stddev(self.config)
        if config.moe is not None and self.is_sparse:
            moe = MixtureOfExperts(config.moe, config.expert_width, config.mlp, stddev, *self.precision, name="moe")
            return moe(h_BxTxD, real_BxT)
        precision, begin = self.precision, config.hidden_stddev
        mlp = GatedMLP(config.mlp_width, config.mlp, stddev, config.bias.mlp, *precision, begin, name="mlp")
        return mlp(h_BxTxD), {}

    def _norm(self, name: str, place: str, x_BxTxD: jax.Array) -> jax.Array:
        return make_norm(name, self.config, self.precision)(x_BxTxD) if self.config.norm in (place, "both") else x_BxTxD


class Turn(nn.Module):
    """The layers of one turn of the pattern."""

    config: DecoderConfig
    kinds: tuple[LayerKind, ...]
    precision: ComputePrecision
    memory: MemoryConfig
    is_in_line: bool
    is_sparse: bool

    @nn.compact
    def __call__(
        self, x_BxTxD: jax.Array, row: SequenceInfo, caches: Mapping[str, Cache] | None
    ) -> tuple[jax.Array, tuple[dict[str, Cache] | None, dict[str, Statistics]]]:
        block = rematerialised(Block, self.memory.remat, is_in_line=self.is_in_line)
        found = {}
        for name, kind in zip(layer_names(self.kinds), self.kinds, strict=True):
            options = (self.is_sparse, self.memory.row_attention)
            layer = block(self.config, kind, self.precision, *options, name=name)
            x_BxTxD, found[name] = layer(x_BxTxD, row, None if caches is None else caches[name])
        new = None if caches is None else {name: cache for name, (cache, _) in found.items()}
        return x_BxTxD, (new, {name: statistics for name, (_, statistics) in found.items()})


class Decoder(nn.Module):
    """A decoder over rows of any length.

    Parameters are kept in `param_dtype`; matmuls run in `compute_dtype`, norms, rotations and softmax in float32. With
    `neftune_alpha` a call needs a "dropout" key unless `deterministic`; `examples` (B,) says where in the step each
    example stands, on which its noise depends.
    """

    config: DecoderConfig
    vocabulary_size: int
    param_dtype: DTypeLike = jnp.float32
    compute_dtype: DTypeLike = jnp.float32
    memory: MemoryConfig = MemoryConfig()

    @nn.compact
    def __call__(
        self,
        tokens_BxT: jax.Array,
        *,
        targets: tuple[jax.Array, jax.Array] | None = None,
        segments: jax.Array | None = None,
        positions: jax.Array | None = None,
        cache: Any = None,
        start: jax.Array | None = None,
        examples: jax.Array | None = None,
        deterministic: bool,
    ) -> Any:
        """Return logits (B, T, V) of the next token, in `compute_dtype`.

        With `targets`, (y_BxT, weight_BxT), it is the summed loss that is returned, for which not all logits need ever
        exist (`memory.loss_chunk_positions`); `deterministic` leaves `z_loss` and the losses of routers out of it.
        `segments` and `positions` (B, T) are those of rows that hold several documents: attention stays within a
        segment, and a token is rotated by its place in its document; without them, by its place in the row.

        Where layers have experts, their statistics are sown in the collection `statistics`, by stage and layer.
        With `cache`, of `init_cache`, the tokens stand at positions `start` to start + T - 1 and see what was cached
        before them; returned are logits and the cache with these tokens in it.
        """
        embedding_VxD, head_VxD = self._embeddings()
        if positions is None:
            positions = jnp.arange(tokens_BxT.shape[1])[None] + (0 if start is None else start)
        row = SequenceInfo(self._rotations(positions), segments, _real(tokens_BxT, targets, segments), start)
        x_BxTxD = self._scaled(self._with_noise(embed(embedding_VxD, tokens_BxT), examples, deterministic))
        new_cache, statistics = {}, {}
        for stage in self.config.stages:
            stage_cache = None if cache is None else cache[stage.name]
            x_BxTxD, found = self._layers(stage)(x_BxTxD, row, stage_cache)
            new_cache[stage.name], statistics[stage.name] = found
        losses_of_rows_B = self._tell(statistics)
        x_BxTxD = make_norm("final_norm", self.config, ComputePrecision(self.param_dtype, self.compute_dtype))(x_BxTxD)
        if self.config.width_ratio != 1:
            x_BxTxD = x_BxTxD * jnp.asarray(self.config.width_ratio, x_BxTxD.dtype)

        def logits_of(weights_VxD: jax.Array, x_BxTxD: jax.Array) -> jax.Array:
            return unembed(weights_VxD, x_BxTxD, self.config.logit_softcap)

        if targets is not None:
            z_loss = 0.0 if deterministic else self.config.z_loss
            chunk = self.memory.loss_chunk_positions
            loss_sum = loss_sum_of(logits_of, head_VxD, x_BxTxD, targets, chunk_positions=chunk, z_loss=z_loss)
            if deterministic or losses_of_rows_B is None:
                return loss_sum
            return loss_sum + jnp.sum(losses_of_rows_B * jnp.sum(targets[1], axis=1, dtype=jnp.float32))
        logits_BxTxV = logits_of(head_VxD, x_BxTxD)
        return logits_BxTxV if cache is None else (logits_BxTxV, new_cache)

    @nn.nowrap
    def init_cache(self, batch: int, length: int, dtype: DTypeLike) -> Any:
        """An empty cache for so many rows of at most `length` tokens."""
        return {
            stage.name: {
                name: empty_cache(self.config, (stage.repeats, batch, length), dtype)
                for name in layer_names(stage.kinds)
            }
            for stage in self.config.stages
        }

    def _tell(self, statistics: dict[str, dict[str, Statistics]]) -> jax.Array | None:
        """Sow the statistics of all layers with experts, and return what they add to the loss of each row's token."""
        sparse = {stage.name: statistics[stage.name] for stage in self.config.stages if stage.is_sparse}
        if not sparse:
            return None
        layers = [layer for stage in sparse.values() for layer in stage.values()]
        losses_B = sum(jnp.sum(layer.pop("loss_B"), axis=0) for layer in layers)
        if not self.is_initializing():
            self.sow(STATISTICS, STATISTICS, sparse, reduce_fn=lambda _, new: new, init_fn=lambda: None)
        return jnp.asarray(losses_B)

    def _with_noise(self, x_BxTxD: jax.Array, examples_B: jax.Array | None, deterministic: bool) -> jax.Array:
        return EmbeddingNoise(self.config.neftune_alpha, deterministic, name="embedding_noise")(x_BxTxD, examples_B)

    def _scaled(self, x_BxTxD: jax.Array) -> jax.Array:
        """Embeddings as the first layer gets them."""
        scale = self.config.embedding_scale
        if scale == 1:
            return x_BxTxD
        return x_BxTxD * jnp.asarray(math.sqrt(self.config.width) if scale == "sqrt_width" else scale, x_BxTxD.dtype)

    def _embeddings(self) -> tuple[jax.Array, jax.Array]:
        """What tokens are looked up in, and what logits are made by, (V, D)."""
        init = with_axes(nn.initializers.normal(INIT_STDDEV), "vocab", "embed")
        shape = (self.vocabulary_size, self.config.width)
        embedding_VxD = self.param("embedding", init, shape, self.param_dtype).astype(self.compute_dtype)
        if self.config.tied_embedding:
            return embedding_VxD, embedding_VxD
        return embedding_VxD, self.param("head", init, shape, self.param_dtype).astype(self.compute_dtype)

    def _rotations(self, positions_BxT: jax.Array) -> dict[LayerKind, Rotation | None]:
        ropes = {kind: self.config.rope_of(kind) for kind in self.config.layer_pattern}
        return {
            kind: None if rope is None else rotation_at(positions_BxT, rope, self.config.rotary_size)
            for kind, rope in ropes.items()
        }

    def _layers(self, stage: Stage) -> Any:
        """The layers of a stage, with parameters stacked by turns of the pattern."""
        is_in_line = self.config.layer_loop == "unroll" or stage.repeats == 1
        return nn.scan(
            Turn,
            variable_axes={"params": 0, BALANCE: 0},
            in_axes=(nn.broadcast, 0),
            split_rngs={"params": True},
            length=stage.repeats,
            unroll=stage.repeats if is_in_line else 1,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )(
            self.config,
            stage.kinds,
            ComputePrecision(self.param_dtype, self.compute_dtype),
            self.memory,
            is_in_line or len(stage.kinds) > 1,
            stage.is_sparse,
            name=stage.name,
        )


def _real(
    tokens_BxT: jax.Array, targets: tuple[jax.Array, jax.Array] | None, segments_BxT: jax.Array | None
) -> jax.Array:
    """Which tokens are no padding: those of a segment, or else those that a target that counts comes after."""
    if segments_BxT is not None:
        return segments_BxT > 0
    if targets is None:
        return jnp.ones(tokens_BxT.shape, jnp.bool_)
    return jax.lax.cummax((targets[1] > 0).astype(jnp.int32), axis=1, reverse=True) > 0


def _by_layer(config: DecoderConfig, statistics: Mapping[str, Mapping[str, Statistics]]) -> dict[int, Statistics]:
    """The statistics of each layer that has experts, by its number."""
    sparse = [stage for stage in config.stages if stage.is_sparse]
    places = [
        (statistics[stage.name][name], turn)
        for stage in sparse
        for turn in range(stage.repeats)
        for name in layer_names(stage.kinds)
    ]
    first = config.layers - len(places)
    return {
        first + number: {name: leaf[turn] for name, leaf in layer.items()}
        for number, (layer, turn) in enumerate(places)
    }


def _mean_hidden_width(config: DecoderConfig) -> float:
    """Hidden width that computes a token, of an MLP or of its experts together; the mean of all layers."""
    if config.moe is None:
        return config.mlp_width
    sparse = (config.moe.experts_per_token + config.moe.shared_experts) * config.expert_width
    dense = config.moe.dense_layers
    return (dense * config.mlp_width + (config.layers - dense) * sparse) / config.layers


def layer_names(kinds: tuple[LayerKind, ...]) -> list[str]:
    """Names of the layers of one turn of the pattern."""
    return [f"layer_{number}" for number in range(len(kinds))]


class PretrainDecoder(BaseTrainer):
    """Trains a decoder on the next token."""

    Config = DecoderTrainerConfig
    config: DecoderTrainerConfig

    def model(self) -> Decoder:
        """The decoder that the spec describes."""
        config, precision = self.config, self.config.precision
        return Decoder(config.model, self.vocabulary_size, precision.params, precision.compute, config.memory)

    @classmethod
    def learning_rate_multiplier(cls, parameter: Parameter) -> float:
        """As mu-P has it, if the model has a base width."""
        return rate_of(cls.config.model, cls.config.optimizer.name, parameter)

    def family(self) -> DecoderFiles:
        """As `transformers` has it."""
        return DecoderFiles(self.config.model, self.vocabulary_size, self.config.data.sequence_length)

    def flops_per_token(self, train_setup: TrainSetup) -> Flops:
        """By formula: causal attention as half of its square, and of a window what it sees of the row on average.

        Of rows that hold several documents that is an upper bound: within a row no form leaves out other documents.
        """
        config, memory, length = self.config.model, self.config.memory, self.config.data.sequence_length
        windows = [min(config.window_of(kind) or length, length) for kind in config.kinds]
        keys = [window - window**2 / (2 * length) for window in windows]
        has_post_norm = config.norm != "pre"  # its gradient needs the result of the layer's last matmul
        flops = compute_transformer_flops(
            layers=config.layers,
            layer_parameters=config.layer_matmul_parameters,
            output_parameters=self.vocabulary_size * config.width,
            attention_width=config.heads * config.head_size,
            value_width=config.heads * config.value_size,
            attended_keys=sum(keys) / len(keys),
            remat=memory.remat,
            last_parameters=0 if has_post_norm else _mean_hidden_width(config) * config.width,
        )
        return replace(flops, recomputed_per_token=flops.recomputed_per_token + self._experts_recomputed(train_setup))

    def _experts_recomputed(self, train_setup: TrainSetup) -> float:
        """FLOPs of routed experts that are computed again though a layer's other matmuls are not.

        With `dots`, since no plain matmul makes their results; and with `none` where tokens travel in rounds. Of the
        matrices out of the hidden layer only where a norm behind needs the result, and is told none.
        """
        moe, memory, sizes = self.config.model.moe, self.config.memory, train_setup.mesh_sizes
        if moe is None or memory.remat == "layers":
            return 0.0
        is_in_rounds = sizes["expert"] > 1 and (moe.capacity_factor is None or sizes["sequence"] > 1)
        if memory.remat == "none" and not is_in_rounds:
            return 0.0
        config = self.config.model
        matrices = config.halves + (memory.remat == "dots" and config.norm != "pre")
        parameters = moe.experts_per_token * matrices * config.expert_width * config.width
        return 2.0 * (config.layers - moe.dense_layers) * parameters

    def sizing(self, sizes: Mapping[str, int]) -> Sizing:
        """By formula. A layer keeps its input and the stream between, cut like that, and of every norm after a part
        that part's result; two normalised copies, of whole rows, and latents and their norms; and q, k, v, attention's
        result and the parts of the hidden layers that compute a token, cut by heads or columns.
        """
        config, latent, tensor = self.config.model, self.config.model.latent, sizes["tensor"]
        query, values = config.heads * config.head_size, config.heads * config.value_size
        keys = config.key_heads * (config.head_size + config.value_size)
        latents = 0 if latent is None else (latent.query_rank or 0) + latent.cached_width
        norms = {"pre": 2, "post": 2, "both": 4}[config.norm]
        hidden = _mean_hidden_width(config)
        return compute_transformer_sizing(
            layers=config.layers,
            width=config.width,
            output_width=self.vocabulary_size,
            sequence_length=self.config.data.sequence_length,
            itemsize=jnp.dtype(self.config.precision.compute).itemsize,
            memory=self.config.memory,
            sizes=sizes,
            kept=2 * config.width
            + 2 * latents
            + (norms * config.width + query + values + keys + (config.halves + 1) * hidden) / tensor,
            kept_of_dots=latents + (3 * config.width + query + keys + config.halves * hidden) / tensor,
            keys_and_values=keys,
            experts=self._expert_sizing(),
        )

    def _expert_sizing(self) -> ExpertSizing:
        """Where no token is dropped, tokens are sent once more in the backward pass instead of being kept; else slots
        are sent, as many as there are.
        """
        config, moe = self.config.model, self.config.model.moe
        if moe is None:
            return NO_EXPERTS
        own = config.expert_matmul_parameters // (moe.experts_per_token + moe.shared_experts)
        journeys = 5 if moe.capacity_factor is None else 4 * moe.capacity_factor
        return ExpertSizing(moe.experts, moe.experts_per_token, config.layers - moe.dense_layers, own, journeys)

    def search_space(self) -> dict[str, tuple[Any, ...]]:
        """What is kept, and whether the loss is computed in chunks."""
        return list_memory_choices(self.config.data.sequence_length)

    @classmethod
    def forward(
        cls, apply_fn: Any, params: Any, batch: Batch, key: jax.Array | None
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Summed cross entropy, in training with the z-loss and the losses of routers."""
        is_noisy = key is not None and cls.config.model.neftune_alpha > 0
        loss_sum, sown = apply_fn(
            {"params": params},
            batch["x"],
            targets=(batch["y"], target_weights(batch)),
            **document_arguments(apply_fn, batch),
            **({"examples": batch["example"], "rngs": {"dropout": key}} if is_noisy else {}),
            deterministic=key is None,
            mutable=[STATISTICS],
        )
        return loss_sum, sown.get(STATISTICS, {})

    @classmethod
    def update_variables(cls, variables: Any, statistics: Any) -> tuple[Any, dict[str, jax.Array]]:
        """The biases that balance the load of experts, and what a row tells of each layer that has experts."""
        config, moe = cls.config.model, cls.config.model.moe
        assert moe is not None, "statistics are of layers with experts"
        found = scalars(_by_layer(config, statistics), moe)
        if BALANCE not in variables:
            return variables, found

        def moved(layer: Any, statistics: Statistics) -> Any:
            return {"moe": {"bias": next_biases(layer["moe"]["bias"], statistics["load_E"], moe.bias_rate or 0.0)}}

        biases = {
            stage: {name: moved(layer, statistics[stage][name]) for name, layer in layers.items()}
            for stage, layers in variables[BALANCE].items()
        }
        return variables | {BALANCE: biases}, found
