"""What is known of a job before its step is compiled, and which mesh near its own would do better.

Arithmetic on an abstract state, within seconds: it must not wait for the compiler. Only the search for a better mesh
asks that, for one matmul at a time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from runner.checkpoint.leaves import flatten_with_names
from runner.parallel.mesh import STATE_AXES, format_mesh, resolve_mesh_sizes
from runner.plan import mesh as mesh_check
from runner.plan.figures import format_amount, report_progress
from runner.plan.machine import TargetMachine, uses_all_reduce
from runner.plan.mesh import (
    MeshSizes,
    MeshWarning,
    ParameterPasses,
    SmallShard,
    find_small_shards,
    list_near_meshes,
    order_sizes,
)
from runner.plan.prediction import Prediction, Predictor, build_abstract
from runner.plan.program import CompiledProgram, count_bytes_per_device
from runner.train.compile import MEMORY_SHARE
from runner.train.setup import TrainSetup
from runner.trainer import BaseTrainer

_NUM_PROBED = 4  # meshes, each with
_NUM_PARAMETERS = 2  # parameters of different sizes
_WHOLE_LANES = 128  # columns of a tile


@dataclass(frozen=True)
class EarlyEstimate:
    """A job on a mesh, by arithmetic. Its chips' peak figures must be known."""

    predictor: Predictor
    machine: TargetMachine
    train_setup: TrainSetup

    @property
    def sizes(self) -> MeshSizes:
        """Of its mesh."""
        return order_sizes(self.train_setup.mesh_sizes)

    def predictions(self, sizes: MeshSizes, abstract: Any) -> list[Prediction]:
        """Of every micro-batch that the spec allows, largest first, whether it fits or not."""
        state = self.predictor.size_of(abstract)
        allowed = self.predictor.job.config.train.micro_batch_examples
        sizes_of = [size for size in self.predictor.micro_batches(dict(sizes)) if allowed in ("auto", size)]
        return [self.predictor.predict(dict(sizes), size, state) for size in sizes_of]

    @property
    def first(self) -> Prediction | None:
        """Of the largest micro-batch that fits, or the smallest if none does."""
        found = self.predictions(self.sizes, self.train_setup.abstract_state)
        return next((one for one in found if self._fits(one)), found[-1] if found else None)

    def _fits(self, prediction: Prediction) -> bool:
        return prediction.needed_bytes <= self.machine.hbm_bytes * MEMORY_SHARE

    @property
    def line(self) -> str:
        """The first estimate, for a person."""
        found = self.first
        mesh = format_mesh(dict(self.sizes))
        if found is None:
            return f"first estimate: {mesh} cannot hold the batch"
        there = format_amount(self.machine.hbm_bytes * MEMORY_SHARE, "bytes")
        fits = "fits" if self._fits(found) else "does not fit"
        step, needed = format_amount(found.times.step_seconds, "seconds"), format_amount(found.needed_bytes, "bytes")
        return (
            f"first estimate, by arithmetic: {mesh}, {found.micro_batch_examples} example(s) a device: state "
            f"{format_amount(found.state_bytes, 'bytes')} and in all {needed} of {there} a device, {fits}; a step "
            f"takes {step} at least, bound by {found.times.bound}"
        )

    @property
    def small(self) -> list[MeshWarning]:
        """The fault that its mesh cuts parameters below the tile of a TPU, or none."""
        found, first = self._small(self.train_setup.abstract_state), self.first
        if not found or first is None:
            return []
        dtype = self.predictor.job.config.precision.compute
        return [mesh_check.make_small_shard_warning(found, format_mesh(dict(self.sizes)), dtype, first.sent_bytes)]

    def _small(self, abstract: Any) -> list[SmallShard]:
        if not self.predictor.accelerator.chip.is_tpu:
            return []
        return find_small_shards(_parameters(abstract), self.predictor.sent_itemsize)

    def faults(self, program: CompiledProgram) -> list[MeshWarning]:
        """Those of a compiled step that cost more than a little. Only a TPU's own compiler shows them."""
        if not self.predictor.accelerator.chip.is_tpu or self.machine.is_faked:
            return []
        memory = self.predictor.job.config.memory
        of_layers = 3 if memory.remat == "layers" else 2
        of_logits = 3  # one of them of a table that is looked up too
        passes = ParameterPasses(program.step.layout.micro_batches_per_device, of_layers, of_logits)
        cut = {axis for axis, size in self.sizes if axis in STATE_AXES and size > 1}
        found = mesh_check.find_mesh_warnings(
            program.collectives, _parameters(self.train_setup.abstract_state), passes, cut
        )
        share = 1 / self.predictor.accelerator.chip.devices_per_chip
        bytes_per_second = self.predictor.speeds.interconnect_bytes_per_second * share
        first = self.first
        seconds = 0.0 if first is None else first.times.compute
        return [fault for fault in found if mesh_check.is_significant(fault, bytes_per_second, seconds)]

    def cure(self, fault: MeshWarning) -> str:
        """A mesh near this one without the fault, for a person: tried with the compiler where it is here."""
        if not fault.is_of_mesh:
            return ""
        near = self._near()
        if self.machine.is_faked or not near:
            return f"; by arithmetic {_told(*near[0])} does not" if near else ""
        with report_progress(f"trying meshes near {format_mesh(dict(self.sizes))}"):
            for sizes, prediction in near[:_NUM_PROBED]:
                if not self._moves_whole(sizes, fault.names):
                    return f"; {_told(sizes, prediction)} gathers and scatters them, as one matmul shows"
        return ""

    def _near(self) -> list[tuple[MeshSizes, Prediction]]:
        """Meshes near this one that fit and cut nothing below the tile: those of whole columns of it first."""
        job = self.predictor.job
        experts = job.sizing(dict(self.sizes)).num_experts
        found = []
        for sizes in list_near_meshes(dict(self.sizes), job.config.data.sequence_length, experts):
            if not self.predictor.micro_batches(dict(sizes)):
                continue
            abstract = self.predictor.state_on(sizes)
            fitting = [one for one in self.predictions(sizes, abstract) if self._fits(one)]
            if fitting and not self._small(abstract):
                is_narrow = _narrowest(abstract) < _WHOLE_LANES
                found.append(((is_narrow, *fitting[0].times.rank), sizes, fitting[0]))
        return [(sizes, prediction) for _, sizes, prediction in sorted(found, key=lambda each: each[0])]

    def _moves_whole(self, sizes: MeshSizes, names: Sequence[str]) -> bool:
        parameters = _parameters(self.predictor.state_on(sizes))
        dtype = self.predictor.job.config.precision.compute
        tried = {parameters[name].shape[-2:]: parameters[name] for name in reversed(names)}
        leaves = list(reversed(tried.values()))[:_NUM_PARAMETERS]
        try:
            return any(uses_all_reduce(self.machine.devices, sizes, leaf, dtype) for leaf in leaves)
        except jax.errors.JaxRuntimeError:  # what the compiler refuses is no cure
            return True


