"""The ragged matmul of TPUs, with its gradient kernels interpreted."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.model import grouped_matmul
from experiments.model.platform import import_for_tpu

MEGABLOX = "jax.experimental.pallas.ops.tpu.megablox.gmm"
I, O = 8, 24  # noqa: E741
CASES = {
    "full": (128, (32, 0, 96)),
    "one expert has all": (256, (0, 256)),
    "slots are left over": (128, (20, 7, 50)),
    "none is filled": (128, (0, 0)),
    "rows that the kernel does not divide": (72, (40, 24)),
    "more rows than a tile": (640, (300, 1, 339)),
}


@pytest.mark.daily(3)
@pytest.mark.parametrize(
    ("dtype", "case"),
    [
        *((jnp.float32, case) for case in CASES if case != "full"),
        (jnp.bfloat16, "full"),
        pytest.param(jnp.float32, "full", marks=pytest.mark.soak),
        *(pytest.param(jnp.bfloat16, case, marks=pytest.mark.soak) for case in CASES if case != "full"),
    ],
)
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


@pytest.mark.daily(1)
@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=() if seed in (4, 5) else pytest.mark.soak) for seed in range(6)]
)
def test_visits_are_those_of_megablox(seed):
    """Compare the visits that are made, for random numbers of slots, some of them zero."""
    generator = np.random.default_rng(seed)
    experts, num_slots, tile = int(generator.integers(1, 9)), 640, (128, 64)[seed % 2]
    cuts = np.sort(generator.integers(0, num_slots // 20, experts - 1)) * 20
    counts = jnp.asarray(np.diff(cuts, prepend=0, append=num_slots), jnp.int32)
    (starts, own, tiles), number = grouped_matmul.list_visits(counts, num_slots, tile)
    reference, wanted = import_for_tpu(MEGABLOX).make_group_metadata(
        group_sizes=counts,
        m=num_slots,
        tm=tile,
        start_group=jnp.int32(0),
        num_nonzero_groups=experts,
        visit_empty_groups=False,
    )
    assert int(number) == int(wanted)
    np.testing.assert_array_equal(starts, reference[0])
    for found, expected in zip((own, tiles), reference[1:], strict=True):
        assert found.shape == expected.shape
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found[:number], expected[:number])
        assert int(found.min()) >= 0
        assert int(found.max()) <= int(expected.max())
