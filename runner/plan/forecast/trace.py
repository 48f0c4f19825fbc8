"""The schedule as Chrome's trace format, which Perfetto opens: a lane of ops, and one for each kind of transfer."""

from typing import TypedDict

from runner.plan.forecast.whole import Forecast

_PROCESS = 1


class Event(TypedDict, total=False):
    """One event; times in microseconds."""

    name: str
    ph: str
    pid: int
    tid: int
    ts: float
    dur: float
    cat: str
    args: dict[str, str | float]


def trace_of(found: Forecast, name: str) -> dict[str, list[Event] | str]:
    """The step by the compiler's estimates, as the content of a JSON file. Memory is a counter, in bytes."""
    ops = {op.name: op for op in found.ops}
    lanes = ["compute", "waiting", *sorted({one.lane for one in found.timing.drawn} - {"compute", "waiting"})]
    events: list[Event] = [{"name": "process_name", "ph": "M", "pid": _PROCESS, "args": {"name": name}}]
    for number, lane in enumerate(lanes):
        about: list[Event] = [
            {"name": "thread_name", "ph": "M", "pid": _PROCESS, "tid": number, "args": {"name": lane}},
            {"name": "thread_sort_index", "ph": "M", "pid": _PROCESS, "tid": number, "args": {"sort_index": number}},
        ]
        events += about
    memory = -1
    for one in found.timing.drawn:
        op = ops.get(one.name)
        args: dict[str, str | float] = {}
        if op is not None:
            args = {"operation": op.op_name, "line": op.line, "shape": op.shape[:200], "runs": op.runs}
        event: Event = {
            "name": one.name,
            "ph": "X",
            "pid": _PROCESS,
            "tid": lanes.index(one.lane),
            "ts": one.start * 1e6,
            "dur": one.seconds * 1e6,
            "cat": op.part if op is not None else one.lane,
            "args": args,
        }
        events.append(event)
        held = memory_at(found, one.stack, one.turns)
        if one.lane == "compute" and held != memory:
            memory = held
            events.append(
                {
                    "name": "temporaries",
                    "ph": "C",
                    "pid": _PROCESS,
                    "ts": one.start * 1e6,
                    "args": {"bytes": float(memory)},
                }
            )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def memory_at(found: Forecast, stack: tuple[tuple[str, str], ...], turns: int) -> int:
    """Bytes of temporaries alive while these ops run; of several turns of a loop, the most."""
    more = found.alive.inside.get(stack[-1], 0) if turns > 1 and stack else 0
    return found.alive.bytes_at(stack) + more
