"""A configurable decoder for today's open model families (Llama, Qwen, Mistral, Gemma, OLMo, ...), and its trainer.

The module owns the architecture and the logical name of every parameter axis. It knows no mesh: names become mesh axes
by the rules of the caller, and without rules every annotation is a no-op.

Shape legend: B batch, T sequence, V vocabulary, D width, E experts, K extra predictions.
"""

import functools
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
    make_cache,
    make_norm,
    residual_stddev,
)
from experiments.model.config import (
    EXTRA_STAGE,
    DecoderConfig,
    DecoderTrainerConfig,
    LayerKind,
    Sharing,
    Stage,
    mup_rate_factor,
)
from experiments.model.config_json import read_model_keys
from experiments.model.delta_net import GatedDeltaNet, count_rule_bytes, count_rule_flops
from experiments.model.embedding import (
    EmbeddingNoise,
    LayerEmbeddings,
    embed,
    evaluated_loss_sum_of,
    loss_sum_of,
    unembed,
)
from experiments.model.huggingface import DecoderFiles
from experiments.model.layers import (
    INIT_STDDEV,
    Dense,
    GatedMLP,
    activate,
    constrain_stream,
    rematerialised,
    save_stream,
    with_axes,
)
from experiments.model.moe import BALANCE, MixtureOfExperts, Statistics, router_metrics, update_biases
from experiments.model.platform import saves_attention
from experiments.model.quantised import ROUNDING, make_rounding_keys, rounds_gradients, use_matmul_type
from experiments.model.rotary import rotation_at
from runner import BaseTrainer
from runner.config import ContextParallelMethod, MatmulType, MemoryConfig
from runner.metrics.meta import SUMS
from runner.optim.groups import Parameter
from runner.storage import JsonObject
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

EXTRA_LOSSES = "extra_losses"  # among the statistics


class Block(nn.Module):
    """One layer: attention and an MLP or experts, each added to the residual stream, with norms before or after."""

    config: DecoderConfig
    kind: LayerKind
    precision: ComputePrecision
    is_sparse: bool = False
    row_attention: ContextParallelMethod = "auto"
    sharing: Sharing = "none"

    @nn.compact
    @rounds_gradients(lambda info: info.examples)
    def __call__(
        self, x_BxTxD: jax.Array, info: SequenceInfo, cache: Any, embedding_BxTxP: jax.Array | None = None
    ) -> tuple[jax.Array, tuple[Cache | None, Statistics]]:
        """Return the stream after the layer, the new cache, and statistics of experts (empty for an MLP).

        `embedding_BxTxP` is the embedding of each token for this layer, if layers have such.
        """
        config, stddev, norm = self.config, residual_stddev(self.config), self._norm
        attention: nn.Module
        if self.kind == "linear":
            attention = GatedDeltaNet(config, self.precision, name="delta_net")
        elif config.latent is not None:
            attention = LatentAttention(config, self.kind, self.precision, self.row_attention, name="attention")
        else:
            form = (self.kind, self.precision, self.row_attention, self.sharing)
            attention = Attention(config, *form, name="attention")
        y_BxTxD, cache = attention(norm("attention_norm", "pre", x_BxTxD), info, cache)
        x_BxTxD += norm("attention_post_norm", "post", y_BxTxD)
        x_BxTxD = save_stream(x_BxTxD)

        h_BxTxD = norm("mlp_norm", "pre", x_BxTxD)
        moe = config.moe if self.is_sparse else None
        statistics: Statistics = {}
        if moe is None or moe.beside_mlp:
            width = config.get_mlp_width(self.sharing)
            options = (width, config.mlp, stddev, config.bias.mlp, *self.precision, config.hidden_stddev)
            y_BxTxD = GatedMLP(*options, name="mlp")(h_BxTxD)
        if moe is not None:
            router_input = None
            if moe.scaled_router:
                router_input = make_norm("router_norm", config, self.precision)(x_BxTxD)
                router_input = router_input.astype(jnp.float32) * config.width**-0.5
            layer = MixtureOfExperts(moe, config.expert_width, config.mlp, stddev, *self.precision, name="moe")
            if moe.beside_mlp:
                z_BxTxD, statistics = layer(norm("moe_norm", "pre", x_BxTxD), info.real, router_input)
                y_BxTxD = norm("mlp_own_norm", "post", y_BxTxD) + norm("moe_post_norm", "post", z_BxTxD)
            else:
                y_BxTxD, statistics = layer(h_BxTxD, info.real, router_input)
        x_BxTxD += norm("mlp_post_norm", "post", y_BxTxD)

        if embedding_BxTxP is not None:
            # As in `ExtraPrediction`, each device projects its own positions of the stream.
            P, D = embedding_BxTxP.shape[-1], config.width
            gate = Dense(P, ("embed", "latent"), config.hidden_stddev, *self.precision, False, name="embedding_gate")
            project = Dense(D, ("latent", "embed"), stddev, *self.precision, False, name="embedding_out")
            gate_BxTxP = gate(constrain_stream(x_BxTxD))
            y_BxTxD = project(activate(config.mlp, gate_BxTxP, embedding_BxTxP))
            x_BxTxD += make_norm("embedding_post_norm", config, self.precision)(y_BxTxD)
        if config.layer_scale:
            init = with_axes(nn.initializers.ones, "layer_scale")
            x_BxTxD *= self.param("layer_scale", init, (1,), self.precision.params).astype(x_BxTxD.dtype)
        return constrain_stream(x_BxTxD), (cache, statistics)

    def _norm(self, name: str, place: str, x_BxTxD: jax.Array) -> jax.Array:
        return make_norm(name, self.config, self.precision)(x_BxTxD) if self.config.norm in (place, "both") else x_BxTxD


