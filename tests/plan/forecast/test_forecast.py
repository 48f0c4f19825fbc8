"""Attribution of predicted time to parts of a step and lines of source."""

import pytest

from runner.plan.forecast import OpTime, compute_forecast
from runner.plan.forecast.module import find_source_line, parse_sources
from tests.plan.forecast.hlo_text import MESH, make_computation, make_module, make_rates

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
# place and caller; callers count from one, and one means none
FRAMES = {1: (8, 1), 2: (7, 2), 3: (3, 3), 4: (1, 4), 5: (2, 4), 6: (4, 5), 7: (5, 5), 8: (6, 5), 9: (5, 1)}
BLOCK, OPTIMIZER, LOSS, DENSE, ATTENTION, LIBRARY = 4, 5, 6, 7, 8, 9


def parse_with_sources(text: str) -> str:
    """Parse a module with the tables of the frames above."""
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


def make_metadata(frame: int, op_name: str = "jit(step)/mul") -> str:
    return f'metadata={{op_name="{op_name}" stack_frame_id={frame}}}'


DOT = "dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
BATCHED = "dot(%c, %c), lhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_batch_dims={0}, rhs_contracting_dims={2}"
INSIDE = (
    make_computation(
        "saves", "%p = f32[20,20] parameter(0)", "ROOT %d = f32[20,20] dynamic-update-slice(%p, %p, %z, %z)"
    )
    + make_computation(
        "lays_out", "%p = f32[20,20] parameter(0)", "ROOT %t = f32[20,20] transpose(%p), dimensions={1,0}"
    )
    + make_computation("multiplies", "%p = f32[20,20] parameter(0)", "ROOT %m = f32[20,20] " + DOT.replace("%a", "%p"))
    + make_computation(
        "takes", "%p = f32[20,20] parameter(0)", "%n = f32[20,20] negate(%p)", "ROOT %g = f32[20,20] gather(%n)"
    )
)


def make_fusion(name: str) -> str:
    return f"fusion(%a), kind=kLoop, calls=%{name}"


PARTS = {
    "a matmul": (DOT, BLOCK, "matmuls"),
    "one in a fusion": (make_fusion("multiplies"), BLOCK, "matmuls"),
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
    "a transpose in a fusion": (make_fusion("lays_out"), BLOCK, "layout changes"),
    "a stack that is written": (make_fusion("saves"), BLOCK, "saving and reading slices"),
    "a stack that is read": (
        "dynamic-slice(%a, %z, %z), dynamic_slice_sizes={1,20}",
        BLOCK,
        "saving and reading slices",
    ),
    "an embedding": (make_fusion("takes"), BLOCK, "gathers and scatters"),
    "what has no origin": ("negate(%a)", 99, "elementwise and reductions"),
}


def attribute_only_op(line: str, frame: int) -> OpTime:
    arguments = ("%a = f32[20,20] parameter(1)", "%c = f32[2,20,20] parameter(2)", "%z = s32[] parameter(3)")
    text = parse_with_sources(make_module(*arguments, f"%y = f32[20,20] {line}, {make_metadata(frame)}", before=INSIDE))
    (op,) = compute_forecast(text, MESH, make_rates()).ops
    return op


@pytest.mark.parametrize("name", PARTS)
def test_the_time_of_an_op_is_attributed_to_its_part(name: str) -> None:
    line, frame, part = PARTS[name]
    assert attribute_only_op(line, frame).part == part


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
def test_an_op_has_the_innermost_line_of_user_source(frame: int, line: str) -> None:
    assert attribute_only_op("negate(%a)", frame).line == line


def test_the_frames_that_trace_a_step_are_ignored() -> None:
    sources = parse_sources(parse_with_sources(make_module()))
    assert [frame.function for frame in sources.get_calls(make_metadata(BLOCK))] == [
        "Block.__call__",
        "train_step",
        "trace_train_step.<locals>.step",
    ]


def test_inline_file_and_line_metadata_is_parsed() -> None:
    sources = parse_sources(make_module())
    assert (
        find_source_line(sources.get_calls('metadata={op_name="a" source_file="/u/b.py" source_line=7}'), "runner")
        == "/u/b.py:7"
    )
    assert find_source_line(sources.get_calls('metadata={op_name="a"}'), "runner") == ""


def test_a_fusion_without_origin_is_attributed_by_its_content() -> None:
    inner = make_computation(
        "multiplies",
        "%p = f32[20,20] parameter(0)",
        f"ROOT %m = f32[20,20] {DOT.replace('%a', '%p')}, {make_metadata(BLOCK, 'jit(step)/dot')}",
    )
    text = parse_with_sources(
        make_module("%a = f32[20,20] parameter(1)", f"%y = f32[20,20] {make_fusion('multiplies')}", before=inner)
    )
    (op,) = compute_forecast(text, MESH, make_rates()).ops
    assert (op.op_name, op.line) == ("jit(step)/dot", "/home/u/experiments/gpt.py:10")
