"""mu-P: what of a decoder depends on its width, so that the learning rate that suits a narrow one suits a wide one.

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

from pydantic import Field, PositiveInt, model_validator

from experiments.model.blocks import INIT_STDDEV
from runner.config import ModelConfig
from runner.errors import InvalidError
from runner.train.recipe.parameter import Parameter

_OPTIMIZER = "adamw"  # to which the column applies
_UNSCALED = ("latent", "moe")  # whose matrices have other widths besides


class Scaled(ModelConfig):
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
    def _all_is_scaled(self) -> "Scaled":
        beside = [key for key in _UNSCALED if getattr(self, key) is not None]
        if self.base_width is not None and beside:
            raise ValueError(
                f"base_width={self.base_width}: what {beside[0]} adds is not scaled; leave out one of them"
            )
        return self


def rate_of(model: Scaled, optimizer: str, parameter: Parameter) -> float:
    """What the learning rate of a parameter is multiplied by. Raises `InvalidError` for an optimizer without a column.

    The decay of adam goes through its moments, and so has none either.
    """
    if model.base_width is None:
        return 1.0
    if optimizer != _OPTIMIZER:
        raise InvalidError(f"base_width={model.base_width}: mu-P here is that of {_OPTIMIZER}, not of {optimizer}")
    is_hidden = parameter.is_matrix and parameter.name.endswith(".kernel")
    return model.width_ratio if is_hidden else 1.0
