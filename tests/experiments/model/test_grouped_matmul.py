"""The ragged matmul of TPUs, with its gradient kernels interpreted."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.model import grouped_matmul

I, O = 8, 24  # noqa: E741
CASES = {
    "full": (128, (32, 0, 96)),
    "one expert has all": (256, (0, 256)),
    "slots are left over": (128, (20, 7, 50)),
    "none is filled": (128, (0, 0)),
    "rows that the kernel does not divide": (72, (40, 24)),
    "more rows than a tile": (640, (300, 1, 339)),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_ragged_matmul_and_gradients_equal_single_matmuls(case, dtype, interpreted_products):
    num_slots, counts = CASES[case]
    generator = np.random.default_rng(0)
    x, w, dy = (
        jnp.asarray(generator.standard_normal(shape), dtype)
        for shape in ((num_slots, I), (len(counts), I, O), (num_slots, O))
    )
    dy = dy.at[sum(counts) :].set(0)  # slots after the last token are never read
    y, pull_back = jax.vjp(functools.partial(grouped_matmul.ragged_matmul, jnp.array(counts)), x, w)
    dx, dw = pull_back(dy)
    wide_x, wide_w, wide_dy = (np.asarray(array, np.float64) for array in (x, w, dy))
    expected = np.zeros((num_slots, O)), np.zeros((num_slots, I)), np.zeros(w.shape)
    for expert, stop in enumerate(np.cumsum(counts)):
        rows = slice(stop - counts[expert], stop)
        expected[0][rows] = wide_x[rows] @ wide_w[expert]
        expected[1][rows] = wide_dy[rows] @ wide_w[expert].T
        expected[2][expert] = wide_x[rows].T @ wide_dy[rows]
    tolerance = {"rtol": 2e-2, "atol": 0.3} if dtype == jnp.bfloat16 else {"rtol": 1e-5, "atol": 1e-4}
    for actual, wanted in zip((y, dx, dw), expected, strict=True):
        assert actual.dtype == dtype
        np.testing.assert_allclose(np.asarray(actual, np.float64), wanted, **tolerance)
