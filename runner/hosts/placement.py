"""Where this process stands among the processes of its job, from what the engine that started it has set.

JAX's own detection answers for TPU pods (one slice or several), SLURM and Open MPI; torchrun's variables are read here.
An engine that says "you are one of several" without saying where the others are is refused: a process that went on
alone would be one of N silent single-host runs.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from jax._src import clusters

from runner.errors import InvalidError, RetryableError

_JAX_CLUSTERS = ("GkeTpuCluster", "GceTpuCluster", "SlurmCluster", "OmpiCluster")
_LOCAL_SIZES = ("LOCAL_WORLD_SIZE", "SLURM_STEP_TASKS_PER_NODE", "OMPI_COMM_WORLD_LOCAL_SIZE")
_LOCAL_RANKS = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK")
_COUNTS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "WORLD_SIZE", "MEGASCALE_NUM_SLICES")
_LISTS = ("TPU_WORKER_HOSTNAMES", "TPU_PROCESS_ADDRESSES")
_FLAGS = "--coordinator HOST:PORT --num-processes N --process-id K"


@dataclass(frozen=True)
class Placement:
    """Where one process stands in its job.

    Attributes:
        coordinator: HOST:PORT of process 0, the same on every process.
        local_devices: indices of the GPUs that are this process's, where one host runs several; None = all.
    """

    coordinator: str
    num_processes: int
    process_id: int
    local_devices: tuple[int, ...] | None = None


def detect(deadline_seconds: float) -> Placement | None:
    """Where this process stands; None if it is alone. Called on every host, before any other use of JAX.

    Raises `InvalidError` if the environment names peers but not their place, `RetryableError` if the name of process 0
    cannot be resolved within the deadline.
    """
    environment = os.environ
    found = _torchrun(environment) or _by_jax(deadline_seconds)
    if found is not None:
        return found if found.num_processes > 1 else None
    claim = _claim(environment)
    if claim is not None:
        raise InvalidError(
            f"{claim} in the environment says that this is one of several processes, but not where the others are; "
            f"give {_FLAGS}"
        )
    return None


def _torchrun(environment: Mapping[str, str]) -> Placement | None:
    """torchrun keeps MASTER_PORT for itself, so the coordinator listens on the port after it."""
    names = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")
    if not all(environment.get(name) for name in names):
        return None
    address, port, size, rank = (environment[name] for name in names)
    coordinator = f"{address}:{environment.get('JAX_COORDINATOR_PORT') or int(port) + 1}"
    return Placement(coordinator, int(size), int(rank), _local_devices(environment))


def _by_jax(deadline_seconds: float) -> Placement | None:
    for name in _JAX_CLUSTERS:
        engine = getattr(clusters, name)
        if not engine.is_env_present():
            continue
        num_processes = engine.get_process_count()
        if num_processes == 1:
            return Placement("", 1, 0)
        port = os.environ.get("JAX_COORDINATOR_PORT")
        try:
            coordinator = engine.get_coordinator_address(int(deadline_seconds), port)
        except RuntimeError as error:
            raise RetryableError(f"cannot join the other processes of the job: {error}") from error
        return Placement(coordinator, num_processes, engine.get_process_id(), _local_devices(os.environ))
    return None


def _local_devices(environment: Mapping[str, str]) -> tuple[int, ...] | None:
    """The GPU of this process, if its host runs several processes of the job."""
    for size, rank in zip(_LOCAL_SIZES, _LOCAL_RANKS, strict=True):
        number = re.match(r"\d+", environment.get(size, ""))  # SLURM: 4(x2) for two hosts with 4 tasks each
        if number is not None and int(number[0]) > 1 and rank in environment:
            return (int(environment[rank]),)
    return None


def _claim(environment: Mapping[str, str]) -> str | None:
    """The variable that says that there are peers."""
    for name in _COUNTS:
        if environment.get(name, "").isdecimal() and int(environment[name]) > 1:
            return f"{name}={environment[name]}"
    for name in _LISTS:
        if "," in environment.get(name, ""):
            return f"{name}={environment[name]}"
    return None