class PatternRepetition(nn.Module):
    """The layers of one repetition of the layer pattern."""

    config: DecoderConfig
    kinds: tuple[LayerKind, ...]
    precision: ComputePrecision
    memory: MemoryConfig
    is_in_line: bool
    is_sparse: bool
    sharing: Sharing = "none"

    @nn.compact
    def __call__(
        self, x_BxTxD: jax.Array, info: SequenceInfo, inputs: tuple[Mapping[str, Cache] | None, jax.Array | None]
    ) -> tuple[jax.Array, tuple[dict[str, Cache] | None, dict[str, Statistics]]]:
        """Return the stream, and by layer the new caches and the statistics.

        `inputs` are the caches by layer, and the embeddings of tokens for each layer (layers, B, T, P). Layers that
        give their keys and values return them as caches.
        """
        caches, embeddings = inputs
        block = rematerialised(Block, self.memory.remat, is_in_line=self.is_in_line)
        results = {}
        for number, (name, kind) in enumerate(zip(_list_layer_names(self.kinds), self.kinds, strict=True)):
            options = (self.is_sparse, self.memory.row_attention, self.sharing)
            layer = block(self.config, kind, self.precision, *options, name=name)
            own = () if embeddings is None else (embeddings[number],)
            x_BxTxD, results[name] = layer(x_BxTxD, info, None if caches is None else caches[name], *own)
        has_caches = caches is not None or self.sharing == "gives"
        new = {name: cache for name, (cache, _) in results.items()} if has_caches else None
        return x_BxTxD, (new, {name: statistics for name, (_, statistics) in results.items()})


