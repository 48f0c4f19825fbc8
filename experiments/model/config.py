"""Configuration of a decoder: the keys of `config.model`, what they imply, and how its layers are stacked.

A layer is of one kind: `full` attends to the whole sequence, `window` to the last positions of it, `no_rope` to the
whole sequence without rotary positions, and `linear` reads it into a state of constant size (`delta_net`). The kinds
follow a pattern that repeats to the last layer. The layers of one repetition are compiled together, and their
parameters are stacked over the repetitions.

mu-P. With `base_width` the learning rate that suits a narrow decoder suits a wide one. The rules are table 8 of Tensor
Programs V (arXiv:2203.03466), column for Adam, relative to a model of `base_width`, at which nothing changes. With
m = width / base_width:

    parameters                   initial variance        multiplier   learning rate
    hidden matrices              1 / m of the base's     1            1 / m; muon, normuon: 1 / sqrt(m); muonh: 1
    logits (tied or not)         the base's              1 / m        unchanged
    embedding, norms, biases     the base's              1            unchanged

Muon. A change of a hidden matrix keeps the change of the activations if its spectral norm grows like sqrt(outputs /
inputs) (arXiv:2310.17813, condition 1), that is not at all, as both grow with m. The updates of muon and normuon have a
root mean square of 0.2 and spectral norms that grow like sqrt(max(inputs, outputs)), so the learning rate is divided by
sqrt(m). The updates of muonh have the norm R of the initial matrix, whose entries shrink like 1 / sqrt(m): the spectral
norm of an orthogonal update, R / sqrt(min(inputs, outputs)), does not grow. For normuon and muonh, whose updates have a
fixed Frobenius norm, this holds where gradients have a full rank, that is with more tokens in a batch than m times the
base width. With fewer, the same norm is spread over fewer directions, and changes grow with the width.

A step of weight decay on a hidden matrix is not divided by m, as in the paper's own package. The paper scales scores by
1 / head_dim. Here `head_dim` is meant to stay constant while the number of heads and `mlp_width` grow with the width.
"""

import math
from collections import Counter
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from experiments.model.layers import INIT_STDDEV
from experiments.model.moe import MoeConfig
from experiments.model.presets import PRESETS
from experiments.model.rotary import Rope
from runner.config import ModelConfig, TrainerConfig
from runner.errors import InvalidError, suggest_choices
from runner.optim.config import OptimizerConfig
from runner.optim.groups import Parameter
from runner.spec import Auto, FrozenModel
from runner.spec.model import Policy
from runner.storage import JsonObject

AXIS_LIMIT = 1 << 31
EXTRA_STAGE = "extra"  # module of the layers that predict further positions
# Optimizers that the table is for, with the power of 1 / m in the learning rate of hidden matrices.
_MUP_POWERS = {"adamw": 1.0, "muon": 0.5, "normuon": 0.5, "muonh": 0.0}
# They add matrices whose other widths the table does not cover.
_UNSCALED_SECTIONS = ("latent", "linear", "moe", "layer_embedding_width")

LayerKind = Literal["full", "window", "no_rope", "linear"]
# Layers that give their keys and values to later ones, and those that take them.
Sharing = Literal["none", "gives", "takes"]


def validate_axes(section: FrozenModel, prefix: str = "") -> None:
    """Raise `ValueError` for a number that is no size of an axis: programs index axes by 32-bit integers."""
    for key in type(section).model_fields:
        value = getattr(section, key)
        if isinstance(value, FrozenModel):
            validate_axes(value, f"{prefix}{key}.")
        elif isinstance(value, int) and value >= AXIS_LIMIT:
            raise ValueError(f"{prefix}{key}={value} is too large; needs less than {AXIS_LIMIT}")


class SizedConfig(ModelConfig):
    """Keys of a model whose numbers are all sizes of axes."""

    @model_validator(mode="after")
    def _validate_axes(self) -> Self:
        validate_axes(self)
        return self


