"""Numbers of a step by leaf: its parameters before it, its gradients without dropout, and its updates."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from runner.checkpoint.fingerprint import format_leaf_name
from runner.parallel.mesh import count_batch_shards, make_batch_sharding
from runner.retrace.losses import make_loss
from runner.retrace.scratch import Retracing
from runner.storage import JsonObject

_HEADS = ("leaf", "shape", "parameters", "gradients", "updates", "update / parameter", "zeros", "not finite")


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

    def to_json(self) -> JsonObject:
        """Return the report as plain data."""
        return {
            "name": self.name,
            "shape": [*self.shape],
            "parameters": self.parameters.to_json(),
            "gradients": self.gradients.to_json(),
            "updates": self.updates.to_json(),
        }


def inspect_step(retracing: Retracing) -> list[LeafReport]:
    """Make the next step, and return the figures of its parameters. Waits for the devices."""
    job = retracing.job
    before, grads = jax.tree.map(jnp.copy, job.state.params), compute_gradients(retracing)
    retracing.advance()
    wide = [jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params) for params in (job.state.params, before)]
    updates = jax.tree.map(jnp.subtract, *wide)
    found = [jax.device_get(_measure_all(tree)) for tree in (before, grads, updates)]
    names = [format_leaf_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(before)]
    shapes = [leaf.shape for leaf in jax.tree.leaves(before)]
    return [
        LeafReport(name, shape, *(LeafFigures(*(each.item() for each in figures)) for figures in row))
        for name, shape, *row in zip(names, shapes, *found, strict=True)
    ]


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


@jax.jit
def _measure_all(tree: Any) -> list[tuple[jax.Array, ...]]:
    def measure(leaf: jax.Array) -> tuple[jax.Array, ...]:
        values = leaf.astype(jnp.float32)
        is_finite = jnp.isfinite(values)
        finite, size = jnp.where(is_finite, values, 0.0), max(leaf.size, 1)
        rms = jnp.sqrt(jnp.sum(jnp.square(finite)) / jnp.maximum(jnp.sum(is_finite), 1))
        zeros = jnp.sum(values == 0) / size
        return rms, jnp.max(jnp.abs(finite), initial=0.0), zeros, jnp.sum(~is_finite)

    return [measure(leaf) for leaf in jax.tree.leaves(tree)]


def format_leaves(reports: Sequence[LeafReport]) -> Iterator[str]:
    """Yield a table: root mean square and largest absolute value of each array, and what is zero or not finite."""
    rows: list[tuple[str, ...]] = [_HEADS]
    for report in reports:
        arrays = report.parameters, report.gradients, report.updates
        ratio = report.updates.rms / report.parameters.rms if report.parameters.rms else math.nan
        cells = [f"{each.rms:.3g} (max {each.largest:.3g})" for each in arrays]
        zeros = "/".join(f"{each.zeros:.0%}" for each in arrays)
        bad = "/".join(str(each.num_not_finite) for each in arrays)
        rows.append((report.name, "x".join(map(str, report.shape)), *cells, f"{ratio:.2g}", zeros, bad))
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADS))]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
