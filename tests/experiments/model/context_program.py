"""Program that prints the arrays and collectives of a context-parallel step compiled for a TPU, as JSON.

It runs in a separate process, because libtpu stays with the process that loads it.

    python -m tests.experiments.model.context_program SPEC TOPOLOGY [KEY=VALUE ...]

`kernels` counts calls of kernels; `collectives` lists those of attention (kind, axes, bytes); `most` is the number
of elements of the largest result; `shapes` lists the shapes of all results.
"""

import json
import math
import sys

from runner.plan.forecast.collectives import find_collectives
from runner.plan.forecast.hlo import get_output_shape, iter_instructions
from tests.plan.tpu_program import compile_step, parse_shapes


def main(spec: str, topology: str, overrides: list[str]) -> None:
    _, program = compile_step(spec, topology, overrides)
    text = program.step.text
    found = [
        one for one in find_collectives(text, program.train_setup.mesh_sizes) if "attention/shard_map" in one.op_name
    ]
    shapes = {shape for one in iter_instructions(text) for shape in parse_shapes(get_output_shape(one))}
    print(
        json.dumps(
            {
                "kernels": text.count('custom_call_target="tpu_custom_call"'),
                "collectives": sorted([one.kind, list(one.axes), one.bytes] for one in found),
                "most": max(map(math.prod, shapes)),
                "shapes": sorted(shapes),
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
