"""Implementations of causal attention, compared with a float64 reference and with each other.

Shape legend: B batch, T sequence, N heads of queries, K heads of keys and values, H width of a head of queries and
keys, W width of a head of values.
"""

import functools
import re
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import NamedSharding, PartitionSpec

from experiments.model import attention, tpu_attention
from experiments.model import platform as form
from experiments.model.attention import (
    BLOCKED,
    FUSED,
    IMPLEMENTATIONS,
    SPLASH,
    cached_attention,
    causal_attention,
)
from experiments.model.rotary import Rope, rotate, rotation_at
from runner.errors import InvalidError
from runner.parallel.mesh import use_sharding_rules
from tests.experiments.model.attention_forms import (
    blocked_attention,
    fused_attention,
    splash_attention,
    xla_attention,
)
from tests.support.tiny_jobs import make_full_mesh

ON_A_CPU = [causal_attention, xla_attention]
SPLITS = [(2, 2, 2), (8, 1, 1), (1, 8, 1), (1, 2, 4), (4, 1, 2)]


class Case(NamedTuple):
    """Sizes of arrays, and options of attention."""

    T: int = 150
    N: int = 4
    K: int = 4
    H: int = 8
    W: int = 8
    B: int = 2
    segments: bool = False
    window: int | None = None
    softcap: float | None = None
    scale: float | None = None
    sinks: bool = False

    @property
    def options(self):
        names = ("window", "softcap", "scale")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def make_arrays(self):
        """Return queries, keys, values and an output gradient."""
        generator = np.random.default_rng(0)
        shapes = [(self.N, self.H), (self.K, self.H), (self.K, self.W), (self.N, self.W)]
        return [generator.normal(size=(self.B, self.T, *shape)).astype(np.float32) for shape in shapes]

    def make_sinks(self):
        """Return a sink for every head by the name of the argument, or nothing without sinks."""
        return {"sinks_N": np.random.default_rng(2).normal(size=self.N).astype(np.float32)} if self.sinks else {}

    def make_segments(self):
        """Return different segments for every sequence, with padding at the end, or nothing without segments."""
        if not self.segments:
            return []
        generator = np.random.default_rng(1)
        cuts_Bx4 = np.sort(generator.integers(0, self.T + 1, (self.B, 4)))
        number_BxT = 1 + (np.arange(self.T) >= cuts_Bx4[:, :3, None]).sum(1)
        return [np.where(np.arange(self.T) < cuts_Bx4[:, 3:], number_BxT, 0).astype(np.int32)]


ALL_BUT_CAP = Case(segments=True, window=20, N=4, K=2, scale=0.3)
CASES = [
    *((form, case) for form in ON_A_CPU for case in (Case(), ALL_BUT_CAP._replace(W=6))),
    *(
        (causal_attention, case)
        for case in (
            Case(T=1),
            Case(T=64, N=4, K=1),
            Case(window=1),
            Case(window=150, softcap=2.0),
            Case(T=600, B=1, N=4, K=2, W=16, segments=True, window=50, softcap=1.5, scale=0.5, sinks=True),
        )
    ),
    *(
        pytest.param(form, case, marks=pytest.mark.soak)
        for form in ON_A_CPU
        for case in (
            *(Case(T) for T in (1, 16, 64, 100, 128, 600)),
            *(Case(N=6, K=3, sinks=True, window=window) for window in (None, 1, 20) if form is causal_attention),
            *(Case(N=6, K=K) for K in (1, 2, 3)),
            *(Case(window=window) for window in (1, 2, 63, 64, 65, 149, 150, 1000)),
            Case(T=600, window=70, N=4, K=2),
            Case(scale=0.2),
            Case(segments=True),
        )
    ),
    *(
        pytest.param(causal_attention, case, marks=pytest.mark.soak)
        for case in (Case(softcap=2.0), Case(W=4), Case(W=16, segments=True), Case(softcap=50.0, scale=3.0))
    ),
]


