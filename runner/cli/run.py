"""`python -m runner SPEC`: join the other hosts, run the job, end with its exit code.

Imported once the spec's top level is known to be good, since it brings jax.
"""

import argparse
import logging
import os
import sys
import traceback
from types import TracebackType

from runner.accelerator import add_deterministic_flags
from runner.console import configure_console, warn
from runner.distributed import preemption
from runner.distributed.clock import Clock, TimeBucket
from runner.distributed.preemption import StopNotice, end_process
from runner.distributed.rendezvous import Placement, detect_placement, join_job
from runner.errors import EXIT_DONE, EXIT_FAILED, PeerLostError, RunnerError, error_from_exit
from runner.job import RestoreableJob
from runner.run.logs import drain_log_file, install_log_file
from runner.spec import Document, ExecutionSpec, load_job_class

_CHATTY_LIBRARIES = ("absl", "urllib3", "google", "azure", "botocore")  # what they would print is told in one line


def run(parsed: argparse.Namespace, document: Document, spec: ExecutionSpec, stop: StopNotice, clock: Clock) -> None:
    """Run the job to its end, and end this process with its exit code.

    Returns only by raising `RunnerError`, where nothing has begun yet. Called on every host.
    """
    job_class: type[RestoreableJob] = load_job_class(document, RestoreableJob)
    if job_class.needs_topology and spec.topology is None:
        raise document.error("", f"missing key topology: {job_class.__name__} needs one")
    job = job_class(spec, document)
    placement = placement_of(parsed, spec.deadlines.start_seconds)
    if placement is not None:
        stop.expect_peers()
    if spec.topology is None or spec.topology.deterministic:
        add_deterministic_flags(os.environ)
    job.compile_cache.open()
    _log(spec)
    is_elastic = spec.topology is not None and spec.topology.elastic
    clock.enter(TimeBucket.DISTRIBUTED_INIT)
    hosts = join_job(placement, spec.deadlines, is_elastic)
    clock.enter(TimeBucket.SET_UP)
    if hosts.num_processes > 1:
        level = spec.logging.level if hosts.is_main else spec.logging.level_other_hosts
        configure_console(spec.job, spec.logging.format, level, hosts.process_id)
    sys.excepthook, sys.unraisablehook = _end_on_bug, _leave_out_late_writes
    stop.join_peers(hosts if hosts.num_processes > 1 else None)
    preemption.watch_gcp_preemption(stop.request_stop)
    code = EXIT_DONE
    try:
        job(hosts, stop, clock)
    except RunnerError as error:
        warn(str(error))
        code = error.exit_code
        if isinstance(error, PeerLostError):
            drain_log_file()
            end_process(code)
    except SystemExit as error:
        end_process(EXIT_FAILED, str(error_from_exit(error)))
    drain_log_file()
    hosts.leave(code)
    clock.end(code)
    end_process(code)


def _log(spec: ExecutionSpec) -> None:
    """Show and keep what is said from now on."""
    for library in _CHATTY_LIBRARIES:
        logging.getLogger(library).setLevel(logging.CRITICAL)
    configure_console(spec.job, spec.logging.format, spec.logging.level)
    install_log_file()


def placement_of(parsed: argparse.Namespace, deadline_seconds: float) -> Placement | None:
    """Where this process stands, as the command line or else the engine says; None if it is alone."""
    if parsed.coordinator is None:
        return detect_placement(deadline_seconds)
    if parsed.num_processes == 1:
        return None
    return Placement(parsed.coordinator, parsed.num_processes, parsed.process_id)


def _leave_out_late_writes(found: "sys.UnraisableHookArgs") -> None:
    """Leave out what tensorstore says of each other write of a save that has failed; the save's own line is there.

    Orbax leaves at the first write that fails, and closes the event loop that the others report to.
    """
    if not (isinstance(found.exc_value, RuntimeError) and str(found.exc_value) == "Event loop is closed"):
        sys.__unraisablehook__(found)


def _end_on_bug(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """End with 1 after the traceback."""
    warn("".join(traceback.format_exception(kind, error, trace)).rstrip("\n"))
    drain_log_file()
    end_process(EXIT_FAILED)
