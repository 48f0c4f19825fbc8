"""What a compiled step communicates and what fills its memory, read from the text of its optimised HLO module.

Text in, numbers out: the text of a compiled program is the same on CPU, GPU and TPU up to the forms told here, and it
can be read where none of these devices is. Knows no jax, no model and no device.

How the text is read, in order:
1. Computations call each other. A collective runs once for every run of the computation that holds it: once for each
   call, and the body of a `while` once for each trip. The compiler states the trips of most loops; where it does not
   (TPU), they follow from the counter's first value, step and bound. Where these are no constants the body counts
   once, and `is_at_least` says so. All branches of a conditional count as taken.
2. An asynchronous collective counts where it starts. On TPU one may be spread over several fusions, each of which
   repeats it: these share a `chain_id`, and the one that `AsyncCollectiveStart` takes is counted.
3. An all-reduce of which each device of a group keeps its own part, inside a TPU's fusion, is a reduce-scatter. One
   that stands by itself moves the whole array twice, whatever is cut out of its result later: it is an all-reduce.
4. Between TPU slices the runtime carries data from host to host, so a collective there is a `send` that names its kind.

The ids in a replica group are positions in the mesh's devices, row-major. Where a module holds fewer partitions than
the mesh has devices it is the program of one slice of several, and slices are the outermost split of the mesh.

Modules, in the order in which they build on each other:

- `text`: instructions, operands, shapes and their bytes
- `source`: the line of a program that an instruction comes from
- `program`: computations, calls, loops, and the collectives as they stand
- `count`: how often a computation runs
- `group`: replica groups, and the mesh axes that they span
- `collective`: what a step communicates
- `buffer`: the largest arrays
"""

from runner.plan.hlo.buffer import Buffer, largest_arrays
from runner.plan.hlo.collective import Collective, collectives, sent_bytes_by_axes
from runner.plan.hlo.program import KINDS

__all__ = ["KINDS", "Buffer", "Collective", "collectives", "largest_arrays", "sent_bytes_by_axes"]