def compute_reference(case, q_BxTxNxH, k_BxTxKxH, v_BxTxKxW, g_BxTxNxW, segments_BxT=None, sinks_N=None):
    """Return output and gradients in float64, one head of queries at a time."""
    q, k, v, g = (x.astype(np.float64) for x in (q_BxTxNxH, k_BxTxKxH, v_BxTxKxW, g_BxTxNxW))
    (B, T, N), scale = q.shape[:3], case.scale or 1 / np.sqrt(q.shape[3])
    results = [np.zeros_like(x) for x in (g, q, k, v, *([] if sinks_N is None else [sinks_N.astype(np.float64)]))]
    segments_BxT = np.ones((B, T)) if segments_BxT is None else segments_BxT
    distance_TxT = np.arange(T)[:, None] - np.arange(T)
    for b, n in np.ndindex(B, N):
        head = (b, slice(None), n), (b, slice(None), n // (N // k.shape[2]))
        q_TxH, k_TxH, v_TxW, g_TxW = q[head[0]], k[head[1]], v[head[1]], g[head[0]]
        s_TxT, slope_TxT = q_TxH @ k_TxH.T * scale, np.full((T, T), scale)
        if case.softcap:
            tanh_TxT = np.tanh(s_TxT / case.softcap)
            s_TxT, slope_TxT = case.softcap * tanh_TxT, scale * (1 - tanh_TxT**2)
        p_TxT = np.exp(s_TxT) * (distance_TxT >= 0) * (distance_TxT < (case.window or T))
        p_TxT *= segments_BxT[b][:, None] == segments_BxT[b]
        sink_Tx1 = np.full((T, 1), 0.0 if sinks_N is None else np.exp(sinks_N[n].astype(np.float64)))
        total_Tx1 = p_TxT.sum(axis=1, keepdims=True) + sink_Tx1
        p_TxT, sink_Tx1 = p_TxT / total_Tx1, sink_Tx1 / total_Tx1
        dp_TxT = g_TxW @ v_TxW.T
        inner_Tx1 = (p_TxT * dp_TxT).sum(axis=1, keepdims=True)
        ds_TxT = p_TxT * (dp_TxT - inner_Tx1) * slope_TxT
        if sinks_N is not None:
            results[4][n] -= (sink_Tx1 * inner_Tx1).sum()
        results[0][head[0]] = p_TxT @ v_TxW
        results[1][head[0]] = ds_TxT @ k_TxH
        results[2][head[1]] += ds_TxT.T @ q_TxH
        results[3][head[1]] += p_TxT.T @ g_TxW
    return results


def compute_value_and_gradients(form, q, k, v, g, *segments, sinks_N=None, **options):
    def attend(q, k, v, *sinks):
        return form(q, k, v, *segments, **({"sinks_N": sinks[0]} if sinks else {}), **options)

    out, pullback = jax.vjp(attend, q, k, v, *([] if sinks_N is None else [sinks_N]))
    return out, *pullback(g)


def check_case(form, case):
    arrays, segments = case.make_arrays(), case.make_segments()
    run = jax.jit(functools.partial(compute_value_and_gradients, form, **case.options))
    sinks = case.make_sinks()
    actual = run(*map(jnp.asarray, arrays), *map(jnp.asarray, segments), **sinks)
    wanted = compute_reference(case, *arrays, *segments, **sinks)
    for got, want, tolerance in zip(actual, wanted, [1e-5] + [1e-4] * (len(wanted) - 1), strict=True):
        np.testing.assert_allclose(got, want, atol=tolerance, rtol=tolerance)


@pytest.mark.daily(4)
@pytest.mark.parametrize(("form", "case"), CASES)
def test_attention_and_gradients_match_a_float64_reference(form, case):
    check_case(form, case)


TPU_CASES = [
    Case(T=380, B=1, N=4, K=2, H=64, W=32, segments=True, window=140, softcap=2.0, scale=0.2, sinks=True),
    Case(T=380, B=1, N=8, K=2, H=64, W=64, segments=True, window=140, softcap=2.0, scale=0.2),
    Case(T=380, B=1, N=4, K=4, H=64, W=64, segments=True, window=140, softcap=2.0, scale=0.2),
    Case(T=256, B=1, N=1, K=1, H=64, W=64),
    Case(T=256, B=1, N=4, K=2, H=128, W=128, segments=True),
    Case(T=384, B=1, N=1, K=1, H=64, W=64, window=1),
    Case(T=256, B=2, N=4, K=2, H=64, W=64, sinks=True),
]
# Both kernels with all options, and that of packed heads.
DAILY_TPU_CASES = [
    (TPU_CASES[0], fused_attention),
    (TPU_CASES[0], splash_attention),
    (TPU_CASES[1], fused_attention),
]


@pytest.mark.parametrize(
    ("case", "form"),
    [
        *DAILY_TPU_CASES,
        *(
            pytest.param(case, form, marks=pytest.mark.soak)
            for case in TPU_CASES
            for form in (fused_attention, splash_attention)
            if (case, form) not in DAILY_TPU_CASES
        ),
    ],
)
def test_interpreted_tpu_kernels_match_a_float64_reference(case, form, interpreted):
    check_case(form, case)


ROW = Case(T=1000, B=1, N=2, K=1, H=64, W=64)


@pytest.mark.daily(1)
@pytest.mark.parametrize(
    "case",
    [
        ROW._replace(window=300, segments=True, softcap=2.0, W=32),
        ROW._replace(N=4, K=2, window=300),
        pytest.param(
            ROW._replace(N=4, K=4, H=32, W=32, window=300, segments=True, softcap=2.0), marks=pytest.mark.soak
        ),
        *(
            pytest.param(ROW._replace(**options, window=window), marks=pytest.mark.soak)
            for window in (None, 1, 100, 128, 129, 256, 257, 384, 512, 513, 700)
            for options in ({}, {"segments": True, "softcap": 2.0, "B": 2}, {"N": 4, "K": 2, "W": 128})
        ),
    ],
)
def test_windows_and_block_lengths_of_the_fused_kernel(case, interpreted, monkeypatch):
    """Check with blocks of a quarter of their length on a TPU."""
    monkeypatch.setattr(attention, "_fused_block_tokens", lambda *_: 256)
    monkeypatch.setattr(tpu_attention, "LONG_STEP", 128)
    check_case(fused_attention, case)


@pytest.mark.parametrize(
    ("case", "rows"),
    [
        (ROW._replace(T=500, N=8, K=4, window=300), 2),
        *(pytest.param(ROW._replace(T=500, N=4, K=K, window=300), 2, marks=pytest.mark.soak) for K in (2, 4)),
        *(
            pytest.param(ROW._replace(N=4, B=2, **options), rows, marks=pytest.mark.soak)
            for options in ({"T": 500}, {"window": 300, "segments": True}, {"H": 128, "softcap": 2.0, "scale": 0.3})
            for rows in (1, 2)
        ),
    ],
)
def test_a_kernel_rotates_queries_and_keys_as_it_reads_them(case, rows, interpreted, monkeypatch):
    monkeypatch.setattr(attention, "_fused_block_tokens", lambda *_: 128)
    positions_BxT = np.arange(case.T) + 1000 * np.arange(min(rows, case.B))[:, None]
    rotation = rotation_at(jnp.asarray(positions_BxT), Rope(), case.H)

    def inside(*arrays, **options):
        return fused_attention(*arrays, rotation=rotation, **options)

    def rotate_first(q, k, *others, **options):
        return blocked_attention(rotate(q, rotation), rotate(k, rotation), *others, **options)

    arrays = [*map(jnp.asarray, case.make_arrays()), *map(jnp.asarray, case.make_segments())]
    got, want = (
        jax.jit(functools.partial(compute_value_and_gradients, form, **case.options))(*arrays)
        for form in (inside, rotate_first)
    )
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4, rtol=1e-4)


