"""Rotary positions: queries and keys turned by angles that grow with the position (Su et al., 2021).

Owns the angles, with the published ways to stretch them over longer rows, and the keys of a spec that choose them. The
halves of a head turn against each other, as in most of Hugging Face's weights, or neighbours do.

Shape legend: B batch, T sequence, N heads, H width of a head, F = H / 2 frequencies.
"""

import math
from typing import Annotated, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from experiments.model.platform import multiplies_to_turn
from runner.spec import Auto, FrozenModel


class LinearScaling(FrozenModel):
    """Positions divided by a factor (Chen et al., 2023)."""

    name: Literal["linear"] = Field(description="Which scaling.")
    factor: PositiveFloat = Field(description="By how much positions shrink.")


class Llama3Scaling(FrozenModel):
    """Slow frequencies divided, fast ones kept, as in Llama 3.1."""

    name: Literal["llama3"] = Field(description="Which scaling.")
    factor: PositiveFloat = Field(description="By how much the slow frequencies shrink.")
    original_positions: PositiveInt = Field(description="Length of the rows that the model was trained on before.")
    low_frequency_factor: PositiveFloat = Field(default=1.0, description="Turns in a row below which all is divided.")
    high_frequency_factor: PositiveFloat = Field(default=4.0, description="Turns in a row above which all is kept.")

    @model_validator(mode="after")
    def _low_is_below_high(self) -> "Llama3Scaling":
        low, high = self.low_frequency_factor, self.high_frequency_factor
        if low >= high:
            raise ValueError(f"low_frequency_factor={low} is not below high_frequency_factor={high}")
        return self


class YarnScaling(FrozenModel):
    """Slow frequencies divided, fast ones kept, a ramp between, and sharper attention (Peng et al., 2023)."""

    name: Literal["yarn"] = Field(description="Which scaling.")
    factor: PositiveFloat = Field(description="By how much the slow frequencies shrink.")
    original_positions: PositiveInt = Field(description="Length of the rows that the model was trained on before.")
    beta_fast: PositiveFloat = Field(default=32.0, description="Turns in a row above which all is kept.")
    beta_slow: PositiveFloat = Field(default=1.0, description="Turns in a row below which all is divided.")
    attention_factor: PositiveFloat | Auto = Field(
        default="auto", description="What queries and keys are multiplied by; auto: 0.1 ln(factor) + 1."
    )


Scaling = Annotated[LinearScaling | Llama3Scaling | YarnScaling, Field(discriminator="name")]


Pairs = Literal["halves", "neighbours"]


class Rope(FrozenModel):
    """Rotary positions of one kind of layer."""

    theta: PositiveFloat = Field(default=10_000.0, description="Base of the wavelengths.")
    scaling: Scaling | None = Field(default=None, description="How angles are stretched over longer rows; null: not.")
    pairs: Pairs = Field(
        default="halves",
        description="What turns against each other: the halves of a head, or elements 0 and 1, 2 and 3, ... of it.",
    )


class Rotation(NamedTuple):
    """What turns queries and keys at given positions; one row of them serves a whole batch."""

    cos: jax.Array  # (B, T, 1, F)
    sin: jax.Array


def frequencies(rope: Rope, head_dim: int) -> tuple[np.ndarray, float]:
    """Radians per position of each of head_dim / 2 pairs, float32, and what cosine and sine are multiplied by."""
    exponents_F = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    plain_F = (1.0 / np.float32(rope.theta) ** exponents_F).astype(np.float32)
    scaling = rope.scaling
    if scaling is None:
        return plain_F, 1.0
    divided_F = plain_F / np.float32(scaling.factor)
    if isinstance(scaling, LinearScaling):
        return divided_F, 1.0
    if isinstance(scaling, Llama3Scaling):
        turns_F = scaling.original_positions * plain_F / (2 * np.pi)
        low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
        kept_F = np.clip((turns_F - low) / (high - low), 0, 1).astype(np.float32)
        return kept_F * plain_F + (1 - kept_F) * divided_F, 1.0

    def pair_that_turns(times: float) -> float:
        wavelengths = scaling.original_positions / (times * 2 * math.pi)
        return head_dim * math.log(wavelengths) / (2 * math.log(rope.theta))

    first = max(math.floor(pair_that_turns(scaling.beta_fast)), 0)
    last = min(math.ceil(pair_that_turns(scaling.beta_slow)), head_dim - 1)
    ramp_F = (np.arange(head_dim // 2, dtype=np.float32) - first) / max(last - first, 0.001)
    kept_F = 1 - np.clip(ramp_F, 0, 1)
    factor = (
        0.1 * math.log(max(scaling.factor, 1)) + 1 if scaling.attention_factor == "auto" else scaling.attention_factor
    )
    return kept_F * plain_F + (1 - kept_F) * divided_F, factor


def rotation_at(positions_BxT: jax.Array, rope: Rope, head_dim: int) -> Rotation:
    """Cosines and sines at these positions, float32."""
    radians_F, factor = frequencies(rope, head_dim)
    angles_BxTx1xF = (positions_BxT[..., None].astype(jnp.float32) * radians_F)[:, :, None]
    return Rotation(jnp.cos(angles_BxTx1xF) * factor, jnp.sin(angles_BxTx1xF) * factor)


def rotate(x_BxTxNxH: jax.Array, rotation: Rotation, pairs: Pairs = "halves") -> jax.Array:
    """`x` turned, in its own dtype; the turn itself is computed in float32.

    Neighbours come out as halves: of queries and keys alike, so that no score shows it, and nothing need be put back.
    """
    if pairs == "neighbours":
        x_BxTxNxH = jnp.concatenate([x_BxTxNxH[..., 0::2], x_BxTxNxH[..., 1::2]], axis=-1)
    if multiplies_to_turn():
        return turned(x_BxTxNxH, rotation)
    first, second = jnp.split(x_BxTxNxH.astype(jnp.float32), 2, axis=-1)
    cos, sin = rotation
    turned_BxTxNxH = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned_BxTxNxH.astype(x_BxTxNxH.dtype)


@jax.custom_vjp
def turned(x_BxTxNxH: jax.Array, rotation: Rotation) -> jax.Array:
    """`x`, whose halves turn against each other, in its own dtype.

    The halves change places by a product with ones and zeros, which rounds nothing: no array is of half a head's width.
    The way back is to turn the gradient by the same angle in the other direction; of angles there is no gradient.
    """
    one_FxF = np.eye(x_BxTxNxH.shape[-1] // 2, dtype=np.float32)
    swap_HxH = np.kron(np.array([[0, 1], [-1, 0]], np.float32), one_FxF)
    other_BxTxNxH = jnp.einsum(
        "btnh,hi->btni",
        x_BxTxNxH,
        jnp.asarray(swap_HxH, x_BxTxNxH.dtype),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    cos, sin = (jnp.concatenate([angles, angles], axis=-1) for angles in rotation)
    return (x_BxTxNxH.astype(jnp.float32) * cos + other_BxTxNxH * sin).astype(x_BxTxNxH.dtype)


def _turned_forward(x_BxTxNxH: jax.Array, rotation: Rotation) -> tuple[jax.Array, Rotation]:
    return turned(x_BxTxNxH, rotation), rotation


def _turned_backward(rotation: Rotation, dy_BxTxNxH: jax.Array) -> tuple[jax.Array, None]:
    return turned(dy_BxTxNxH, Rotation(rotation.cos, -rotation.sin)), None


turned.defvjp(_turned_forward, _turned_backward)
