"""Simulated time of loops, async pairs, conditionals, calls and fusions, compared with counts made by hand."""

import itertools
import json

import pytest

from runner.plan.forecast import build_trace, compute_forecast
from tests.plan.forecast.hlo_text import (
    MESH,
    compute_text_forecast,
    format_cycles,
    make_computation,
    make_module,
    make_negate,
    make_rates,
    round_nanoseconds,
)


def make_loop(name: str, trips: int, *inside: str) -> tuple[tuple[str, ...], str]:
    """Make a loop whose trip count is given only by its condition, and whose counter takes negligible time."""
    before = make_computation(
        f"{name}_cond",
        f"%{name}_c = (s32[]{{:S(6)}}, f32[250]{{0}}) parameter(0)",
        f"%{name}_ci = s32[]{{:S(6)}} get-tuple-element(%{name}_c), index=0",
        f"%{name}_bound = s32[]{{:S(6)}} constant({trips})",
        f"ROOT %{name}_test = pred[]{{:S(6)}} compare(%{name}_ci, %{name}_bound), direction=LT",
    ) + make_computation(
        f"{name}_body",
        f"%{name}_p = (s32[]{{:S(6)}}, f32[250]{{0}}) parameter(0)",
        f"%{name}_i = s32[]{{:S(6)}} get-tuple-element(%{name}_p), index=0",
        f"%{name}_x = f32[250]{{0}} get-tuple-element(%{name}_p), index=1",
        f"%{name}_one = s32[]{{:S(6)}} constant(1)",
        f"%{name}_next = s32[]{{:S(6)}} add(%{name}_i, %{name}_one)",
        *inside,
        f"ROOT %{name}_out = (s32[]{{:S(6)}}, f32[250]{{0}}) tuple(%{name}_next, %{name}_x)",
    )
    lines = (
        f"%{name}_zero = s32[]{{:S(6)}} constant(0)",
        f"%{name}_in = (s32[]{{:S(6)}}, f32[250]{{0}}) tuple(%{name}_zero, %x)",
        f"%{name} = (s32[]{{:S(6)}}, f32[250]{{0}}) while(%{name}_in), condition=%{name}_cond, body=%{name}_body",
    )
    return lines, before


IN_LOOP = make_negate("a", "L_x")
ONE_LOOP = make_loop("L", 3, IN_LOOP)
INNER = make_loop("M", 4, make_negate("b", "M_x", 7000))
NESTED = make_loop(
    "L",
    3,
    IN_LOOP,
    *(line.replace("%x", "%L_x") for line in INNER[0]),
)
BRANCHES = make_computation("short", "%s = f32[250]{0} parameter(0)", make_negate("s1", "s")) + make_computation(
    "long", "%l = f32[250]{0} parameter(0)", make_negate("l1", "l"), make_negate("l2", "l1")
)
FUSED = make_computation(
    "fused",
    "%f0 = f32[250]{0} parameter(0)",
    "%f1 = f32[250]{0} negate(%f0)",
    "ROOT %f2 = f32[250]{0} exponential(%f1)",
)
GROUPS = "channel_id=1, replica_groups=[2,2]<=[4], use_global_device_ids=true"
COPY = (
    "%cs = (f32[2500]{0:S(1)}, f32[2500]{0}, u32[]{:S(2)}) copy-start(%big)",
    "%cd = f32[2500]{0:S(1)} copy-done(%cs)",
)
BIG = "%big = f32[2500]{0} parameter(1)"
TO_HOST = (
    "%us = ((f32[2500]{0:S(5)}, f32[250]{0}, s32[]), f32[2500]{0:S(5)}, u32[]) "
    "dynamic-update-slice-start(%big, %x, %i)",
    "%ud = f32[2500]{0:S(5)} dynamic-update-slice-done(%us)",
)
GATHER = (
    f"%gs = (f32[250]{{0}}, f32[500]{{0}}) all-gather-start(%x), {GROUPS}, dimensions={{0}}",
    "%gd = f32[500]{0} all-gather-done(%gs)",
)