class ExtraPrediction(nn.Module):
    """Layer that predicts one position further ahead than the one before it (DeepSeek-V3, 2024, section 2.2).

    Its input is projected from the normalised output of the layers so far, and the normalised embedding of the last
    token that the layers before it have predicted.
    """

    config: DecoderConfig
    stage: Stage
    precision: ComputePrecision
    memory: MemoryConfig
    is_in_line: bool

    @nn.compact
    @rounds_gradients(lambda info: info.examples)
    def __call__(
        self, x_BxTxD: jax.Array, info: SequenceInfo, inputs: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, tuple[jax.Array, dict[str, Statistics]]]:
        """Return the normalised output for the next layer of this kind and for the loss, and statistics of experts.

        `x` is the normalised output of the layers so far. `inputs` are embeddings (B, T, D), and the positions (B, T)
        for which these are of the same document.
        """
        embeddings_BxTxD, real_BxT = inputs
        config, (layer_name,) = self.config, _list_layer_names(self.stage.kinds)
        norm = functools.partial(make_norm, config=config, precision=self.precision)
        both_BxTx2D = jnp.concatenate([norm("embedding_norm")(embeddings_BxTxD), norm("input_norm")(x_BxTxD)], axis=-1)
        # The columns of the kernel are not sharded, so each device projects its own positions of the stream.
        axes = ("embed", "latent")
        project = Dense(config.width, axes, config.hidden_stddev, *self.precision, has_bias=False, name="projection")
        block = rematerialised(Block, self.memory.remat, is_in_line=self.is_in_line)
        options = (self.precision, self.stage.is_sparse, self.memory.row_attention)
        layer = block(config, self.stage.kinds[0], *options, name=layer_name)
        x_BxTxD, (_, statistics) = layer(constrain_stream(project(both_BxTx2D)), info._replace(real=real_BxT), None)
        x_BxTxD = norm("output_norm")(x_BxTxD)
        return x_BxTxD, (x_BxTxD, {layer_name: statistics})


