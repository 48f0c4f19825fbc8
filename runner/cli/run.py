"""The command `python -m runner SPEC`: join the other processes of the job, run it, end with its exit code.

This module imports jax. It is imported only when the top level of the spec is known to be valid.

A supervisor may start the process ahead of time, as a standby: it imports what every job needs, and waits until a
command line comes through a pipe (`wait_for_arguments`). Then it becomes the process of that job, so that the restart
does not wait for imports. A standby uses no device, and imports none of the user's modules, which might use one.
"""

import json
import logging
import os
import sys
from types import TracebackType
from typing import NoReturn

from runner.accelerator import platform_errors
from runner.attempts.logs import drain_log_file, install_log_file
from runner.attempts.membership import Membership
from runner.attempts.take_over import confirm_take_over
from runner.cli.arguments import JobArguments
from runner.cli.traceback import format_bug
from runner.console import configure_console, warn
from runner.distributed import preemption
from runner.distributed.clock import Clock, TimeCategory
from runner.distributed.preemption import StopNotice, end_process
from runner.distributed.rendezvous import Placement, detect_placement, join_job
from runner.errors import EXIT_DONE, EXIT_FAILED, EXIT_RETRYABLE, PeerLostError, RunnerError, error_from_exit
from runner.job import make_job, prepare_process
from runner.nvidia import gpu_errors
from runner.spec import Document, ExecutionSpec

# Libraries whose own log lines would repeat what the runner reports in one line. That of JAX advises to unset the
# variables of proxies, which `join_job` bypasses.
_CHATTY_LIBRARIES = ("absl", "urllib3", "google", "azure", "botocore", "jax._src.distributed")


def run(arguments: JobArguments, document: Document, spec: ExecutionSpec, stop: StopNotice, clock: Clock) -> NoReturn:
    """Run the job to its end, and end this process with its exit code. Called on every host.

    Raises `RunnerError` if the job could not begin.
    """
    # A bug must end the process at once: Python would wait for threads that wait for peers.
    sys.excepthook = _end_on_bug
    # The whole `config` is validated here, before this process waits for any other.
    job = make_job(document, spec)
    placement = find_placement(
        arguments.coordinator, arguments.num_processes, arguments.process_id, spec.deadlines.start_seconds
    )
    if placement is not None:
        # A stop that is requested from here on waits until the other processes can learn of it.
        stop.expect_peers()
    elif not arguments.is_take_over:
        confirm_take_over(job.store)
    prepare_process(job)  # before `join_job`, which starts JAX
    for library in _CHATTY_LIBRARIES:
        logging.getLogger(library).setLevel(logging.CRITICAL)
    configure_console(spec.job, spec.logging.format, spec.logging.level)
    # Records are collected from here on; the file opens once the attempt has claimed the directory.
    install_log_file()
    # The wait for slow hosts is accounted to its own category, apart from the set-up.
    clock.enter(TimeCategory.DISTRIBUTED_INIT)
    members = None
    if placement is not None and spec.topology is not None and spec.topology.elastic:
        members = Membership(spec, placement.process_id)
    hosts = join_job(placement, spec.deadlines, members)
    if members is not None:
        members.close()
    clock.enter(TimeCategory.SET_UP)
    if hosts.num_processes > 1:
        # The process number is known only from here on.
        level = spec.logging.level if hosts.is_main else spec.logging.level_other_hosts
        configure_console(spec.job, spec.logging.format, level, hosts.process_id)
    stop.join_peers(hosts if hosts.num_processes > 1 else None)
    preemption.watch_gcp_preemption(stop.request_stop)
    # From here on every way out must name a code to the peers, which otherwise wait for this process.
    code = EXIT_DONE
    try:
        with platform_errors(), gpu_errors():  # the first use of a device is in the job
            job(hosts, stop, clock)
    except RunnerError as error:
        warn(str(error))
        code = error.exit_code
        if isinstance(error, PeerLostError):
            # `hosts.leave` would wait for the lost peer.
            drain_log_file()
            end_process(code)
    except SystemExit as error:
        # `sys.exit` in the job's own code is a failure, whatever its code: a scheduler would take the code for the
        # job's.
        end_process(EXIT_FAILED, str(error_from_exit(error)))
    # The order matters: `leave` may wait for other processes, and what is logged must be written before.
    drain_log_file()
    hosts.leave(code)
    clock.end(code)
    end_process(code)


def wait_for_arguments(descriptor: int) -> list[str]:
    """Wait for a line of JSON with the words of a command line, and return them.

    The line is an object with `words`, and with `variables` that the supervisor sets for each start, which are added to
    the environment first. The caller has imported what a job needs. If a module has been changed since, the process
    executes the command line from the beginning instead.

    An empty line ends the process with 0, and so does a closed pipe with 76, since the supervisor has ended. The codes
    differ because a supervisor must not take a line that was lost for the end of the job.
    """
    sources = _read_source_times()
    with os.fdopen(descriptor, "rb") as pipe:
        line = pipe.readline()
    if not line.endswith(b"\n"):
        end_process(EXIT_RETRYABLE)
    if not line.strip():
        end_process(EXIT_DONE)
    message = json.loads(line)
    words: list[str] = message["words"]
    os.environ.update(message["variables"])
    if _read_source_times() != sources:
        os.execv(sys.executable, [sys.executable, "-m", "runner", *words])
    return words


def _read_source_times() -> dict[str, int]:
    """Return the time of the last change of each imported module's file, in nanoseconds; 0 if the file is gone."""
    paths = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    times = {}
    for path in filter(None, paths):
        try:
            times[path] = os.stat(path).st_mtime_ns
        except OSError:
            times[path] = 0
    return times


def find_placement(
    coordinator: str | None, num_processes: int | None, process_id: int | None, deadline_seconds: float
) -> Placement | None:
    """Return the place of this process in the job, None if it is alone.

    It is that of the command line, which gives all three numbers or none, or else that of the engine, which has
    `deadline_seconds` to answer.
    """
    # The three options are given together or not at all; `JobArguments` has checked it.
    if coordinator is None or num_processes is None or process_id is None:
        return detect_placement(deadline_seconds)
    return None if num_processes == 1 else Placement(coordinator, num_processes, process_id)


def _end_on_bug(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    warn(format_bug(error))
    drain_log_file()
    end_process(EXIT_FAILED)
