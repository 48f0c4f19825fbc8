"""First estimate of a job on a mesh, warnings about the mesh, and better meshes near it.

The estimate is arithmetic on an abstract state and takes seconds, since it is printed before the step is compiled. Only
the search for a better mesh asks the compiler, for one matmul at a time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from runner.checkpoint.leaves import flatten_with_names
from runner.parallel.mesh import STATE_AXES, format_mesh, resolve_mesh_sizes
from runner.plan.figures import format_amount, report_progress
from runner.plan.machine import TargetMachine, uses_all_reduce
from runner.plan.mesh import (
    MeshSizes,
    MeshWarning,
    ParameterPasses,
    SmallShard,
    find_mesh_warnings,
    find_small_shards,
    is_significant,
    list_near_meshes,
    make_small_shard_warning,
    order_sizes,
)
from runner.plan.prediction import Prediction, Predictor, build_abstract
from runner.plan.program import CompiledProgram, count_bytes_per_device
from runner.train.compile import MEMORY_SHARE
from runner.train.setup import TrainSetup
from runner.trainer import BaseTrainer

_NUM_PROBED_MESHES = 4
_NUM_PROBED_PARAMETERS = 2  # of different shapes, on each mesh
_TILE_COLUMNS = 128


@dataclass(frozen=True)
class EarlyEstimate:
    """Estimate of a job on a mesh by arithmetic, for chips with known peak figures."""

    predictor: Predictor
    machine: TargetMachine
    train_setup: TrainSetup

    @property
    def sizes(self) -> MeshSizes:
        """Sizes of the job's mesh."""
        return order_sizes(self.train_setup.mesh_sizes)

    @property
    def first(self) -> Prediction | None:
        """Prediction for the largest micro-batch that fits, or for the smallest if none does."""
        found = self._predict(self.sizes, self.train_setup.abstract_state)
        return next((one for one in found if self._fits(one)), found[-1] if found else None)

    def _predict(self, sizes: MeshSizes, abstract_state: Any) -> list[Prediction]:
        """Return the prediction for every micro-batch that the spec allows, largest first, whether it fits or not."""
        state = self.predictor.measure_state(abstract_state)
        allowed = self.predictor.job.config.train.micro_batch_examples
        micro_batches = [size for size in self.predictor.list_micro_batches(dict(sizes)) if allowed in ("auto", size)]
        return [self.predictor.predict(dict(sizes), size, state) for size in micro_batches]

    def _fits(self, prediction: Prediction) -> bool:
        return prediction.needed_bytes <= self.machine.hbm_bytes * MEMORY_SHARE

    @property
    def line(self) -> str:
        """First estimate, for the user."""
        found = self.first
        mesh = format_mesh(dict(self.sizes))
        if found is None:
            return f"first estimate: {mesh} cannot hold the batch"
        available = format_amount(self.machine.hbm_bytes * MEMORY_SHARE, "bytes")
        state, fits = format_amount(found.state_bytes, "bytes"), "fits" if self._fits(found) else "does not fit"
        step, needed = format_amount(found.times.step_seconds, "seconds"), format_amount(found.needed_bytes, "bytes")
        return (
            f"first estimate, by arithmetic: {mesh}, {found.micro_batch_examples} example(s) per device: a device "
            f"needs {needed}, {state} of it for the state, and may use {available}, so the job {fits}; a step takes at "
            f"least {step}, bound by {found.times.bound}"
        )

    @property
    def small_shard_warnings(self) -> list[MeshWarning]:
        """Warning that the mesh splits parameters below the tile of a TPU, or none."""
        found, first = self._find_small_shards(self.train_setup.abstract_state), self.first
        if not found or first is None:
            return []
        dtype = self.predictor.job.config.precision.compute
        return [make_small_shard_warning(found, format_mesh(dict(self.sizes)), dtype, first.sent_bytes)]

    def _find_small_shards(self, abstract_state: Any) -> list[SmallShard]:
        if not self.predictor.accelerator.chip.is_tpu:
            return []
        return find_small_shards(_flatten_parameters(abstract_state), self.predictor.sent_itemsize)

    def find_warnings(self, program: CompiledProgram) -> list[MeshWarning]:
        """Return the significant warnings about a compiled step. Only a TPU's own compiler shows them."""
        chip = self.predictor.accelerator.chip
        # XLA for CPU and GPU choose their collectives differently.
        if not chip.is_tpu or self.machine.is_faked:
            return []
        passes = ParameterPasses(
            program.step.layout.micro_batches_per_device,
            layers=3 if self.predictor.job.config.memory.remat == "layers" else 2,
            logits=3,  # one of them for the lookup, where the table is that of the embedding
        )
        sharded_axes = {axis for axis, size in self.sizes if axis in STATE_AXES and size > 1}
        parameters = _flatten_parameters(self.train_setup.abstract_state)
        found = find_mesh_warnings(program.collectives, parameters, passes, sharded_axes)
        bytes_per_second = self.predictor.speeds.interconnect_bytes_per_second / chip.devices_per_chip
        # Traffic that is small beside the compute time can be hidden behind it.
        first = self.first
        seconds = 0.0 if first is None else first.times.compute
        return [warning for warning in found if is_significant(warning, bytes_per_second, seconds)]

    def suggest_mesh(self, warning: MeshWarning) -> str:
        """Return the end of a warning's line: a mesh near this one that avoids it, or "".

        Where libtpu is available, meshes are tried with the compiler until one avoids the problem.
        """
        if not warning.is_of_mesh:
            return ""
        near = self._list_near_meshes()
        # Fake CPU devices do not show what the compiler of the chip does with small shards.
        if self.machine.is_faked or not near:
            return f"; by arithmetic {_format_suggestion(*near[0])} avoids this" if near else ""
        with report_progress(f"trying meshes near {format_mesh(dict(self.sizes))}"):
            for sizes, prediction in near[:_NUM_PROBED_MESHES]:
                if not self._uses_all_reduce(sizes, warning.names):
                    suggestion = _format_suggestion(sizes, prediction)
                    return f"; {suggestion} gathers and scatters them, as compiling one matmul shows"
        return ""

    def _list_near_meshes(self) -> list[tuple[MeshSizes, Prediction]]:
        """Return meshes near this one that fit and have no small shards, best first."""
        job = self.predictor.job
        num_experts = job.sizing(dict(self.sizes)).num_experts
        found = []
        for sizes in list_near_meshes(dict(self.sizes), job.config.data.sequence_length, num_experts):
            if not self.predictor.list_micro_batches(dict(sizes)):
                continue
            abstract_state = self.predictor.shard_state(sizes)
            fitting = [one for one in self._predict(sizes, abstract_state) if self._fits(one)]
            if not fitting or self._find_small_shards(abstract_state):
                continue
            # Rows or columns of the narrowest shard of a matrix, along an axis that is sharded. Meshes whose shards
            # keep whole columns of a tile come first.
            widths = [
                shard
                for leaf in _flatten_parameters(abstract_state).values()
                if leaf.ndim > 1
                for size, shard in list(zip(leaf.shape, leaf.sharding.shard_shape(leaf.shape), strict=True))[-2:]
                if shard < size
            ]
            is_narrow = min(widths, default=_TILE_COLUMNS) < _TILE_COLUMNS
            found.append(((is_narrow, *fitting[0].times.rank), sizes, fitting[0]))
        return [(sizes, prediction) for _, sizes, prediction in sorted(found, key=lambda each: each[0])]

    def _uses_all_reduce(self, sizes: MeshSizes, names: Sequence[str]) -> bool:
        """Return True if the compiler moves some of these parameters by all-reduce on a mesh."""
        parameters = _flatten_parameters(self.predictor.shard_state(sizes))
        dtype = self.predictor.job.config.precision.compute
        # One parameter of each shape, of equals the first, largest first.
        by_shape = {parameters[name].shape[-2:]: parameters[name] for name in reversed(names)}
        leaves = list(reversed(by_shape.values()))[:_NUM_PROBED_PARAMETERS]
        try:
            return any(uses_all_reduce(self.machine.devices, sizes, leaf, dtype) for leaf in leaves)
        except jax.errors.JaxRuntimeError:
            # A mesh that the compiler rejects is no suggestion.
            return True


