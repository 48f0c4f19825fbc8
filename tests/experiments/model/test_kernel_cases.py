"""Cases of the kernels of the models: what tracing records, samples of their shapes, and kernels made wrong."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo

from experiments.model import attention, embedding, grouped_matmul, platform, rotary, tpu_attention
from experiments.model.attention import (
    BLOCKED,
    CUDNN,
    FUSED,
    IMPLEMENTATIONS,
    SPLASH,
    XLA,
    cudnn_attention,
    find_obstacle,
    fused_attention,
    make_attention_trial,
    select_implementation,
    splash_attention,
)
from experiments.model.context_layout import AttentionInputs, AttentionOptions
from experiments.model.decoder import PretrainDecoder
from experiments.model.layers import packs_heads
from experiments.model.quantised import Quantised
from runner.train import kernel_check
from runner.train.kernel_check import (
    EXACT_TOLERANCE,
    TOLERANCES,
    KernelCase,
    KernelUse,
    find_difference,
    run_case,
    use_kernels,
)
from tests.support.tiny_jobs import make_gpt

SEED = 1  # of the random shapes


@pytest.fixture(autouse=True)
def few_repetitions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted kernels are slow and always give the same bits."""
    monkeypatch.setattr(kernel_check, "REPETITIONS", 2)


# A sample of shapes.