@pytest.mark.soak
@pytest.mark.parametrize("is_turned", [False, True])
@pytest.mark.parametrize("window", [None, 140])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_two_cores_read_nothing_before_it_is_written(dtype, window, is_turned, monkeypatch):
    """Check with two emulated cores that transfer blocks concurrently with the kernel, and memory filled with NaN."""
    case = ROW._replace(T=300, N=4, K=2, B=2, W=32, segments=True, softcap=2.0, window=window)
    params = pltpu.InterpretParams(uninitialized_memory="nan", detect_races=True, num_cores_or_threads=2)
    monkeypatch.setattr(pl, "pallas_call", functools.partial(pl.pallas_call, interpret=params))
    monkeypatch.setattr(attention, "_fused_block_tokens", lambda *_: 128)
    rotation = rotation_at(jnp.arange(case.T)[None], Rope(), case.H) if is_turned else None
    arrays = [jnp.asarray(x, dtype) for x in case.make_arrays()]
    ids = [*map(jnp.asarray, case.make_segments())]

    def rotate_first(q, k, *others, **options):
        q, k = (q, k) if rotation is None else (rotate(q, rotation), rotate(k, rotation))
        return blocked_attention(q, k, *others, **options)

    inside = functools.partial(fused_attention, rotation=rotation)
    got, want = (compute_value_and_gradients(form, *arrays, *ids, **case.options) for form in (inside, rotate_first))
    assert not interpret_pallas_call.races.races_found
    for one, other in zip(got, want, strict=True):
        tolerance = 1e-4 if dtype == jnp.float32 else 0.1
        np.testing.assert_allclose(one.astype(jnp.float32), other.astype(jnp.float32), atol=tolerance, rtol=tolerance)


