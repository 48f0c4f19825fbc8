"""The compiled TPU programs of the decoders: nothing of size batch x sequence x vocabulary, no parameter whole that
need not be. Compiled by libtpu in a process of its own, which prints what it holds: see `tpu_program`.
"""

import math
from typing import Any

import pytest

from tests.plan.tpu_program import Shape
from tests.support.libtpu import run_module

pytestmark = pytest.mark.soak
# A small spec as a large one would be, with a vocabulary that is no other size.
CUT = (
    "config.memory.loss_chunk_positions=16",
    "config.model.layers=5",
    "config.model.vocabulary_size=320",
    "topology.mesh.fsdp=4",
)
PROGRAMS = {
    # With the micro-batch that fits, by their plans, so that only that one is compiled.
    "llama_1b": ("v5e-64", "config.train.micro_batch_examples=4"),
    "llama3_8b": ("v5p-128", "config.train.micro_batch_examples=2"),
    "llama_nano": ("v5e-4", *CUT),
    "moe_nano": ("v5e-4", *CUT),
}


@pytest.fixture(scope="module", params=PROGRAMS)
def program(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Arrays and gathers of the compiled step of a spec."""
    return look(request.param, *PROGRAMS[request.param])


def look(spec: str, *options: str) -> dict[str, Any]:
    """Return what `tpu_program` prints."""
    return dict(run_module("tests.plan.tpu_program", f"specs/{spec}.yaml", *options))


def without_ones(shape: Shape | list[int]) -> list[int]:
    """Return the sizes above one, sorted, so that a transposed or reshaped array has the same."""
    return sorted(size for size in shape if size != 1)


def test_nothing_has_the_size_of_all_logits(program: dict[str, Any]) -> None:
    parameters = [without_ones(shape) for _, *shape in program["parameters"].values()]
    others = [shape for shape in program["of_vocabulary"] if without_ones(shape) not in parameters]
    assert others, "no logits at all were found"
    all_logits = program["tokens"] * program["vocabulary"]
    assert [shape for shape in others if math.prod(shape) >= all_logits] == []


def test_no_all_gather_makes_more_than_a_layer_of_a_parameter_that_stacks_several(program: dict[str, Any]) -> None:
    assert program["gathered"], "parameters that are cut are gathered somewhere"
    several = {name: shape for name, (layers, *shape) in program["parameters"].items() if layers > 1}
    assert several, "some parameters stack several layers"
    whole = [without_ones(shape) for shape in several.values()]
    assert [shape for shape in program["gathered"] if without_ones(shape) in whole] == []
    layers = [shape[1:] for shape in several.values()]
    others = [shape for stacked, *shape in program["parameters"].values() if stacked <= 1]
    most = max(math.prod(shape) for shape in (*layers, *others))
    assert [shape for shape in program["gathered"] if math.prod(shape) > most] == []


def test_tokens_go_to_experts_over_an_axis_by_ragged_all_to_all_and_no_more_of_them_than_a_window_holds() -> None:
    cut = [option for option in CUT if "mesh" not in option]
    mesh = ("topology.mesh.data=1", "topology.mesh.fsdp=2", "topology.mesh.expert=4")
    sizes = ("config.model.width=128", "config.train.micro_batch_examples=4")  # of the lanes of a register, at least
    found = look("moe_nano", "v5e-8", *cut, *mesh, *sizes)["collectives"]
    travels = [bytes_ for kind, axes, bytes_ in found if kind == "ragged-all-to-all" and axes == ["expert"]]
    # There and back; backward the tokens again, the gradients of results, and those of tokens. A device has 4 rows of
    # 64 tokens for 2 experts each, 128 float32 wide; a window for each of 4 devices holds a quarter more than the mean.
    assert travels == [4 * 64 * 2 * 5 // 4 * 128 * 4] * 5
    assert {tuple(axes) for kind, axes, _ in found if "all-to-all" in kind} == {("expert",)}
    tokens = 4 * 64 * 128 * 4
    assert [one for one in found if one[0] == "all-gather" and one[1] == ["expert"] and one[2] >= tokens] == []