class Decoder(nn.Module):
    """A decoder for sequences of any length.

    Parameters are kept in `param_dtype`; matmuls run in `compute_dtype`, norms, rotations and softmax in float32. Those
    of layers are quantised as `matmul` says. With `neftune_alpha` a call needs a "dropout" key unless `deterministic`.
    With a "rounding" key gradients in 8 bits are rounded stochastically (`make_rounding_keys`).
    """

    config: DecoderConfig
    vocabulary_size: int
    param_dtype: DTypeLike = jnp.float32
    compute_dtype: DTypeLike = jnp.float32
    memory: MemoryConfig = MemoryConfig()
    matmul: MatmulType = "compute"

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
        count: jax.Array | None = None,
        examples: jax.Array | None = None,
        deterministic: bool,
    ) -> Any:
        """Return logits of the next token, or the loss.

        Where layers have experts, their statistics are sown in the collection `statistics`, by stage and layer. The
        summed losses and weights of extra predictions are sown there too, by the distance of the predicted position.

        Args:
            tokens_BxT: ids.
            targets: (y_BxT, weight_BxT). If given, the summed loss is returned. With `memory.loss_chunk_positions` it
                is computed without all logits ever existing.
            segments: (B, T), documents of sequences that hold several; attention stays within a segment.
            positions: (B, T), place of each token in its document, by which it is rotated; by default in the sequence.
            cache: from `init_cache`, or from the previous call.
            start: position of the first token, if there is a cache. Tokens are at `start` to start + T - 1, and attend
                to those that were cached before them.
            count: number of tokens that are not padding at the end, if there is a cache; None: all. Linear layers read
                only these.
            examples: (B), place of each example in the step, which its noise and its stochastic rounding depend on.
            deterministic: True leaves out noise, `z_loss` and the losses of routers.

        Returns:
            Logits (B, T, V) in `compute_dtype`; with a cache also the cache with these tokens; with targets the summed
            loss, float32.
        """
        config = self.config
        init = with_axes(nn.initializers.normal(INIT_STDDEV), "vocab", "embed")
        shape = (self.vocabulary_size, config.width)
        embedding_VxD = head_VxD = self.param("embedding", init, shape, self.param_dtype).astype(self.compute_dtype)
        if not config.tied_embedding:
            head_VxD = self.param("head", init, shape, self.param_dtype).astype(self.compute_dtype)

        # By default the place in the sequence, which continues after what is cached.
        if positions is None:
            positions = jnp.arange(tokens_BxT.shape[1])[None] + (0 if start is None else start)
        # Sines and cosines are computed once per kind of layer, and not in each layer.
        ropes = {kind: config.get_rope(kind) for kind in config.layer_pattern}
        rotations = {
            kind: None if rope is None else rotation_at(positions, rope, config.get_rotary_size(kind))
            for kind, rope in ropes.items()
        }
        real_BxT = _find_real_tokens(tokens_BxT, targets, segments)
        info = SequenceInfo(rotations, segments, real_BxT, start, count, examples=examples)

        x_BxTxD = embed(embedding_VxD, tokens_BxT)
        x_BxTxD = EmbeddingNoise(config.neftune_alpha, deterministic, name="embedding_noise")(x_BxTxD, examples)
        if config.embedding_scale != 1:
            scale = math.sqrt(config.width) if config.embedding_scale == "sqrt_width" else config.embedding_scale
            x_BxTxD = x_BxTxD * jnp.asarray(scale, x_BxTxD.dtype)
        embeddings_BxTxD = x_BxTxD
        layer_embeddings_LxBxTxP = None
        if config.layer_embedding_width is not None:
            sizes = self.vocabulary_size, config.layers, config.layer_embedding_width
            norm = config.norm_epsilon, config.norm_offset
            embed_layers = LayerEmbeddings(*sizes, *norm, self.param_dtype, self.compute_dtype, name="layer_embeddings")
            layer_embeddings_LxBxTxP = embed_layers(tokens_BxT, x_BxTxD)
        new_cache, statistics, first = {}, {}, 0
        for stage in config.stages:
            stage_cache, own = None if cache is None else cache[stage.name], None
            shape = stage.repeats, len(stage.kinds)
            if layer_embeddings_LxBxTxP is not None:
                own = layer_embeddings_LxBxTxP[first : first + math.prod(shape)]
                own = own.reshape(*shape, *own.shape[1:])
            first += math.prod(shape)
            with use_matmul_type(self.matmul):
                x_BxTxD, results = self._make_layers(stage)(x_BxTxD, info, (stage_cache, own))
            new_cache[stage.name], statistics[stage.name] = results
            if stage.sharing == "gives":
                # Of several layers of one kind the last one gives; the stage has one repetition.
                given = jax.tree.map(lambda leaf: leaf[0], list(results[0].values()))
                info = info._replace(given=dict(zip(stage.kinds, given, strict=True)))

        x_BxTxD = make_norm("final_norm", config, ComputePrecision(self.param_dtype, self.compute_dtype))(x_BxTxD)
        extra_KxBxTxD, is_training = None, targets is not None and not deterministic
        if config.extra_predictions and (is_training or self.is_initializing()):
            extra_KxBxTxD, statistics[EXTRA_STAGE] = self._predict_further(x_BxTxD, embeddings_BxTxD, info)

        # Statistics of all layers with experts, and what their routers add to the loss of each token of a sequence.
        router_loss_B: jax.Array | None = None
        sparse = {name: layers for name, layers in statistics.items() if any(layers.values())}
        if sparse:
            layers = [layer for stage in sparse.values() for layer in stage.values()]
            router_loss_B = jnp.asarray(sum(jnp.sum(layer.pop("loss_B"), axis=0) for layer in layers))
            self._sow_statistics(sparse)

        def compute_logits(weights_VxD: jax.Array, x_BxTxD: jax.Array) -> jax.Array:
            return unembed(weights_VxD, x_BxTxD, config.logit_softcap)

        def scale_output(x: jax.Array) -> jax.Array:
            return x if config.width_ratio == 1 else x * jnp.asarray(config.width_ratio, x.dtype)

        x_BxTxD = scale_output(x_BxTxD)
        if targets is not None:
            z_loss = 0.0 if deterministic else config.z_loss
            chunk = self.memory.loss_chunk_positions
            if self.is_mutable_collection(SUMS) and not self.is_initializing():
                return evaluated_loss_sum_of(self, compute_logits, head_VxD, x_BxTxD, targets, chunk)
            softcap = config.logit_softcap
            loss_sum = loss_sum_of(
                compute_logits, head_VxD, x_BxTxD, targets, chunk_positions=chunk, z_loss=z_loss, softcap=softcap
            )
            # An evaluation reports the cross entropy alone, so that runs with and without experts compare.
            if deterministic:
                return loss_sum
            if extra_KxBxTxD is not None:
                losses, weights = [], []
                for index, extra_BxTxD in enumerate(extra_KxBxTxD):
                    y_BxT, weight_BxT = (_shift_within_documents(leaf, segments, 1 + index) for leaf in targets)
                    arguments = compute_logits, head_VxD, scale_output(extra_BxTxD), (y_BxT, weight_BxT)
                    losses.append(loss_sum_of(*arguments, chunk_positions=chunk, softcap=softcap))
                    weights.append(jnp.sum(weight_BxT, dtype=jnp.float32))
                losses_K = jnp.stack(losses)
                figures = {"loss_K": jax.lax.stop_gradient(losses_K), "weight_K": jnp.stack(weights)}
                self._sow_statistics({EXTRA_LOSSES: figures})
                loss_sum += config.extra_prediction_weight * jnp.mean(losses_K)
            if router_loss_B is None:
                return loss_sum
            # Weighted by the targets of each sequence, so that the split into micro-batches changes nothing.
            return loss_sum + jnp.sum(router_loss_B * jnp.sum(targets[1], axis=1, dtype=jnp.float32))
        logits_BxTxV = compute_logits(head_VxD, x_BxTxD)
        return logits_BxTxV if cache is None else (logits_BxTxV, new_cache)

    def _predict_further(
        self, x_BxTxD: jax.Array, embeddings_BxTxD: jax.Array, info: SequenceInfo
    ) -> tuple[jax.Array, dict[str, Statistics]]:
        """Return the outputs that predict the next K positions, (K, B, T, D), and the statistics of their layers."""
        stage = self.config.extra_stage
        is_in_line = self.config.layer_loop == "unroll" or stage.repeats == 1
        distances = range(1, 1 + stage.repeats)
        embeddings = [jnp.roll(embeddings_BxTxD, -distance, axis=1) for distance in distances]
        real = [_shift_within_documents(info.real, info.segments, distance) for distance in distances]
        module = _stack_layers(ExtraPrediction, stage.repeats, is_in_line)
        options = ComputePrecision(self.param_dtype, self.compute_dtype), self.memory, is_in_line
        layers = module(self.config, stage, *options, name=stage.name)
        with use_matmul_type(self.matmul):
            _, outputs = layers(x_BxTxD, info, (jnp.stack(embeddings), jnp.stack(real)))
        return outputs

    def _sow_statistics(self, statistics: Mapping[str, Any]) -> None:
        if not self.is_initializing():
            self.sow(STATISTICS, STATISTICS, statistics, reduce_fn=lambda old, new: old | new, init_fn=dict)

    @nn.nowrap
    def init_cache(self, batch: int, length: int, dtype: DTypeLike) -> Any:
        """Return an empty cache for `batch` sequences of at most `length` tokens."""
        return {
            stage.name: {
                name: make_cache(self.config, kind, stage.sharing, (stage.repeats, batch, length), dtype)
                for name, kind in zip(_list_layer_names(stage.kinds), stage.kinds, strict=True)
            }
            for stage in self.config.stages
        }

    def _make_layers(self, stage: Stage) -> Any:
        """Return the layers of a stage, with parameters stacked over the repetitions of its pattern."""
        is_in_line = self.config.layer_loop == "unroll" or stage.repeats == 1
        return _stack_layers(PatternRepetition, stage.repeats, is_in_line)(
            self.config,
            stage.kinds,
            ComputePrecision(self.param_dtype, self.compute_dtype),
            self.memory,
            is_in_line or len(stage.kinds) > 1,  # several layers of one repetition are unrolled inside of the loop
            stage.is_sparse,
            stage.sharing,
            name=stage.name,
        )