class WidthScaledConfig(ModelConfig):
    """Keys of a decoder that scale initial weights, logits and learning rates with its width (mu-P)."""

    base_width: PositiveInt | None = Field(
        default=None,
        description="Turn on mu-P for adamw, muon, normuon or muonh: initial weights, learning rates of hidden "
        "matrices and logits are scaled for width / base_width. Grow heads and mlp_width with width, and keep "
        "head_dim. null: off.",
    )

    @property
    def width_ratio(self) -> float:
        """base_width / width; 1 without a base width."""
        return 1.0 if self.base_width is None else self.base_width / int(getattr(self, "width"))  # noqa: B009

    @property
    def hidden_stddev(self) -> float:
        """Initial standard deviation of hidden matrices."""
        return INIT_STDDEV * math.sqrt(self.width_ratio)

    @model_validator(mode="after")
    def _validate_base_width(self) -> "WidthScaledConfig":
        unscaled = [key for key in _UNSCALED_SECTIONS if getattr(self, key) is not None]
        if self.base_width is not None and unscaled:
            raise ValueError(
                f"base_width={self.base_width}: mu-P does not scale the matrices that {unscaled[0]} adds; "
                "leave out one of the two"
            )
        return self


def mup_rate_factor(model: WidthScaledConfig, optimizer: OptimizerConfig, parameter: Parameter) -> float:
    """Return mu-P's factor on the learning rate of a parameter.

    Raises:
        InvalidError: the optimizer is none that the table is for. Plain adam is excluded too, because its weight decay
            passes through the moments.
    """
    if model.base_width is None:
        return 1.0
    if optimizer.name not in _MUP_POWERS:
        names = ", ".join(_MUP_POWERS)
        raise InvalidError(
            f"base_width={model.base_width}: mu-P is implemented for {names}, not for {optimizer.name}; use one of "
            "them or leave out base_width"
        )
    if optimizer.matrices is not None:
        raise InvalidError(
            f"matrices: mu-P of base_width={model.base_width} has learning rates for {optimizer.name} of all hidden "
            "matrices; leave out one of the two"
        )
    is_hidden = parameter.is_matrix and parameter.name.endswith(".kernel")
    return float(model.width_ratio ** _MUP_POWERS[optimizer.name]) if is_hidden else 1.0


class Biases(FrozenModel):
    """Matmuls that have a bias."""

    query_key_value: bool = Field(
        default=False,
        description="Bias of the query, key and value projections; with `latent`, of the projections to the latents.",
    )
    attention_out: bool = Field(default=False, description="Bias of the projection after attention.")
    mlp: bool = Field(default=False, description="Bias of the MLP's matmuls.")


class LatentConfig(FrozenModel):
    """Multi-head latent attention: keys and values are projected from one latent vector per token (DeepSeek-V2)."""

    key_value_rank: PositiveInt = Field(description="Width of the latent of keys and values.")
    query_rank: PositiveInt | None = Field(
        default=None, description="Width of the latent of queries; null: queries are projected from the stream."
    )
    plain_head_dim: PositiveInt = Field(description="Part of a head of queries and keys that is not rotated.")
    rotary_head_dim: PositiveInt = Field(
        description="Part that is rotated; even. All heads share the rotated part of a key."
    )
    value_head_dim: PositiveInt = Field(description="Width of a head of values.")

    @property
    def cached_width(self) -> int:
        """Numbers that a cached decode keeps of a token in each layer."""
        return self.key_value_rank + self.rotary_head_dim

    def count_matmul_parameters(self, heads: int, width: int) -> int:
        """Return the parameters of one layer's attention matmuls, for a stream of this width."""
        queries, values = heads * (self.plain_head_dim + self.rotary_head_dim), heads * self.value_head_dim
        query = queries * width if self.query_rank is None else self.query_rank * (width + queries)
        up = self.key_value_rank * (heads * self.plain_head_dim + values)
        return query + self.cached_width * width + up + values * width


