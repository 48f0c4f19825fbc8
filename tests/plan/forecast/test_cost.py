"""Cost model of HLO ops: matmuls in every form, HBM traffic, kernels."""

from dataclasses import replace

import pytest

from runner.plan.forecast.cost import (
    Matmul,
    TypicalShares,
    compute_causal_share,
    compute_cost,
    count_moved_bytes,
    find_matmuls,
)
from runner.plan.forecast.module import HloModule, Op, load_module, parse_arrays
from tests.plan.forecast.hlo_text import (
    NANO,
    compute_text_forecast,
    format_cycles,
    make_computation,
    make_module,
    make_rates,
    round_nanoseconds,
)


def parse_last_op(text: str) -> tuple[HloModule, Op]:
    """Return a module and the last op of its entry computation."""
    found = load_module(text)
    return found, list(found.computations[found.entry].values())[-1]


def list_matmuls(lhs: str, rhs: str, line: str) -> list[Matmul]:
    """Return the matmuls of an op with two arguments."""
    return find_matmuls(
        *parse_last_op(make_module(f"%a = {lhs} parameter(1)", f"%b = {rhs} parameter(2)", f"%y = {line}"))
    )


# In the form of libtpu 0.0.42, except the last ones.
MATMULS = {
    "a dot": (
        "f32[8,16]",
        "f32[16,32]",
        "f32[8,32] dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
        Matmul(1, 8, 32, 16),
    ),
    "a dot of int8": (
        "s8[8,16]",
        "s8[16,32]",
        "s32[8,32] dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
        Matmul(1, 8, 32, 16, "s8"),
    ),
    "a convolution of float8": (
        "f8e5m2[512,64]",
        "f8e4m3fn[64,256]",
        "f32[512,256] convolution(%a, %b), dim_labels=bf_io->bf",
        Matmul(1, 512, 256, 64, "f8e5m2"),
    ),
    "a dot of int8 and more bits": (
        "s8[8,16]",
        "bf16[16,32]",
        "f32[8,32] dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
        Matmul(1, 8, 32, 16),
    ),
    "a dot of batches": (
        "f32[4,8,16]",
        "f32[4,32,16]",
        "f32[4,8,32] dot(%a, %b), lhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_batch_dims={0}, "
        "rhs_contracting_dims={2}",
        Matmul(4, 8, 32, 16),
    ),
    "a plain convolution": (
        "bf16[512,64]",
        "bf16[64,256]",
        "f32[512,256] convolution(%a, %b), dim_labels=bf_io->bf",
        Matmul(1, 512, 256, 64),
    ),
    "a window of one": (
        "bf16[16,1024,768]",
        "bf16[50304,768,1]",
        "bf16[16,1024,50304] convolution(%a, %b), window={size=1}, dim_labels=0bf_oi0->0bf",
        Matmul(1, 16 * 1024, 50304, 768),
    ),
    "a window that sums": (
        "bf16[16,768,1024]",
        "bf16[16,1024,3072]",
        "f32[768,3072,1] convolution(%a, %b), window={size=16}, dim_labels=0bf_0io->bf0",
        Matmul(1, 768, 3072, 16 * 1024),
    ),
    "heads that a padded window splits": (
        "bf16[1,1024,768,1]",
        "bf16[12,64,768,1]",
        "bf16[1,1024,12,64] convolution(%a, %b), window={size=1x12 pad=0_0x11_11 rhs_reversal=0x1}, "
        "dim_labels=0bf1_1oi0->0b1f",
        Matmul(1, 1024, 12 * 64, 768),
    ),
    "batches in two dilated windows": (
        "bf16[8,64,4,16]",
        "bf16[8,64,4,16]",
        "f32[8,4,64,64] convolution(%a, %b), window={size=8x4 stride=7x3 lhs_dilate=8x4}, dim_labels=0b1f_0o1i->01bf",
        Matmul(32, 64, 64, 16),
    ),
    "groups of features": (
        "f32[2,10,12]",
        "f32[3,4,24]",
        "f32[2,8,24] convolution(%a, %b), window={size=3}, dim_labels=b0f_0io->b0f, feature_group_count=3",
        Matmul(3, 2 * 8, 8, 3 * 4),
    ),
    "an image": (
        "f32[2,9,9,3]",
        "f32[3,3,3,16]",
        "f32[2,7,7,16] convolution(%a, %b), window={size=3x3}, dim_labels=b01f_01io->b01f",
        Matmul(1, 2 * 49, 16, 27),
    ),
    "a GPU library's": (
        "f32[8,16]",
        "f32[16,32]",
        '(f32[8,32], s8[4]) custom-call(%a, %b), custom_call_target="__cublas$gemm", '
        'backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"],'
        '"lhs_batch_dimensions":[],"rhs_batch_dimensions":[]}}}',
        Matmul(1, 8, 32, 16),
    ),
}


