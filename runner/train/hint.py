"""A job sized for other hardware is refused, with the options that make it run here, if slowly."""

import shlex

import jax

from runner.accelerator import parse_accelerator
from runner.config import TrainerConfig
from runner.data import is_available
from runner.errors import InvalidError
from runner.spec import ExecutionSpec, Topology
from runner.train.mesh import does_mesh_fit


def options_for_here(spec: ExecutionSpec, topology: Topology, config: TrainerConfig, num_devices: int) -> list[str]:
    """The `--set` options that make a trainer's spec run on the devices at hand."""
    length = min(config.data.sequence_length, 128)
    total = f"total_tokens={100 * num_devices * length}" if config.train.total_tokens else "total_steps=100"
    data = config.data
    is_missing = not all(is_available(named.source) for named in data.sources)
    options = {
        "topology.accelerator=any": True,
        "topology.mesh={data: auto, fsdp: 1, tensor: 1}": not does_mesh_fit(topology.mesh, num_devices),
        f"directory={spec.directory}_here": True,
        "checkpoint.every_steps=10": True,
        f"config.train.global_batch_examples={num_devices}": True,
        f"config.train.{total}": True,
        "config.train.total_epochs=null": config.train.total_epochs is not None,
        f"config.data.sequence_length={length}": length != config.data.sequence_length,
        "config.memory.loss_chunk_positions=null": length % (config.memory.loss_chunk_positions or 1) != 0,
        "config.data.source=python-stdlib": is_missing and not data.mixture,
        "config.data.mixture=[]": is_missing and bool(data.mixture),
        "config.data.dtype=null": is_missing and data.dtype is not None,
        "config.data.options={}": is_missing and bool(data.options),
        "config.data.validation={}": not all(is_available(named.source) for named in data.validation.values()),
        "config.schedule.warmup_steps=10": config.schedule.warmup_steps > 10,
        "config.eval.every_steps=50": config.eval.every_steps is not None,
        "config.precision.compute=float32": jax.default_backend() == "cpu",
    }
    return [shlex.quote(option) for option, is_needed in options.items() if is_needed]


def refuse_other_hardware(spec: ExecutionSpec, topology: Topology, config: TrainerConfig) -> None:
    """Raise `InvalidError` if the devices at hand are not what the job is sized for."""
    wanted = parse_accelerator(topology.accelerator)
    device, number = jax.devices()[0], jax.device_count()
    if wanted is not None and not wanted.matches(device.device_kind, number):
        options = options_for_here(spec, topology, config, number)
        raise InvalidError(
            f"sized for {topology.accelerator}, here: {number} x {device.device_kind}; "
            f"to run it here: {' '.join(f'--set {option}' for option in options)}"
        )