def estimate_early(job: BaseTrainer, train_setup: TrainSetup, machine: TargetMachine) -> EarlyEstimate | None:
    """The outlook of a job on a mesh; None where the chips' peak figures or the job's FLOPs are not known."""
    accelerator = machine.accelerator
    if accelerator is None or accelerator.chip.speeds is None:
        return None
    try:
        return EarlyEstimate(Predictor(job, job.flops_per_token(train_setup), accelerator), machine, train_setup)
    except ValueError:  # a kernel that does not say what it computes
        return None


def format_first_estimate(job: BaseTrainer, train_setup: TrainSetup, machine: TargetMachine) -> str:
    """What arithmetic says of the job, for a person; of an unknown chip, what its state takes."""
    outlook = estimate_early(job, train_setup, machine)
    if outlook is not None:
        return outlook.line
    state, there = count_bytes_per_device(train_setup.abstract_state), machine.hbm_bytes * MEMORY_SHARE
    return (
        f"first estimate, by arithmetic: {format_mesh(train_setup.mesh_sizes)}: "
        f"state {format_amount(state, 'bytes')} of "
        f"{format_amount(there, 'bytes')} a device; what a step takes is not known of this device"
    )


def build_first_setup(job: BaseTrainer, machine: TargetMachine) -> TrainSetup:
    """The job before anything is laid out, over no devices. Raises `InvalidError` if the mesh does not fit."""
    return build_abstract(job.setup_builder, order_sizes(resolve_mesh_sizes(job.topology.mesh, len(machine.devices))))


def _parameters(abstract: Any) -> dict[str, jax.ShapeDtypeStruct]:
    return flatten_with_names({"params": abstract.params})


def _narrowest(abstract: Any) -> int:
    """Rows or columns of the narrowest shard of a matrix, along an axis that is cut."""
    widths = [
        shard
        for leaf in _parameters(abstract).values()
        if leaf.ndim > 1
        for size, shard in list(zip(leaf.shape, leaf.sharding.shard_shape(leaf.shape), strict=True))[-2:]
        if shard < size
    ]
    return min(widths, default=_WHOLE_LANES)


def _told(sizes: MeshSizes, prediction: Prediction) -> str:
    return f"{format_mesh(dict(sizes))} ({format_amount(prediction.sent_bytes, 'bytes')} by arithmetic)"