@pytest.mark.soak
def test_long_blocks_of_the_splash_kernel(interpreted, monkeypatch):
    monkeypatch.setattr(attention, "SPLASH_BLOCK_TOKENS", (128,))
    for module in (attention, form):
        monkeypatch.setattr(module, "LONG_BLOCK_TOKENS", 256)
    monkeypatch.setattr(form, "fits_long_blocks", lambda *_: True)
    check_case(splash_attention, ROW._replace(segments=True, softcap=2.0))


@pytest.mark.daily(5)
@pytest.mark.parametrize(
    ("case", "dtype", "block"),
    [
        (Case(T=128, H=64, W=64), jnp.bfloat16, 128),
        (Case(T=640, H=64, W=64), jnp.bfloat16, 640),
        (Case(T=1000, H=64, W=64), jnp.bfloat16, 1024),
        (Case(T=1100, H=64, W=64), jnp.bfloat16, 384),
        (Case(T=4096, H=128, W=128), jnp.bfloat16, 1024),
        (Case(T=4096, H=192, W=128), jnp.bfloat16, 512),
        (Case(T=8192, H=128, W=128), jnp.float32, 384),
        (Case(T=16384, H=128, W=128), jnp.bfloat16, 0),
        (Case(T=100, H=64, W=64), jnp.bfloat16, 0),
    ],
)
def test_the_block_length_fits_the_smallest_vmem(case, dtype, block):
    q, _, v, _ = (jax.ShapeDtypeStruct(x.shape, dtype) for x in case.make_arrays())
    assert attention._fused_block_tokens(q, v) == block


@pytest.mark.parametrize(
    ("form", "sizes"),
    [
        (BLOCKED, (1, 1, 8)),
        *(pytest.param(BLOCKED, sizes, marks=pytest.mark.soak) for sizes in SPLITS),
        *(pytest.param(form, (2, 1, 4), marks=pytest.mark.soak) for form in (FUSED, SPLASH)),
    ],
)
def test_attention_is_the_same_under_any_sharding(form, sizes, interpreted, monkeypatch):
    monkeypatch.setitem(IMPLEMENTATIONS, "cpu", (form,))
    case = Case(T=125, N=24, K=6, B=8, segments=True, window=20, softcap=3.0, sinks=True)
    arrays = [*map(jnp.asarray, case.make_arrays()), *map(jnp.asarray, case.make_segments())]
    run = jax.jit(functools.partial(compute_value_and_gradients, blocked_attention, **case.options))
    want = run(*arrays, **case.make_sinks())
    mesh = make_full_mesh(*sizes)
    with use_sharding_rules(mesh):
        rows, heads = nn.logical_to_mesh_axes(("batch", "heads"))
        specs = [PartitionSpec(rows, None, heads if x.shape[2] % sizes[2] == 0 else None) for x in arrays[:4]]
        split = jax.device_put(arrays, [NamedSharding(mesh, spec) for spec in (*specs, PartitionSpec(rows))])
        run = jax.jit(functools.partial(compute_value_and_gradients, causal_attention, **case.options))
        actual = run(*split, **jax.device_put(case.make_sinks(), NamedSharding(mesh, PartitionSpec(heads))))
        forward = jax.jit(functools.partial(causal_attention, **case.options)).lower(*split[:3], split[4]).compile()
    for got, expected in zip(actual, want, strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-5)
    assert not re.findall(r"(all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)\(", forward.as_text())


