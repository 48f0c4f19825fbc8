"""Attribution of time to parts of a step and lines of source."""

import pytest

from runner.plan.forecast import OpTime, compute_forecast
from runner.plan.forecast.module import find_source_line, parse_sources
from tests.plan.forecast.text import MESH, computation, module, rates

FILES = (
    "/home/u/experiments/gpt.py",
    "/venv/lib/python3.11/site-packages/optax/_src/transform.py",
    "/home/u/runner/train/step.py",
    "/home/u/runner/train/loss.py",
    "/venv/lib/python3.11/site-packages/flax/linen/linear.py",
    "/home/u/experiments/attention.py",
    "/home/u/outside.py",
)
FUNCTIONS = ("Block.__call__", "update_fn", "train_step", "cross_entropy_sum", "Dense.__call__", "causal_attention")
FUNCTIONS += ("trace_train_step.<locals>.step", "<module>")
# file, function, line
PLACES = ((1, 1, 10), (2, 2, 20), (3, 3, 30), (4, 4, 40), (5, 5, 50), (6, 6, 60), (3, 7, 70), (7, 8, 80))
# place, the caller counted from one, with one for none
FRAMES = {1: (8, 1), 2: (7, 2), 3: (3, 3), 4: (1, 4), 5: (2, 4), 6: (4, 5), 7: (5, 5), 8: (6, 5), 9: (5, 1)}
BLOCK, OPTIMIZER, LOSS, DENSE, ATTENTION, LIBRARY = 4, 5, 6, 7, 8, 9


def with_sources(text: str) -> str:
    """Return a module with the tables of the frames above."""
    tables = (
        ("FileNames", [f'"{file}"' for file in FILES]),
        ("FunctionNames", [f'"{name}"' for name in FUNCTIONS]),
        ("FileLocations", [f"{{file_name_id={f} function_name_id={g} line={n} end_line={n}}}" for f, g, n in PLACES]),
        ("StackFrames", [f"{{file_location_id={place} parent_frame_id={up}}}" for place, up in FRAMES.values()]),
    )
    rows = "".join(
        f"\n{name}\n" + "\n".join(f"{number} {row}" for number, row in enumerate(lines, 1)) + "\n"
        for name, lines in tables
    )
    head, _, rest = text.partition("\n")
    return f"{head}\n{rows}\n{rest}"


def at(frame: int, op_name: str = "jit(step)/mul") -> str:
    return f'metadata={{op_name="{op_name}" stack_frame_id={frame}}}'


DOT = "dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
BATCHED = "dot(%c, %c), lhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_batch_dims={0}, rhs_contracting_dims={2}"
INSIDE = (
    computation("saves", "%p = f32[20,20] parameter(0)", "ROOT %d = f32[20,20] dynamic-update-slice(%p, %p, %z, %z)")
    + computation("lays_out", "%p = f32[20,20] parameter(0)", "ROOT %t = f32[20,20] transpose(%p), dimensions={1,0}")
    + computation("multiplies", "%p = f32[20,20] parameter(0)", "ROOT %m = f32[20,20] " + DOT.replace("%a", "%p"))
    + computation(
        "takes", "%p = f32[20,20] parameter(0)", "%n = f32[20,20] negate(%p)", "ROOT %g = f32[20,20] gather(%n)"
    )
)


def fusion(name: str) -> str:
    return f"fusion(%a), kind=kLoop, calls=%{name}"


PARTS = {
    "a matmul": (DOT, BLOCK, "matmuls"),
    "one in a fusion": (fusion("multiplies"), BLOCK, "matmuls"),
    "one of the loss": (DOT, LOSS, "matmuls"),
    "one in a layer of a library": (DOT, DENSE, "matmuls"),
    "one in attention, of no batches": (DOT, ATTENTION, "matmuls"),
    "scores of heads": (BATCHED, ATTENTION, "attention"),
    "experts": (BATCHED, BLOCK, "matmuls"),
    "a softmax": ("exponential(%a)", ATTENTION, "attention"),
    "an activation function": ("exponential(%a)", BLOCK, "elementwise and reductions"),
    "the loss": ("exponential(%a)", LOSS, "loss"),
    "the optimizer": ("negate(%a)", OPTIMIZER, "optimizer"),
    "its matmuls": (DOT, OPTIMIZER, "optimizer"),
    "a copy": ("copy(%a)", BLOCK, "layout changes"),
    "one of attention": ("copy(%a)", ATTENTION, "layout changes"),
    "a transpose in a fusion": (fusion("lays_out"), BLOCK, "layout changes"),
    "a stack that is written": (fusion("saves"), BLOCK, "saving and reading slices"),
    "a stack that is read": (
        "dynamic-slice(%a, %z, %z), dynamic_slice_sizes={1,20}",
        BLOCK,
        "saving and reading slices",
    ),
    "an embedding": (fusion("takes"), BLOCK, "gathers and scatters"),
    "what has no origin": ("negate(%a)", 99, "elementwise and reductions"),
}


def only(line: str, frame: int) -> OpTime:
    arguments = ("%a = f32[20,20] parameter(1)", "%c = f32[2,20,20] parameter(2)", "%z = s32[] parameter(3)")
    text = with_sources(module(*arguments, f"%y = f32[20,20] {line}, {at(frame)}", before=INSIDE))
    (op,) = compute_forecast(text, MESH, rates()).ops
    return op


@pytest.mark.parametrize("name", PARTS)
def test_the_time_of_an_op_belongs_to_a_part(name: str) -> None:
    line, frame, part = PARTS[name]
    assert only(line, frame).part == part


@pytest.mark.parametrize(
    ("frame", "line"),
    [
        (BLOCK, "/home/u/experiments/gpt.py:10"),
        (DENSE, "/home/u/experiments/gpt.py:10"),
        (ATTENTION, "/home/u/experiments/attention.py:60"),
        (LOSS, "/home/u/experiments/gpt.py:10"),
        (OPTIMIZER, "/home/u/runner/train/step.py:30"),
        (LIBRARY, "flax/linen/linear.py:50"),
        (99, ""),
    ],
)
def test_an_op_is_told_by_the_innermost_line_of_the_users_own_source(frame: int, line: str) -> None:
    assert only("negate(%a)", frame).line == line


def test_who_traced_a_step_is_no_part_of_it() -> None:
    sources = parse_sources(with_sources(module()))
    assert [frame.function for frame in sources.get_calls(at(BLOCK))] == [
        "Block.__call__",
        "train_step",
        "trace_train_step.<locals>.step",
    ]


def test_a_text_that_states_file_and_line_is_read_too() -> None:
    sources = parse_sources(module())
    assert (
        find_source_line(sources.get_calls('metadata={op_name="a" source_file="/u/b.py" source_line=7}'), "runner")
        == "/u/b.py:7"
    )
    assert find_source_line(sources.get_calls('metadata={op_name="a"}'), "runner") == ""


def test_a_fusion_that_has_lost_its_origin_is_told_by_what_is_inside() -> None:
    inner = computation(
        "multiplies",
        "%p = f32[20,20] parameter(0)",
        f"ROOT %m = f32[20,20] {DOT.replace('%a', '%p')}, {at(BLOCK, 'jit(step)/dot')}",
    )
    text = with_sources(module("%a = f32[20,20] parameter(1)", f"%y = f32[20,20] {fusion('multiplies')}", before=inner))
    (op,) = compute_forecast(text, MESH, rates()).ops
    assert (op.op_name, op.line) == ("jit(step)/dot", "/home/u/experiments/gpt.py:10")
