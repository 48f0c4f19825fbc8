"""The job as N processes on this machine: a pod in miniature, on faked CPU devices where asked for.

Every process gets the same command that a pod's hosts get. Their output is joined line by line with a prefix each, a
signal to this process is forwarded once to every one of them, and this process ends with the job's exit code.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from types import FrameType
from typing import IO

from runner.errors import EXIT_DONE, EXIT_FAILED, EXIT_INVALID, EXIT_PREEMPTED, EXIT_RETRYABLE
from runner.terminal import say

LINGER_SECONDS = 60.0  # what the survivors of a lost process get to end by themselves


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _environment(devices_per_process: int | None) -> dict[str, str]:
    environment = dict(os.environ, PYTHONUNBUFFERED="1")
    if devices_per_process is not None:
        flags = environment.get("XLA_FLAGS", "")
        environment["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={devices_per_process}".strip()
        environment["JAX_PLATFORMS"] = "cpu"
    return environment


def _copy_lines(stream: IO[str], prefix: str) -> None:
    for line in stream:
        say(f"{prefix}{line.rstrip()}")


def job_code(codes: Sequence[int]) -> int:
    """The job's exit code from those of its processes; a negative one is death by a signal.

    The most telling wins: what a person must see before what a retry mends, and that before success.
    """
    known = [code if code in (0, 1, 2, 75) else EXIT_RETRYABLE if code in (-9, -6, -15, 76) else 1 for code in codes]
    for code in (EXIT_FAILED, EXIT_INVALID, EXIT_RETRYABLE, EXIT_PREEMPTED):
        if code in known:
            return code
    return EXIT_DONE


def run(arguments: Sequence[str], num_processes: int, devices_per_process: int | None) -> int:
    """Run `python -m runner ARGUMENTS` as a job of several processes and return the job's exit code."""
    command = [sys.executable, "-m", "runner", *arguments]
    coordinator = f"127.0.0.1:{_free_port()}"
    environment = _environment(devices_per_process)
    processes, readers = [], []
    for process_id in range(num_processes):
        place = ["--coordinator", coordinator, "--num-processes", str(num_processes), "--process-id", str(process_id)]
        # A session of its own keeps a terminal's Ctrl-C from reaching the process twice.
        process = subprocess.Popen(
            command + (place if num_processes > 1 else []),
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        assert process.stdout is not None
        reader = threading.Thread(target=_copy_lines, args=(process.stdout, f"[{process_id}] "), daemon=True)
        reader.start()
        processes.append(process)
        readers.append(reader)

    def forward(number: int, frame: FrameType | None) -> None:
        for process in processes:
            if process.poll() is None:
                process.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, forward)
    codes = _wait(processes)
    for reader in readers:
        reader.join(timeout=5)
    return job_code(codes)


def _wait(processes: Sequence["subprocess.Popen[str]"]) -> list[int]:
    """Wait for all; once one has died of a signal, the others get a while to notice before they are killed."""
    ended = threading.Semaphore(0)
    lost = threading.Event()

    def wait_for(process: "subprocess.Popen[str]") -> None:
        if process.wait() < 0:
            lost.set()
        ended.release()

    for process in processes:
        threading.Thread(target=wait_for, args=(process,), daemon=True).start()
    left = len(processes)
    while left:
        if ended.acquire(timeout=LINGER_SECONDS if lost.is_set() else 1.0):
            left -= 1
        elif lost.is_set():
            for process in processes:
                if process.poll() is None:
                    process.kill()
    return [process.wait() for process in processes]