def _stack_layers(module: type[nn.Module], repeats: int, is_in_line: bool) -> Any:
    """Return `module`, whose second argument is the same for all layers, repeated with stacked parameters."""
    return nn.scan(
        module,
        variable_axes={"params": 0, BALANCE: 0},
        in_axes=(nn.broadcast, 0),
        split_rngs={"params": True, ROUNDING: True},
        length=repeats,
        unroll=repeats if is_in_line else 1,
        metadata_params={nn.PARTITION_NAME: "layers"},
    )


def _shift_within_documents(values_BxT: jax.Array, segments_BxT: jax.Array | None, distance: int) -> jax.Array:
    """Return the value `distance` positions further ahead, and 0 beyond the end of a document."""
    is_inside = jnp.arange(values_BxT.shape[1]) < values_BxT.shape[1] - distance
    if segments_BxT is not None:
        is_inside = is_inside & (segments_BxT == jnp.roll(segments_BxT, -distance, axis=1))
    return jnp.where(is_inside, jnp.roll(values_BxT, -distance, axis=1), jnp.zeros((), values_BxT.dtype))


def _find_real_tokens(
    tokens_BxT: jax.Array, targets: tuple[jax.Array, jax.Array] | None, segments_BxT: jax.Array | None
) -> jax.Array:
    """Return which tokens are not padding: those of a segment, else those up to the last target that counts."""
    if segments_BxT is not None:
        return segments_BxT > 0
    if targets is None:
        return jnp.ones(tokens_BxT.shape, jnp.bool_)
    return jax.lax.cummax((targets[1] > 0).astype(jnp.int32), axis=1, reverse=True) > 0


