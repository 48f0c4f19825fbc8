"""Arrays in compiled TPU programs of decoders: no full logits, and no gather of more than one layer of a parameter.

`tpu_program` compiles them with libtpu in a process of its own.
"""

import math
from typing import Any

import pytest

from tests.plan.tpu_program import Shape
from tests.support.libtpu import run_module

pytestmark = pytest.mark.soak
# Options that give a small spec the structure of a large one, with a vocabulary size that is unique.
SMALL_OPTIONS = (
    "config.memory.loss_chunk_positions=16",
    "config.model.layers=5",
    "config.model.vocabulary_size=320",
    "topology.mesh.fsdp=4",
)
PROGRAMS = {
    # The micro-batch that fits according to the plans, so that only this one is compiled.
    "llama_1b": ("v5e-64", "config.train.micro_batch_examples=4"),
    "llama3_8b": ("v5p-128", "config.train.micro_batch_examples=2"),
    "llama_nano": ("v5e-4", *SMALL_OPTIONS),
    "moe_nano": ("v5e-4", *SMALL_OPTIONS),
}


@pytest.fixture(scope="module", params=PROGRAMS)
def program(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Summary of the compiled step of a spec."""
    return run_tpu_program(request.param, *PROGRAMS[request.param])


def run_tpu_program(spec: str, *options: str) -> dict[str, Any]:
    return dict(run_module("tests.plan.tpu_program", f"specs/{spec}.yaml", *options))


def drop_ones(shape: Shape | list[int]) -> list[int]:
    """Return the sizes above one, sorted, which transposition and reshaping to unit dimensions preserve."""
    return sorted(size for size in shape if size != 1)


def test_no_array_has_the_size_of_all_logits(program: dict[str, Any]) -> None:
    parameters = [drop_ones(shape) for _, *shape in program["parameters"].values()]
    others = [shape for shape in program["of_vocabulary"] if drop_ones(shape) not in parameters]
    assert others, "no logits at all were found"
    all_logits = program["tokens"] * program["vocabulary"]
    assert [shape for shape in others if math.prod(shape) >= all_logits] == []


def test_all_gathers_produce_at_most_one_layer_of_stacked_parameters(program: dict[str, Any]) -> None:
    assert program["gathered"], "sharded parameters must be gathered somewhere"
    several = {name: shape for name, (layers, *shape) in program["parameters"].items() if layers > 1}
    assert several, "some parameters must stack several layers"
    whole = [drop_ones(shape) for shape in several.values()]
    assert [shape for shape in program["gathered"] if drop_ones(shape) in whole] == []
    layers = [shape[1:] for shape in several.values()]
    others = [shape for stacked, *shape in program["parameters"].values() if stacked <= 1]
    # The matrices into the hidden layer of experts are gathered as one.
    joined = sum(math.prod(shape[1:]) for name, shape in several.items() if name.endswith(("moe.gate", "moe.up")))
    most = max(joined, *(math.prod(shape) for shape in (*layers, *others)))
    assert [shape for shape in program["gathered"] if math.prod(shape) > most] == []


def test_expert_tokens_are_sent_by_ragged_all_to_all_within_a_window() -> None:
    cut = [option for option in SMALL_OPTIONS if "mesh" not in option]
    mesh = ("topology.mesh.data=1", "topology.mesh.fsdp=2", "topology.mesh.expert=4")
    sizes = ("config.model.width=128", "config.train.micro_batch_examples=4")  # at least the lanes of a register
    program = run_tpu_program("moe_nano", "v5e-8", *cut, *mesh, *sizes)
    found = program["collectives"]
    travels = [bytes_ for kind, axes, bytes_ in found if kind == "ragged-all-to-all" and axes == ["expert"]]
    # Tokens and results in the forward pass; tokens, gradients of results and gradients of tokens in the backward pass.
    # A device has 4 sequences of 64 tokens for 2 experts each, 128 float32 wide; the window for each of 4 devices is a
    # quarter larger than the mean.
    assert travels == [4 * 64 * 2 * 5 // 4 * 128 * 4] * 5
    # Besides, the devices that share the matrices of some experts redistribute them before they gather them.
    matrices = {
        name.rsplit(".", 1)[1]: math.prod(shape[1:])
        for name, (_, *shape) in program["parameters"].items()
        if ".moe." in name and ".shared." not in name
    }
    shards = {(matrices["gate"] + matrices["up"]) * 4 // 8, matrices["down"] * 4 // 8}
    others = {(*axes, bytes_) for kind, axes, bytes_ in found if "all-to-all" in kind and axes != ["expert"]}
    assert others == {("fsdp", bytes_) for bytes_ in shards}
    tokens = 4 * 64 * 128 * 4
    assert [one for one in found if one[0] == "all-gather" and one[1] == ["expert"] and one[2] >= tokens] == []
