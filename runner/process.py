"""The processes of one job on this machine: the same command in each, a coordinator, faked devices where asked for.

A pod in miniature. What the processes print and how they end is the business of whoever started them.
"""

import os
import re
import socket
import subprocess
from collections.abc import Mapping, Sequence
from typing import IO

_NUM_FAKED = re.compile(r"--xla_force_host_platform_device_count=\d+")
_THREADS_PER_FAKED_DEVICE = 4


def make_environment(num_devices: int | None) -> dict[str, str]:
    """This process's variables, with `num_devices` faked CPU devices for the process to start; None = fake none."""
    variables = dict(os.environ)
    if num_devices is None:
        return variables
    flags = _NUM_FAKED.sub("", variables.get("XLA_FLAGS", "")).split()
    variables["XLA_FLAGS"] = " ".join([*flags, f"--xla_force_host_platform_device_count={num_devices}"])
    variables["JAX_PLATFORMS"] = "cpu"
    if num_devices > _num_cpus():
        # XLA makes as many threads as there are CPUs or devices. In a collective each device waits on a thread of its
        # own, and if that takes all of them, none is left for the work that they wait for: the step hangs. Not set
        # otherwise, because XLA splits its sums by the number of threads, so that other threads are other bits.
        variables.setdefault("NPROC", str(_THREADS_PER_FAKED_DEVICE * num_devices))
    return variables


def _num_cpus() -> int:
    """The CPUs that this process may run on, as XLA counts them."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_port() -> int:
    """A TCP port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def make_placements(num_processes: int) -> list[list[str]]:
    """By process, the words that tell the runner its place in a job of this machine; a single one needs none."""
    if num_processes == 1:
        return [[]]
    job = ["--coordinator", f"127.0.0.1:{free_port()}", "--num-processes", str(num_processes)]
    return [[*job, "--process-id", str(process_id)] for process_id in range(num_processes)]


def start_processes(
    command: Sequence[str], num_processes: int, variables: Mapping[str, str], output: int | IO[bytes]
) -> list[subprocess.Popen[bytes]]:
    """Start the command in every process of a job; what each prints goes to `output` (`subprocess.PIPE`, or a file).

    Each has a session of its own: a Ctrl-C on the terminal reaches only the caller, who passes on what they are to
    hear. They outlive a caller that is killed.
    """
    return [
        subprocess.Popen(
            [*command, *placement],
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        for placement in make_placements(num_processes)
    ]
