"""How long a step will take, op by op, and why: read from the compiled program, on a machine without the chip.

A TPU's compiler writes an estimate of cycles beside each op of its schedule. Their sum is the upper end of a range;
the lower is the sum of the rooflines of the ops, each as fast as matrix units and memory allow. Text and the chip's
peak figures in, numbers out: knows no jax, no model and no spec.

How it is counted, in order:
1. Every op of the schedule runs on the one compute lane, as often as loops, calls and conditionals have it run: a loop
   by its trips, a conditional by its longest branch. Loops whose trips are not known count once, and it is said.
2. What starts and is awaited later (copies between memories, collectives) runs on a lane of its own, one transfer
   after the other. What is still missing when it is awaited is exposed; the rest is hidden. A collective without a
   start is exposed as a whole, and takes the bytes that a device sends over its links.
3. An op's roofline is the larger of its matmuls, with sizes filled up to the width of a matrix unit, at peak, and the
   bytes that it moves in main memory at the memory's bandwidth. What is cut out of a larger array, or put into one in
   place, counts by its own size; what lies in the chip's fast memory counts nothing.
4. A kernel counts by the cost that it states; attention kernels that state none by their shapes and their blocks.
5. An op without an estimate counts by its roofline in both ends of the range.

Modules, in the order in which they build on each other:

- `hlo`: A module as a whole: which computation calls which, how often a loop turns, and the collectives as t
- `module`: The instructions of a module by computation, in the order in which the compiler has scheduled them
- `sources`: Which line of whose source an op comes from: by the tables of files and stack frames that a module b
- `collectives`: Among whom: the replica groups of a collective as device ids, and the mesh axes that they span
- `cost`: The matrix multiplications in an op: `dot`, `convolution`, and those within fusions and library call
- `schedule`: The schedule of a program as a tree of loops, calls and branches, and the time that it takes
- `memory`: What is alive in a device's main memory at each op, by the scheduled order: the step's temporaries
- `forecast`: The forecast of a program: its time as a range, where it goes, and what is alive meanwhile
"""

from runner.plan.forecast.cost import DeviceRates
from runner.plan.forecast.forecast import Forecast, OpTime, build_trace, compute_forecast, get_live_bytes

__all__ = ["DeviceRates", "Forecast", "OpTime", "build_trace", "compute_forecast", "get_live_bytes"]