class LinearConfig(FrozenModel):
    """Linear layers: gated delta nets (Yang et al., 2024), as in Qwen3-Next."""

    key_heads: PositiveInt = Field(description="Heads of queries and of keys; topology.mesh.tensor must divide them.")
    value_heads: PositiveInt = Field(
        description="Heads of values, each with a state; value_heads / key_heads of them share a head of keys."
    )
    key_head_dim: PositiveInt = Field(description="Width of a head of queries and keys.")
    value_head_dim: PositiveInt = Field(description="Width of a head of values.")
    conv_width: PositiveInt = Field(
        default=4, description="Positions that the convolution of queries, keys and values reads, its own included."
    )
    projections: Literal["fused", "separate"] = Field(
        default="fused",
        description="Two projections of the input, which hold the parts of each head of keys together (Qwen3-Next), or "
        "one for each part (Qwen3.5). Both compute the same.",
    )

    @property
    def key_width(self) -> int:
        """Width of all heads of keys."""
        return self.key_heads * self.key_head_dim

    @property
    def value_width(self) -> int:
        """Width of all heads of values."""
        return self.value_heads * self.value_head_dim

    @property
    def projected_width(self) -> int:
        """Numbers that a token is projected to: queries, keys, values, output gates, and two for each state."""
        return 2 * (self.key_width + self.value_width + self.value_heads)


class FullHeadsConfig(FrozenModel):
    """Heads of full layers, where they differ from those of other layers (Gemma 4)."""

    head_dim: PositiveInt | Auto = Field(default="auto", description="Width of a head, even; auto: that of the others.")
    key_value_heads: PositiveInt | Auto = Field(
        default="auto", description="Key and value heads; auto: as many as the others have."
    )
    keys_as_values: bool = Field(
        default=False, description="Project no values: the projected keys, before norm and rotation, are values too."
    )


class KeyValueSharingConfig(FrozenModel):
    """Last layers that attend to the keys and values of earlier ones (Gemma 4)."""

    layers: PositiveInt = Field(
        description="Last layers without keys and values of their own: each attends to those of the last layer of its "
        "kind before all of them."
    )
    mlp_width: PositiveInt | Auto = Field(
        default="auto", description="Hidden width of the MLP of these layers; auto: that of the others."
    )


class Stage(NamedTuple):
    """Stacked layers: a sequence of kinds that repeats."""

    name: str  # of the module that holds the parameters
    kinds: tuple[LayerKind, ...]
    repeats: int
    is_sparse: bool = False  # the layers have experts instead of an MLP, or beside it
    sharing: Sharing = "none"


