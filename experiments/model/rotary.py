"""Rotary position embedding (RoPE, Su et al., 2021): frequencies, published scalings and the rotation itself.

Two conventions exist for the pairs of elements that rotate together: the two halves of a head, as in most weights on
Hugging Face, or neighbouring elements.

Shape legend: B batch, T sequence, N heads, H width of a head, F = H / 2 frequencies.
"""

import functools
import math
from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from experiments.model.platform import rotates_by_matmul
from runner.spec import Auto, FrozenModel
from runner.train.kernel_check import KernelCase, KernelTrial, get_kernel_use

KERNEL = "rotate_by_matmul"  # name of the kernel in its test


class LinearScaling(FrozenModel):
    """Positions divided by a factor (Chen et al., 2023)."""

    name: Literal["linear"] = Field(description="Kind of scaling.")
    factor: PositiveFloat = Field(description="Divisor of all positions.")


class Llama3Scaling(FrozenModel):
    """Low frequencies divided, high frequencies unchanged, as in Llama 3.1."""

    name: Literal["llama3"] = Field(description="Kind of scaling.")
    factor: PositiveFloat = Field(description="Divisor of the low frequencies.")
    original_positions: PositiveInt = Field(description="Sequence length that the model was pretrained with.")
    low_frequency_factor: PositiveFloat = Field(
        default=1.0, description="Frequencies with fewer turns than this in original_positions are divided."
    )
    high_frequency_factor: PositiveFloat = Field(
        default=4.0, description="Frequencies with more turns than this in original_positions stay unchanged."
    )

    @model_validator(mode="after")
    def _validate_factors(self) -> "Llama3Scaling":
        low, high = self.low_frequency_factor, self.high_frequency_factor
        if low >= high:
            raise ValueError(f"low_frequency_factor={low} is not below high_frequency_factor={high}; make it smaller")
        return self


class YarnScaling(FrozenModel):
    """Low frequencies divided, high ones unchanged, a ramp between, and sharper attention (YaRN, Peng et al., 2023)."""

    name: Literal["yarn"] = Field(description="Kind of scaling.")
    factor: PositiveFloat = Field(description="Divisor of the low frequencies.")
    original_positions: PositiveInt = Field(description="Sequence length that the model was pretrained with.")
    beta_fast: PositiveFloat = Field(
        default=32.0, description="Frequencies with more turns than this in original_positions stay unchanged."
    )
    beta_slow: PositiveFloat = Field(
        default=1.0, description="Frequencies with fewer turns than this in original_positions are divided."
    )
    attention_factor: PositiveFloat | Auto = Field(
        default="auto", description="Factor on rotated queries and keys; auto: 0.1 ln(factor) + 1."
    )
    truncate: bool = Field(
        default=True,
        description="Round the pairs of elements between which frequencies change to whole ones, outwards; GPT-OSS "
        "does not.",
    )

    @property
    def rotation_factor(self) -> float:
        """`attention_factor` with `auto` resolved."""
        return 0.1 * math.log(max(self.factor, 1)) + 1 if self.attention_factor == "auto" else self.attention_factor


Scaling = Annotated[LinearScaling | Llama3Scaling | YarnScaling, Field(discriminator="name")]
Pairs = Literal["halves", "neighbours"]


class Rope(FrozenModel):
    """Rotary positions of one kind of layer."""

    theta: PositiveFloat = Field(default=10_000.0, description="Base of the wavelengths.")
    scaling: Scaling | None = Field(
        default=None, description="Scaling of the frequencies for longer sequences; null: none."
    )
    pairs: Pairs = Field(
        default="halves",
        description="Elements that rotate together: the two halves of a head, or neighbours (0 and 1, 2 and 3, ...).",
    )
    fraction: PositiveFloat = Field(
        default=1.0, le=1.0, description="Share of a head that is rotated: its first elements."
    )
    proportional: bool = Field(
        default=False,
        description="`fraction` is the share of the pairs of a whole head, those with the shortest wavelengths, and "
        "not a smaller head at its beginning (Gemma 4).",
    )

    def resolve(self) -> "Rope":
        """Return the same rotary positions with `auto` resolved to nine digits."""
        if not isinstance(self.scaling, YarnScaling):
            return self
        factor = float(f"{self.scaling.rotation_factor:.9g}")
        return self.model_copy(update={"scaling": self.scaling.model_copy(update={"attention_factor": factor})})


class Rotation(NamedTuple):
    """Cosines and sines that rotate queries and keys at given positions; B is 1 if all sequences share them."""

    cos: jax.Array  # (B, T, 1, F)
    sin: jax.Array


