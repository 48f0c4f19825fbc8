"""The processes of one job on this machine: the same command in each, a coordinator, faked devices where asked for.

A pod in miniature. What the processes print and how they end is the business of whoever started them. None is left
alone: on Linux each is asked to stop when whoever started it dies, of kill -9 too. Run as a program, this file is what
sees to that (`bind_to_parent`); it imports nothing of the project.
"""

import contextlib
import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import IO, NoReturn

# What asks a job to stop. SIGHUP is a terminal that closes, SIGUSR1 and SIGUSR2 are what batch systems can be told to
# send. The first two insist: who sends one twice wants the end now.
INSISTENT_SIGNALS = (signal.SIGTERM, signal.SIGINT)
STOP_SIGNALS = (*INSISTENT_SIGNALS, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
# It comes again for each thread of the parent that dies, and so must not insist; nor does `nohup` have it ignored.
_DEATH_SIGNAL = signal.SIGUSR1
_PR_SET_PDEATHSIG = 1
_NUM_FAKED = re.compile(r"--xla_force_host_platform_device_count=\d+")
_THREADS_PER_FAKED_DEVICE = 4
_PORTS = range(20_000, 30_000)  # below those that systems give to connections


def list_stop_signals() -> tuple[signal.Signals, ...]:
    """The signals by which this process can be asked to stop: what `nohup` has set to be ignored stays ignored.

    SIGTERM and SIGINT never are: a shell that starts a command in the background has it ignore SIGINT.
    """
    return tuple(
        number
        for number in STOP_SIGNALS
        if number in INSISTENT_SIGNALS or signal.getsignal(number) is not signal.SIG_IGN
    )


def make_environment(num_devices: int | None, given: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables `given`, with `num_devices` faked CPU devices for the process to start; None = fake none."""
    variables = dict(given)
    if num_devices is None:
        return variables
    flags = _NUM_FAKED.sub("", variables.get("XLA_FLAGS", "")).split()
    variables["XLA_FLAGS"] = " ".join([*flags, f"--xla_force_host_platform_device_count={num_devices}"])
    variables["JAX_PLATFORMS"] = "cpu"
    if num_devices > count_cpus():
        # XLA makes as many threads as there are CPUs or devices. In a collective each device waits on a thread of its
        # own, and if that takes all of them, none is left for the work that they wait for: the step hangs. Not set
        # otherwise, because XLA splits its sums by the number of threads, so that other threads are other bits.
        variables.setdefault("NPROC", str(_THREADS_PER_FAKED_DEVICE * num_devices))
    return variables


def count_cpus() -> int:
    """The CPUs that this process may run on, as XLA counts them."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def read_age_seconds() -> float:
    """Since this process was created, to a hundredth; 0 where the system does not tell (it does on Linux)."""
    created = read_creation_ticks(os.getpid())
    if created is None:
        return 0.0
    return max(time.clock_gettime(time.CLOCK_BOOTTIME) - created / os.sysconf("SC_CLK_TCK"), 0.0)


def read_creation_ticks(process_id: int) -> int | None:
    """When a process of this machine was created, in ticks since its boot; None if none of this number lives."""
    try:
        with open(f"/proc/{process_id}/stat", "rb") as file:
            state, *fields = file.read().rpartition(b")")[2].split()
            return None if state in b"ZX" else int(fields[18])
    except (OSError, ValueError, IndexError):
        return None


def read_machine_id() -> str:
    """Tells this boot of this machine, and its processes' numbering, from any other; empty where nothing does."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def find_free_port() -> int:
    """A TCP port that is free now, and that the system gives nobody who asks for any port before it is taken."""
    while True:
        port = _PORTS[int.from_bytes(os.urandom(4), "little") % len(_PORTS)]
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def make_placements(num_processes: int) -> list[list[str]]:
    """By process, the words that tell the runner its place in a job of this machine; a single one needs none."""
    if num_processes == 1:
        return [[]]
    job = ["--coordinator", f"127.0.0.1:{find_free_port()}", "--num-processes", str(num_processes)]
    return [[*job, "--process-id", str(process_id)] for process_id in range(num_processes)]


def start_processes(
    command: Sequence[str], num_processes: int, variables: Mapping[str, str], output: int | IO[bytes]
) -> list[subprocess.Popen[bytes]]:
    """Start the command in every process of a job; what each prints goes to `output` (`subprocess.PIPE`, or a file).

    Each has a session of its own: a Ctrl-C on the terminal reaches only the caller, who passes on what they are to
    hear. To be called from a thread that lives as long as they may: they end with it (see `bind_to_parent`).
    """
    return [
        subprocess.Popen(
            bind_to_parent([*command, *placement]),
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        for placement in make_placements(num_processes)
    ]


def bind_to_parent(command: Sequence[str]) -> list[str]:
    """The command as this process is to start it, so that it is asked to stop when this process dies.

    On Linux the kernel sends it SIGUSR1 as soon as the thread that started it has ended. That is asked for by a program
    which then becomes the command, with the same process id: no code runs between fork and exec. Elsewhere the command
    as it is: what it runs outlives a parent that is killed.
    """
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def _become(command: list[str], parent: int) -> NoReturn:
    """Ask for a signal at the death of the parent, and become the command."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(_DEATH_SIGNAL)) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # it died before its death was asked for
        sys.exit(128 + _DEATH_SIGNAL)
    os.execvp(command[0], command)


if __name__ == "__main__":
    _become(sys.argv[2:], int(sys.argv[1]))
