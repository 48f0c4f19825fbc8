"""The keys of a decoder, and which layers it has. Owns no arithmetic of a model.

A layer is of one kind: `full` attends to the whole row, `window` to a stretch of it, `no_rope` to the whole row without
positions. Kinds follow each other in a pattern, which is repeated; layers of one turn of it are compiled together.

mu-P: what of a decoder depends on its width, so that the learning rate that suits a narrow one suits a wide one.

Table 8 of Tensor Programs V (arXiv:2203.03466), its column for Adam, against the model of `base_width`, at which
nothing changes. With m = width / base_width:

    parameters                   variance at the start   multiplier   learning rate
    hidden matrices              1 / m of the base's     1            1 / m
    logits' (tied or not)        the base's              1 / m        as it stands
    embedding, norms, biases     the base's              1            as it stands

What a step of decay takes off a hidden matrix is not divided by m, as in the paper's own package. The paper scales
scores by 1 / head_dim: here `head_dim` is to stay what it is, and heads grow in number with the width, as does
`mlp_width`.
"""

import math
from typing import Any, Literal, NamedTuple

from pydantic import ConfigDict, Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from experiments.model.layers import INIT_STDDEV
from experiments.model.moe import MoeConfig
from experiments.model.presets import PRESETS
from experiments.model.rotary import Rope
from runner.config import ModelConfig, TrainerConfig
from runner.errors import InvalidError
from runner.optim.groups import Parameter
from runner.spec import Auto, FrozenModel
from runner.spec.document import suggest_choices
from runner.storage import JsonObject

_OPTIMIZER = "adamw"  # to which the column applies
_UNSCALED = ("latent", "moe")  # whose matrices have other widths besides


class WidthScaledConfig(ModelConfig):
    """The part of a decoder's keys that says whether its width scales what begins and what learns."""

    base_width: PositiveInt | None = Field(
        default=None,
        description="mu-P, for adamw: hidden matrices begin and learn, and logits are scaled, as suits "
        "width / base_width; then heads of one head_dim and mlp_width grow with width. null: not.",
    )

    @property
    def width_ratio(self) -> float:
        """base_width / width, 1 without."""
        return 1.0 if self.base_width is None else self.base_width / int(getattr(self, "width"))  # noqa: B009

    @property
    def hidden_stddev(self) -> float:
        """Standard deviation at the start of hidden matrices."""
        return INIT_STDDEV * math.sqrt(self.width_ratio)

    @model_validator(mode="after")
    def _all_is_scaled(self) -> "WidthScaledConfig":
        beside = [key for key in _UNSCALED if getattr(self, key) is not None]
        if self.base_width is not None and beside:
            raise ValueError(
                f"base_width={self.base_width}: what {beside[0]} adds is not scaled; leave out one of them"
            )
        return self


def rate_of(model: WidthScaledConfig, optimizer: str, parameter: Parameter) -> float:
    """What the learning rate of a parameter is multiplied by. Raises `InvalidError` for an optimizer without a column.

    The decay of adam goes through its moments, and so has none either.
    """
    if model.base_width is None:
        return 1.0
    if optimizer != _OPTIMIZER:
        raise InvalidError(f"base_width={model.base_width}: mu-P here is that of {_OPTIMIZER}, not of {optimizer}")
    is_hidden = parameter.is_matrix and parameter.name.endswith(".kernel")
    return model.width_ratio if is_hidden else 1.0


LayerKind = Literal["full", "window", "no_rope"]


class Biases(FrozenModel):
    """Which matmuls have a bias."""

    query_key_value: bool = Field(
        default=False, description="Those that make queries, keys and values; with `latent`, those that make latents."
    )
    attention_out: bool = Field(default=False, description="The one after attention.")
    mlp: bool = Field(default=False, description="Those of the MLP.")


