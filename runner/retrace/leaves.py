"""Numbers of a step: its parameters before it, its gradients without dropout, its updates and its activations.

A leaf that stacks the layers of a loop, and a module in it, also have the numbers of each layer.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from runner.checkpoint.fingerprint import format_leaf_name
from runner.huggingface.safetensors import DTYPE_NAMES, encode_header
from runner.parallel.mesh import count_batch_shards, make_batch_sharding
from runner.retrace.activations import capture_activations, count_layers, find_layers
from runner.retrace.losses import make_loss
from runner.retrace.scratch import Retracing
from runner.storage import JsonObject

# Of the absolute values of an array, two bins a decade; smaller and larger ones count in the first and the last bin.
HISTOGRAM_EDGES = tuple(10.0 ** (half / 2) for half in range(-24, 9))
_MAX_NAMED = 8
_HEADS = ("leaf", "shape", "parameters", "gradients", "updates", "update / parameter", "zeros", "not finite")
_ACTIVATION_HEADS = ("module", "shape", "rms of layers", "largest", "zeros", "not finite")


class LeafFigures(NamedTuple):
    """Figures of one array. Values that are not finite are left out of `rms` and `largest`."""

    rms: float  # root mean square
    largest: float  # largest absolute value
    zeros: float  # share of the values
    num_not_finite: int

    def to_json(self) -> JsonObject:
        """Return the figures as plain data; numbers that are not finite are None."""
        return {name: value if math.isfinite(value) else None for name, value in self._asdict().items()}


class LeafReport(NamedTuple):
    """Figures of one parameter in a step."""

    name: str
    shape: tuple[int, ...]
    parameters: LeafFigures  # before the step
    gradients: LeafFigures  # of the mean loss
    updates: LeafFigures
    layers: Sequence["LeafReport"] = ()  # of a leaf that stacks them

    def to_json(self) -> JsonObject:
        """Return the report as plain data."""
        return {
            "name": self.name,
            "shape": [*self.shape],
            "parameters": self.parameters.to_json(),
            "gradients": self.gradients.to_json(),
            "updates": self.updates.to_json(),
            **({"layers": [layer.to_json() for layer in self.layers]} if self.layers else {}),
        }


class ActivationReport(NamedTuple):
    """Figures of the result of a module, for one example of each shard of the batch."""

    name: str
    shape: tuple[int, ...]  # of one layer
    figures: Sequence[LeafFigures]  # of each layer of a loop; of the array itself outside of loops
    has_layers: bool

    def to_json(self) -> JsonObject:
        """Return the report as plain data."""
        found = [each.to_json() for each in self.figures]
        return {"name": self.name, "shape": [*self.shape], **({"layers": found} if self.has_layers else found[0])}


class ObservedValue(NamedTuple):
    """Value that the model computes for tools alone, such as the attention entropy of each head."""

    name: str
    values: np.ndarray  # (L, ...) of each layer of a loop, (1, ...) outside of loops

    def format(self) -> str:
        """Return a line with the mean and the extremes."""
        ends = []
        for choose in (np.argmin, np.argmax):
            layer = int(choose(self.values)) // self.values[0].size
            place = f" in layer {layer}" if len(self.values) > 1 else ""
            ends.append(f"{self.values.flat[choose(self.values)]:.4g}{place}")
        return f"{self.name}: mean {self.values.mean():.4g}, from {ends[0]} to {ends[1]}"


class StepInspection(NamedTuple):
    """Figures of the arrays of a step, by leaf and by module."""

    leaves: Sequence[LeafReport]
    activations: Sequence[ActivationReport]
    observed: Sequence[ObservedValue]
    histograms: Mapping[str, Sequence[int]]  # counts by kind and name, such as `gradients.head.kernel`, without zeros
    left_out: Mapping[str, str]  # primitive below which a module is computed, by the name of the module

    def to_json(self) -> JsonObject:
        """Return the figures as plain data."""
        return {
            "leaves": [leaf.to_json() for leaf in self.leaves],
            "activations": [each.to_json() for each in self.activations],
            "observed": [{"name": each.name, "layers": each.values.tolist()} for each in self.observed],
            "histograms": {
                "edges": [*HISTOGRAM_EDGES],
                "counts": {name: [*counts] for name, counts in self.histograms.items()},
            },
            "left_out": dict(self.left_out),
        }

    def format(self) -> Iterator[str]:
        """Yield a table of leaves and one of modules, with the layers that have their extreme values.

        A leaf that stacks layers is followed by the layer with the largest gradients.
        """
        rows: list[tuple[str, ...]] = [_HEADS]
        for leaf in self.leaves:
            rows.append(_format_leaf(leaf))
            if leaf.layers:
                most = max(leaf.layers, key=lambda layer: (layer.gradients.num_not_finite, layer.gradients.rms))
                rows.append(_format_leaf(most._replace(name=f"  largest gradients: {most.name}")))
        yield from _align(rows)
        yield ""
        rows = [_ACTIVATION_HEADS]
        for report in self.activations:
            smallest, largest = (choose(each.rms for each in report.figures) for choose in (min, max))
            worst = max(range(len(report.figures)), key=lambda layer: report.figures[layer].largest)
            where = f" in layer {worst}" if report.has_layers else ""
            rows.append(
                (
                    report.name,
                    "x".join(map(str, report.shape)),
                    f"{smallest:.3g} to {largest:.3g}" if report.has_layers else f"{largest:.3g}",
                    f"{report.figures[worst].largest:.3g}{where}",
                    f"{max(each.zeros for each in report.figures):.0%}",
                    str(sum(each.num_not_finite for each in report.figures)),
                )
            )
        yield from _align(rows)
        for observed in self.observed:
            yield observed.format()
        yield from self.format_left_out()

    def format_left_out(self) -> Iterator[str]:
        """Yield a line for each primitive below which modules are computed, whose results are not known."""
        for primitive in dict.fromkeys(self.left_out.values()):
            names = [name for name, each in self.left_out.items() if each == primitive]
            more = f" and {len(names) - _MAX_NAMED} more, see --json" if len(names) > _MAX_NAMED else ""
            yield f"no results of modules below a `{primitive}`: {', '.join(names[:_MAX_NAMED])}{more}"


def inspect_step(retracing: Retracing, save_path: Path | None = None) -> StepInspection:
    """Make the next step, and return the figures of its arrays. Waits for the devices.

    The arrays themselves are written to `save_path` as safetensors, if it is given; nothing may be there.
    """
    job = retracing.job
    setup = job.programs.at(job.step).train_setup
    captured, left_out = capture_activations(retracing, count_batch_shards(setup.mesh))
    number = count_layers(captured)
    before, grads = jax.tree.map(jnp.copy, job.state.params), compute_gradients(retracing)
    retracing.advance()
    wide = [jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params) for params in (job.state.params, before)]
    updates = jax.tree.map(jnp.subtract, *wide)
    names = [format_leaf_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(before)]
    trees = {"parameters": before, "gradients": grads, "updates": updates}
    groups = {kind: dict(zip(names, jax.tree.leaves(tree), strict=True)) for kind, tree in trees.items()}
    if save_path is not None:
        _save(save_path, groups | {"activations": {each.name: each.values for each in captured}})
    whole = [
        [LeafFigures(*(each.item() for each in figures)) for figures in jax.device_get(_measure_all(tree))]
        for tree in trees.values()
    ]
    stacked = [name for name in names if find_layers(name, groups["parameters"][name].shape, number) is not None]
    by_layer = [_read_layers({name: group[name] for name in stacked}) for group in groups.values()]
    leaves = []
    for name, leaf, *figures in zip(names, jax.tree.leaves(before), *whole, strict=True):
        layers = [
            LeafReport(f"layer {layer}", leaf.shape[1:], *row)
            for layer, row in enumerate(zip(*(each.get(name, ()) for each in by_layer), strict=True))
        ]
        leaves.append(LeafReport(name, leaf.shape, *figures)._replace(layers=layers))
    observed = [ObservedValue(each.name, np.atleast_2d(each.values)) for each in captured if each.is_observed]
    captured = [each for each in captured if not each.is_observed]
    measured = _read_layers(
        {each.name: each.values if each.loop is not None else each.values[None] for each in captured}
    )
    activations = [
        ActivationReport(
            each.name, each.values.shape[each.loop is not None :], measured[each.name], each.loop is not None
        )
        for each in captured
    ]
    arrays = groups | {"activations": {each.name: each.values for each in captured}}
    counted = {f"{kind}.{name}": _count_values(leaf) for kind, group in arrays.items() for name, leaf in group.items()}
    histograms = {name: counts.tolist() for name, counts in jax.device_get(counted).items()}
    return StepInspection(leaves, activations, observed, histograms, left_out)


def _save(path: Path, groups: Mapping[str, Mapping[str, jax.Array]]) -> None:
    """Write arrays as safetensors, one at a time in memory; an array is named by its group and its leaf or module."""
    tensors = {f"{group}.{name}": values for group, arrays in groups.items() for name, values in arrays.items()}
    # The format has no narrower type that every reader knows.
    narrow = {name: values for name, values in tensors.items() if values.dtype not in DTYPE_NAMES}
    tensors |= {name: values.astype(jnp.float32) for name, values in narrow.items()}
    header, _ = encode_header({name: (DTYPE_NAMES[each.dtype], each.shape) for name, each in tensors.items()})
    with path.open("xb") as file:
        file.write(header)
        for values in tensors.values():
            file.write(np.asarray(values).tobytes())


def compute_gradients(retracing: Retracing) -> Any:
    """Return the gradients of the mean loss of the next step, without dropout, in float32."""
    job, step = retracing.job, retracing.job.step
    program, loss = job.programs.at(step), make_loss(job, step + 1)
    setup, arrays = program.train_setup, retracing.load_arrays(step)
    sharding = make_batch_sharding(setup.mesh, program.layout.has_sequences)
    size = program.layout.micro_batch_examples * count_batch_shards(setup.mesh)

    @jax.jit
    def compute(state: Any, batch: Any) -> Any:
        (_, count), grads = jax.value_and_grad(loss, has_aux=True)(state.params, state, batch)
        return count, jax.tree.map(lambda grad: grad.astype(jnp.float32), grads)

    total, whole = 0.0, None
    with setup.sharding_rules():
        # One micro-batch at a time is in memory, as in the step.
        for first in range(0, len(next(iter(arrays.values()))), size):
            micro = {name: values[None, first : first + size] for name, values in arrays.items()}
            batch = {name: jax.device_put(values, sharding) for name, values in micro.items()}
            count, grads = compute(job.state, batch)
            total += float(count)
            whole = grads if whole is None else jax.tree.map(jnp.add, whole, grads)
    return jax.tree.map(lambda grad: grad / (total or 1.0), whole)


def _measure(leaf: jax.Array) -> tuple[jax.Array, ...]:
    values = leaf.astype(jnp.float32)
    is_finite = jnp.isfinite(values)
    finite, size = jnp.where(is_finite, values, 0.0), max(leaf.size, 1)
    rms = jnp.sqrt(jnp.sum(jnp.square(finite)) / jnp.maximum(jnp.sum(is_finite), 1))
    zeros = jnp.sum(values == 0) / size
    return rms, jnp.max(jnp.abs(finite), initial=0.0), zeros, jnp.sum(~is_finite)


@jax.jit
def _measure_all(tree: Any) -> list[tuple[jax.Array, ...]]:
    return [_measure(leaf) for leaf in jax.tree.leaves(tree)]


@jax.jit
def _count_values(leaf: jax.Array) -> jax.Array:
    """Return the number of values of each bin of `HISTOGRAM_EDGES`, without zeros and what is not finite."""
    values = jnp.abs(leaf.astype(jnp.float32)).reshape(-1)
    is_counted = (values > 0) & jnp.isfinite(values)
    bins = jnp.floor(2 * jnp.log10(jnp.where(is_counted, values, 1.0))).astype(jnp.int32) + 24
    last = len(HISTOGRAM_EDGES) - 2
    return jnp.bincount(jnp.clip(bins, 0, last), weights=is_counted.astype(jnp.int32), length=last + 1)


# Of each layer of a leaf (L, ...).
_measure_layers = jax.jit(jax.vmap(_measure))


def _read_layers(leaves: Mapping[str, jax.Array]) -> dict[str, list[LeafFigures]]:
    """Return the figures of each layer of stacked leaves (L, ...) by name."""
    found = jax.device_get([_measure_layers(leaf) for leaf in leaves.values()])
    return {
        name: [LeafFigures(*(each.item() for each in row)) for row in zip(*figures, strict=True)]
        for name, figures in zip(leaves, found, strict=True)
    }


def _format_leaf(report: LeafReport) -> tuple[str, ...]:
    arrays = report.parameters, report.gradients, report.updates
    ratio = report.updates.rms / report.parameters.rms if report.parameters.rms else math.nan
    cells = [f"{each.rms:.3g} (max {each.largest:.3g})" for each in arrays]
    zeros = "/".join(f"{each.zeros:.0%}" for each in arrays)
    bad = "/".join(str(each.num_not_finite) for each in arrays)
    return (report.name, "x".join(map(str, report.shape)), *cells, f"{ratio:.2g}", zeros, bad)


def _align(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
