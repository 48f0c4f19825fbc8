"""Forecasts of a step's time and memory, op by op, from the compiled program's text, without the chip.

A TPU's compiler writes an estimate in cycles beside each op of its schedule. Their sum is the upper end of the forecast
range. The lower end is the sum of the rooflines of the ops: each op runs as fast as matrix units and memory bandwidth
allow. The input is text and the chip's peak figures, the output is numbers; the package does not depend on jax, models
or specs.

Rules of the count:

1. Every op of the schedule runs on a single compute lane, as often as loops, calls and conditionals execute it: a loop
   by its trip count, a conditional by its longest branch. A branch in a `jax.named_scope("fallback")` runs in rare
   cases and does not count. A loop whose trip count is unknown counts once, and the forecast reports the number of
   such loops.
2. Asynchronous work (copies between memories, collectives) runs on a lane of its own, one transfer after the other.
   The part that has not finished when it is awaited is exposed, the rest is hidden. A synchronous collective is fully
   exposed. A collective takes the bytes that a device sends over the bandwidth of its links.
3. The roofline of an op is the larger of two times: its matmuls at peak, with sizes padded to the width of a matrix
   unit, and its HBM traffic at the memory's bandwidth. A slice of a larger array, or an update in place, counts by its
   own size. Arrays in the chip's fast memory cause no HBM traffic.
4. A kernel counts by its stated cost, and by no less traffic than that of its arrays in whole tiles; an attention
   kernel without a stated cost by its shapes and blocks.
5. An op without an estimate counts by its roofline at both ends of the range. XLA for GPU writes no estimates; there
   the upper end is that of ops that reach typical shares of the peaks (`TypicalShares`).

- `hlo`: parser of HLO text: instructions, shapes, calls and loop trip counts
- `module`: instructions of a module by computation, in scheduled order; their source lines; its largest arrays
- `collectives`: collectives with their mesh axes, sizes and run counts
- `cost`: matmul FLOPs, HBM traffic and roofline of an op
- `schedule`: simulation of the schedule with its asynchronous transfers
- `forecast`: forecast of a program by part, line and op, and its trace for Perfetto
"""

from runner.plan.forecast.cost import DeviceRates, TypicalShares
from runner.plan.forecast.forecast import Forecast, OpTime, build_trace, compute_forecast, get_live_bytes

__all__ = ["DeviceRates", "Forecast", "OpTime", "TypicalShares", "build_trace", "compute_forecast", "get_live_bytes"]