class LatentConfig(FrozenModel):
    """Heads whose keys and values are made of one latent vector of a token (DeepSeek-V2, 2024)."""

    key_value_rank: PositiveInt = Field(description="Width of the latent that keys and values are made of.")
    query_rank: PositiveInt | None = Field(
        default=None, description="Width of the latent that queries are made of; null: made without one."
    )
    plain_head_dim: PositiveInt = Field(description="Part of a head of queries and keys that is not rotated.")
    rotary_head_dim: PositiveInt = Field(description="Part that is, even; of keys one is shared by all heads.")
    value_head_dim: PositiveInt = Field(description="Width of a head of values.")

    @property
    def cached_width(self) -> int:
        """What a cached decode keeps of a token in each layer."""
        return self.key_value_rank + self.rotary_head_dim

    def matmul_parameters(self, heads: int, width: int) -> int:
        """Parameters of the matmuls that make so many heads of a stream of this width, and of the one behind them."""
        queries, values = heads * (self.plain_head_dim + self.rotary_head_dim), heads * self.value_head_dim
        made = queries * width if self.query_rank is None else self.query_rank * (width + queries)
        up = self.key_value_rank * (heads * self.plain_head_dim + values)
        return made + self.cached_width * width + up + values * width


class Stage(NamedTuple):
    """Layers that are stacked: some kinds one after the other, the whole so many times."""

    name: str  # of its parameters
    kinds: tuple[LayerKind, ...]
    repeats: int
    is_sparse: bool = False  # whether they have experts in the place of an MLP


def _need_preset_or_sizes(schema: JsonObject) -> None:
    """In the JSON Schema too, a preset stands for the keys that are needed without one."""
    schema["anyOf"] = [{"required": ["preset"]}, {"required": schema.pop("required")}]


