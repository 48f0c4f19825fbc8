"""GPT-2 as published, and its trainer.

Pre-LayerNorm, learned positions, tied embedding, tanh-approximated GELU, biases everywhere. The module owns the
architecture, the logical name of every parameter axis, and the tensors of `GPT2LMHeadModel` and its config.json in
Hugging Face's files. It does not depend on the mesh: the caller's rules map names to mesh axes, and without rules every
annotation is a no-op. Layouts that depend on the platform are in `experiments.model.platform`.

Shape legend: B batch, T sequence, S positions of a cache, L layers, V vocabulary, D width, M = 4 D width of the MLP,
N heads, H = D / N width of a head.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from pydantic import ConfigDict, Field, NonNegativeFloat, PositiveInt, model_validator

from experiments.model.attention import cached_attention, causal_attention
from experiments.model.config import validate_axes
from experiments.model.config_json import describe_unknown_keys
from experiments.model.embedding import EmbeddingNoise, evaluated_loss_sum_of, lookup, loss_sum_of, unembed
from experiments.model.layers import (
    INIT_STDDEV,
    Dense,
    FromHeads,
    LayerNorm,
    ToHeads,
    constrain,
    constrain_stream,
    flatten_tokens,
    gather_stream,
    gelu,
    packs_heads,
    rematerialised,
    save_stream,
    with_axes,
)
from experiments.model.platform import mark_saved, saves_attention
from experiments.model.quantised import ROUNDING, make_rounding_keys, rounds_gradients, use_matmul_type
from runner import BaseTrainer
from runner.config import ContextParallelMethod, MatmulType, MemoryConfig, ModelConfig, TrainerConfig
from runner.errors import InvalidError
from runner.huggingface.mapping import Family, TensorPiece
from runner.metrics.meta import SUMS
from runner.spec import Auto
from runner.spec.model import Policy
from runner.storage import JsonObject
from runner.train.flops import Flops, Sizing, compute_transformer_flops, compute_transformer_sizing, list_memory_choices
from runner.train.loss import document_arguments, target_weights
from runner.train.setup import TrainSetup
from runner.train.step import Batch

LAYER_NORM_EPSILON = 1e-5

Cache = dict[str, jax.Array]  # keys and values of earlier positions: (L, B, S, N, H), without L for one layer


class GPTConfig(ModelConfig):
    """Sizes of a GPT-2, and options for the compilation of its layers.

    `layer_loop: scan` compiles one layer and loops over it, so compile time does not grow with depth, as very deep
    models need. `unroll` compiles every layer: compile time grows with depth, but a step does not save and read slices
    of stacked arrays. This saves a few percent of a step on a CPU, 3 to 20% on a TPU by its compiler's estimates, and
    some memory. Both have the same parameters, with all layers stacked, so a checkpoint of one loads into the other.
    """

    # Published weights may provide the required keys.
    model_config = ConfigDict(json_schema_extra=lambda schema: schema.pop("required"))
    has_8bit_matmuls: ClassVar[bool] = True
    has_gradient_rounding: ClassVar[bool] = True

    layers: PositiveInt = Field(description="Transformer layers.")
    heads: PositiveInt = Field(
        description="Attention heads; must divide width. If topology.mesh.tensor does not divide them, devices hold "
        "more than their share."
    )
    width: PositiveInt = Field(description="Width of the residual stream.")
    dropout: Annotated[float, Policy.STAGE] = Field(
        default=0.0, ge=0, lt=1, description="Dropout rate of embeddings and of the outputs of attention and MLP."
    )
    neftune_alpha: Annotated[NonNegativeFloat, Policy.STAGE] = Field(
        default=0.0, description="Alpha of NEFTune noise on embeddings in training; 0: none."
    )
    vocabulary_size: PositiveInt | Auto = Field(default="auto", description="auto: that of the data set.")
    layer_loop: Literal["scan", "unroll"] = Field(
        default="scan", description="Compile one layer and loop over it, or compile every layer."
    )

    @model_validator(mode="after")
    def _validate_heads(self) -> "GPTConfig":
        validate_axes(self)
        if self.width % self.heads:
            raise ValueError(
                f"width={self.width} does not divide over heads={self.heads}; use a multiple of {self.heads}"
            )
        return self


class Dropout(nn.Module):
    """Dropout with a mask for each example, drawn from the step's key and the index of the example in the step.

    The masks therefore do not depend on the split of a step into micro-batches, devices and hosts.
    """

    rate: float
    deterministic: bool

    @nn.compact
    def __call__(self, x_BxTxD: jax.Array, examples_B: jax.Array) -> jax.Array:
        """Return `x` with dropped elements; `examples_B` is the index of each example in the step."""
        if self.deterministic or self.rate == 0:
            return x_BxTxD
        # One key per example: a mask must not depend on which examples share a micro-batch or a device.
        keys_B = jax.vmap(jax.random.fold_in, (None, 0))(self.make_rng("dropout"), examples_B)
        draw = jax.vmap(lambda key: jax.random.bernoulli(key, 1 - self.rate, x_BxTxD.shape[1:]))
        return jnp.where(draw(keys_B), x_BxTxD / (1 - self.rate), 0)


class GPTBlock(nn.Module):
    """One layer: attention and MLP, each on a normalised copy of the residual stream and added back to it."""

    config: GPTConfig
    deterministic: bool
    param_dtype: DTypeLike
    compute_dtype: DTypeLike
    row_attention: ContextParallelMethod = "auto"

    @nn.compact
    @rounds_gradients(lambda examples_B: examples_B)
    def __call__(
        self,
        x_BxTxD: jax.Array,
        examples_B: jax.Array,
        segments_BxT: jax.Array | None,
        cache: Cache | None,
        start: jax.Array | None,
    ) -> tuple[jax.Array, Cache | None]:
        """Return the stream after the layer, and the cache with the keys and values of these tokens, if any."""
        B, T, D = x_BxTxD.shape
        N = self.config.heads
        # GPT-2 starts with smaller weights where a matmul adds to the stream, which happens twice in each layer.
        residual_stddev = INIT_STDDEV / math.sqrt(2 * self.config.layers)
        # One module for both calls. Its name is automatic and folds into the random key, so a second module or another
        # class name would change the masks.
        dropout = functools.partial(Dropout(self.config.dropout, self.deterministic), examples_B=examples_B)

        # Flattened once for the three projections, so that the backward pass keeps one copy instead of three.
        h_BTxD = flatten_tokens(gather_stream(self._layer_norm("attention_norm")(x_BxTxD)))
        precision = self.param_dtype, self.compute_dtype
        is_packed = packs_heads(N, N, D // N)
        q_BxTxNxH, k_BxTxNxH, v_BxTxNxH = (
            ToHeads(D, ("embed", "heads"), INIT_STDDEV, *precision, True, is_packed, N, name=name)(h_BTxD, (B, T))
            for name in ("query", "key", "value")
        )
        if cache is None:
            qkv = (q_BxTxNxH, k_BxTxNxH, v_BxTxNxH)
            a_BxTxNxH = causal_attention(*qkv, segments_BxT, row_attention=self.row_attention)
        else:
            assert start is not None, "a call with a cache needs start"
            new = {"key": k_BxTxNxH, "value": v_BxTxNxH}
            cache = {name: lax.dynamic_update_slice_in_dim(cache[name], new[name], start, axis=1) for name in new}
            a_BxTxNxH = cached_attention(q_BxTxNxH, cache["key"], cache["value"], start)
        out = FromHeads(D, ("heads", "embed"), residual_stddev, *precision, is_packed=is_packed, name="attention_out")
        x_BxTxD = save_stream(x_BxTxD + dropout(constrain_stream(out(a_BxTxNxH))))

        h_BTxD = flatten_tokens(gather_stream(self._layer_norm("mlp_norm")(x_BxTxD)))
        h_BxTxM = self._dense("mlp_in", 4 * D, ("embed", "mlp"))(h_BTxD).reshape(B, T, 4 * D)
        h_BxTxM = gelu(mark_saved(constrain(h_BxTxM, "batch", "sequence", "mlp")))
        h_BTxD = self._dense("mlp_out", D, ("mlp", "embed"), residual_stddev)(flatten_tokens(h_BxTxM))
        return constrain_stream(x_BxTxD + dropout(constrain_stream(h_BTxD.reshape(B, T, D)))), cache

    def _dense(self, name: str, features: int, axes: tuple[str, str], stddev: float = INIT_STDDEV) -> Dense:
        return Dense(features, axes, stddev, self.param_dtype, self.compute_dtype, name=name)

    def _layer_norm(self, name: str) -> LayerNorm:
        return LayerNorm(LAYER_NORM_EPSILON, self.param_dtype, self.compute_dtype, name=name)


class GPT(nn.Module):
    """GPT-2 for sequences of at most `sequence_length` tokens.

    Parameters are kept in `param_dtype`; matmuls run in `compute_dtype`, layer norms and softmax in float32. Those of
    layers are quantised as `matmul` says. With a "rounding" key gradients in 8 bits are rounded stochastically
    (`make_rounding_keys`).
    """

    config: GPTConfig
    vocabulary_size: int
    sequence_length: int
    param_dtype: DTypeLike = jnp.float32
    compute_dtype: DTypeLike = jnp.float32
    memory: MemoryConfig = MemoryConfig()
    matmul: MatmulType = "compute"

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
        """Return logits of the next token, or the loss; needs a "dropout" key unless deterministic.

        Args:
            tokens_BxT: ids.
            examples_B: index of each example in the step, on which dropout, noise and stochastic rounding depend;
                None: 0, 1, 2, ...
            targets: (y_BxT, weight_BxT). If given, the summed cross entropy is returned. With
                `memory.loss_chunk_positions` it is computed in chunks, so that not all logits exist at a time.
            segments: (B, T), documents of sequences that hold several; attention stays within a segment.
            positions: (B, T), position of each token in its document, for the position embedding; by default that in
                the sequence.
            cache: from `init_cache`, or from the previous call.
            start: position of the first token (int32 scalar), if there is a cache. Tokens are at `start` to
                start + T - 1, after those in the cache.
            deterministic: True leaves out dropout and noise.

        Returns:
            Logits (B, T, V) in `compute_dtype`; with a cache also the cache with these tokens; with targets the summed
            cross entropy, float32.
        """
        config, (B, T) = self.config, tokens_BxT.shape
        examples_B = jnp.arange(B) if examples_B is None else examples_B
        D, V = config.width, self.vocabulary_size
        # Embedding and output head are one matrix, as in GPT-2.
        embedding_init = with_axes(nn.initializers.normal(INIT_STDDEV), "vocab", "embed")
        positions_init = with_axes(nn.initializers.normal(INIT_STDDEV), "positions", "embed")
        embedding_VxD = self.param("embedding", embedding_init, (V, D), self.param_dtype).astype(self.compute_dtype)
        positions_TxD = self.param("positions", positions_init, (self.sequence_length, D), self.param_dtype).astype(
            self.compute_dtype
        )
        positions_TxD = constrain(positions_TxD, "positions", "embed_act")  # sharded as `lookup` returns embeddings
        if start is not None:
            positions = start + jnp.arange(T)
        x_BxTxD = lookup(embedding_VxD, tokens_BxT)
        x_BxTxD += positions_TxD[:T] if positions is None else positions_TxD[positions]
        noise = EmbeddingNoise(config.neftune_alpha, deterministic, name="embedding_noise")
        x_BxTxD = constrain_stream(noise(constrain_stream(x_BxTxD), examples_B))
        x_BxTxD = Dropout(config.dropout, deterministic)(x_BxTxD, examples_B)

        # Both loops stack parameters over layers. Unrolling is a scan whose body is repeated for every layer.
        is_unrolled = config.layer_loop == "unroll"
        blocks = nn.scan(
            rematerialised(GPTBlock, self.memory.remat, is_in_line=is_unrolled),
            variable_axes={"params": 0},
            in_axes=(nn.broadcast, nn.broadcast, 0, nn.broadcast),
            split_rngs={"params": True, "dropout": True, ROUNDING: True},
            length=config.layers,
            unroll=config.layers if is_unrolled else 1,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )(config, deterministic, self.param_dtype, self.compute_dtype, self.memory.row_attention, name="blocks")
        with use_matmul_type(self.matmul):
            x_BxTxD, cache = blocks(x_BxTxD, examples_B, segments, cache, start)
        x_BxTxD = LayerNorm(LAYER_NORM_EPSILON, self.param_dtype, self.compute_dtype, name="final_norm")(x_BxTxD)

        if targets is not None:
            chunk = self.memory.loss_chunk_positions
            if self.is_mutable_collection(SUMS) and not self.is_initializing():
                return evaluated_loss_sum_of(self, unembed, embedding_VxD, x_BxTxD, targets, chunk)
            return loss_sum_of(unembed, embedding_VxD, x_BxTxD, targets, chunk_positions=chunk)
        logits_BxTxV = unembed(embedding_VxD, x_BxTxD)
        return logits_BxTxV if cache is None else (logits_BxTxV, cache)

    @nn.nowrap
    def init_cache(self, batch: int, length: int, dtype: DTypeLike) -> Cache:
        """Return an empty cache for `batch` sequences of at most `length` tokens."""
        N = self.config.heads
        shape = (self.config.layers, batch, length, N, self.config.width // N)
        return {"key": jnp.zeros(shape, dtype), "value": jnp.zeros(shape, dtype)}


# Hugging Face's files: tensor -> parameter.
_UNSTACKED_TENSORS = {
    "transformer.wte.weight": "embedding",
    "transformer.wpe.weight": "positions",
    "transformer.ln_f.weight": "final_norm.scale",
    "transformer.ln_f.bias": "final_norm.bias",
}
_NORMS = {"ln_1": "attention_norm", "ln_2": "mlp_norm"}
_MATMULS = {"attn.c_proj": "attention_out", "mlp.c_fc": "mlp_in", "mlp.c_proj": "mlp_out"}
_MASKS = (".attn.bias", ".attn.masked_bias")  # older files hold them beside the weights
# Keys of config.json that change no tensor's shape, with the default values of the format.
_DEFAULTS = {
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": True,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
}
_SYNONYMS = {"gelu_pytorch_tanh": "gelu_new"}
# Further keys, which have no effect, or one that shapes of tensors show: of sizes, precision and heads.
_OTHER_KEYS = {"vocab_size", "n_layer", "n_embd", "n_positions", "n_ctx", "n_inner", "reorder_and_upcast_attn"}
_OTHER_KEYS |= {f"summary_{name}" for name in ("type", "use_proj", "activation", "proj_to_labels", "first_dropout")}
_KEYS = _DEFAULTS.keys() | _OTHER_KEYS | {"model_type", "n_head"}


@dataclass(frozen=True)
class GPT2Files(Family):
    """Weights and config.json of a GPT-2 in Hugging Face's layout.

    Kernels are (in, out) in both layouts. Query, key and value are one tensor in the files.
    """

    layers: int
    heads: int
    width: int
    vocabulary_size: int
    positions: int
    dropout: float

    def pieces(self) -> list[TensorPiece]:
        """Return every parameter with its tensor."""
        pieces = [TensorPiece(tensor, leaf) for tensor, leaf in _UNSTACKED_TENSORS.items()]
        for layer in range(self.layers):
            prefix, index = f"transformer.h.{layer}", (layer,)
            for tensor, leaf in _NORMS.items():
                pieces.append(TensorPiece(f"{prefix}.{tensor}.weight", f"blocks.{leaf}.scale", index))
                pieces.append(TensorPiece(f"{prefix}.{tensor}.bias", f"blocks.{leaf}.bias", index))
            # Query, key and value are ranges of columns of one tensor.
            for number, leaf in enumerate(("query", "key", "value")):
                start, stop = number * self.width, (number + 1) * self.width
                for name, kind, axis in (("weight", "kernel", 1), ("bias", "bias", 0)):
                    tensor, part = f"{prefix}.attn.c_attn.{name}", (axis, start, stop)
                    pieces.append(TensorPiece(tensor, f"blocks.{leaf}.{kind}", index, part=part))
            for tensor, leaf in _MATMULS.items():
                pieces.append(TensorPiece(f"{prefix}.{tensor}.weight", f"blocks.{leaf}.kernel", index))
                pieces.append(TensorPiece(f"{prefix}.{tensor}.bias", f"blocks.{leaf}.bias", index))
        return pieces

    def config(self) -> JsonObject:
        """Return config.json, without ids of special tokens, which the model does not know."""
        sizes = {"n_layer": self.layers, "n_head": self.heads, "n_embd": self.width, "n_positions": self.positions}
        # This model drops no attention weights, whatever its dropout rate is.
        dropout = dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), self.dropout) | {"attn_pdrop": 0.0}
        ends = {"bos_token_id": None, "eos_token_id": None}
        names = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}
        return {**names, "vocab_size": self.vocabulary_size, **sizes, **_DEFAULTS, **dropout, **ends}

    def differences(self, config: Mapping[str, Any]) -> list[str]:
        """Return the differences between the config.json of given weights and this model, one line each."""
        # Other sizes are compared by the shapes of tensors, which do not depend on the number of heads.
        needed = {"model_type": "gpt2", "n_head": self.heads, **_DEFAULTS}
        found = {key: config.get(key, _DEFAULTS.get(key)) for key in needed}
        unknown = describe_unknown_keys(config, "gpt2", _KEYS, {}) if found["model_type"] == "gpt2" else ""
        return [unknown] * bool(unknown) + [
            f"{key}: got {found[key]!r}, the model needs {value!r}"
            for key, value in needed.items()
            if _SYNONYMS.get(str(found[key]), found[key]) != value
        ]

    def known_as(self, tensor: str) -> str | None:
        """Return the tensor's name in `pieces`, or None to skip it.

        The files of OpenAI's release leave out `transformer.`, and some files repeat the embedding as the head.
        """
        if tensor.endswith(_MASKS) or tensor == "lm_head.weight":
            return None
        return tensor if tensor.startswith("transformer.") else f"transformer.{tensor}"


class PretrainGPT(BaseTrainer):
    """Trainer of a GPT-2 on the next token."""

    Config = TrainerConfig[GPTConfig]

    @classmethod
    def read_published_model(cls, config: Mapping[str, Any]) -> JsonObject:
        """Return the keys of `config.model` that the config.json of a GPT-2 describes."""
        if config.get("model_type") != "gpt2":
            kind = str(config.get("model_type"))[:60]
            raise InvalidError(f"model_type: got {kind!r}, {cls.__name__} trains models of gpt2")
        if unknown := describe_unknown_keys(config, "gpt2", _KEYS, {}):
            raise InvalidError(unknown)
        names = {"layers": "n_layer", "heads": "n_head", "width": "n_embd", "vocabulary_size": "vocab_size"}
        if missing := [name for name in names.values() if name not in config]:
            raise InvalidError(f"{missing[0]}: is missing from config.json")
        return {key: config[name] for key, name in names.items()} | {"dropout": config.get("resid_pdrop", 0.1)}

    def model(self) -> GPT:
        """Return the GPT that the spec describes."""
        config, precision = self.config, self.config.precision
        return GPT(
            config.model,
            self.vocabulary_size,
            config.data.tokens_per_example,
            precision.params,
            precision.compute,
            config.memory,
            precision.matmul,
        )

    returns_loss_sum = True

    @classmethod
    def forward(
        cls, apply_fn: Any, params: Any, batch: Batch, key: jax.Array | None
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Return the summed cross entropy; with a key each example has its own dropout and noise."""
        # Validation passes no key, and so has neither dropout nor noise, but the accuracy.
        is_training = key is not None
        # A class that belongs to no job, as in a program that only calls this method, has no configuration.
        rngs = make_rounding_keys(cls.config.precision, key) if hasattr(cls, "config") else {}
        if key is not None:
            rngs["dropout"] = key
        targets = batch["y"], target_weights(batch)
        # The sum instead of the mean: the step divides by the tokens of the whole global batch.
        found = apply_fn(
            {"params": params},
            batch["x"],
            batch["example"],
            targets,
            **document_arguments(apply_fn, batch),
            deterministic=not is_training,
            **({"rngs": rngs} if is_training else {"mutable": [SUMS]}),
        )
        return (found, {}) if is_training else found

    def family(self) -> GPT2Files:
        """Return the layout of the weights in Hugging Face's files."""
        model, length = self.config.model, self.config.data.tokens_per_example
        return GPT2Files(model.layers, model.heads, model.width, self.vocabulary_size, length, model.dropout)

    def flops_per_token(self, train_setup: TrainSetup) -> Flops:
        """Return FLOPs by formula: causal attention as half of its square, with scores that are always recomputed.

        For sequences of several documents this is an upper bound: no implementation skips other documents.
        """
        model, memory = self.config.model, self.config.memory
        return compute_transformer_flops(
            layers=model.layers,
            layer_parameters=12 * model.width**2,
            output_parameters=self.vocabulary_size * model.width,
            attention_width=model.width,
            attended_keys=self.config.data.tokens_per_example / 2,
            remat=memory.remat,
            is_attention_saved=saves_attention(self.config, self.topology, train_setup.mesh),
            last_parameters=4 * model.width**2,
            matmul=self.config.precision.matmul,
            quantised_parameters=12 * model.width**2,
        )

    def sizing(self, sizes: Mapping[str, int]) -> Sizing:
        """Return the memory and communication per token by formula.

        In units of D a layer saves its input and the stream between attention and MLP, both sharded like the stream;
        two normalised copies of the gathered stream; and queries, keys, values, attention's result and 4 + 4 of the
        hidden layer before and after its GELU, sharded by heads or columns.
        """
        model, tensor = self.config.model, sizes["tensor"]
        return compute_transformer_sizing(
            layers=model.layers,
            width=model.width,
            output_width=self.vocabulary_size,
            sequence_length=self.config.data.tokens_per_example,
            itemsize=jnp.dtype(self.config.precision.compute).itemsize,
            memory=self.config.memory,
            sizes=sizes,
            kept=model.width * (2 + 14 / tensor),
            kept_of_dots=model.width * 10 / tensor,
            keys_and_values=2 * model.width,
        )

    def search_space(self) -> dict[str, tuple[Any, ...]]:
        """Return the memory options that `plan --search` may vary."""
        return list_memory_choices(self.config.data.tokens_per_example)

    def final_choices(self) -> dict[str, tuple[Any, ...]]:
        """Return the layer loops between which `plan --search` chooses, last of all."""
        return {"config.model.layer_loop": ("unroll", "scan")}