@pytest.mark.parametrize("name", MATMULS)
def test_every_form_of_a_matmul_is_parsed_to_its_sizes(name: str) -> None:
    lhs, rhs, line, expected = MATMULS[name]
    assert list_matmuls(lhs, rhs, line) == [expected]


def test_a_fusion_has_the_matmuls_inside_it_and_a_loop_has_none() -> None:
    product = "%y = f32[8,8] dot(%p, %q), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    inner = make_computation("inner", "%p = f32[8,8] parameter(0)", "%q = f32[8,8] negate(%p)", "ROOT " + product)
    outer = make_computation(
        "outer", "%o = f32[8,8] parameter(0)", "ROOT %n = f32[8,8] fusion(%o), kind=kOutput, calls=%inner"
    )
    entry = "%z = f32[8,8] fusion(%x), kind=kOutput, calls=%outer"
    assert find_matmuls(*parse_last_op(make_module(entry, before=inner + outer))) == [Matmul(1, 8, 8, 8)]
    loop = "%z = f32[8,8] while(%x), condition=%inner, body=%outer"
    assert find_matmuls(*parse_last_op(make_module(loop, before=inner + outer))) == []


@pytest.mark.parametrize(
    ("matmul", "width", "filled"),
    [
        (Matmul(1, 1024, 1024, 1024), 128, 2 * 1024**3),
        (Matmul(1, 1024, 1024, 64), 128, 2 * 1024 * 1024 * 128),  # a head width of 64 fills half of the unit
        (Matmul(1, 1024, 64, 1024), 128, 2 * 1024 * 128 * 1024),
        (Matmul(3, 1000, 1024, 128), 128, 2 * 3 * 1000 * 1024 * 128),  # the streamed dimension is not padded
        (Matmul(1, 1, 1, 1), 128, 2 * 128**3),
        (Matmul(1, 1024, 1024, 128), 256, 2 * 1024 * 1024 * 256),
        (Matmul(5, 7, 3, 9), 1, 2 * 5 * 7 * 3 * 9),
    ],
)
def test_a_matmul_fills_whole_matrix_units(matmul: Matmul, width: int, filled: int) -> None:
    assert matmul.count_padded_flops(width) == filled


def test_a_matmul_of_8_bits_takes_the_time_of_its_own_peak() -> None:
    rates = replace(make_rates(), int8_per_second=2 * NANO, float8_per_second=4 * NANO)
    seconds = {name: rates.compute_seconds(Matmul(1, 10, 10, 10, name)) for name in (None, "s8", "f8e4m3fn")}
    assert [1 / (NANO * each) for each in seconds.values()] == pytest.approx([1 / 2000, 2 / 2000, 4 / 2000])
    assert make_rates().compute_seconds(Matmul(1, 10, 10, 10, "s8")) == seconds[None]


@pytest.mark.parametrize(("name", "peak"), [("grouped", 2), ("attention", 1)])
def test_a_kernel_of_two_operands_in_8_bits_takes_the_time_of_their_peak(name: str, peak: int) -> None:
    stated = '"cost_estimate":{"flops":"5000","transcendentals":"0","bytes_accessed":"8"}'
    lines = (
        "%m = s32[4] parameter(1)",
        "%a = s8[8,8] parameter(2)",
        "%s = f32[8] parameter(3)",
        "%b = s8[8] parameter(4)",
    )
    notes = f'custom_call_target="tpu_custom_call", backend_config={{"custom_call_config":{{{stated}}}}}'
    module = make_module(*lines, f"%{name} = f32[8] custom-call(%m, %a, %s, %b), {notes}")
    rates = replace(make_rates(), int8_per_second=2 * NANO)
    cost = compute_cost(*parse_last_op(module), rates)
    assert cost is not None
    assert cost.low * NANO == pytest.approx(5000 / peak)


def test_the_time_of_an_op_is_the_maximum_of_compute_and_traffic() -> None:
    lines = ("%a = f32[10,1000] parameter(1)", "%b = f32[1000,10] parameter(2)")
    product = "%y = f32[10,10] dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}, " + format_cycles(1)
    assert round_nanoseconds(compute_text_forecast(*lines, product)) == (2 * 10 * 10 * 1000, 1)
    thin = product.replace("f32[10,10]", "f32[1,10]").replace("%a", "%c")
    assert round_nanoseconds(compute_text_forecast("%c = f32[1,1000] parameter(1)", lines[1], thin)) == (
        4 * (1000 + 10000 + 10),
        1,
    )


