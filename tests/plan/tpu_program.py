"""Program that prints arrays and collectives of a step compiled for a TPU as JSON; a process cannot release libtpu.

    python -m tests.plan.tpu_program SPEC TOPOLOGY [KEY=VALUE ...]

`gathered`: shapes of the results of all-gathers; `of_vocabulary`: shapes with the vocabulary as an axis; `parameters`:
for each name the number of stacked layers (0 if none) and the shape; `collectives`: kind, mesh axes and bytes of each.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from runner.accelerator import parse_accelerator
from runner.checkpoint.leaves import flatten_with_names
from runner.plan.checks import Findings, open_job
from runner.plan.forecast.collectives import find_collectives
from runner.plan.forecast.hlo import ARRAY_PATTERN, get_output_shape, iter_instructions, parse_program
from runner.plan.program import CompiledProgram, compile_program, open_machine
from runner.spec import load_document
from runner.trainer import BaseTrainer

Shape = tuple[int, ...]


def compile_step(spec: str, topology: str, overrides: Sequence[str]) -> tuple[BaseTrainer, CompiledProgram]:
    """Return the job, and its train step as `plan` compiles it."""
    findings = Findings()
    job = open_job(load_document(spec, [f"topology.accelerator={topology}", *overrides]), findings)
    machine = open_machine(parse_accelerator(topology))
    assert isinstance(job, BaseTrainer), findings.problems
    assert machine is not None
    train_setup = job.setup_builder.build_on_mesh(
        job.setup_builder.make_mesh(machine.devices), jax.random.key(job.spec.seed)
    )
    return job, compile_program(job.setup_builder, train_setup, machine, with_val=False)


def parse_shapes(text: str) -> Iterator[Shape]:
    """Return the sizes of an array, or of all arrays in a tuple."""
    for match in ARRAY_PATTERN.finditer(text):
        yield tuple(int(size.lstrip("<=")) for size in match[2].split(",") if size)


def count_stacked_layers(job: BaseTrainer) -> dict[str, int]:
    """Return the number of layers that each parameter stacks in its first axis, 0 for none."""
    tokens_BxT = jnp.zeros((1, 8), jnp.int32)
    boxed: Any = jax.eval_shape(lambda key: job.model().init(key, tokens_BxT, deterministic=True), jax.random.key(0))
    is_box = lambda leaf: isinstance(leaf, nn.LogicallyPartitioned)  # noqa: E731
    found = jax.tree_util.tree_leaves_with_path(boxed["params"], is_leaf=is_box)
    names = flatten_with_names({"params": nn.unbox(boxed["params"])})
    boxes = [box for _, box in found]
    return {name: box.value.shape[0] * (box.names[0] == "layers") for name, box in zip(names, boxes, strict=True)}


def summarise_program(job: BaseTrainer, program: CompiledProgram) -> dict[str, Any]:
    """Return the summary that the program prints."""
    text, layout = program.step.text, program.step.layout
    gathered = {
        shape
        for found in parse_program(text).collectives
        if found.kind == "all-gather"
        for shape in parse_shapes(get_output_shape(found.instruction))
    }
    results = {shape for one in iter_instructions(text) for shape in parse_shapes(get_output_shape(one))}
    layers = count_stacked_layers(job)
    shapes = {
        name: leaf.shape
        for name, leaf in flatten_with_names({"params": program.train_setup.abstract_state.params}).items()
    }
    return {
        "tokens": layout.micro_batch_examples * layout.fields["x"].shape[0],
        "vocabulary": job.vocabulary_size,
        "parameters": {name: [layers[name], *shape] for name, shape in shapes.items()},
        "gathered": sorted(gathered),
        "collectives": [
            (one.kind, one.axes, one.bytes) for one in find_collectives(text, program.train_setup.mesh_sizes)
        ],
        "of_vocabulary": sorted(shape for shape in results if job.vocabulary_size in shape),
    }


if __name__ == "__main__":
    print(json.dumps(summarise_program(*compile_step(sys.argv[1], sys.argv[2], sys.argv[3:]))))