SCHEDULES = {
    "an op": ((make_negate(),), "", 2000, 5000),
    "ops one after the other": ((make_negate(), make_negate("z", "y", 1000)), "", 4000, 6000),
    "what has no estimate": (("%y = f32[250]{0} negate(%x)",), "", 2000, 2000),
    "names of what is there": (
        (
            "%t = (f32[250]{0}) tuple(%x)",
            "%y = f32[250]{0} get-tuple-element(%t), index=0",
            "%b = f32[250]{0} bitcast(%y)",
        ),
        "",
        0,
        0,
    ),
    "a loop": (*ONE_LOOP, 3 * 2000, 3 * 5000),
    "a loop in a loop": (NESTED[0], INNER[1] + NESTED[1], 3 * (2000 + 4 * 2000), 3 * (5000 + 4 * 7000)),
    "a loop that never turns": (*make_loop("L", 0, IN_LOOP), 0, 0),
    "a conditional takes its longest branch": (
        ("%c = f32[250]{0} conditional(%i, %x, %x), branch_computations={%short, %long}",),
        BRANCHES,
        4000,
        10000,
    ),
    "a conditional of true and false": (
        ("%c = f32[250]{0} conditional(%i, %x, %x), true_computation=%long, false_computation=%short",),
        BRANCHES,
        4000,
        10000,
    ),
    "a branch for rare cases does not count": (
        ("%c = f32[250]{0} conditional(%i, %x, %x), branch_computations={%short, %rare}",),
        BRANCHES
        + make_computation(
            "rare",
            "%r = f32[250]{0} parameter(0)",
            make_negate("r1", "r", 90000) + ', metadata={op_name="jit(step)/cond/branch_0_fun/fallback/neg"}',
        ),
        2000,
        5000,
    ),
    "two calls": (
        ("%c = f32[250]{0} call(%x), to_apply=%short", "%d = f32[250]{0} call(%c), to_apply=%long"),
        BRANCHES,
        6000,
        15000,
    ),
    "a fusion counts once": (
        (f"%y = f32[250]{{0}} fusion(%x), kind=kLoop, calls=%fused, {format_cycles(9000)}",),
        FUSED,
        2000,
        9000,
    ),
    "a copy that nothing hides": ((BIG, *COPY), "", 10000, 10000),
    "an update in place of what lies in the host's memory": ((BIG, *TO_HOST), "", 2000, 2000),
    "a copy that is hidden in part": ((BIG, COPY[0], make_negate(), COPY[1]), "", 10000, 10000),
    "a copy that is hidden whole": ((BIG, COPY[0], make_negate(estimated=12000), COPY[1]), "", 10000, 12000),
    "copies follow one another": (
        (BIG, COPY[0], COPY[0].replace("%cs", "%cs2"), COPY[1], COPY[1].replace("%c", "%c2").replace("(%c2s", "(%cs2")),
        "",
        20000,
        20000,
    ),
    "a copy within main memory is read and written": (
        (BIG, *(line.replace("S(1)", "") for line in COPY)),
        "",
        20000,
        20000,
    ),
    "a gather that is hidden in part": ((GATHER[0], make_negate(estimated=400), GATHER[1]), "", 2000, 1000),
    "a copy and a gather do not wait for each other": (
        (BIG, COPY[0], GATHER[0], GATHER[1], COPY[1]),
        "",
        10000,
        10000,
    ),
    "a reduction that is not started": (
        (make_negate(), f"%r = f32[250]{{0}} all-reduce(%y), {GROUPS}, to_apply=%add"),
        "",
        2000 + 1000,
        5000 + 1000,
    ),
    "a copy around a loop": ((BIG, COPY[0], *ONE_LOOP[0], COPY[1]), ONE_LOOP[1], 10000, 15000),
    "a copy in each turn": (
        *make_loop("L", 3, BIG, *COPY),
        30000,
        30000,
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_time_of_a_schedule_equals_the_counted_one(name: str) -> None:
    lines, before, low, high = SCHEDULES[name]
    assert round_nanoseconds(compute_text_forecast(*lines, before=before)) == (low, high)


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_times_of_all_ops_sum_to_the_total(name: str) -> None:
    lines, before, *_ = SCHEDULES[name]
    found = compute_text_forecast(*lines, before=before)
    assert sum(op.low for op in found.ops) == pytest.approx(found.low, abs=1e-12)
    assert sum(op.high for op in found.ops) == pytest.approx(found.high, abs=1e-12)
    assert sum(high for _, high in found.sum_by_part().values()) == pytest.approx(found.high, abs=1e-12)
    assert sum(high for _, high in found.sum_by_line().values()) == pytest.approx(found.high, abs=1e-12)


@pytest.mark.parametrize("name", SCHEDULES)
def test_grouped_ops_sum_to_the_total(name: str) -> None:
    lines, before, *_ = SCHEDULES[name]
    found = compute_text_forecast(*lines, before=before)
    sums = found.sum_similar_ops()
    assert sum(op.num_ops for op in sums) == len(found.ops)
    for of in ("low", "high", "runs", "transfer"):
        assert sum(getattr(op, of) for op in sums) == pytest.approx(sum(getattr(op, of) for op in found.ops))


def test_ops_on_arrays_of_equal_size_are_grouped_across_memory_spaces() -> None:
    elsewhere = make_negate("c", "x", 3000).replace("f32[250]{0}", "f32[250]{0:S(1)}", 1)
    small = make_negate("d", "x", 4000).replace("f32[250]", "f32[25]", 1)
    found = compute_text_forecast(make_negate("a", "x", 1000), make_negate("b", "x", 2000), elsewhere, small)
    assert [(op.name, op.num_ops, op.runs) for op in found.sum_similar_ops()] == [("c", 3, 3), ("d", 1, 1)]
    assert [round(op.high * 1e9) for op in found.sum_similar_ops()] == [6000, 4000]


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_op_lane_of_a_trace_covers_the_total_time(name: str) -> None:
    lines, before, *_ = SCHEDULES[name]
    found = compute_text_forecast(*lines, before=before)
    content = json.loads(json.dumps(build_trace(found, "name")))
    threads = {
        event["tid"]: event["args"]["name"] for event in content["traceEvents"] if event["name"] == "thread_name"
    }
    spans = [event for event in content["traceEvents"] if event["ph"] == "X"]
    on_lane = [event for event in spans if threads[event["tid"]] in ("compute", "waiting")]
    at_once = sum(op.high for op in found.ops if op.opcode == "all-reduce")
    assert sum(event["dur"] for event in on_lane) == pytest.approx((found.high - at_once) * 1e6)
    ends = sorted((event["ts"], event["ts"] + event["dur"]) for event in on_lane)
    assert all(first[1] <= second[0] + 1e-9 for first, second in itertools.pairwise(ends)), "ops must not overlap"


def test_exposed_and_hidden_times_sum_to_a_transfer() -> None:
    found = compute_text_forecast(GATHER[0], make_negate(estimated=400), GATHER[1])
    assert {key: tuple(round(s * 1e9) for s in both) for key, both in found.sum_collectives().items()} == {
        "all-gather over fsdp": (600, 400)
    }


def test_a_loop_of_unknown_trips_counts_once_and_is_reported() -> None:
    lines, before = make_loop("L", 3, IN_LOOP)
    found = compute_text_forecast(*lines, before=before.replace("add(%L_i", "multiply(%L_i"))
    assert (round_nanoseconds(found), found.num_endless) == ((2000, 5000), 1)
    assert compute_text_forecast(*lines, before=before).num_endless == 0


def test_a_program_without_estimates_uses_rooflines_and_reports_it() -> None:
    plain = compute_text_forecast("%y = f32[250]{0} negate(%x)")
    assert (round_nanoseconds(plain), plain.has_estimates) == ((2000, 2000), False)
    unknown = compute_text_forecast(make_negate(), clock=None)
    assert (round_nanoseconds(unknown), unknown.has_estimates) == ((2000, 2000), False)
    assert compute_text_forecast(make_negate()).has_estimates


# Asynchronous collectives and reduce-scatters in the form of libtpu.

PIECE = (
    "all-gather(%param), channel_id=130, replica_groups=[2,2]<=[4], dimensions={0}, use_global_device_ids=true, "
    'frontend_attributes={chain_id="8"}'
)
CHAIN = (
    make_computation(
        "starts",
        "%param = f32[250]{0} parameter(0)",
        f"%g1 = f32[500]{{0}} {PIECE}",
        "ROOT %begun = (f32[250]{0}, f32[500]{0}, s32[2]{0:S(4)}) custom-call(%g1), "
        'custom_call_target="AsyncCollectiveStart"',
    )
    + make_computation(
        "goes_on",
        "%param = f32[250]{0} parameter(0)",
        f"%g2 = f32[500]{{0:S(1)}} {PIECE}",
        "%n = f32[250]{0} negate(%param)",
        "ROOT %both = (f32[250]{0}, f32[500]{0:S(1)}) tuple(%n, %g2)",
    )
    + make_computation(
        "ends",
        "%param = f32[250]{0} parameter(0)",
        f"%g3 = f32[500]{{0}} {PIECE}",
        'ROOT %done = f32[500]{0} custom-call(%g3), custom_call_target="AsyncCollectiveDone"',
    )
)


@pytest.mark.parametrize(("estimated", "high"), [(400, 1000), (3000, 3000)])
def test_the_pieces_of_a_collective_are_one_transfer(estimated: int, high: int) -> None:
    found = compute_text_forecast(
        "%s = (f32[250]{0}, f32[500]{0}) fusion(%x), kind=kCustom, calls=%starts",
        "%m = (f32[250]{0}, f32[500]{0:S(1)}) fusion(%x), kind=kCustom, calls=%goes_on, " + format_cycles(estimated),
        "%e = f32[500]{0} fusion(%m), kind=kCustom, calls=%ends",
        before=CHAIN,
    )
    assert round_nanoseconds(found)[1] == high
    assert [op.transfer * 1e9 for op in found.ops if op.basis == "links"] == [pytest.approx(1000)]


# A collective in one fusion with a matmul of 50 ns at its roofline.
BESIDE = make_computation(
    "beside",
    "%left = f32[25,10]{1,0} parameter(0)",
    "%right = f32[10,10]{1,0} parameter(1)",
    "%shard = f32[250]{0} parameter(2)",
    f"%g = f32[500]{{0}} all-gather(%shard), {GROUPS}, dimensions={{0}}",
    "%product = f32[25,10]{1,0} dot(%left, %right), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
    "ROOT %both = (f32[25,10]{1,0}, f32[500]{0}) tuple(%product, %g)",
)


@pytest.mark.parametrize(("estimated", "high", "hidden"), [(400, 1000, 400), (3000, 3000, 1000)])
def test_a_collective_in_a_fusion_with_a_matmul_runs_beside_it(estimated: int, high: int, hidden: int) -> None:
    found = compute_text_forecast(
        "%m = (f32[25,10]{1,0}, f32[500]{0}) fusion(%x, %x, %x), kind=kOutput, calls=%beside, "
        + format_cycles(estimated),
        before=BESIDE,
    )
    assert round_nanoseconds(found)[1] == high
    assert found.flops == 2 * 25 * 10 * 10
    (collective,) = found.sum_collectives().values()
    assert [round(seconds * 1e9) for seconds in collective] == [1000 - hidden, hidden]


def test_an_all_reduce_of_which_each_keeps_a_part_is_a_reduce_scatter_of_half_the_time() -> None:
    inner = make_computation(
        "scatters",
        "%whole = f32[250]{0} parameter(0)",
        f"%r = f32[250]{{0}} all-reduce(%whole), {GROUPS}, to_apply=%add",
        "%zero = s32[] constant(0)",
        "ROOT %part = f32[125]{0} dynamic-slice(%r, %zero), dynamic_slice_sizes={125}",
    )
    found = compute_text_forecast("%y = f32[125]{0} fusion(%x), kind=kCustom, calls=%scatters", before=inner)
    assert round_nanoseconds(found) == (500, 500)
    assert [op.part for op in found.ops] == ["reduce-scatter over fsdp"]


def test_what_goes_to_other_slices_is_there_when_it_has_been_received() -> None:
    meeting = (
        '_xla_host_transfer_rendezvous="r0",_xla_megascale_target="{1,2}",_xla_megascale_transfer_type="ALL_REDUCE"'
    )
    text = make_module(
        f"%s = (f32[250]{{0}}, u32[], token[]) send(%x, %t), channel_id=5, frontend_attributes={{{meeting}}}",
        f"%r = (f32[250]{{0}}, u32[], token[]) recv(%t), channel_id=4, frontend_attributes={{{meeting}}}",
        "%sd = token[] send-done(%s)",
        make_negate(estimated=300),
        "%rd = (f32[250]{0}, token[]) recv-done(%r)",
    )
    found = compute_forecast(text.replace("num_partitions=4", "num_partitions=2"), MESH, make_rates())
    assert round(found.high * 1e9) == 1000
    assert [op.part for op in found.ops if op.basis == "links"] == ["all-reduce over data"]


def test_a_long_schedule_is_drawn_by_the_first_turns_and_the_rest_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner.plan.forecast.schedule.MAX_TRACE_SPANS", 2)
    lines, before = make_loop("L", 50, IN_LOOP)
    found = compute_forecast(make_module(*lines, before=before), MESH, make_rates())
    assert round_nanoseconds(found) == (50 * 2000, 50 * 5000)
    assert [(one.name, one.trips) for one in found.timing.spans][-1] == ("L: 48 more", 48)