def draw_facts(number: int) -> tuple[dict[str, Any], str]:
    """Return the facts of a random case of attention of one to three blocks, and its dtype."""
    generator = np.random.default_rng((SEED, number))
    block = 128
    length = int(generator.integers(block // 2, 3 * block))
    group, key_heads = int(generator.integers(1, 4)), int(generator.integers(1, 3))
    head = int(generator.choice([8, 32, 64]))
    value, has_sinks = int(generator.choice([head, 16])), bool(generator.random() < 0.3)
    if is_packed := number % 2 == 1:
        head = value = int(generator.choice([32, 64]))
        group, key_heads, has_sinks = int(generator.integers(1, 3)) * 128 // head, 128 // head, False

    def maybe(value: Any) -> Any:
        return value if generator.random() < 0.5 else None

    facts = {
        "sequences": int(generator.integers(1, 3)),
        "positions": length,
        "heads": group * key_heads,
        "key_heads": key_heads,
        "head": head,
        "value": value,
        "blocks": [block, block],
        "segments": generator.random() < 0.5,
        "rotation": generator.random() < 0.5,
        "sinks": has_sinks,
        "packed": is_packed,
        # With a window of 1 the gradients of queries and keys are zero, and an error is relative to nothing.
        "window": maybe(int(generator.integers(2, length))),
        "softcap": maybe(float(generator.uniform(1, 20))),
        "scale": maybe(float(generator.uniform(0.05, 0.5))),
    }
    return facts, "bfloat16" if generator.random() < 0.3 else "float32"


def check_attention(attend: Callable[..., jax.Array], facts: dict[str, Any], dtype: str) -> str:
    trial = make_attention_trial(attend, facts, jnp.dtype(dtype))
    found, wanted = (jax.device_get(jax.jit(form)(*trial.inputs)) for form in (trial.kernel, trial.reference))
    return find_difference(found, wanted, EXACT_TOLERANCE if dtype == "float32" else TOLERANCES[dtype])


@pytest.mark.parametrize("number", [0, *(pytest.param(number, marks=pytest.mark.soak) for number in range(1, 80))])
def test_a_sample_of_shapes_matches_the_definition(number: int, interpreted: None) -> None:
    facts, dtype = draw_facts(number)
    assert check_attention(fused_attention, facts, dtype) == "", (facts, dtype)


@pytest.mark.soak
@pytest.mark.parametrize("number", range(30))
def test_a_sample_of_shapes_of_the_library_matches_the_definition(number: int, interpreted: None) -> None:
    facts, dtype = draw_facts(number)
    assert check_attention(splash_attention, facts | {"rotation": False}, dtype) == "", (facts, dtype)


def test_the_sample_has_every_option() -> None:
    drawn = [draw_facts(number)[0] for number in range(80)]
    assert all(packs_heads(facts["heads"], facts["key_heads"], facts["head"]) for facts in drawn if facts["packed"])
    assert all(
        len({facts[name] is None or facts[name] is False for facts in drawn}) == 2
        for name in ("segments", "rotation", "sinks", "packed", "window", "softcap", "scale")
    )
    assert any(facts["positions"] % 2 for facts in drawn[:3])
    for name in ("segments", "rotation", "packed", "window", "softcap"):
        assert any(facts[name] for facts in drawn[:3]), name
    assert any(facts["heads"] > facts["key_heads"] for facts in drawn[:3])


# What tracing records.


def trace(directory: Path, **changes: Any) -> KernelUse:
    """Trace the train step of a small decoder for two devices, and return its kernels."""
    model = {
        "layers": 4, "heads": 4, "key_value_heads": 2, "width": 32, "mlp_width": 32, "head_dim": 16, "window": 70,
        "layer_pattern": ["window", "full"],
    }  # fmt: skip
    base = {
        "job": "experiments.model.decoder:PretrainDecoder",
        "config.model": model,
        "config.data.sequence_length": 250,
    }
    job = make_gpt(directory, PretrainDecoder, **base | {"topology.mesh": {"data": 2}} | changes)
    setup = job.setup_builder.build(jax.devices()[:2])
    job.setup_builder.trace(setup)
    return setup.kernels


@pytest.fixture
def kernels_on_cpu(monkeypatch: pytest.MonkeyPatch, interpreted: None) -> None:
    """The kernels of TPUs on CPUs, interpreted."""
    monkeypatch.setitem(IMPLEMENTATIONS, "cpu", (FUSED, SPLASH, BLOCKED))


@pytest.mark.soak
def test_tracing_records_each_kind_of_attention_once(tmp_path: Path, kernels_on_cpu: None) -> None:
    cases = sorted(trace(tmp_path).cases.values(), key=lambda case: str(case.facts["window"]))
    facts = {"positions": 250, "heads": 4, "key_heads": 2, "head": 16, "value": 16, "blocks": [256, 256]}
    assert [{name: case.facts[name] for name in facts} for case in cases] == [facts] * 2
    assert [case.facts["window"] for case in cases] == [70, None]
    assert {(case.kernel, case.owner, case.is_demanded) for case in cases} == {("fused_attention", "ours", False)}
    assert len({case.digest for case in cases}) == 2
    demanded = trace(tmp_path, **{"config.memory.attention": "ours"}).cases.values()
    assert all(case.is_demanded for case in demanded)
    library = trace(tmp_path, **{"config.memory.attention": "library"}).cases.values()
    assert {case.kernel for case in library} == {"splash_attention"}


def test_a_cpu_has_no_kernel_to_test(tmp_path: Path) -> None:
    assert trace(tmp_path).cases == {}


@pytest.mark.parametrize(
    ("platform_name", "attention", "avoided", "selected"),
    [
        ("tpu", "auto", (), FUSED),
        ("tpu", "library", (), SPLASH),
        ("tpu", "auto", ("fused_attention",), SPLASH),
        ("tpu", "auto", ("fused_attention", "splash_attention"), XLA),
        ("cuda", "auto", (), CUDNN),
        ("cuda", "library", (), CUDNN),
        ("cuda", "ours", (), BLOCKED),
        ("cuda", "auto", ("cudnn_attention",), BLOCKED),
        ("cpu", "library", (), BLOCKED),
    ],
)
def test_the_choice_follows_the_spec_and_the_tests(
    platform_name: str, attention: Any, avoided: tuple[str, ...], selected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        IMPLEMENTATIONS, "cuda", tuple(one._replace(fits=lambda _: True) for one in IMPLEMENTATIONS["cuda"])
    )
    use = KernelUse(attention)
    use.avoided = frozenset(avoided)
    array = jax.ShapeDtypeStruct((1, 256, 4, 64), jnp.bfloat16)
    with use_kernels(use):
        assert (
            select_implementation(platform_name, AttentionInputs(*[array] * 3), AttentionOptions()).attend
            is selected.attend
        )


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ({}, ""),
        ({"segments": True}, ""),
        ({"segments": True, "positions": 255}, "does not fit 255 positions and heads of 64, with documents"),
        ({"segments": True, "positions": 2**15}, "does not fit 32768 positions and heads of 64, with documents"),
        ({"positions": 2**15}, ""),
        ({"head": 100}, "does not fit 256 positions and heads of 100"),
        ({"head": 512}, "does not fit 256 positions and heads of 512"),
        ({"dtype": jnp.float32}, "needs bfloat16 or float16, not float32"),
        ({"softcap": 30.0}, "has no soft-cap"),
        ({"sinks": True}, "has no sinks"),
        ({"value": 128}, "needs values that are not wider than keys"),
        ({"avoided": True}, "has failed its test"),
        ({"attention": "ours"}, "memory.attention=ours excludes cudnn_attention"),
    ],
)
def test_what_keeps_attention_from_cudnn_is_named(
    case: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("experiments.model.attention.compute_capability", lambda: (9, 0))
    use = KernelUse(case.get("attention", "auto"))
    use.avoided = frozenset({"cudnn_attention"} if "avoided" in case else ())
    T, H, dtype = case.get("positions", 256), case.get("head", 64), case.get("dtype", jnp.bfloat16)
    q = jax.ShapeDtypeStruct((1, T, 4, H), dtype)
    v = jax.ShapeDtypeStruct((1, T, 4, case.get("value", H)), dtype)
    segments = jax.ShapeDtypeStruct((1, T), jnp.int32) if "segments" in case else None
    sinks = jax.ShapeDtypeStruct((4,), dtype) if "sinks" in case else None
    inputs = AttentionInputs(q, q, v, segments, None, sinks)
    with use_kernels(use):
        obstacle = find_obstacle(CUDNN, inputs, AttentionOptions(softcap=case.get("softcap")))
        selected = select_implementation("cuda", inputs, AttentionOptions(softcap=case.get("softcap")))
    assert (reason in obstacle) if reason else not obstacle
    assert (selected.attend is CUDNN.attend) == (not reason)


@pytest.mark.parametrize("key_heads", [1, 2])
def test_documents_reach_cudnn_as_a_mask_without_a_gradient(key_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)
    T = 128
    arrays = [jax.ShapeDtypeStruct((2, T, heads, 64), jnp.bfloat16) for heads in (2, key_heads, key_heads)]

    def get_results(attend: Any, *leaves: Any) -> list[str]:
        """Return the types of what the call of cuDNN's backward pass takes and returns."""
        traced = jax.jit(jax.grad(lambda *x: attend(*x).astype(jnp.float32).sum(), argnums=(0, 1, 2))).trace(*leaves)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert "__cudnn$fmhaScaleBiasSoftmax(" in text
        (line,) = [line for line in text.splitlines() if "@__cudnn$fmhaScaleBiasSoftmaxBackward" in line]
        return line.rpartition("->")[2].split("tensor<")[1:]

    def attend(q: Any, k: Any, v: Any, segments: Any) -> jax.Array:
        return cudnn_attention(AttentionInputs(q, k, v, segments, None, None), AttentionOptions())

    found = get_results(attend, *arrays, jax.ShapeDtypeStruct((2, T), jnp.int32))
    assert [name.split(">")[0] for name in found] == [
        "2x2x128x64xbf16",
        *[f"2x{key_heads}x128x64xbf16"] * 2,
        "0xui8",
    ]  # no gradient of the mask

    def attend_with_bias(q: Any, k: Any, v: Any, bias: Any) -> jax.Array:
        return jax.nn.dot_product_attention(q, k, v, bias, is_causal=True, implementation="cudnn")

    # A bias of someone else keeps its gradient.
    found = get_results(attend_with_bias, *arrays, jax.ShapeDtypeStruct((2, 2, T, T), jnp.bfloat16))
    assert "2x2x128x128xbf16" in [name.split(">")[0] for name in found]


# Cases of each kernel, and kernels made wrong.


def make_case(kernel: str, dtype: Any = jnp.float32, **options: Any) -> KernelCase:
    """Return the case that a kernel records for some arrays."""
    if kernel == "rotate_by_matmul":
        return rotary._make_case(jax.ShapeDtypeStruct((2, 64, 4, 16), dtype))
    if kernel == "take_rows_sorted":
        return embedding._make_case(jax.ShapeDtypeStruct((5000, 24), dtype))
    if kernel == "ragged_matmul":
        slots, experts = jax.ShapeDtypeStruct((200, 16), dtype), jax.ShapeDtypeStruct((6, 16, 24), dtype)
        return grouped_matmul._make_case(slots, experts)
    if kernel == "ragged_matmul_in_8_bits":
        options = {"is_transposed": False, "types": (jnp.int8, jnp.int8), "inputs": 16} | options
        inputs = options["inputs"]
        shapes = (200, inputs), (6, 24, inputs) if options["is_transposed"] else (6, inputs, 24)
        x, w = (
            Quantised(jax.ShapeDtypeStruct(shape, each), None)  # type: ignore[arg-type]
            for shape, each in zip(shapes, options["types"], strict=True)
        )
        return grouped_matmul.make_8_bit_case(x, w, dtype, options["is_transposed"])
    is_packed = kernel == "fused_attention, packed"
    heads, width = ((16, 4, 4), 32) if is_packed else ((4, 2, 2), 16)
    q, k, v = (jax.ShapeDtypeStruct((8, 1000, number, width), dtype) for number in heads)
    one = SPLASH if kernel == "splash_attention" else FUSED
    chosen = AttentionOptions(**({"window": 300} | options))
    rotation = (
        None if one is SPLASH else rotary.Rotation(*[jax.ShapeDtypeStruct((1, 1000, 1, width // 2), jnp.float32)] * 2)
    )
    segments = jax.ShapeDtypeStruct((8, 1000), jnp.int32)
    return attention._make_case(one, AttentionInputs(q, k, v, segments, rotation), chosen)


@pytest.fixture
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 128 positions."""
    monkeypatch.setattr(attention, "_fused_block_tokens", lambda *_: 128)
    monkeypatch.setattr(attention, "SPLASH_BLOCK_TOKENS", (128,))


SLOW = ("fused_attention, packed", "splash_attention", "ragged_matmul", "ragged_matmul_in_8_bits")
KERNELS = ("rotate_by_matmul", "take_rows_sorted", "fused_attention", *SLOW)


@pytest.mark.parametrize("dtype", [jnp.float32, pytest.param(jnp.bfloat16, marks=pytest.mark.soak)])
@pytest.mark.parametrize("kernel", [pytest.param(name, marks=[pytest.mark.soak] * (name in SLOW)) for name in KERNELS])
def test_a_right_kernel_passes_its_case(
    kernel: str, dtype: Any, interpreted: None, interpreted_products: None, short_blocks: None
) -> None:
    case = make_case(kernel, dtype)
    assert case.kernel == kernel.removesuffix(", packed")
    assert case.facts.get("packed", False) == kernel.endswith(", packed")
    assert run_case(case) == ""


INT8, FLOAT8 = (jnp.int8, jnp.int8), (jnp.float8_e5m2, jnp.float8_e4m3fn)


@pytest.mark.parametrize(
    ("types", "is_transposed"),
    [
        pytest.param(INT8, False, id="int8"),
        pytest.param(FLOAT8, True, id="float8, transposed"),
        pytest.param(INT8, True, id="int8, transposed", marks=pytest.mark.soak),
        pytest.param(FLOAT8, False, id="float8", marks=pytest.mark.soak),
    ],
)
def test_both_forms_of_the_kernel_of_8_bits_pass(types: Any, is_transposed: bool, interpreted_products: None) -> None:
    case = make_case("ragged_matmul_in_8_bits", types=types, is_transposed=is_transposed)
    assert run_case(case) == ""


@pytest.mark.parametrize("size", [16, 1100])
def test_a_wrong_scale_of_experts_fails_its_case(
    size: int, interpreted_products: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make_case("ragged_matmul_in_8_bits", is_transposed=True, inputs=size)
    assert run_case(case) == ""
    find = grouped_matmul._find_own_slots
    monkeypatch.setattr(grouped_matmul, "_find_own_slots", lambda *arrays: jnp.roll(find(*arrays), 1, axis=1))
    assert "relative error" in run_case(case)


def test_a_case_keeps_blocks_padding_and_the_edge_of_a_window(short_blocks: None) -> None:
    facts = make_case("fused_attention").facts
    # 1,000 positions are padded by 24; 300 are two blocks and 44 positions.
    assert (facts["positions"], facts["window"]) == (4 * 128 - 24, 300)
    assert (facts["heads"], facts["key_heads"], facts["segments"], facts["rotation"]) == (4, 2, True, True)
    assert make_case("fused_attention", window=900).facts["window"] == 2 * 128 + 900 % 128
    assert make_case("fused_attention", window=None).facts["positions"] == 2 * 128 - 24


def shift_window(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = tpu_attention.CausalBlocks
    monkeypatch.setattr(tpu_attention, "CausalBlocks", lambda block, window: blocks(block, window + 1))


def rotate_back(monkeypatch: pytest.MonkeyPatch) -> None:
    rotate = tpu_attention._rotate
    monkeypatch.setattr(tpu_attention, "_rotate", lambda attention, x, cos, sin: rotate(attention, x, cos, -sin))


def forget_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tpu_attention, "UNSEEN", 0.0)


def lose_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    run = tpu_attention._run_backward

    def run_wrong(*arguments: Any) -> Any:
        q, k, v = run(*arguments)
        return q, k, v.at[:, 100, -16:].set(0) if v.ndim == 3 else v.at[:, -1, 100].set(0)

    monkeypatch.setattr(tpu_attention, "_run_backward", run_wrong)


FAULTS = [shift_window, rotate_back, forget_mask, lose_gradients]


@pytest.mark.parametrize(
    "break_kernel",
    [pytest.param(fault, marks=[pytest.mark.soak] * (fault is not shift_window)) for fault in FAULTS],
    ids=lambda fault: fault.__name__,
)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, pytest.param(jnp.float32, marks=pytest.mark.soak)])
def test_a_kernel_made_wrong_fails_its_case(
    break_kernel: Callable[..., None], dtype: Any, interpreted: None, short_blocks: None, monkeypatch: Any
) -> None:
    break_kernel(monkeypatch)
    assert "relative error" in run_case(make_case("fused_attention", dtype))


def test_a_wrong_gradient_of_the_embedding_fails_its_case(monkeypatch: pytest.MonkeyPatch) -> None:
    searchsorted = jnp.searchsorted
    monkeypatch.setattr(
        jnp, "searchsorted", lambda *arrays, **options: searchsorted(*arrays, **options | {"side": "left"})
    )
    assert "relative error" in run_case(make_case("take_rows_sorted"))


def test_a_form_is_left_out_where_its_kernel_is_avoided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rotary, "rotates_by_matmul", lambda: True)
    monkeypatch.setattr(platform, "platform", lambda: "gpu")
    rotation = rotary.rotation_at(jnp.arange(4)[None], rotary.Rope(), 8)
    use, x = KernelUse(), jnp.ones((1, 4, 2, 8))
    with use_kernels(use):
        assert "dot_general" in str(jax.make_jaxpr(functools.partial(rotary.rotate, rotation=rotation))(x))
        use.avoided = frozenset(["rotate_by_matmul"])
        assert "dot_general" not in str(jax.make_jaxpr(functools.partial(rotary.rotate, rotation=rotation))(x))
    assert [case.kernel for case in use.cases.values()] == ["rotate_by_matmul"]