def estimate_early(job: BaseTrainer, train_setup: TrainSetup, machine: TargetMachine) -> EarlyEstimate | None:
    """Return the estimate of a job on a mesh, None where the chip's peak figures or the job's FLOPs are unknown."""
    accelerator = machine.accelerator
    if accelerator is None or accelerator.chip.speeds is None:
        return None
    try:
        return EarlyEstimate(Predictor(job, job.flops_per_token(train_setup), accelerator), machine, train_setup)
    except ValueError:  # the job has a kernel that does not state its FLOPs
        return None


def format_first_estimate(job: BaseTrainer, train_setup: TrainSetup, machine: TargetMachine) -> str:
    """Return the first estimate for the user; for an unknown chip, only the size of the state."""
    estimate = estimate_early(job, train_setup, machine)
    if estimate is not None:
        return estimate.line
    state = format_amount(count_bytes_per_device(train_setup.abstract_state), "bytes")
    available = format_amount(machine.hbm_bytes * MEMORY_SHARE, "bytes")
    return (
        f"first estimate, by arithmetic: {format_mesh(train_setup.mesh_sizes)}: the state takes {state} of {available} "
        "per device; the time of a step is unknown for this device"
    )


def build_first_setup(job: BaseTrainer, machine: TargetMachine) -> TrainSetup:
    """Return the setup of a job on a mesh of no devices.

    Raises:
        InvalidError: the mesh does not match the machine.
    """
    return build_abstract(job.setup_builder, order_sizes(resolve_mesh_sizes(job.topology.mesh, len(machine.devices))))


def _flatten_parameters(abstract_state: Any) -> dict[str, jax.ShapeDtypeStruct]:
    return flatten_with_names({"params": abstract_state.params})


def _format_suggestion(sizes: MeshSizes, prediction: Prediction) -> str:
    return f"{format_mesh(dict(sizes))} ({format_amount(prediction.sent_bytes, 'bytes')} by arithmetic)"