def _list_layer_names(kinds: tuple[LayerKind, ...]) -> list[str]:
    """Return the module names of the layers of one repetition of the pattern."""
    return [f"layer_{number}" for number in range(len(kinds))]


class PretrainDecoder(BaseTrainer):
    """Trainer of a decoder on the next token."""

    Config = DecoderTrainerConfig
    config: DecoderTrainerConfig

    def model(self) -> Decoder:
        """Return the decoder that the spec describes."""
        config, precision = self.config, self.config.precision
        options = (precision.params, precision.compute, config.memory, precision.matmul)
        return Decoder(config.model, self.vocabulary_size, *options)

    @classmethod
    def read_published_model(cls, config: Mapping[str, Any]) -> JsonObject:
        """Return the keys of `config.model` that the config.json of any known family describes."""
        return read_model_keys(dict(config))

    @classmethod
    def learning_rate_multiplier(cls, parameter: Parameter) -> float:
        """Return mu-P's factor on the learning rate of a parameter; 1 without a base width."""
        return mup_rate_factor(cls.config.model, cls.config.optimizer, parameter)

    def family(self) -> DecoderFiles:
        """Return the layout of the weights in Hugging Face's files."""
        return DecoderFiles(self.config.model, self.vocabulary_size, self.config.data.tokens_per_example)

    returns_loss_sum = True

    @classmethod
    def forward(
        cls, apply_fn: Any, params: Any, batch: Batch, key: jax.Array | None
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Return the summed cross entropy, in training plus z-loss and losses of routers, and their statistics."""
        # Only the keys that are drawn from are passed.
        rngs = make_rounding_keys(cls.config.precision, key)
        if key is not None and cls.config.model.neftune_alpha > 0:
            rngs["dropout"] = key
        loss_sum, sown = apply_fn(
            {"params": params},
            batch["x"],
            targets=(batch["y"], target_weights(batch)),
            **document_arguments(apply_fn, batch),
            **({"examples": batch["example"], "rngs": rngs} if rngs else {}),
            deterministic=key is None,
            mutable=[STATISTICS] if key is not None else [STATISTICS, SUMS],
        )
        return loss_sum, {**sown.pop(STATISTICS, {}), **sown}

    @classmethod
    def update_variables(cls, variables: Any, statistics: Any) -> tuple[Any, dict[str, jax.Array]]:
        """Return the next biases of the routers, and metrics of extra predictions and of layers that have experts."""
        config, moe = cls.config.model, cls.config.model.moe
        metrics = {}
        if EXTRA_LOSSES in statistics:
            losses = statistics[EXTRA_LOSSES]
            means_K = losses["loss_K"] / jnp.maximum(losses["weight_K"], 1)
            metrics = {f"extra_loss/{1 + index}": means_K[index] for index in range(config.extra_predictions)}
        if moe is None:
            return variables, metrics
        # Statistics are stacked by stage and layer name; metrics are named by the number of the layer.
        places = [
            (statistics[stage.name][name], repeat)
            for stage in [*config.stages, config.extra_stage]
            if stage.is_sparse
            for repeat in range(stage.repeats)
            for name in _list_layer_names(stage.kinds)
        ]
        # Layers without experts come first, so the others are numbered from the end.
        first = config.num_trained_layers - len(places)
        by_layer = {
            first + number: {name: leaf[repeat] for name, leaf in layer.items()}
            for number, (layer, repeat) in enumerate(places)
        }
        metrics |= router_metrics(by_layer, moe)
        if BALANCE not in variables:
            return variables, metrics

        def update(layer: Any, statistics: Statistics) -> Any:
            return {"moe": {"bias": update_biases(layer["moe"]["bias"], statistics["load_E"], moe.bias_rate or 0.0)}}

        biases = {
            stage: {name: update(layer, statistics[stage][name]) for name, layer in layers.items()}
            for stage, layers in variables[BALANCE].items()
        }
        return variables | {BALANCE: biases}, metrics

    def flops_per_token(self, train_setup: TrainSetup) -> Flops:
        """Return FLOPs by formula: causal attention as half of its square, a window as its mean over the sequence.

        Linear layers count with their matmuls and the delta rule in chunks. For sequences of several documents this is
        an upper bound: no implementation skips other documents.
        """
        config, memory, length = self.config.model, self.config.memory, self.config.data.tokens_per_example
        # A window longer than the sequence is full attention. Keys of wider heads count by their width.
        kinds = config.trained_kinds
        windows = [(min(config.get_window(kind) or length, length), kind) for kind in kinds if kind != "linear"]
        keys = [
            (window - window**2 / (2 * length)) * (config.get_head_size(kind) / config.head_size)
            for window, kind in windows
        ] + [0.0] * kinds.count("linear")
        # Embeddings of layers are projected before the layers, which do not repeat it.
        last: float = config.width * (config.layer_embedding_width or 0)
        if not config.needs_last_result:
            last += config.mean_hidden_width * config.width
        flops = compute_transformer_flops(
            layers=config.num_trained_layers,
            layer_parameters=config.layer_matmul_parameters,
            output_parameters=(1 + config.extra_predictions) * self.vocabulary_size * config.width,
            attention_width=config.heads * config.head_size,
            value_width=config.heads * config.value_size,
            attended_keys=sum(keys) / len(keys),
            remat=memory.remat,
            is_attention_saved=saves_attention(self.config, self.topology, train_setup.mesh),
            last_parameters=last,
            state_flops=0 if config.linear is None else config.linear_share * count_rule_flops(config.linear),
            matmul=self.config.precision.matmul,
            quantised_parameters=config.quantised_parameters,
        )
        recomputed = flops.recomputed_per_token + self._count_recomputed_expert_flops(train_setup)
        return replace(flops, recomputed_per_token=recomputed)

    def _count_recomputed_expert_flops(self, train_setup: TrainSetup) -> float:
        """Return the FLOPs of routed experts that are recomputed although a layer's other matmuls are not.

        This happens with `dots`, because no plain matmul makes the results of experts, and with `none` where tokens are
        exchanged in rounds. The matrices out of the hidden layer are recomputed only if what follows needs their result
        and the policy does not save it.
        """
        config, memory, sizes = self.config.model, self.config.memory, train_setup.mesh_sizes
        moe = config.moe
        if moe is None or memory.remat == "layers":
            return 0.0
        is_in_rounds = sizes["expert"] > 1 and (moe.capacity_factor is None or sizes["sequence"] > 1)
        if memory.remat == "none" and not is_in_rounds:
            return 0.0
        matrices = config.num_input_matrices + (memory.remat == "dots" and config.needs_last_result)
        parameters = moe.experts_per_token * matrices * config.expert_width * config.width
        return 2.0 * (config.num_trained_layers - moe.dense_layers) * parameters

    def sizing(self, sizes: Mapping[str, int]) -> Sizing:
        """Return the memory and communication of a token by formula.

        A layer saves its input and the stream between attention and MLP, both sharded like the stream, and after every
        norm its result in that sharding; two normalised copies of the gathered stream, and latents with their norms;
        and queries, keys, values, attention's result and the hidden layers that process a token, sharded by heads or
        columns. Linear layers count with their share of the layers.
        """
        config, moe, latent, tensor = (
            self.config.model,
            self.config.model.moe,
            self.config.model.latent,
            sizes["tensor"],
        )
        query, values = config.heads * config.head_size, config.heads * config.value_size
        keys = config.key_heads * (config.head_size + config.value_size)
        own_keys = float(keys)
        layers = {layer: count for layer, count in config.trained_layers.items() if layer[0] != "linear"}
        if latent is None and layers:
            # The mean over layers: full layers may have other heads, and some layers no keys of their own.
            number, wide_query, wide_keys, wide_own_keys = sum(layers.values()), 0, 0, 0
            for (kind, sharing), count in layers.items():
                wide_query += count * config.heads * config.get_head_size(kind)
                wide_keys += count * 2 * config.get_key_heads(kind) * config.get_head_size(kind)
                wide_own_keys += count * config.count_key_value_heads(kind, sharing) * config.get_head_size(kind)
            query = values = round(wide_query / number)
            keys, own_keys = round(wide_keys / number), wide_own_keys / number
        # With gates also these, and the result that they are applied to.
        has_gate, working = config.attention_gate, 0.0
        projected, mixed = query + own_keys + has_gate * query, float(values + has_gate * values)
        if config.linear is not None:
            # The mean over layers; a linear layer keeps its result before the norm and after it, both in float32.
            share, width = config.linear_share, config.linear.value_width
            wide = 2 * 4 / jnp.dtype(self.config.precision.compute).itemsize * width
            projected += share * (config.linear.projected_width - projected)
            mixed += share * (wide + width - mixed)
            working = count_rule_bytes(config.linear) / tensor
        latents = 0 if latent is None else (latent.query_rank or 0) + latent.cached_width
        norms = {"pre": 2, "post": 2, "both": 4}[config.norm]
        if moe is not None and moe.beside_mlp:
            norms += {"pre": 1, "post": 2, "both": 3}[config.norm]
        if config.layer_embedding_width is not None:
            # The embeddings of all layers exist at once, as rows, projections and sums.
            norms, itemsize = norms + 1, jnp.dtype(self.config.precision.compute).itemsize
            working += 3 * config.layers * config.layer_embedding_width * itemsize / tensor
        hidden, matrices = config.mean_hidden_width, config.num_input_matrices
        experts = NO_EXPERTS
        if moe is not None:
            expert_parameters = (matrices + 1) * config.expert_width * config.width
            # In rounds the backward pass sends tokens once more instead of keeping them; fixed slots are all sent,
            # filled or not.
            journeys = 5 if moe.capacity_factor is None else 4 * moe.capacity_factor
            num_layers = config.num_trained_layers - moe.dense_layers
            experts = ExpertSizing(moe.experts, moe.experts_per_token, num_layers, expert_parameters, journeys)
        return compute_transformer_sizing(
            layers=config.num_trained_layers,
            width=config.width,
            output_width=self.vocabulary_size,
            sequence_length=self.config.data.tokens_per_example,
            itemsize=jnp.dtype(self.config.precision.compute).itemsize,
            memory=self.config.memory,
            sizes=sizes,
            kept=2 * config.width
            + 2 * latents
            + (norms * config.width + projected + mixed + (matrices + 1) * hidden) / tensor,
            kept_of_dots=latents + (3 * config.width + projected + matrices * hidden) / tensor,
            keys_and_values=keys,
            working_bytes=working,
            predictions=1 + config.extra_predictions,
            can_shard_sequences=config.linear is None,
            experts=experts,
        )

    def search_space(self) -> dict[str, tuple[Any, ...]]:
        """Return the memory options that `plan --search` may vary."""
        return list_memory_choices(self.config.data.tokens_per_example)

    def final_choices(self) -> dict[str, tuple[Any, ...]]:
        """Return the layer loops between which `plan --search` chooses, last of all."""
        return {"config.model.layer_loop": ("unroll", "scan")}