class DecoderConfig(WidthScaledConfig):
    """Sizes and choices of a decoder: with these, today's open families are one model.

    `layer_loop: scan` compiles one turn of the pattern of layers and loops over it, `unroll` compiles every layer in
    line, which takes longer to compile and on a TPU less time and memory in a step; both hold the same parameters.
    """

    model_config = ConfigDict(json_schema_extra=_need_preset_or_sizes)

    preset: str | None = Field(
        default=None,
        exclude=True,
        description="A published model, llama3_8b for one; keys beside it replace its values.",
    )
    layers: PositiveInt = Field(description="Transformer blocks.")
    width: PositiveInt = Field(description="Width of the residual stream.")
    heads: PositiveInt = Field(description="Heads of queries; topology.mesh.tensor must divide them.")
    key_value_heads: PositiveInt | Auto = Field(
        default="auto",
        description="Heads of keys and values, each shared by heads / key_value_heads; auto: heads. Where "
        "topology.mesh.tensor does not divide them, every device whose queries read one has a copy of it.",
    )
    head_dim: PositiveInt | Auto = Field(default="auto", description="Width of a head, even; auto: width / heads.")
    latent: LatentConfig | None = Field(
        default=None,
        description="Make keys and values of one latent vector of a token; key_value_heads and head_dim then stay "
        "auto. null: not.",
    )
    mlp_width: PositiveInt = Field(description="Hidden width of the MLP.")
    mlp: Literal["swiglu", "geglu", "squared_relu"] = Field(
        default="swiglu",
        description="SiLU or tanh-approximated GELU of a gate, times a second matmul; or relu(x)^2 alone.",
    )
    moe: MoeConfig | None = Field(default=None, description="Experts in the place of the MLP; null: none.")
    norm: Literal["pre", "post", "both"] = Field(
        default="pre", description="Whether attention and MLP have their input normalised, their output, or both."
    )
    norm_epsilon: PositiveFloat = Field(
        default=1e-5, description="Added to the mean square in every norm; in those of latents 1e-6 is."
    )
    norm_offset: bool = Field(
        default=False, description="Keep each norm's scale as its distance from 1, as Gemma does."
    )
    query_key_norm: Literal["head", "whole"] | None = Field(
        default=None, description="Normalise queries and keys, head by head or all heads as one; null: not."
    )
    bias: Biases = Field(default=Biases(), description="Which matmuls have a bias.")
    layer_pattern: list[LayerKind] = Field(
        default=["full"],
        min_length=1,
        description="Kinds of layers, repeated to the last: attention to the whole row (full), to the last `window` "
        "positions (window), to the whole row without rotary positions (no_rope).",
    )
    window: PositiveInt | None = Field(
        default=None, description="Positions that a query of a window layer sees, its own included."
    )
    rope: Rope = Field(default=Rope(), description="Rotary positions.")
    window_rope: Rope | None = Field(default=None, description="Those of window layers; null: `rope`.")
    query_scale: PositiveFloat | Auto = Field(
        default="auto", description="What scores are multiplied by; auto: 1 / sqrt(head_dim)."
    )
    attention_softcap: PositiveFloat | None = Field(default=None, description="s of s tanh(scores / s); null: none.")
    logit_softcap: PositiveFloat | None = Field(default=None, description="s of s tanh(logits / s); null: none.")
    embedding_scale: PositiveFloat | Literal["sqrt_width"] = Field(
        default=1.0, description="What embeddings are multiplied by: a number, or the square root of width."
    )
    tied_embedding: bool = Field(default=False, description="Make logits by the embedding, not a matrix of their own.")
    neftune_alpha: NonNegativeFloat = Field(default=0.0, description="NEFTune noise in training, its paper's alpha.")
    z_loss: NonNegativeFloat = Field(
        default=0.0, description="Weight of the squared log of each softmax's denominator in the training loss."
    )
    vocabulary_size: PositiveInt | Auto = Field(default="auto", description="auto takes the data set's.")
    layer_loop: Literal["scan", "unroll"] = Field(default="scan", description="Compile one turn of layers, or each.")

    @model_validator(mode="before")
    @classmethod
    def _fill_in_preset(cls, data: Any) -> Any:
        """What a preset says, replaced by what stands beside it: of a section key by key."""
        if not isinstance(data, dict) or not isinstance(data.get("preset"), str):
            return data
        name = data["preset"]
        if name not in PRESETS:
            raise ValueError(f"unknown preset {name[:60]!r}{suggest_choices(name, sorted(PRESETS))}")
        preset = PRESETS[name]
        sections = {
            key: preset[key] | data[key]
            for key in preset
            if isinstance(preset[key], dict) and isinstance(data.get(key), dict)
        }
        return preset | data | sections

    @model_validator(mode="after")
    def _heads_fit(self) -> "DecoderConfig":
        if self.latent is None and self.head_dim == "auto" and self.width % self.heads:
            raise ValueError(
                f"width={self.width} does not divide over heads={self.heads}; use a multiple of {self.heads}, or set "
                "head_dim"
            )
        if self.rotary_size % 2:
            key = "head_dim" if self.latent is None else "latent.rotary_head_dim"
            raise ValueError(f"{key}={self.rotary_size} is odd; rotary positions need pairs")
        if self.heads % self.key_heads:
            raise ValueError(f"heads={self.heads} does not divide over key_value_heads={self.key_heads}")
        return self

    @model_validator(mode="after")
    def _latent_is_alone(self) -> "DecoderConfig":
        beside = {"key_value_heads": "auto", "head_dim": "auto", "query_key_norm": None}
        given = [f"{key}={getattr(self, key)}" for key, unset in beside.items() if getattr(self, key) != unset]
        if self.latent is not None and given:
            raise ValueError(f"{given[0]} says what `latent` says another way; leave out one of them")
        return self

    @model_validator(mode="after")
    def _window_is_read(self) -> "DecoderConfig":
        if "window" in self.layer_pattern and self.window is None:
            raise ValueError("layer_pattern has window layers; set window, the positions that they see")
        unread = [name for name in ("window", "window_rope") if getattr(self, name) is not None]
        if "window" not in self.layer_pattern and unread:
            raise ValueError(f"{unread[0]} is set, and layer_pattern has no window layer that reads it")
        return self

    @model_validator(mode="after")
    def _experts_fit(self) -> "DecoderConfig":
        moe = self.moe
        if moe is None:
            return self
        if moe.dense_layers >= self.layers:
            raise ValueError(f"moe.dense_layers={moe.dense_layers} leaves none of layers={self.layers} with experts")
        if moe.dense_layers == 0 and self.expert_width != self.mlp_width:
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
    def key_heads(self) -> int:
        """Heads of keys and values."""
        return self.heads if self.key_value_heads == "auto" else self.key_value_heads

    @property
    def head_size(self) -> int:
        """Width of a head of queries and keys."""
        if self.latent is not None:
            return self.latent.plain_head_dim + self.latent.rotary_head_dim
        return self.width // self.heads if self.head_dim == "auto" else self.head_dim

    @property
    def rotary_size(self) -> int:
        """Width of what is rotated of a head."""
        return self.head_size if self.latent is None else self.latent.rotary_head_dim

    @property
    def value_size(self) -> int:
        """Width of a head of values."""
        return self.head_size if self.latent is None else self.latent.value_head_dim

    @property
    def attention_matmul_parameters(self) -> int:
        """Parameters of the matmuls of one layer's attention."""
        if self.latent is not None:
            return self.latent.matmul_parameters(self.heads, self.width)
        return 2 * (self.heads + self.key_heads) * self.head_size * self.width

    @property
    def layer_matmul_parameters(self) -> float:
        """Parameters of the matmuls that compute a token in one layer; the mean of all layers, where they differ."""
        attention = self.attention_matmul_parameters
        mlp = (self.halves + 1) * self.mlp_width * self.width
        if self.moe is None:
            return attention + mlp
        experts = self.expert_matmul_parameters + self.moe.experts * self.width  # and the router
        dense = self.moe.dense_layers
        return attention + (dense * mlp + (self.layers - dense) * experts) / self.layers

    @property
    def expert_matmul_parameters(self) -> int:
        """Parameters of the experts that compute a token in one layer."""
        if self.moe is None:
            return 0
        number = self.moe.experts_per_token + self.moe.shared_experts
        return number * (self.halves + 1) * self.expert_width * self.width

    @property
    def halves(self) -> int:
        """Matrices into the hidden layer of an MLP or an expert."""
        return 1 if self.mlp == "squared_relu" else 2

    @property
    def kinds(self) -> list[LayerKind]:
        """The kind of every layer, first to last."""
        return [self.layer_pattern[layer % len(self.layer_pattern)] for layer in range(self.layers)]

    @property
    def stages(self) -> list[Stage]:
        """All layers, in order: whole turns of the pattern, then what is left of one; those without experts first."""
        if self.moe is None:
            return self._stages(0, self.layers, "", False)
        dense = self.moe.dense_layers
        return [*self._stages(0, dense, "dense_", False), *self._stages(dense, self.layers, "", True)]

    def _stages(self, first: int, stop: int, prefix: str, is_sparse: bool) -> list[Stage]:
        """The layers from `first` on to `stop`, which is none of them."""
        shift = first % len(self.layer_pattern)
        pattern = (*self.layer_pattern[shift:], *self.layer_pattern[:shift])
        turns, rest = divmod(stop - first, len(pattern))
        found = [Stage(f"{prefix}blocks", pattern, turns, is_sparse)] if turns else []
        return [*found, Stage(f"last_{prefix}blocks", pattern[:rest], 1, is_sparse)] if rest else found

    def window_of(self, kind: LayerKind) -> int | None:
        """Positions that a query of such a layer sees; None: all before it."""
        return self.window if kind == "window" else None

    def rope_of(self, kind: LayerKind) -> Rope | None:
        """Rotary positions of such a layer."""
        if kind == "no_rope":
            return None
        return self.window_rope or self.rope if kind == "window" else self.rope


class DecoderTrainerConfig(TrainerConfig[DecoderConfig]):
    """The `config` of a job that trains a decoder."""

    @model_validator(mode="after")
    def _window_fits_row(self) -> "DecoderTrainerConfig":
        window, length = self.model.window, self.data.sequence_length
        if window is not None and window > length:
            raise ValueError(
                f"model.window={window} is larger than a row, data.sequence_length={length}; use at most {length}"
            )
        return self
