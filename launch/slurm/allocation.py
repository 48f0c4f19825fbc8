"""The nodes and GPUs to ask SLURM for, from what a spec's accelerator is."""

from dataclasses import dataclass

from runner.accelerator import parse_accelerator
from runner.spec import Document, ExecutionSpec


@dataclass(frozen=True)
class Allocation:
    """What the job asks of the cluster. `gpus_per_node` None = none are asked for."""

    num_nodes: int
    gpus_per_node: int | None = None
    takes_whole_nodes: bool = False


def allocate(document: Document, spec: ExecutionSpec, num_nodes: int | None, gpus_per_node: int | None) -> Allocation:
    """The nodes that the spec's accelerator needs. Raises `InvalidError` for what SLURM nodes are not."""
    name = spec.topology.accelerator if spec.topology is not None else "any"
    accelerator = parse_accelerator(name)
    if accelerator is None:
        return Allocation(num_nodes or 1, gpus_per_node)
    chip = accelerator.chip
    if chip.is_tpu:
        raise document.error(
            "topology.accelerator",
            f"{name} is a TPU slice, SLURM has nodes of GPUs or CPUs; launch it by jobset or tpu-vm",
        )
    if chip.chips_per_host is None:
        if gpus_per_node is not None:
            raise document.error("topology.accelerator", f"{name} has no GPUs; leave out --gpus-per-node")
        return Allocation(num_nodes or 1)
    per_node = gpus_per_node or accelerator.chips_on_a_host or chip.chips_per_host
    whole = per_node == chip.chips_per_host
    if accelerator.num_chips is None:
        return Allocation(num_nodes or 1, per_node, whole)
    num_gpus = accelerator.num_slices * accelerator.num_chips
    if num_gpus % per_node:
        raise document.error("topology.accelerator", f"{num_gpus} GPUs do not divide over nodes of {per_node}")
    if num_nodes not in (None, num_gpus // per_node):
        raise document.error(
            "topology.accelerator", f"{name} is {num_gpus // per_node} nodes of {per_node} GPUs, --nodes is {num_nodes}"
        )
    return Allocation(num_gpus // per_node, per_node, whole)