def test_the_largest_number_of_cycles_is_no_estimate() -> None:
    cost = compute_cost(
        *parse_last_op(make_module(f"%y = f32[250] negate(%x), {format_cycles(2**63 - 1)}")), make_rates()
    )
    assert cost is not None
    assert (cost.high, cost.basis) == (cost.low, "roofline")


# Memory traffic.

STACK, ROW = 4 * 12 * 100, 4 * 100
UPDATE = make_computation(
    "update",
    "%stack = f32[12,100]{1,0} parameter(0)",
    "%row = f32[1,100]{1,0} parameter(1)",
    "%at = s32[] parameter(2)",
    "%zero = s32[] constant(0)",
    "%new = f32[1,100]{1,0} negate(%row)",
    "ROOT %put = f32[12,100]{1,0} dynamic-update-slice(%stack, %new, %at, %zero)",
)
SLICE = make_computation(
    "cut",
    "%whole = f32[12,100]{1,0} parameter(0)",
    "%at2 = s32[] parameter(1)",
    "%zero2 = s32[] constant(0)",
    "%seen = f32[12,100]{1,0} bitcast(%whole)",
    "ROOT %row2 = f32[1,100]{1,0} dynamic-slice(%seen, %at2, %zero2), dynamic_slice_sizes={1,100}",
)
NESTED = make_computation(
    "nested",
    "%outside = f32[12,100]{1,0} parameter(0)",
    "%at3 = s32[] parameter(1)",
    "%r3 = f32[1,100]{1,0} fusion(%outside, %at3), kind=kLoop, calls=%cut",
    "ROOT %n3 = f32[1,100]{1,0} negate(%r3)",
)
PARALLEL = make_computation(
    "beside",
    "%mine = f32[1,100]{1,0} parameter(0)",
    "%all = f32[12,100]{1,0} parameter(1)",
    "%r4 = f32[1,100]{1,0} parameter(2)",
    "%n4 = f32[1,100]{1,0} negate(%r4)",
    "%gathered = f32[12,100]{1,0} all-gather(%mine), dimensions={0}",
    "ROOT %three = (f32[1,100]{1,0}, f32[12,100]{1,0}, f32[12,100]{1,0}) tuple(%n4, %all, %gathered)",
)
ARGUMENTS = (
    "%s = f32[12,100]{1,0} parameter(1)",
    "%r = f32[1,100]{1,0} parameter(2)",
    "%i = s32[] parameter(3)",
    "%r5 = f32[1,100]{1,0} parameter(4)",
)
MOVES = {
    "an op reads and writes": ("%y = f32[12,100]{1,0} negate(%s)", 2 * STACK),
    "the same operand is read once": ("%y = f32[12,100]{1,0} add(%s, %s)", 2 * STACK),
    "a cut counts by itself": (
        "%y = f32[1,100]{1,0} dynamic-slice(%s, %i, %i), dynamic_slice_sizes={1,100}",
        2 * ROW + 4,
    ),
    "what is put in place counts by itself": (
        "%y = f32[12,100]{1,0} dynamic-update-slice(%s, %r, %i, %i)",
        2 * ROW + 4,
    ),
    "in a fusion too": ("%y = f32[12,100]{1,0} fusion(%s, %r, %i), kind=kLoop, calls=%update", 2 * ROW + 4),
    "a cut in a fusion too": ("%y = f32[1,100]{1,0} fusion(%s, %i), kind=kLoop, calls=%cut", 2 * ROW + 4),
    "and in a fusion of a fusion": ("%y = f32[1,100]{1,0} fusion(%s, %i), kind=kLoop, calls=%nested", 2 * ROW + 4),
    "what goes on beside it, or is handed on, counts nothing": (
        "%y = (f32[1,100]{1,0}, f32[12,100]{1,0}, f32[12,100]{1,0}) fusion(%r, %s, %r5), kind=kOutput, calls=%beside",
        2 * ROW,
    ),
    "fast memory is not main memory": ("%y = f32[12,100]{1,0:S(1)} negate(%s)", STACK),
    "whole tiles are moved": ("%y = f32[12,100]{1,0:T(8,128)} negate(%s)", STACK + 4 * 16 * 128),
    "a gather reads what it takes": ("%y = f32[3,100]{1,0} gather(%s, %i), offset_dims={1}", 2 * 3 * ROW + 4),
}


