"""Meshes to choose from: all that a job can be laid over, and those near one. Arithmetic; knows no job and no device.

What bounds their number: `tensor` is 16 at most, `expert` divides the experts, and `sequence` leaves each device two
stretches of a row of `_LEAST_POSITIONS`, below which it only waits for its neighbours.
"""

from collections.abc import Iterator, Mapping

from runner.train.mesh import AXES

_MAX_TENSOR = 16  # beyond a few chips next to each other, tensor parallelism only waits for its network
_LEAST_POSITIONS = 1024

Sizes = tuple[tuple[str, int], ...]  # devices by axis, in the order of AXES


def all_meshes(num_devices: int, sequence_length: int, num_experts: int) -> Iterator[Sizes]:
    """Every mesh over so many devices that rows of this length and so many experts of a layer (1: none) allow."""
    for tensor in _divisors(num_devices, _MAX_TENSOR):
        for expert in _divisors(num_devices // tensor):
            if not allows({"expert": expert}, sequence_length, num_experts):
                continue
            for sequence in _divisors(num_devices // (tensor * expert)):
                if not allows({"sequence": sequence}, sequence_length, num_experts):
                    continue
                left = num_devices // (tensor * expert * sequence)
                for fsdp in _divisors(left):
                    yield in_order(
                        {"data": left // fsdp, "fsdp": fsdp, "sequence": sequence, "expert": expert, "tensor": tensor}
                    )


def near_meshes(sizes: Mapping[str, int], sequence_length: int, num_experts: int) -> list[Sizes]:
    """Those that a factor makes of a mesh that goes from one axis to another."""
    found = []
    for giver in AXES:
        for factor in _divisors(sizes[giver])[1:]:
            for taker in (axis for axis in AXES if axis != giver):
                near = {**sizes, giver: sizes[giver] // factor, taker: sizes[taker] * factor}
                is_allowed = taker in ("data", "fsdp") or allows({taker: near[taker]}, sequence_length, num_experts)
                if is_allowed and near["tensor"] <= max(_MAX_TENSOR, sizes["tensor"]):
                    found.append(in_order(near))
    return found


def allows(sizes: Mapping[str, int], sequence_length: int, num_experts: int) -> bool:
    """Whether rows and experts can be cut so, and rows are long enough for it."""
    sequence, expert = sizes.get("sequence", 1), sizes.get("expert", 1)
    halves = 2 * sequence  # the first part of a row and the last, the second and the last but one: equal causal work
    is_long = sequence == 1 or (sequence_length % halves == 0 and sequence_length // halves >= _LEAST_POSITIONS)
    return is_long and num_experts % expert == 0


def in_order(sizes: Mapping[str, int]) -> Sizes:
    """As `Sizes`."""
    return tuple((axis, sizes[axis]) for axis in AXES)


def _divisors(number: int, most: int | None = None) -> list[int]:
    return [size for size in range(1, min(number, most or number) + 1) if number % size == 0]
