"""Live buffers at each op, counted by hand, with arrays of 1,000 bytes."""

import pytest

from runner.plan.forecast import compute_forecast
from runner.plan.forecast.memory import compute_live_memory
from runner.plan.forecast.module import load_module
from runner.plan.profile import compute_memory_timeline
from tests.plan.forecast.test_schedule import loop
from tests.plan.forecast.text import MESH, computation, module, negate, rates

FUSED = computation(
    "fused",
    "%f0 = f32[250]{0} parameter(0)",
    "%f1 = f32[250]{0} negate(%f0)",
    "ROOT %f2 = f32[250]{0} exponential(%f1)",
)
UPDATE = computation(
    "update",
    "%stack = f32[250]{0} parameter(0)",
    "%row = f32[5]{0} parameter(1)",
    "%zero = s32[] constant(0)",
    "ROOT %put = f32[250]{0} dynamic-update-slice(%stack, %row, %zero)",
)
END = "ROOT %end = f32[250]{0} negate(%x)"  # the result of the whole is no temporary
IN_TURN = ("%m = f32[250]{0} reverse(%L_x), dimensions={0}", "%n = f32[250]{0} reverse(%m), dimensions={0}")

ALIVE = {
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
        ("%a = f32[250]{0} reverse(%x)", negate("b", "a"), negate("c", "b"), END),
        "",
        1000,
    ),
    "not where it is needed still": (
        ("%a = f32[250]{0} reverse(%x)", negate("b", "a"), "%c = f32[250]{0} dot(%a, %b)", END),
        "",
        3000,
    ),
    "not where it is needed by another name": (
        (
            "%a = f32[250]{0} reverse(%x)",
            "%same = f32[250]{0} bitcast(%a)",
            negate("b", "a"),
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
        ("%a = f32[250]{0} reverse(%x)", *(line.replace("%x", "%a") for line in loop("L", 3, *IN_TURN)[0]), END),
        loop("L", 3, *IN_TURN)[1],
        1000 + 2000,
    ),
    "the branch that needs most": (
        (
            "%a = f32[250]{0} reverse(%x)",
            "%c = f32[250]{0} conditional(%i, %a, %a), branch_computations={%one, %two}",
            "ROOT %d = f32[250]{0} reverse(%c)",
        ),
        computation("one", "%p1 = f32[250]{0} parameter(0)", "ROOT %o1 = f32[250]{0} reverse(%p1)")
        + computation(
            "two",
            "%p2 = f32[250]{0} parameter(0)",
            "%q2 = f32[250]{0} reverse(%p2)",
            "%r2 = f32[250]{0} reverse(%q2)",
            "ROOT %o2 = f32[250]{0} dot(%q2, %r2)",
        ),
        2000 + 2000,
    ),
}


@pytest.mark.parametrize("name", ALIVE)
def test_the_peak_is_the_one_counted_by_hand(name: str) -> None:
    lines, before, peak = ALIVE[name]
    assert compute_live_memory(load_module(module(*lines, before=before))).peak == peak


def test_what_is_alive_at_the_peak_is_told_the_largest_first() -> None:
    text = module(
        "%a = f32[250]{0} reverse(%x)",
        "%b = bf16[1000]{0} convert(%a)",
        "ROOT %c = f32[250]{0} dot(%a, %b)",
    )
    found = compute_live_memory(load_module(text))
    assert [(one.shape, one.bytes, one.op.name) for one in found.peak_buffers] == [
        ("bf16[1000]", 2000, "b"),
        ("f32[250]", 1000, "a"),
    ]


def test_memory_over_time_has_the_peak_where_it_is() -> None:
    def lasting(name: str, of: str) -> str:
        return negate(name, of, 1000).replace("negate", "reverse")

    text = module(lasting("a", "x"), lasting("b", "a"), lasting("c", "x"), "ROOT " + lasting("d", "x"))
    found = compute_forecast(text, MESH, rates())
    assert compute_memory_timeline(found, 4) == [1000, 2000, 1000, 0]
