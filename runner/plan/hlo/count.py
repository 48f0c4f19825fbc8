"""How often each computation of a module runs in one run of the program."""

import graphlib
import re
from collections import defaultdict
from typing import NamedTuple

from runner.plan.hlo.program import Call, Program
from runner.plan.hlo.text import SAME_VALUE

_FLIPPED = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE", "NE": "NE"}


class _Value(NamedTuple):
    """A constant, or (`element` given) that element of the loop's state plus a constant."""

    element: int | None
    number: int


def counts_of(program: Program) -> dict[str, tuple[int, bool]]:
    """How often each computation runs in one run of the entry, and whether that is a lower bound."""
    callers: dict[str, list[Call]] = defaultdict(list)
    for call in program.calls:
        callers[call.callee].append(call)
    graph = {callee: {call.caller for call in calls} for callee, calls in callers.items()}
    trips = trips_of(program)
    counts: dict[str, tuple[int, bool]] = defaultdict(lambda: (0, False))
    for name in graphlib.TopologicalSorter(graph).static_order():
        runs, is_at_least = int(name == program.entry), False
        for call in callers.get(name, ()):
            times = trips[call.loop] if call.loop else 1
            runs += counts[call.caller][0] * (1 if times is None else times)
            is_at_least |= counts[call.caller][1] or times is None
        counts[name] = runs, is_at_least
    counts.setdefault(program.entry, (1, False))
    return counts


def trips_of(program: Program) -> dict[str, int | None]:
    """Trips of each `while`, None where they are not known."""
    return {loop: _trips(program, *parts) for loop, parts in program.loops.items()} | program.trips


def _trips(program: Program, state: str, condition: str, body: str) -> int | None:
    """Trips of a loop that counts from one constant to another in constant steps, else None."""
    test = program.scalars.get(program.roots.get(condition, ""))
    direction = re.search(r"direction=(\w+)", test.rest) if test else None
    if test is None or direction is None:
        return None
    left, right = (_value(program, name) for name in test.operands)
    compare = direction[1]
    if right and right.element is not None:
        left, right, compare = right, left, _FLIPPED.get(compare, "")
    if not left or not right or left.element is None or right.element is not None:
        return None
    start = _value(program, _element(program, state, left.element))
    step = _value(program, _element(program, program.roots.get(body, ""), left.element))
    if not start or not step or start.element is not None or step.element != left.element or step.number == 0:
        return None
    distance = right.number - left.number - start.number
    if compare in ("LE", "GE"):
        distance += 1 if compare == "LE" else -1
    if compare not in _FLIPPED or ((compare in ("LT", "LE")) != (step.number > 0) and compare != "NE"):
        return None
    return max(-(-distance // step.number), 0)


def _element(program: Program, name: str, index: int) -> str:
    """Which instruction gives that element of a tuple, or ""."""
    return dict(enumerate(program.tuples.get(name, ()))).get(index, "")


def _value(program: Program, name: str) -> _Value | None:
    """What is known of a scalar before the program runs."""
    scalar = program.scalars.get(name)
    if scalar is None:
        return None
    if scalar.opcode == "constant":
        number = re.match(r"\((-?\d+)\)", scalar.rest)
        return _Value(None, int(number[1])) if number else None
    if scalar.opcode == "get-tuple-element":
        index = re.search(r"index=(\d+)", scalar.rest)
        return _Value(int(index[1]), 0) if index and scalar.operands[0] in program.states else None
    values = [_value(program, operand) for operand in scalar.operands]
    if scalar.opcode in SAME_VALUE:
        return values[0]
    if scalar.opcode not in ("add", "subtract"):
        return None
    left, right = values
    if left is None or right is None:
        return None
    if scalar.opcode == "subtract":
        return _Value(left.element, left.number - right.number) if right.element is None else None
    if left.element is not None and right.element is not None:
        return None
    return _Value(right.element if left.element is None else left.element, left.number + right.number)
