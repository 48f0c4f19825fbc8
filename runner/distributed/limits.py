"""Limits of the system on this process, checked before a job starts: open files and threads."""

import _thread
import contextlib
import math
import os
import resource
import threading

from runner.errors import InvalidError

_OTHER_DESCRIPTORS = 128  # files that a process has open at the least, besides its connections to other processes
_SPARE_DESCRIPTORS = 1024  # for data, saves and replicas, as far as the system allows
# Threads of a job on CPUs, measured: 23 on 2 CPUs, 91 with 8 simulated devices, for which `NPROC` is 32. Those of
# accelerators come on top.
_OTHER_THREADS, _THREADS_PER_CPU = 32, 3


def raise_descriptor_limit(num_connections: int) -> None:
    """Raise this process's limit of open files, if it is too low for so many connections to other processes.

    Raises `InvalidError` if the system does not allow enough.
    """
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed, spare = _OTHER_DESCRIPTORS + num_connections, _SPARE_DESCRIPTORS
    soft, hard = (math.inf if each == resource.RLIM_INFINITY else each for each in limits)
    wanted = min(needed + spare, hard)
    if wanted > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (int(wanted), limits[1]))
    if max(wanted, soft) < needed:
        raise InvalidError(
            f"this process may open {hard:.0f} files at most, needs {needed}, of which {num_connections} are for "
            "connections to other processes; raise the hard limit (ulimit -Hn, or LimitNOFILE= of systemd)"
        )


def raise_thread_limit() -> None:
    """Raise this process's limit of threads to the hard limit. Raise `InvalidError` if a job cannot start its threads.

    JAX ends a process without a useful message if it cannot start one. The limits are those of the user and of the
    control groups, and count other processes, so threads are started and ended to find out: within milliseconds.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    with contextlib.suppress(OSError, ValueError):  # a system may not allow it, and what counts is found out below
        resource.setrlimit(resource.RLIMIT_NPROC, (hard, hard))
    given = os.environ.get("NPROC", "")  # the number of CPUs for which XLA starts threads
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    needed = _OTHER_THREADS + _THREADS_PER_CPU * (int(given) if given.isdecimal() else len(usable))
    is_over, num_started = threading.Event(), 0
    try:
        while num_started < needed:
            _thread.start_new_thread(is_over.wait, ())
            num_started += 1
    except RuntimeError as error:
        raise make_thread_error(num_started, needed) from error
    finally:
        is_over.set()


def make_thread_error(num_started: int, needed: int) -> InvalidError:
    """Return the error of a process that may start fewer threads than it needs."""
    return InvalidError(
        f"this process may start {num_started} more threads, needs about {needed}; raise the limit of processes "
        "(ulimit -Hu, TasksMax= of systemd, the limit of pids of a container)"
    )