def frequencies(rope: Rope, head_dim: int) -> tuple[np.ndarray, float]:
    """Return radians per position for each pair of elements, float32, and the factor on cosines and sines.

    `head_dim` is the width of the rotated part of a head, which has half as many pairs.
    """
    # Rounded from 64 bits: NumPy's powers of 32 bits differ between CPUs in their last bit, and so would the programs.
    plain_F = np.array([float(rope.theta) ** (-even / head_dim) for even in range(0, head_dim, 2)], np.float32)
    scaling = rope.scaling
    if scaling is None:
        return plain_F, 1.0
    divided_F = plain_F / np.float32(scaling.factor)
    if isinstance(scaling, LinearScaling):
        return divided_F, 1.0
    if isinstance(scaling, Llama3Scaling):
        turns_F = scaling.original_positions * plain_F / (2 * np.pi)
        low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
        unchanged_F = np.clip((turns_F - low) / (high - low), 0, 1).astype(np.float32)
        return unchanged_F * plain_F + (1 - unchanged_F) * divided_F, 1.0

    # YaRN: a linear ramp between the pairs that make `beta_fast` and `beta_slow` turns in the original sequence.
    def find_pair(turns: float) -> float:
        wavelengths = scaling.original_positions / (turns * 2 * math.pi)
        return head_dim * math.log(wavelengths) / (2 * math.log(rope.theta))

    first, last = find_pair(scaling.beta_fast), find_pair(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    ramp_F = (np.arange(head_dim // 2, dtype=np.float32) - np.float32(first)) / np.float32(max(last - first, 0.001))
    unchanged_F = 1 - np.clip(ramp_F, 0, 1)
    return unchanged_F * plain_F + (1 - unchanged_F) * divided_F, scaling.rotation_factor


def rotation_at(positions_BxT: jax.Array, rope: Rope, head_dim: int) -> Rotation:
    """Return the cosines and sines at these positions, float32; `head_dim` is the width that `rope` is a part of."""
    if rope.proportional:
        radians_F, factor = frequencies(rope, head_dim)
        # The other pairs turn by no angle, so that a kernel can still rotate whole heads.
        radians_F = np.where(np.arange(head_dim // 2) < round(rope.fraction * head_dim) // 2, radians_F, np.float32(0))
    else:
        radians_F, factor = frequencies(rope, round(rope.fraction * head_dim))
    angles_BxTx1xF = (positions_BxT[..., None].astype(jnp.float32) * radians_F)[:, :, None]
    return Rotation(jnp.cos(angles_BxTx1xF) * factor, jnp.sin(angles_BxTx1xF) * factor)


def rotate(x_BxTxNxH: jax.Array, rotation: Rotation, pairs: Pairs = "halves") -> jax.Array:
    """Return `x` rotated, in its own dtype; the rotation is computed in float32.

    Neighbouring pairs are returned as halves. Queries and keys are permuted alike, so scores do not change, and the
    elements need not be put back. Elements behind the rotated part of a head stay as they are.
    """
    width = 2 * rotation.cos.shape[-1]
    if width < x_BxTxNxH.shape[-1]:
        rotated_BxTxNxR = rotate(x_BxTxNxH[..., :width], rotation, pairs)
        return jnp.concatenate([rotated_BxTxNxR, x_BxTxNxH[..., width:]], axis=-1)
    if pairs == "neighbours":
        x_BxTxNxH = jnp.concatenate([x_BxTxNxH[..., 0::2], x_BxTxNxH[..., 1::2]], axis=-1)
    if rotates_by_matmul() and (use := get_kernel_use()).is_allowed(KERNEL):
        use.record(_make_case(x_BxTxNxH))
        return rotate_by_matmul(x_BxTxNxH, rotation)
    return rotate_halves(x_BxTxNxH, rotation)


def rotate_halves(x_BxTxNxH: jax.Array, rotation: Rotation) -> jax.Array:
    """Return `x` with its halves rotated, in its own dtype."""
    first, second = jnp.split(x_BxTxNxH.astype(jnp.float32), 2, axis=-1)
    cos, sin = rotation
    rotated_BxTxNxH = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated_BxTxNxH.astype(x_BxTxNxH.dtype)


@jax.custom_vjp
def rotate_by_matmul(x_BxTxNxH: jax.Array, rotation: Rotation) -> jax.Array:
    """Rotate the halves of `x`, which swap places in a product with ones, minus ones and zeros.

    The product rounds nothing, and no array has the width of half a head. The backward pass rotates the gradient by the
    same angle in the other direction; angles get no gradient.
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


def _rotate_by_matmul_backward(rotation: Rotation, dy_BxTxNxH: jax.Array) -> tuple[jax.Array, None]:
    return rotate_by_matmul(dy_BxTxNxH, Rotation(rotation.cos, -rotation.sin)), None


rotate_by_matmul.defvjp(
    lambda x_BxTxNxH, rotation: (rotate_by_matmul(x_BxTxNxH, rotation), rotation), _rotate_by_matmul_backward
)


def _make_case(x_BxTxNxH: jax.Array) -> KernelCase:
    H, dtype = x_BxTxNxH.shape[-1], x_BxTxNxH.dtype

    def make_trial() -> KernelTrial:
        generator = np.random.default_rng(0)
        x, gradient = (generator.normal(size=(2, 256, 2, H)).astype(dtype) for _ in range(2))
        radians = generator.uniform(0, 2 * np.pi, (1, 256, 1, H // 2))
        angles = np.cos(radians).astype(np.float32), np.sin(radians).astype(np.float32)

        def run(form: Callable[..., jax.Array], x: jax.Array, gradient: jax.Array, *angles: jax.Array) -> Any:
            out, pull_back = jax.vjp(lambda x: form(x, Rotation(*angles)), x)
            return out, *pull_back(gradient)

        def reference(x: jax.Array, gradient: jax.Array, *angles: jax.Array) -> Any:
            return run(rotate_halves, x.astype(jnp.float32), gradient.astype(jnp.float32), *angles)

        return KernelTrial(functools.partial(run, rotate_by_matmul), reference, (x, gradient, *angles))

    return KernelCase(
        KERNEL,
        "rotation",
        "ours",
        "a rotation of the halves of a head",
        {"head": H},
        dtype.name,
        make_trial,
        (__file__,),
    )
