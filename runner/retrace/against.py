"""Two runs replayed against each other: the first step, the first layer and the first leaf whose values differ.

Both are repeated from the newest checkpoint that has the same fingerprint in both, or else from their beginnings. The
states after each step are compared by their digests, and the rows by all values that both have. Both are then
repeated to the state before the first step that differs, and the arrays of this one step are compared in the order of
computation. Arrays of one run at a time are on the devices; the host holds those of both, or files do (`side`).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np

from runner.checkpoint.fingerprint import LeafLayout, add_digests, combine_digests, describe_leaves, format_leaf_name
from runner.checkpoint.manifest import read_committed
from runner.errors import InvalidError
from runner.metrics.file import read_rows
from runner.metrics.rows import Row
from runner.parallel.mesh import count_batch_shards
from runner.retrace.activations import capture_activations, count_layers, iterate_in_order, split_layers
from runner.retrace.leaves import compute_gradients
from runner.retrace.replay import LOSS, ROUNDING, Difference, compare_losses, compare_rows
from runner.retrace.scratch import RetraceRequest, retrace
from runner.storage import JsonObject, open_store
from runner.train.state import PARAMS

# Differences up to this many epsilons of the coarser dtype, relative to the largest value of the array, are rounding.
ROUNDING_EPSILONS = 8
_MAX_NAMED = 4
# Kinds of arrays of a step, in the order of computation.
_BATCH, _PARAMETERS, _UPDATED = "batch", "parameters before the step", "parameters after the step"
_ACTIVATIONS, _GRADIENTS = "activations without dropout", "gradients without dropout"

Pair = tuple[RetraceRequest, RetraceRequest]
Verdict = Literal["same bits", "within rounding", "different"]
Place = tuple[str, int | None]  # name of an array, and its layer if it is one of several that are stacked
Arrays = Mapping[str, Mapping[Place, np.ndarray]]  # of a step by kind, in the order of computation


class ArrayDifference(NamedTuple):
    """Difference of an array of one step between two runs."""

    name: str
    layer: int | None
    num_values: int
    num_different: int
    position: tuple[int, ...]  # of the first value that differs
    relative: float  # largest difference over the largest absolute value of both arrays
    bound: float  # largest one that is rounding
    dtypes: tuple[str, str]

    @property
    def is_rounding(self) -> bool:
        """True if the difference is within the bound of the dtypes."""
        return self.relative <= self.bound

    def __str__(self) -> str:
        dtypes = " and ".join(dict.fromkeys(self.dtypes))
        return (
            f"{_format_place((self.name, self.layer))} ({dtypes}): {self.num_different:,} of "
            f"{self.num_values:,} values differ, from {[*self.position]} on, by {self.relative:.2g} of the largest"
        )


class GroupComparison(NamedTuple):
    """Comparison of the arrays of one kind, in the order of computation."""

    kind: str
    num_compared: int
    num_different: int
    first: ArrayDifference | None
    uncompared: Sequence[str]  # arrays that only one of the runs has, or with other shapes


@dataclass(frozen=True)
class RunsComparison:
    """Outcome of `compare_runs`.

    Attributes:
        starts: completed steps from which each run was repeated.
        last: last step that was compared.
        step: first step with a difference; None if there is none.
        rows: values that differ in the rows of that step.
        groups: comparisons of the arrays of that step.
        parts: parts of the train state after that step whose bits differ.
        notes: lines about what could not be compared.
    """

    starts: tuple[int, int]
    last: int
    step: int | None
    rows: Sequence[Difference]
    groups: Sequence[GroupComparison]
    parts: Sequence[str]
    notes: Sequence[str]

    @property
    def verdict(self) -> Verdict:
        """Outcome in words. The first array that differs decides, because rounding grows in those after it."""
        if self.step is None:
            return "same bits"
        deviation = max((compare_losses(*each[2:]) for each in self.rows if each.key == LOSS), default=0.0)
        first = next((group.first for group in self.groups if group.first is not None), None)
        is_rounding = first is not None and first.is_rounding and deviation <= ROUNDING
        return "within rounding" if is_rounding else "different"

    def to_json(self) -> JsonObject:
        """Return the comparison as plain data."""
        return {
            "from_steps": [*self.starts],
            "compared_to_step": self.last,
            "verdict": self.verdict,
            "first_step": self.step,
            "rows": [{"key": key, "values": values} for _, key, *values in self.rows],
            "arrays": [
                {
                    "kind": group.kind,
                    "compared": group.num_compared,
                    "different": group.num_different,
                    "first": None
                    if group.first is None
                    else group.first._asdict() | {"is_rounding": group.first.is_rounding},
                    "uncompared": [*group.uncompared],
                }
                for group in self.groups
            ],
            "state": [*self.parts],
            "notes": [*self.notes],
        }

    def format(self) -> Iterator[str]:
        """Yield the lines for people."""
        yield from self.notes
        where = " and ".join(
            f"checkpoint {start}" if start else "the beginning" for start in dict.fromkeys(self.starts)
        )
        if self.step is None:
            yield f"no difference: SAME BITS in rows and states of the steps {max(self.starts) + 1} to {self.last}"
            return
        yield f"first difference in step {self.step}, from {where}: {self.verdict.upper()}"
        for _, key, *values in self.rows:
            yield f"row: {key} is {values[0]!r} and {values[1]!r}"
        is_first = True
        for group in self.groups:
            if group.first is None:
                yield f"{group.kind}: {group.num_compared} arrays are the same"
            else:
                yield f"{group.kind}: {group.num_different} of {group.num_compared} arrays differ, at first"
                yield f"    {group.first}"
                # Rounding grows in the arrays after the first one, so their size proves nothing.
                if is_first and group.first.bound:
                    size = "the bits differ, within rounding" if group.first.is_rounding else "this is beyond rounding"
                    yield f"    {size}, which is up to {group.first.bound:.2g} of the largest"
                is_first = False
            if group.uncompared:
                named = ", ".join(group.uncompared[:_MAX_NAMED])
                more = f" and {len(group.uncompared) - _MAX_NAMED} more" if len(group.uncompared) > _MAX_NAMED else ""
                yield f"    not compared, in one run alone or with another shape: {named}{more}"
        yield f"state after the step differs in: {', '.join(self.parts) or 'nothing'}"


class RunReplay(NamedTuple):
    """Rows and digests of a run that was repeated, by step."""

    start: int
    num_shards: int  # of a batch
    rows: Mapping[int, Row]
    layouts: Mapping[str, str]  # names, shapes and dtypes of each part of the state
    digests: Mapping[int, Mapping[str, str]]  # of each part of the state after each step, and at the start

    def to_json(self) -> JsonObject:
        """Return the replay as plain data, for `from_json`."""
        return self._asdict() | {"rows": [*self.rows.values()]}

    @classmethod
    def from_json(cls, record: JsonObject) -> Self:
        """Return the replay of which `to_json` has returned the data, possibly by way of JSON."""
        rows = {row["step"]: row for row in record["rows"]}
        digests = {int(step): parts for step, parts in record["digests"].items()}
        return cls(**record | {"rows": rows, "digests": digests})

    def list_other_parts(self, other: "RunReplay", step: int) -> list[str]:
        """Return the parts of the state after a step that differ from those of another run.

        A part with other arrays, as with an average in one run alone, is left out, unless it is the parameters.
        """
        own, others = self.digests[step], other.digests[step]
        parts = [part for part, layout in self.layouts.items() if part == PARAMS or other.layouts.get(part) == layout]
        return [part for part in parts if own[part] != others[part]]


class StepComputer:
    """Steps of runs computed in this process."""

    def replay(self, request: RetraceRequest, other: RunReplay | None = None) -> RunReplay:
        """Repeat a run up to the step of a request, or to the one after the first whose state differs from `other`."""
        with retrace(request) as retracing:
            job, shapes = retracing.job, describe_leaves(retracing.job.state)
            layouts: dict[str, str] = {}
            for name, shape in shapes.items():
                layouts[_get_part(name)] = f"{layouts.get(_get_part(name), '')}{name} {shape} "
            num_shards = count_batch_shards(job.programs.at(job.step).train_setup.mesh)
            digests = {job.step: _digest_parts(job.state)}
            found, is_other = RunReplay(retracing.start, num_shards, {}, layouts, digests), False
            while job.step < request.step and not is_other:
                # Noticed one step later, because a start with another state has no row yet.
                is_known = other is not None and job.step in other.digests
                is_other = other is not None and is_known and found.list_other_parts(other, job.step) != []
                retracing.advance()
                digests[job.step] = _digest_parts(job.state)
            return found._replace(rows={row["step"]: row for row in retracing.read_rows()})

    def collect(self, request: RetraceRequest, num_examples: int) -> Arrays:
        """Return the arrays of the step of a request by kind, in the order of computation.

        Activations are those of the first examples of its batch.
        """
        with retrace(request) as retracing:
            retracing.advance_to(request.step - 1)
            batch = retracing.load_arrays(request.step - 1)
            activations = capture_activations(retracing, num_examples, has_inputs=True).activations
            layers = count_layers(activations)
            ordered = {(name, layer): np.asarray(each) for name, layer, each in iterate_in_order(activations)}
            del activations
            before = _list_leaves(retracing.job.state.params, layers)
            gradients = _list_leaves(compute_gradients(retracing), layers)
            retracing.advance()
            return {
                _BATCH: {(name, None): values for name, values in batch.items()},
                _PARAMETERS: before,
                _ACTIVATIONS: ordered,
                _GRADIENTS: gradients,
                _UPDATED: _list_leaves(retracing.job.state.params, layers),
            }


def compare_runs(requests: Pair, step: int, computer: StepComputer) -> RunsComparison:
    """Repeat two runs up to a step, and compare them where they differ first.

    A run that cannot have the overrides or the code of its request at a checkpoint, such as another precision, is
    repeated from its beginning, and so is the other one. Raises `InvalidError` as `retrace` does.
    """
    stores = [open_store(request.directory) for request in requests]
    recorded = [{row["step"]: row for row in read_rows(store)} for store in stores]
    committed = [read_committed(store) for store in stores]
    logged = sorted({*recorded[0]} & {*recorded[1]})
    other = (each for each in logged if _compare_rows(recorded[0], recorded[1], each))
    states = [{each.step: each.fingerprint for each in known.values() if each.fingerprint} for known in committed]
    shared = [each for each, fingerprint in states[0].items() if states[1].get(each) == fingerprint]
    notes: list[str] = []
    # Recorded rows show most differences; rows of other windows, hardware or code differ although the replays do not.
    for limit in dict.fromkeys((min(next(other, step), step), step)):
        start = max((each for each in shared if each < limit), default=0)
        requests = _at(requests, limit, start)
        try:
            second = computer.replay(requests[1])
        except InvalidError:
            if not ((requests[1].overrides or requests[1].code) and start):
                raise
            what = "these values" if requests[1].overrides else "this code"
            notes.append(f"the second run cannot have {what} at a checkpoint: both are repeated from the beginning")
            shared, requests = [], _at(requests, limit, 0)
            second = computer.replay(requests[1])
        first = computer.replay(requests[0], second)
        found = _find_first(first, second)
        if found is not None:
            break
        if limit < step:
            notes.append(f"the recorded rows of step {limit} differ, and those of the replays do not")
    if found is None:
        return RunsComparison((first.start, second.start), max(first.digests), None, (), (), (), notes)
    num_examples = math.lcm(first.num_shards, second.num_shards)
    arrays = [computer.collect(replace(each, step=found), num_examples) for each in requests]
    dtypes = {values.dtype for each in arrays for values in each[_ACTIVATIONS].values()}
    # Gradients of float32 parameters have the precision of the activations.
    epsilons = dict.fromkeys([_GRADIENTS, _UPDATED], max(map(_get_epsilon, dtypes), default=0.0))
    groups = [_compare_groups(kind, arrays[0][kind], arrays[1][kind], epsilons.get(kind, 0.0)) for kind in arrays[0]]
    rows = _compare_rows(first.rows, second.rows, found)
    parts = first.list_other_parts(second, found)
    return RunsComparison((first.start, second.start), found, found, rows, groups, parts, notes)


def _at(requests: Pair, step: int, newest_checkpoint: int) -> Pair:
    first, second = (replace(each, step=step, newest_checkpoint=newest_checkpoint) for each in requests)
    return first, second


def _compare_rows(first: Mapping[int, Row], second: Mapping[int, Row], step: int) -> list[Difference]:
    """Return the differences of the rows of a step, in the keys that both have; the loss comes first."""
    rows = [each.get(step, {}) for each in (first, second)]
    # The mean over the steps since the row before depends on how often rows are written.
    keys = rows[0].keys() & rows[1].keys() - {"train/loss_mean"}
    found = compare_rows(*({key: row[key] for key in keys} for row in rows))
    return sorted(found, key=lambda each: each.key != LOSS)


def _get_part(name: str) -> str:
    return name.partition(".")[0]


def _digest_parts(state: Any) -> dict[str, str]:
    """Return a digest of the bits of each part of a train state. Waits for the devices."""
    layout = LeafLayout(state)
    records = add_digests(layout.shapes, layout.leaf_digests(layout.dispatch(state)))
    parts = dict.fromkeys(map(_get_part, records))
    return {
        part: combine_digests({name: each for name, each in records.items() if _get_part(name) == part})
        for part in parts
    }


def _find_first(first: RunReplay, second: RunReplay) -> int | None:
    """Return the first step before which, after which or in whose row a value differs; None if there is none."""
    start = max(first.start, second.start)
    if first.list_other_parts(second, start):
        return start + 1
    for step in sorted(step for step in first.digests.keys() & second.digests.keys() if step > start):
        if first.list_other_parts(second, step) or _compare_rows(first.rows, second.rows, step):
            return step
    return None


def _list_leaves(tree: Any, layers: Mapping[str, int]) -> dict[Place, np.ndarray]:
    found: dict[Place, np.ndarray] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(jax.device_get(tree)):
        name = format_leaf_name(path)
        found |= {(name, layer): values for layer, values in split_layers(name, leaf, layers)}
    return found


def _format_place(place: Place) -> str:
    name, layer = place
    return name if layer is None else f"layer {layer}, {name}"


def _get_epsilon(dtype: np.dtype) -> float:
    return float(jnp.finfo(dtype).eps) if jnp.issubdtype(dtype, jnp.floating) else 0.0


def _compare_groups(
    kind: str, first: Mapping[Place, np.ndarray], second: Mapping[Place, np.ndarray], epsilon: float
) -> GroupComparison:
    """Compare the arrays of one kind; `epsilon` is the least one that counts, of the dtype of the computation."""
    both = [place for place, values in first.items() if place in second and second[place].shape == values.shape]
    places = {*both}
    others = dict.fromkeys(_format_place(place) for place in [*first, *second] if place not in places)
    found = [
        each for place in both if (each := compare_values(*place, first[place], second[place], epsilon)) is not None
    ]
    return GroupComparison(kind, len(both), len(found), found[0] if found else None, [*others])


def compare_values(
    name: str, layer: int | None, first: np.ndarray, second: np.ndarray, epsilon: float = 0.0
) -> ArrayDifference | None:
    """Return the difference of two arrays of one shape; None if all their bits are the same.

    Values of different dtypes differ if their numbers do. Values of which one alone is finite differ infinitely.
    """
    if first.dtype == second.dtype:
        words = [each.reshape(-1).view(f"u{first.itemsize}").reshape(each.shape) for each in (first, second)]
        is_other = words[0] != words[1]
    wide = [np.asarray(each, np.float64) for each in (first, second)]
    if first.dtype != second.dtype:
        is_other = (wide[0] != wide[1]) & ~(np.isnan(wide[0]) & np.isnan(wide[1]))
    if not is_other.any():
        return None
    with np.errstate(invalid="ignore"):
        gaps = np.abs(wide[0] - wide[1])[is_other]
    # Equal infinities, and values that are no numbers in both, have no gap.
    is_alike = (wide[0] == wide[1]) | (np.isnan(wide[0]) & np.isnan(wide[1]))
    gaps = np.where(is_alike[is_other], 0.0, np.where(np.isfinite(gaps), gaps, np.inf))
    scale = max(float(np.max(np.abs(each), where=np.isfinite(each), initial=0.0)) for each in wide)
    largest = float(gaps.max())
    dtypes = first.dtype, second.dtype
    return ArrayDifference(
        name,
        layer,
        first.size,
        int(is_other.sum()),
        tuple(map(int, np.argwhere(is_other)[0])),
        largest / scale if scale and math.isfinite(largest) else largest,
        ROUNDING_EPSILONS * max(epsilon, *map(_get_epsilon, dtypes)),
        (str(dtypes[0]), str(dtypes[1])),
    )