class DecoderConfig(WidthScaledConfig):
    """Sizes and options of a decoder, which cover today's open model families.

    `layer_loop: scan` compiles one repetition of the layer pattern and loops over it. `unroll` compiles every layer: it
    takes longer to compile, and on a TPU less time and memory in a step. Both have the same parameters.
    """

    # A preset, or published weights, may stand for the required keys.
    model_config = ConfigDict(json_schema_extra=lambda schema: schema.pop("required"))
    has_8bit_matmuls: ClassVar[bool] = True
    has_gradient_rounding: ClassVar[bool] = True

    preset: str | None = Field(
        default=None,
        exclude=True,
        description="A published model, for example llama3_8b; keys beside it replace its values.",
    )
    layers: PositiveInt = Field(description="Transformer layers.")
    width: PositiveInt = Field(description="Width of the residual stream.")
    heads: PositiveInt = Field(description="Query heads; topology.mesh.tensor must divide them.")
    key_value_heads: PositiveInt | Auto = Field(
        default="auto",
        description="Key and value heads, each shared by heads / key_value_heads query heads; auto: heads. If "
        "topology.mesh.tensor does not divide them, each device holds copies of those that its queries read.",
    )
    head_dim: PositiveInt | Auto = Field(default="auto", description="Width of a head, even; auto: width / heads.")
    latent: LatentConfig | None = Field(
        default=None,
        description="Multi-head latent attention; key_value_heads and head_dim must then stay auto. null: off.",
    )
    mlp_width: PositiveInt = Field(description="Hidden width of the MLP.")
    mlp: Literal["swiglu", "geglu", "squared_relu", "clamped_swiglu"] = Field(
        default="swiglu",
        description="MLP with a SiLU gate, with a tanh-approximated GELU gate, relu(x)^2 without a gate, or GPT-OSS's "
        "(up + 1) gate sigmoid(1.702 gate), with gate and up clamped to 7.",
    )
    moe: MoeConfig | None = Field(default=None, description="Mixture of experts instead of the MLP; null: off.")
    layer_embedding_width: PositiveInt | None = Field(
        default=None,
        description="Width of a second embedding of each token, of which every layer has its own and adds a gated "
        "projection to the stream (per-layer embeddings, Gemma 4); null: none.",
    )
    layer_scale: bool = Field(
        default=False, description="Multiply the stream after each layer by a learned number, 1 at first."
    )
    norm: Literal["pre", "post", "both"] = Field(
        default="pre", description="Normalise the input of attention and MLP, their output, or both."
    )
    norm_epsilon: PositiveFloat = Field(
        default=1e-5, description="Added to the mean square in every norm, except in those of latents, which have 1e-6."
    )
    norm_offset: bool = Field(default=False, description="Store the scale of each norm minus 1, as Gemma does.")
    query_key_norm: Literal["head", "whole"] | None = Field(
        default=None, description="Normalise queries and keys, each head by itself or all heads together; null: off."
    )
    value_norm: bool = Field(default=False, description="Normalise each head of values, without a learned scale.")
    attention_gate: bool = Field(
        default=False,
        description="Multiply attention's result by the sigmoid of gates, which the query projection makes beside the "
        "queries.",
    )
    bias: Biases = Field(default=Biases(), description="Matmuls that have a bias.")
    layer_pattern: list[LayerKind] = Field(
        default=["full"],
        min_length=1,
        description="Kinds of layers, repeated to the last layer: attention to the whole sequence (full), to the last "
        "`window` positions (window), or to the whole sequence without rotary positions (no_rope); or no attention but "
        "a gated delta net (linear).",
    )
    linear: LinearConfig | None = Field(default=None, description="Linear layers of layer_pattern; null: none.")
    window: PositiveInt | None = Field(
        default=None, description="Positions that a query of a window layer attends to, its own included."
    )
    rope: Annotated[Rope, Policy.STAGE] = Field(default=Rope(), description="Rotary positions.")
    window_rope: Annotated[Rope | None, Policy.STAGE] = Field(
        default=None, description="Rotary positions of window layers; null: `rope`."
    )
    full_heads: FullHeadsConfig | None = Field(
        default=None, description="Heads of full layers, where they differ from those of others; null: they do not."
    )
    key_value_sharing: KeyValueSharingConfig | None = Field(
        default=None, description="Last layers that attend to the keys and values of earlier ones; null: none."
    )
    query_scale: PositiveFloat | Auto = Field(
        default="auto", description="Factor on attention scores; auto: 1 / sqrt(head_dim)."
    )
    attention_softcap: PositiveFloat | None = Field(
        default=None, description="Soft-cap s on scores, which become s tanh(scores / s); null: none."
    )
    attention_sinks: bool = Field(
        default=False,
        description="Give each head a learned score for the value zero in its softmax, beside those of the keys.",
    )
    logit_softcap: PositiveFloat | None = Field(
        default=None, description="Soft-cap s on logits, which become s tanh(logits / s); null: none."
    )
    embedding_scale: PositiveFloat | Literal["sqrt_width"] = Field(
        default=1.0, description="Factor on embeddings: a number, or the square root of width."
    )
    tied_embedding: bool = Field(default=False, description="Use the embedding as the output head.")
    neftune_alpha: Annotated[NonNegativeFloat, Policy.STAGE] = Field(
        default=0.0, description="Alpha of NEFTune noise on embeddings in training; 0: none."
    )
    z_loss: NonNegativeFloat = Field(
        default=0.0, description="Weight of the squared log-denominator of the softmax in the training loss."
    )
    extra_predictions: NonNegativeInt = Field(
        default=0,
        description="Further positions that are predicted in training, each by a layer of its own (multi-token "
        "prediction, DeepSeek-V3).",
    )
    extra_prediction_weight: Annotated[NonNegativeFloat, Policy.STAGE] = Field(
        default=0.1, description="Weight in the training loss of the mean loss of these predictions."
    )
    vocabulary_size: PositiveInt | Auto = Field(default="auto", description="auto: that of the data set.")
    layer_loop: Literal["scan", "unroll"] = Field(
        default="scan", description="Compile one repetition of the layer pattern and loop, or compile every layer."
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_in_preset(cls, data: Any) -> Any:
        if not isinstance(data, dict) or not isinstance(data.get("preset"), str):
            return data
        name = data["preset"]
        if name not in PRESETS:
            raise ValueError(f"unknown preset {name[:60]!r}{suggest_choices(name, sorted(PRESETS))}")
        preset = PRESETS[name]
        # Sections are merged key by key, so that `rope: {theta: ...}` keeps the preset's scaling.
        sections = {
            key: preset[key] | data[key]
            for key in preset
            if isinstance(preset[key], dict) and isinstance(data.get(key), dict)
        }
        return preset | data | sections

    @model_validator(mode="after")
    def _validate_sizes(self) -> "DecoderConfig":
        validate_axes(self)

        # Heads.
        if self.latent is None and self.head_dim == "auto" and self.width % self.heads:
            raise ValueError(
                f"width={self.width} does not divide over heads={self.heads}; use a multiple of {self.heads}, or set "
                "head_dim"
            )
        widest = max(self.value_size, *(self.get_head_size(kind) for kind in self.layer_pattern))
        joined = {"heads x head size": self.heads * widest}
        if self.layer_embedding_width is not None:
            joined["layers x layer_embedding_width"] = self.layers * self.layer_embedding_width
        if self.moe is not None:
            joined["moe.shared_experts x width"] = self.shared_width
        if self.linear is not None:
            joined["linear's heads x head size"] = self.linear.projected_width
        for name, size in joined.items():
            if size >= AXIS_LIMIT:
                raise ValueError(f"{name}={size} is too large for an axis; needs less than {AXIS_LIMIT}")
        for kind in self.layer_pattern:
            size, rope = self.get_rotary_size(kind), self.get_rope(kind)
            prefix = "full_heads." if kind == "full" and self.full_heads is not None else ""
            if size % 2:
                key = "latent.rotary_head_dim" if self.latent is not None else f"{prefix}head_dim"
                raise ValueError(f"{key}={size} is odd; rotary positions need pairs, use an even number")
            rotated = 0.0 if rope is None else round(rope.fraction * size, 6)
            if rotated % 2:
                name = "window_rope" if kind == "window" and self.window_rope is not None else "rope"
                raise ValueError(
                    f"{name}.fraction={rope and rope.fraction} rotates {rotated:g} of the {size} elements "
                    "of a head; rotary positions need pairs, make it an even number"
                )
            if self.heads % (number := self.get_key_heads(kind)):
                key = f"{prefix}key_value_heads"
                raise ValueError(f"heads={self.heads} does not divide over {key}={number}; use a divisor")

        # Latent attention has head sizes of its own.
        defaults: JsonObject = {
            "key_value_heads": "auto",
            "head_dim": "auto",
            "query_key_norm": None,
            "value_norm": False,
            "attention_sinks": False,
            "full_heads": None,
            "key_value_sharing": None,
        }
        others = {key: value for key, default in defaults.items() if (value := getattr(self, key)) != default}
        if self.latent is not None and others:
            key, value = next(iter(others.items()))
            given = key if isinstance(value, FrozenModel) else f"{key}={value}"
            raise ValueError(f"{given} contradicts `latent`, which defines the heads itself; leave out one of them")

        if self.attention_gate and (self.latent is not None or self.query_key_norm == "whole"):
            other = "latent" if self.latent is not None else "query_key_norm=whole"
            raise ValueError(f"attention_gate is not supported with {other}; leave out one of them")

        # Linear layers.
        unread = ["query_key_norm", "value_norm", "attention_gate", "attention_sinks"]
        unread = [key for key in unread if getattr(self, key)]
        if unread and set(self.layer_pattern) == {"linear"}:
            raise ValueError(f"{unread[0]} is set, and layer_pattern has no attention that reads it; leave it out")
        if ("linear" in self.layer_pattern) != (self.linear is not None):
            both = "linear is set, and layer_pattern has no linear layer that reads it; leave it out"
            raise ValueError(both if self.linear else "layer_pattern has linear layers; set `linear`, their heads")
        if self.linear is not None and self.linear.value_heads % self.linear.key_heads:
            raise ValueError(
                f"linear.value_heads={self.linear.value_heads} does not divide over key_heads={self.linear.key_heads}; "
                "use a multiple"
            )

        # Heads of full layers, and layers that share keys and values.
        if self.full_heads is not None and "full" not in self.layer_pattern:
            raise ValueError("full_heads is set, and layer_pattern has no full layer that reads it; leave it out")
        if self.full_heads is not None and self.full_heads.keys_as_values and self.query_key_norm == "whole":
            raise ValueError(
                "full_heads.keys_as_values is not supported with query_key_norm=whole; leave out one of them"
            )
        if self.key_value_sharing is not None:
            shared, kinds = self.key_value_sharing.layers, self.layer_kinds
            if set(kinds[-shared:]) == {"linear"}:
                raise ValueError(f"key_value_sharing.layers={shared} has linear layers alone, without keys; use more")
            missing = {*kinds[-shared:]} - {"linear", *kinds[: max(self.layers - shared, 0)]}
            if missing:
                raise ValueError(
                    f"key_value_sharing.layers={shared} leaves none of layers={self.layers} of the kind "
                    f"{min(missing)} to give keys and values; use fewer"
                )
            dense = 0 if self.moe is None else self.moe.dense_layers
            for other, value in (("moe.dense_layers", dense), ("extra_predictions", self.extra_predictions)):
                if value:
                    raise ValueError(f"key_value_sharing is not supported with {other}={value}; leave out one of them")
        if self.layer_embedding_width is not None and self.extra_predictions:
            raise ValueError("layer_embedding_width is not supported with extra_predictions; leave out one of them")
        if self.layer_embedding_width is not None and self.mlp not in ("swiglu", "geglu"):
            raise ValueError(
                f"layer_embedding_width needs the gate of mlp swiglu or geglu, got {self.mlp}; use one of these"
            )

        # Extra predictions.
        weight = self.extra_prediction_weight
        if not self.extra_predictions and weight != type(self).model_fields["extra_prediction_weight"].default:
            raise ValueError(
                f"extra_prediction_weight={weight} is read by no layer; leave it out, or set extra_predictions"
            )

        # Windows.
        if "window" in self.layer_pattern and self.window is None:
            raise ValueError("layer_pattern has window layers; set window, the positions that they attend to")
        unread = [name for name in ("window", "window_rope") if getattr(self, name) is not None]
        if "window" not in self.layer_pattern and unread:
            raise ValueError(f"{unread[0]} is set, and layer_pattern has no window layer that reads it; leave it out")

        # Experts.
        moe = self.moe
        if moe is not None and moe.dense_layers >= self.layers:
            raise ValueError(
                f"moe.dense_layers={moe.dense_layers} leaves none of layers={self.layers} with experts; use fewer"
            )
        if moe is not None and moe.dense_layers == 0 and not moe.beside_mlp and self.expert_width != self.mlp_width:
            raise ValueError(
                f"mlp_width={self.mlp_width} is read by no layer; make it the experts' width, and leave out "
                f"moe.expert_width={moe.expert_width}"
            )
        return self

    @property
    def expert_width(self) -> int:
        """Hidden width of one expert."""
        return self.mlp_width if self.moe is None or self.moe.expert_width == "auto" else self.moe.expert_width

    @property
    def shared_width(self) -> int:
        """Hidden width of all shared experts together."""
        return 0 if self.moe is None else self.moe.compute_shared_width(self.expert_width)

    @property
    def key_heads(self) -> int:
        """Number of key and value heads."""
        return self.heads if self.key_value_heads == "auto" else self.key_value_heads

    @property
    def head_size(self) -> int:
        """Width of a head of queries and keys."""
        if self.latent is not None:
            return self.latent.plain_head_dim + self.latent.rotary_head_dim
        return self.width // self.heads if self.head_dim == "auto" else self.head_dim

    def get_head_size(self, kind: LayerKind) -> int:
        """Return the width of a head of queries and keys in such a layer."""
        own = "auto" if kind != "full" or self.full_heads is None else self.full_heads.head_dim
        return self.head_size if own == "auto" else own

    def get_key_heads(self, kind: LayerKind) -> int:
        """Return the number of key and value heads of such a layer."""
        own = "auto" if kind != "full" or self.full_heads is None else self.full_heads.key_value_heads
        return self.key_heads if own == "auto" else own

    def has_keys_as_values(self, kind: LayerKind) -> bool:
        """Return True if the keys of such a layer are its values too."""
        return kind == "full" and self.full_heads is not None and self.full_heads.keys_as_values

    def get_rotary_size(self, kind: LayerKind) -> int:
        """Return the width of the part of a head that `get_rope` is for."""
        return self.get_head_size(kind) if self.latent is None else self.latent.rotary_head_dim

    def get_mlp_width(self, sharing: Sharing) -> int:
        """Return the hidden width of the MLP of such layers."""
        own = "auto" if sharing != "takes" or self.key_value_sharing is None else self.key_value_sharing.mlp_width
        return self.mlp_width if own == "auto" else own

    @property
    def value_size(self) -> int:
        """Width of a head of values."""
        return self.head_size if self.latent is None else self.latent.value_head_dim

    @property
    def num_input_matrices(self) -> int:
        """Matrices into the hidden layer of an MLP or an expert: two with a gate, else one."""
        return 1 if self.mlp == "squared_relu" else 2

    @property
    def expert_matmul_parameters(self) -> int:
        """Parameters of the experts that process a token in one layer."""
        if self.moe is None:
            return 0
        hidden = self.moe.experts_per_token * self.expert_width + self.shared_width
        return hidden * (self.num_input_matrices + 1) * self.width

    @property
    def num_trained_layers(self) -> int:
        """Layers of a training step, with those that predict further positions."""
        return self.layers + self.extra_predictions

    def count_attention_parameters(self, kind: LayerKind, sharing: Sharing) -> int:
        """Return the parameters of the attention matmuls of such a layer, or of its linear attention."""
        if kind == "linear" and self.linear is not None:
            return (self.linear.projected_width + self.linear.value_width) * self.width
        if self.latent is not None:
            return self.latent.count_matmul_parameters(self.heads, self.width)
        queries = self.heads * (2 if self.attention_gate else 1)
        return (
            (queries + self.heads + self.count_key_value_heads(kind, sharing)) * self.get_head_size(kind) * self.width
        )

    def count_key_value_heads(self, kind: LayerKind, sharing: Sharing) -> int:
        """Return the number of heads that such a layer projects to as keys and as values."""
        return 0 if sharing == "takes" else self.get_key_heads(kind) * (1 if self.has_keys_as_values(kind) else 2)

    @property
    def layer_matmul_parameters(self) -> float:
        """Parameters of the matmuls that process a token in one layer; the mean over trained layers."""
        number = self.num_trained_layers
        layers = self.trained_layers.items()
        attention = sum(count * self.count_attention_parameters(*layer) for layer, count in layers) / number
        mlp = (self.num_input_matrices + 1) * self.mean_mlp_width * self.width
        others = self.extra_predictions * 2 * self.width**2 / number
        # Gate and projection of a layer, and its share of the projection of the token's embedding.
        others += 3 * self.width * (self.layer_embedding_width or 0)
        if self.moe is None:
            return attention + mlp + others
        experts = self.expert_matmul_parameters + self.moe.experts * self.width  # the second term is the router
        experts += self.moe.shared_gate * self.width
        dense = number if self.moe.beside_mlp else self.moe.dense_layers
        sparse = number - self.moe.dense_layers
        return attention + (dense * mlp + sparse * experts) / number + others

    @property
    def mean_mlp_width(self) -> float:
        """Hidden width of an MLP; the mean over trained layers, as if all of them had one."""
        layers = self.trained_layers.items()
        return sum(count * self.get_mlp_width(sharing) for (_, sharing), count in layers) / self.num_trained_layers

    @property
    def quantised_parameters(self) -> float:
        """Part of `layer_matmul_parameters` that `precision.matmul` quantises: without routers and gates."""
        # The projection of the embeddings of layers is computed before them.
        excluded: float = self.width * (self.layer_embedding_width or 0)
        if self.linear is not None:
            excluded += self.linear_share * 2 * self.linear.value_heads * self.width  # beta and decay
        if self.moe is not None:
            sparse = (self.num_trained_layers - self.moe.dense_layers) / self.num_trained_layers
            excluded += sparse * (self.moe.experts + self.moe.shared_gate) * self.width
        return self.layer_matmul_parameters - excluded

    @property
    def mean_hidden_width(self) -> float:
        """Hidden width that processes a token, of an MLP or of its experts together; the mean over trained layers."""
        if self.moe is None:
            return self.mean_mlp_width
        number = self.num_trained_layers
        sparse = self.moe.experts_per_token * self.expert_width + self.shared_width
        dense = number if self.moe.beside_mlp else self.moe.dense_layers
        return (dense * self.mean_mlp_width + (number - self.moe.dense_layers) * sparse) / number

    @property
    def needs_last_result(self) -> bool:
        """True if the gradient of what follows a layer's matmuls needs their result: a norm, a gate or a factor."""
        return self.norm != "pre" or self.layer_embedding_width is not None or self.layer_scale

    @property
    def linear_share(self) -> float:
        """Share of linear layers among trained layers."""
        return self.trained_kinds.count("linear") / self.num_trained_layers

    @property
    def layer_kinds(self) -> list[LayerKind]:
        """Kind of every layer, first to last."""
        return [self.layer_pattern[layer % len(self.layer_pattern)] for layer in range(self.layers)]

    @property
    def trained_kinds(self) -> list[LayerKind]:
        """Kind of every layer of a training step, those that predict further positions last."""
        return [*self.layer_kinds, *self.extra_stage.kinds * self.extra_predictions]

    @property
    def trained_layers(self) -> Counter[tuple[LayerKind, Sharing]]:
        """Number of layers of a training step of each kind that give, take or keep keys and values."""
        layers: Counter[tuple[LayerKind, Sharing]] = Counter()
        for stage in (*self.stages, self.extra_stage):
            for kind in stage.kinds:
                layers[kind, stage.sharing] += stage.repeats
        return layers

    @property
    def stages(self) -> list[Stage]:
        """All layers in order: dense layers before sparse ones, whole repetitions of the pattern before the rest.

        Layers that give keys and values are a stage of one repetition, so that those of no other layer are kept.
        """
        if self.key_value_sharing is not None:
            stop, is_sparse = self.layers - self.key_value_sharing.layers, self.moe is not None
            before, after = self.layer_kinds[:stop], {*self.layer_kinds[stop:]} - {"linear"}
            first = min((stop - 1 - before[::-1].index(kind) for kind in after), default=stop)
            first -= first % len(self.layer_pattern)
            return [
                *self._make_stages(0, first, "", is_sparse),
                Stage("giving_blocks", tuple(before[first:]), 1, is_sparse, "gives"),
                *self._make_stages(stop, self.layers, "taking_", is_sparse, "takes"),
            ]
        if self.moe is None:
            return self._make_stages(0, self.layers, "", False)
        dense = self.moe.dense_layers
        return [*self._make_stages(0, dense, "dense_", False), *self._make_stages(dense, self.layers, "", True)]

    @property
    def extra_stage(self) -> Stage:
        """Layers that predict further positions, each like the last layer of the decoder."""
        return Stage(EXTRA_STAGE, (self.layer_kinds[-1],), self.extra_predictions, self.moe is not None)

    def _make_stages(
        self, first: int, stop: int, prefix: str, is_sparse: bool, sharing: Sharing = "none"
    ) -> list[Stage]:
        shift = first % len(self.layer_pattern)
        pattern = (*self.layer_pattern[shift:], *self.layer_pattern[:shift])
        repeats, rest = divmod(stop - first, len(pattern))
        stages = [Stage(f"{prefix}blocks", pattern, repeats, is_sparse, sharing)] if repeats else []
        return [*stages, Stage(f"last_{prefix}blocks", pattern[:rest], 1, is_sparse, sharing)] if rest else stages

    def get_window(self, kind: LayerKind) -> int | None:
        """Return the positions that a query of such a layer attends to; None is the whole past."""
        return self.window if kind == "window" else None

    def get_rope(self, kind: LayerKind) -> Rope | None:
        """Return the rotary positions of such a layer."""
        if kind in ("no_rope", "linear"):
            return None
        return self.window_rope or self.rope if kind == "window" else self.rope


class DecoderTrainerConfig(TrainerConfig[DecoderConfig]):
    """The `config` section of a job that trains a decoder."""
