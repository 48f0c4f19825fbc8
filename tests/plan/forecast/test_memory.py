"""Live buffers at each op, compared with counts made by hand; most arrays have 1,000 bytes."""

import pytest

from runner.plan.forecast import compute_forecast
from runner.plan.forecast.forecast import compute_live_memory
from runner.plan.forecast.module import load_module
from runner.plan.profile import compute_memory_timeline
from tests.plan.forecast.hlo_text import MESH, make_computation, make_module, make_negate, make_rates
from tests.plan.forecast.test_schedule import make_loop

FUSED = make_computation(
    "fused",
    "%f0 = f32[250]{0} parameter(0)",
    "%f1 = f32[250]{0} negate(%f0)",
    "ROOT %f2 = f32[250]{0} exponential(%f1)",
)
UPDATE = make_computation(
    "update",
    "%stack = f32[250]{0} parameter(0)",
    "%row = f32[5]{0} parameter(1)",
    "%zero = s32[] constant(0)",
    "ROOT %put = f32[250]{0} dynamic-update-slice(%stack, %row, %zero)",
)
END = "ROOT %end = f32[250]{0} negate(%x)"  # the result of the program is not a temporary
SEQUENTIAL = ("%m = f32[250]{0} reverse(%L_x), dimensions={0}", "%n = f32[250]{0} reverse(%m), dimensions={0}")

LIVE_CASES = {
    "nothing but arguments and the result": ((END,), "", 0),
    "one": (("%a = f32[250]{0} reverse(%x)", END), "", 1000),
    "one dies as the next is made": (
        ("%a = f32[250]{0} reverse(%x)", "%b = f32[250]{0} reverse(%a)", "%c = f32[250]{0} reverse(%b)", END),
        "",
        2000,
    ),
    "one that is used at last lives on": (
        (
            "%a = f32[250]{0} reverse(%x)",
            "%b = f32[250]{0} reverse(%a)",
            "%c = f32[250]{0} reverse(%b)",
            "ROOT %d = f32[250]{0} dot(%a, %c)",
        ),
        "",
        3000,
    ),
    "value by value in the same place": (
        ("%a = f32[250]{0} reverse(%x)", make_negate("b", "a"), make_negate("c", "b"), END),
        "",
        1000,
    ),
    "not where it is needed still": (
        ("%a = f32[250]{0} reverse(%x)", make_negate("b", "a"), "%c = f32[250]{0} dot(%a, %b)", END),
        "",
        3000,
    ),
    "not where it is needed by another name": (
        (
            "%a = f32[250]{0} reverse(%x)",
            "%same = f32[250]{0} bitcast(%a)",
            make_negate("b", "a"),
            "ROOT %c = f32[250]{0} dot(%same, %b)",
        ),
        "",
        2000,
    ),
    "names have no place": (
        (
            "%a = f32[250]{0} reverse(%x)",
            "%t = (f32[250]{0}) tuple(%a)",
            "%g = f32[250]{0} get-tuple-element(%t), index=0",
            "%b = f32[250]{0} bitcast(%g)",
            "ROOT %c = f32[250]{0} reverse(%b)",
        ),
        "",
        1000,
    ),
    "fast memory is another": (("%a = f32[250]{0:S(1)} reverse(%x)", END), "", 0),
    "a copy has its place from its start": (
        (
            "%s = (f32[250]{0}, f32[250]{0}, u32[]) copy-start(%x)",
            "%a = f32[250]{0} reverse(%x)",
            "%d = f32[250]{0} copy-done(%s)",
            "ROOT %b = f32[250]{0} dot(%d, %a)",
        ),
        "",
        2000,
    ),
    "a fusion in the place of its operand": (
        ("%a = f32[250]{0} reverse(%x)", "%b = f32[250]{0} fusion(%a), kind=kLoop, calls=%fused", END),
        FUSED,
        1000,
    ),
    "an update in place": (
        (
            "%a = f32[250]{0} reverse(%x)",
            "%r = f32[5]{0:S(1)} slice(%x)",
            "%b = f32[250]{0} fusion(%a, %r), kind=kCustom, calls=%update",
            "ROOT %c = f32[250]{0} reverse(%b)",
        ),
        UPDATE,
        1000,
    ),
    "what a loop carries has one place, and its turns theirs once": (
        (
            "%a = f32[250]{0} reverse(%x)",
            *(line.replace("%x", "%a") for line in make_loop("L", 3, *SEQUENTIAL)[0]),
            END,
        ),
        make_loop("L", 3, *SEQUENTIAL)[1],
        1000 + 2000,
    ),
    "the branch that needs most": (
        (
            "%a = f32[250]{0} reverse(%x)",
            "%c = f32[250]{0} conditional(%i, %a, %a), branch_computations={%one, %two}",
            "ROOT %d = f32[250]{0} reverse(%c)",
        ),
        make_computation("one", "%p1 = f32[250]{0} parameter(0)", "ROOT %o1 = f32[250]{0} reverse(%p1)")
        + make_computation(
            "two",
            "%p2 = f32[250]{0} parameter(0)",
            "%q2 = f32[250]{0} reverse(%p2)",
            "%r2 = f32[250]{0} reverse(%q2)",
            "ROOT %o2 = f32[250]{0} dot(%q2, %r2)",
        ),
        2000 + 2000,
    ),
}


@pytest.mark.parametrize("name", LIVE_CASES)
def test_the_peak_equals_the_counted_one(name: str) -> None:
    lines, before, peak = LIVE_CASES[name]
    assert compute_live_memory(load_module(make_module(*lines, before=before))).peak == peak


def test_live_buffers_at_the_peak_are_listed_by_size() -> None:
    text = make_module(
        "%a = f32[250]{0} reverse(%x)",
        "%b = bf16[1000]{0} convert(%a)",
        "ROOT %c = f32[250]{0} dot(%a, %b)",
    )
    found = compute_live_memory(load_module(text))
    assert [(one.shape, one.bytes, one.op.name) for one in found.peak_buffers] == [
        ("bf16[1000]", 2000, "b"),
        ("f32[250]", 1000, "a"),
    ]


def test_memory_over_time_has_its_peak_at_the_right_op() -> None:
    def make_event(name: str, of: str) -> str:
        return make_negate(name, of, 1000).replace("negate", "reverse")

    text = make_module(make_event("a", "x"), make_event("b", "a"), make_event("c", "x"), "ROOT " + make_event("d", "x"))
    found = compute_forecast(text, MESH, make_rates())
    assert compute_memory_timeline(found, 4) == [1000, 2000, 1000, 0]
