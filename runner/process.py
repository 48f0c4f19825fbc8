"""Processes of one job on this machine: the same command in each, a coordinator, simulated CPU devices on request.

The caller handles output and exit codes of the processes. No process is orphaned: on Linux each is asked to stop when
the process that started it dies, even by kill -9. For this purpose the file is also run as a program
(`bind_to_parent`), and therefore imports no other module of the project.
"""

import contextlib
import ctypes
import gc
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import IO

# Environment variable of a process that waits for its command line: the file descriptor from which it comes.
STANDBY_VARIABLE = "RUNNER_STANDBY"
STANDBY_BYTES = 2**30  # free memory that such a process needs; it takes about a quarter of that
# Environment variable with the path of a file to which a process adds its host if one of its devices is defective; and
# the variable in which SLURM gives the host its name.
_FAULTY_HOSTS_VARIABLE = "RUNNER_FAULTY_HOSTS"
NODE_VARIABLE = "RUNNER_NODE"  # name of the machine, set by launchers whose containers have other host names
# Signals that ask a job to stop. A closing terminal sends SIGHUP; batch systems can be told to send SIGUSR1 or SIGUSR2.
# A second SIGTERM or SIGINT ends the process at once.
INSISTENT_SIGNALS = (signal.SIGTERM, signal.SIGINT)
STOP_SIGNALS = (*INSISTENT_SIGNALS, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
# The kernel sends it once for each thread of the parent that dies, so a repetition must be harmless; `nohup` does not
# ignore it.
_DEATH_SIGNAL = signal.SIGUSR1
_PR_SET_PDEATHSIG = 1
_CONTAINER = Path("/sys/fs/cgroup")  # control groups of version 2; the first one is that of a container
_OWN_GROUP = Path("/proc/self/cgroup")
_NUM_FAKED = re.compile(r"--xla_force_host_platform_device_count=\d+")
_THREADS_PER_FAKED_DEVICE = 4
_ONE_HEAP = "glibc.malloc.arena_max=1"  # as `runner.__main__` sets it
_MMAP_MAX, _TRIM_THRESHOLD = -4, -1  # parameters of mallopt
_PORTS = range(20_000, 30_000)  # below the ephemeral ports that systems assign to connections


class GarbageCollection:
    """Python's garbage collector while a job makes steps: it runs where the job says, the same on all hosts.

    Otherwise it would stop one host at a time, for which all others wait. What exists after the first collection, such
    as modules and traced programs, is frozen: later collections do not look at it. The context restores the former
    state at its end. A process that has switched the collector off, or has frozen objects itself, keeps that.
    """

    def __init__(self) -> None:
        self._is_used = self._may_freeze = self._is_frozen = False

    def __enter__(self) -> None:
        self._is_used, self._may_freeze = gc.isenabled(), gc.get_freeze_count() == 0

    def __exit__(self, *reason: object) -> None:
        if self._is_frozen:
            gc.unfreeze()
        if self._is_used:
            gc.enable()
        self._is_used = self._is_frozen = False

    @contextlib.contextmanager
    def allow(self) -> Iterator[None]:
        """Allow automatic collections inside the context, and collect at its end."""
        if self._is_used:
            gc.enable()
        yield
        self.collect()

    def collect(self, generation: int = 1) -> None:
        """Collect garbage up to a generation (2: all), and allow no automatic collection from here on.

        The first call collects all garbage, and freezes the rest.
        """
        if not self._is_used:
            return
        gc.disable()
        if self._may_freeze and not self._is_frozen:
            gc.collect()
            gc.freeze()
            self._is_frozen = True
        else:
            gc.collect(generation)


def list_stop_signals() -> tuple[signal.Signals, ...]:
    """Return the signals by which this process can be asked to stop.

    A signal that was set to be ignored, as `nohup` does, stays ignored. SIGTERM and SIGINT never are: a shell that
    starts a command in the background makes it ignore SIGINT.
    """
    return tuple(
        number
        for number in STOP_SIGNALS
        if number in INSISTENT_SIGNALS or signal.getsignal(number) is not signal.SIG_IGN
    )


def make_environment(num_devices: int | None, given: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables `given`, with `num_devices` simulated CPU devices for the process; None for no change."""
    variables = dict(given)
    if num_devices is None:
        return variables
    flags = _NUM_FAKED.sub("", variables.get("XLA_FLAGS", "")).split()
    variables["XLA_FLAGS"] = " ".join([*flags, f"--xla_force_host_platform_device_count={num_devices}"])
    variables["JAX_PLATFORMS"] = "cpu"
    variables.pop("JAX_NUM_CPU_DEVICES", None)  # it outranks the flag
    add_cpu_threads(variables)
    return variables


def make_code_environment(code: str) -> dict[str, str]:
    """Return the variables of this process, with the modules of a directory before those that are installed."""
    # Python would otherwise look in the present directory first.
    paths = [os.path.abspath(code), os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"}


def add_cpu_threads(variables: MutableMapping[str, str], num_devices: int = -1) -> None:
    """Set `NPROC`, the number of XLA's threads on CPUs, if simulated devices would have too few threads.

    Call it before JAX starts its backend. A value that is already set is kept. `num_devices` is
    `jax.config.jax_num_cpu_devices`; if it is negative, as it is by default, the flag in `XLA_FLAGS` is read.
    """
    if num_devices < 0:
        # The last one counts.
        flags = _NUM_FAKED.findall(variables.get("XLA_FLAGS", ""))
        num_devices = int(flags[-1].rpartition("=")[2]) if flags else 1
    num_threads = _THREADS_PER_FAKED_DEVICE * num_devices
    if num_devices > 1 and num_threads > count_cpus():
        # XLA makes as many threads as there are CPUs or devices. Each device of a program takes one while it waits, in
        # a collective for the others or for one of the 32 programs that may be in flight on it; a save runs a program
        # beside the step. If they take all threads, none is left for the work that they wait for, and the job hangs.
        # Not set otherwise, because XLA splits its sums by the number of threads, so another number gives other bits.
        variables.setdefault("NPROC", str(num_threads))


def count_cpus() -> int:
    """Return the number of CPUs that this process may use, as XLA counts them."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def read_memory_bytes() -> int:
    """Return the memory of this machine, or of this container if that has less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _read_limit(_CONTAINER)
    return total if limit is None else min(total, limit)


def read_resident_bytes() -> int | None:
    """Return the memory that this process holds; None where the kernel does not tell it, as outside of Linux."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None


def read_free_memory_bytes() -> int | None:
    """Return the memory that processes of this machine or container may still use; None if unknown."""
    try:
        available = re.search(r"^MemAvailable: +(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE)
        free = [1024 * int(available[1])] if available else []
        # A batch system limits a job by a control group that contains the group of this process.
        own = re.search(r"^0::/(.*)$", _OWN_GROUP.read_text(), re.MULTILINE) if _OWN_GROUP.exists() else None
        group = _CONTAINER / (own[1] if own else "")
        for each in [group, *group.parents][: len(group.relative_to(_CONTAINER).parts) + 1]:
            if (limit := _read_limit(each)) is not None:
                # Files that were read count as used, and are dropped when a process needs the memory.
                files = re.search(r"^inactive_file (\d+)$", (each / "memory.stat").read_text(), re.MULTILINE)
                free.append(limit - int((each / "memory.current").read_text()) + (int(files[1]) if files else 0))
    except (OSError, ValueError):
        return None
    return min(free, default=None)


def keep_freed_memory(num_bytes: int) -> bool:
    """Let this process keep freed memory, if it has one heap and there is room; return True if it does so from now on.

    On a CPU XLA allocates the temporaries of every step again, and the kernel clears all pages that it gives to a
    process (`tests.benchmarks.torch_step` measures the cost). A heap that never shrinks keeps the pages for the next
    step. It may hold two sets of temporaries, because a step can be started before the previous one has ended.
    `num_bytes` are those of a step, on the devices of all processes on this machine.
    """
    if _ONE_HEAP not in os.environ.get("GLIBC_TUNABLES", "").split(":"):
        return False
    free = read_free_memory_bytes()
    # Two sets may take half of the free memory.
    if free is None or 4 * num_bytes > free:
        return False
    allocator = ctypes.CDLL(None)
    return bool(allocator.mallopt(_MMAP_MAX, 0) and allocator.mallopt(_TRIM_THRESHOLD, -1))


def _read_limit(group: Path) -> int | None:
    """Return the memory that a control group may use; None if it has no limit."""
    limit = group / "memory.max"
    return int(text) if limit.exists() and (text := limit.read_text().strip()).isdecimal() else None


def read_age_seconds() -> float:
    """Return the age of this process, to a hundredth of a second; 0 where the system does not tell (Linux does)."""
    created = read_creation_ticks(os.getpid())
    if created is None:
        return 0.0
    return max(time.clock_gettime(time.CLOCK_BOOTTIME) - created / os.sysconf("SC_CLK_TCK"), 0.0)


def read_creation_ticks(process_id: int) -> int | None:
    """Return when a process of this machine was created, in ticks since boot; None if no such process is alive."""
    try:
        with open(f"/proc/{process_id}/stat", "rb") as file:
            # The name of the process is in parentheses and may contain anything, so the fields are read after it.
            state, *fields = file.read().rpartition(b")")[2].split()
            return None if state in b"ZX" else int(fields[18])
    except (OSError, ValueError, IndexError):
        return None


def read_machine_id() -> str:
    """Return an id of this boot of this machine and of its process numbering; empty where there is none."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def read_node_name() -> str:
    """Return the name that the engine has for this machine, or else the host name."""
    return os.environ.get("SLURMD_NODENAME") or os.environ.get(NODE_VARIABLE) or socket.gethostname()


def report_faulty_host() -> None:
    """Add this host to the file of hosts with defective devices, if the launcher has named one."""
    path = os.environ.get(_FAULTY_HOSTS_VARIABLE)
    if path:
        with open(path, "a") as file:
            file.write(read_node_name() + "\n")


def find_free_port() -> int:
    """Return a TCP port that is free now, and that the system does not assign to other programs by itself."""
    while True:
        port = _PORTS[int.from_bytes(os.urandom(4), "little") % len(_PORTS)]
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def make_placements(num_processes: int) -> list[list[str]]:
    """Return for each process of a job on this machine the options that give it its place; a single one needs none."""
    if num_processes == 1:
        return [[]]
    coordinator = f"127.0.0.1:{find_free_port()}"
    return [format_placement(coordinator, num_processes, process_id) for process_id in range(num_processes)]


def format_placement(coordinator: str, num_processes: int, process_id: int | str) -> list[str]:
    """Return the options that give the runner its place in a job; `process_id` may be a variable of the engine."""
    return ["--coordinator", coordinator, "--num-processes", str(num_processes), "--process-id", str(process_id)]


def start_processes(
    command: Sequence[str], num_processes: int, variables: Mapping[str, str], output: int | IO[bytes]
) -> list[subprocess.Popen[bytes]]:
    """Start the command, without placement options, in every process of a job; see `start_process`."""
    placements = make_placements(num_processes)
    return [start_process([*command, *placement], variables, output) for placement in placements]


def start_process(
    command: Sequence[str], variables: Mapping[str, str], output: int | IO[bytes], inherited: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """Start one process of a job, which inherits further file descriptors on request.

    The process has its own session, so that Ctrl-C on the terminal reaches only the caller, which forwards signals.
    Call this from a thread that lives as long as the process should, because the process is stopped when the thread
    ends (see `bind_to_parent`).
    """
    return subprocess.Popen(
        bind_to_parent(command),
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        pass_fds=inherited,
    )


def bind_to_parent(command: Sequence[str]) -> list[str]:
    """Return the command in a form that is asked to stop when this process dies.

    On Linux the kernel sends the command SIGUSR1 as soon as the thread that started it has ended. A small program
    requests that and then becomes the command, with the same process id, so no code has to run between fork and exec.
    Elsewhere the command is returned as it is, and outlives a parent that is killed.
    """
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def request_death_signal(parent: int) -> None:
    """Ask the kernel for SIGUSR1 to this process at the death of its parent, and exit if that has died. Linux only."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(_DEATH_SIGNAL)) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # It died before the request.
        sys.exit(128 + _DEATH_SIGNAL)


if __name__ == "__main__":
    # Form of a command that `bind_to_parent` returns: this program, the parent, the command.
    request_death_signal(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