@pytest.mark.parametrize("name", MOVES)
def test_an_op_has_the_counted_memory_traffic(name: str) -> None:
    line, expected = MOVES[name]
    assert (
        count_moved_bytes(*parse_last_op(make_module(*ARGUMENTS, line, before=UPDATE + SLICE + NESTED + PARALLEL)))
        == expected
    )


def test_arrays_have_their_memory_space() -> None:
    found = parse_arrays("(bf16[8,64]{1,0:T(8,128)(2,1)S(1)}, f32[2]{0}, s8[4]{0:S(5)})")
    assert [(one.dims, one.bytes, one.hbm_bytes, one.traffic_bytes) for one in found] == [
        ((8, 64), 2048, 0, 0),
        ((2,), 8, 8, 8),
        ((4,), 4, 0, 4),
    ]


# Kernels.


@pytest.mark.parametrize(
    ("length", "block", "blocks_in_a_row", "share"),
    [
        (1024, 1024, None, 1),
        (1024, 512, None, 3 / 4),
        (1024, 128, None, 36 / 64),
        (2048, 512, 2, 7 / 16),
        (2048, 512, 1, 4 / 16),
    ],
)
def test_causal_attention_computes_the_blocks_on_and_below_the_diagonal(
    length: int, block: int, blocks_in_a_row: int | None, share: float
) -> None:
    assert compute_causal_share(length, length, block, block, blocks_in_a_row) == share


KERNEL = (
    "%q = bf16[2,12,1,1024,64] parameter(1)",
    "%k = bf16[2,12,1024,64] parameter(2)",
    "%m = s8[1,2,2] parameter(3)",
)
NOTES = (
    'custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={\n"xprof_metadata":"'
    r"{\"block_q\": 512, \"block_kv\": 512, \"block_q_dq\": 1024, \"block_kv_dq\": 1024}"
    '"\n}}, metadata={op_name="jit(step)/splash/pallas_call"}, backend_config={"custom_call_config":{"body":"abc"}}'
)
ONE_BLOCK = 2 * 2 * 12 * 1024 * 1024 * 64
SUM, OF_KEYS = "f32[2,12,512,64]", "bf16[2,12,1024,64]"


@pytest.mark.parametrize(
    ("name", "result", "flops"),
    [
        ("splash_mqa_fwd_residuals.1", "bf16[2,12,1,1024,64]", 2 * ONE_BLOCK * 3 / 4),
        ("splash_mqa_dq_no_residuals.1", f"({SUM}, bf16[2,12,1,1024,64])", 3 * ONE_BLOCK),
        ("splash_mqa_dkv_no_residuals", f"({SUM}, {SUM}, {OF_KEYS}, {OF_KEYS})", 4 * ONE_BLOCK),
        (
            "splash_mqa_dkv_no_residuals.2",
            f"({SUM}, {SUM}, {SUM}, bf16[2,2,12,1,1024,64], {OF_KEYS}, {OF_KEYS})",
            5 * ONE_BLOCK,
        ),
    ],
)
@pytest.mark.parametrize("width", [1, 128])
def test_the_cost_of_an_attention_kernel_is_that_of_its_blocks(
    name: str, result: str, flops: float, width: int
) -> None:
    found = compute_text_forecast(*KERNEL, f"%{name} = {result} custom-call(%m, %q, %k, %k), {NOTES}", width=width)
    (op,) = found.ops
    assert (op.part, op.basis, found.num_unknown) == ("attention", "shapes", 0)
    assert op.low * 1e9 == op.high * 1e9 == pytest.approx(flops * (1 if width == 1 else 2))


@pytest.mark.parametrize("width", [1, 128])
def test_a_stated_attention_cost_is_padded_to_matrix_units(width: int) -> None:
    stated = NOTES.replace('"body":"abc"', '"body":"abc","cost_estimate":{"flops":"90000000","bytes_accessed":"8"}')
    found = compute_text_forecast(
        *KERNEL, f"%attention_backward = {OF_KEYS} custom-call(%m, %q, %k, %k), {stated}", width=width
    )
    (op,) = found.ops
    assert (op.part, op.basis, op.low * 1e9) == ("attention", "stated", pytest.approx(9e7 if width == 1 else 18e7))