@pytest.mark.soak
@pytest.mark.parametrize("rows", [1, 8])
def test_rotation_in_a_kernel_is_the_same_under_sharding(rows, interpreted, monkeypatch):
    case = Case(T=125, N=8, K=4, B=8, H=16, W=16, segments=True)
    arrays = [*map(jnp.asarray, case.make_arrays()), *map(jnp.asarray, case.make_segments())]
    positions_BxT = jnp.arange(case.T) + 7 * jnp.arange(rows)[:, None]
    rotation = rotation_at(positions_BxT, Rope(), case.H)

    def attend(q, k, v, segments):
        return causal_attention(q, k, v, segments, rotation)

    want = jax.jit(functools.partial(compute_value_and_gradients, attend))(*arrays)
    monkeypatch.setattr(attention, "platform", lambda: "tpu")
    mesh = make_full_mesh(2, 1, 4)
    with use_sharding_rules(mesh):
        axes = nn.logical_to_mesh_axes(("batch", "sequence", "heads"))
        specs = [*[axes] * 4, PartitionSpec(axes[0])]
        split = jax.device_put(arrays, [NamedSharding(mesh, spec) for spec in specs])
        actual = jax.jit(functools.partial(compute_value_and_gradients, attend))(*split)
        assert "forward_attention" in str(jax.make_jaxpr(attend)(*split[:3], split[4]))
    for got, expected in zip(actual, want, strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-5)


@pytest.mark.parametrize("form", ON_A_CPU)
def test_future_tokens_do_not_change_past_outputs(form):
    q, k, v, _ = map(jnp.asarray, Case().make_arrays())
    changed_k, changed_v = k.at[:, 70:].add(1), v.at[:, 70:].add(1)
    run = jax.jit(form)
    before, after = run(q, k, v), run(q, changed_k, changed_v)
    assert (before[:, :70] == after[:, :70]).all()
    assert (before[:, 70:] != after[:, 70:]).any()


@pytest.mark.parametrize("platform", ["cpu", "cuda", "rocm", "tpu"])
@pytest.mark.parametrize(
    ("case", "has_kernel"),
    [
        (Case(T=256, H=64, W=64), True),
        (Case(T=250, N=4, K=2, H=64, W=32, segments=True, window=100, softcap=30.0, scale=0.1), True),
        (Case(T=256, N=4, K=2, H=64, W=64, window=100, sinks=True), True),
        (Case(T=100, H=64, W=64, segments=True), False),  # more than an eighth of the sequence would be padding
    ],
)
def test_every_platform_has_an_implementation(case, has_kernel, platform):
    q, k, v, _ = (jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) for x in case.make_arrays())
    attend = jax.jit(functools.partial(causal_attention, **case.options))
    lowered = attend.trace(q, k, v, *case.make_segments(), **case.make_sinks()).lower(lowering_platforms=(platform,))
    assert ("tpu_custom_call" in lowered.as_text()) == (has_kernel and platform == "tpu")


@pytest.mark.parametrize(
    "case",
    [Case(T=40), Case(T=40, N=4, K=1, window=7, softcap=3.0, scale=0.5, W=4, sinks=True)],
    ids=["plain", "all options"],
)
def test_cached_attention_equals_attention_to_the_whole_sequence(case):
    q, k, v, _ = map(jnp.asarray, case.make_arrays())
    want = jax.jit(functools.partial(blocked_attention, **case.options))(q, k, v, **case.make_sinks())
    attend = jax.jit(functools.partial(cached_attention, **case.options, **case.make_sinks()))
    cache_k, cache_v = (jnp.full((case.B, 48, *x.shape[2:]), 9.0) for x in (k, v))  # masked positions
    start = 0
    for length in (18, 1, 1, 20):
        here = slice(start, start + length)
        cache_k, cache_v = cache_k.at[:, here].set(k[:, here]), cache_v.at[:, here].set(v[:, here])
        np.testing.assert_allclose(attend(q[:, here], cache_k, cache_v, start), want[:, here], atol=1e-6)
        start += length


def test_softmax_of_bfloat16_inputs_runs_in_float32():
    q, k, v, _ = (jnp.asarray(x, jnp.bfloat16) for x in Case(T=64).make_arrays())
    half = blocked_attention(q, k, v)
    full = blocked_attention(*(x.astype(jnp.float32) for x in (q, k, v)))
    assert half.dtype == jnp.bfloat16
    np.testing.assert_allclose(half.astype(jnp.float32), full, atol=0.03)
    assert "exp bf16" not in str(jax.make_jaxpr(blocked_attention)(q, k, v))


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (Case(N=6, K=4), "6 heads of queries do not divide over 4 heads"),
        (Case(window=0), "window=0 leaves no position"),
        (Case(softcap=0.0), "softcap=0.0 does not bound"),
    ],
)
def test_unsupported_sizes_and_options_are_refused_in_one_line(case, message):
    with pytest.raises(InvalidError, match=message) as error:
        causal_attention(*case.make_arrays()[:3], **case.options)
    assert "\n" not in str(error.value)