@pytest.mark.parametrize(
    ("layout", "stated_bytes", "moved_bytes"),
    [
        ("", 3072, 3072),
        ("", 8, 3072),
        ("", 2 * 3072, 2 * 3072),
        (":T(8,128)(2,1)", 3072, 2 * 3072),
        (":T(8,128)(2,1)", 2 * 3072, 4 * 3072),
        (":T(8,128)(2,1)S(1)", 3072, 0),
    ],
    ids=["packed", "understated", "read twice", "padded", "padded and read twice", "in fast memory"],
)
def test_a_kernel_moves_its_arrays_in_whole_tiles_as_often_as_it_states(
    layout: str, stated_bytes: int, moved_bytes: int
) -> None:
    array = f"bf16[8,64]{{1,0{layout}}}"
    cost = f'{{"custom_call_config":{{"cost_estimate":{{"flops":"0","bytes_accessed":"{stated_bytes}"}}}}}}'
    kernel = f'custom-call(%a, %b, %a), custom_call_target="tpu_custom_call", backend_config={cost}'
    found = compute_text_forecast(f"%a = {array} copy(%x)", f"%b = {array} copy(%x)", f"%fast = {array} {kernel}")
    (op,) = [op for op in found.ops if op.name == "fast"]
    assert (op.basis, op.low * 1e9) == ("stated", pytest.approx(moved_bytes))


def test_a_stated_kernel_cost_is_used_and_unknown_kernels_are_counted() -> None:
    stated = '"cost_estimate":{"flops":"41943040","transcendentals":"0","bytes_accessed":"458784"}'
    line = '%ragged-dot.1 = f32[250] custom-call(%x), custom_call_target="tpu_custom_call", backend_config={COST}'
    found = compute_text_forecast(line.replace("COST", f'"custom_call_config":{{{stated}}}'))
    assert (round_nanoseconds(found), found.num_unknown) == ((41943040, 41943040), 0)
    assert [(op.part, op.basis) for op in found.ops] == [("matmuls", "stated")]
    unknown = compute_text_forecast(line.replace("COST", "").replace("ragged-dot", "mystery"))
    assert (round_nanoseconds(unknown), unknown.num_unknown) == ((2000, 2000), 1)
    assert [op.part for op in unknown.ops] == ["other kernels"]


# In the form of XLA for GPU: batch, positions, heads and head; the kernel reads the products of 4 x 2 heads.
CUDNN_HEADS = "bf16[4,1024,2,64]"


@pytest.mark.parametrize(
    ("target", "products"),
    [("__cudnn$fmhaSoftmax", 2), ("__cudnn$fmhaSoftmaxBackward", 5)],
    ids=["forward", "backward"],
)
@pytest.mark.parametrize(("window", "share"), [(0, 36 / 64), (128, 15 / 64)])
def test_attention_of_cudnn_counts_by_its_shapes(target: str, products: int, window: int, share: float) -> None:
    config = f'backend_config={{"cudnn_fmha_backend_config": {{"sliding_window_length": {window}}}}}'
    lines = [f"%{name} = {CUDNN_HEADS} parameter({number})" for number, name in enumerate("qkv", 1)]
    call = f'%y = ({CUDNN_HEADS}, u8[0]) custom-call(%q, %k, %v), custom_call_target="{target}", {config}'
    module, op = parse_last_op(make_module(*lines, call))
    rates = make_rates()
    cost = compute_cost(module, op, rates)
    assert cost is not None
    assert cost.flops == share * products * 2 * 4 * 2 * 1024 * 1024 * 64
    assert (cost.low, cost.basis) == (cost.high, "shapes")
    typical = compute_cost(module, op, replace(rates, typical=TypicalShares(0.5, 0.5, 0.25, 0.0)))
    assert typical is not None
    assert typical.low == cost.low
    assert 2 * cost.low <= typical.high <= 4 * cost.low


def test_typical_shares_raise_the_upper_end_of_ops_without_an_estimate() -> None:
    lines = ["%a = f32[512,512] parameter(1)", "%b = f32[512,512] parameter(2)"]
    dot = "%y = f32[512,512] dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    shares = TypicalShares(matmul=0.5, hbm=0.25, attention=0.1, launch_seconds=1.0)
    for line in (dot, "%y = f32[512,512] add(%a, %b)"):
        module, op = parse_last_op(make_module(*lines, line))
        rates = make_rates()
        lowest = compute_cost(module, op, rates)
        found = compute_cost(module, op, replace(rates, typical=shares))
        assert lowest is not None
        assert found is not None
        matmul_seconds = sum(map(rates.compute_seconds, find_matmuls(module, op)))
        memory_seconds = lowest.moved_bytes / rates.hbm_bytes_per_second
        assert (found.low, found.basis) == (lowest.low, "typical")
        assert found.high == max(matmul_seconds / 0.5, memory_seconds / 0.25) + 1.0
