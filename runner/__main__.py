"""The command: parse, check the spec, resolve the job class, run it, and map every error to an exit code."""

import argparse
import contextlib
import importlib
import logging
import os
import pathlib
import sys
import tempfile
import traceback
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn

from runner.errors import EXIT_DONE, EXIT_FAILED, EXIT_RETRYABLE, InvalidError, PeerLostError, RunnerError
from runner.hosts.preemption import StopNotice, end_process
from runner.terminal import warn

if TYPE_CHECKING:
    from runner.hosts.placement import Cluster

_USAGE = """python -m runner SPEC [--set KEY=VALUE ...] [--coordinator HOST:PORT --num-processes N --process-id K]
       python -m runner plan SPEC [--topology ACCELERATOR] [--search] [--chips auto --hours H] [--json]
                                  [--set KEY=VALUE ...]
       python -m runner checkpoints SPEC_OR_DIRECTORY [--verify]
       python -m runner checkpoints copy SOURCE TARGET
       python -m runner verify-resume SPEC [--steps N] [--kills K] [--processes P] [--devices-per-process M]
                                           [--seed S] [--set KEY=VALUE ...]
       python -m runner schema [SPEC]"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InvalidError(f"{message}\nusage: {_USAGE}")


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(prog="python -m runner", usage=_USAGE, description="Run the job that a spec describes.")
    parser.add_argument("spec", metavar="SPEC", help="YAML ExecutionSpec")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override one key; repeatable")
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="address of process 0")
    parser.add_argument("--num-processes", type=int, metavar="N")
    parser.add_argument("--process-id", type=int, metavar="K")
    parsed = parser.parse_args(arguments)
    given = [parsed.coordinator, parsed.num_processes, parsed.process_id]
    if any(value is None for value in given) and any(value is not None for value in given):
        raise InvalidError("--coordinator, --num-processes and --process-id: give all three or none")
    if parsed.num_processes is not None and not 0 <= parsed.process_id < parsed.num_processes:
        raise InvalidError(f"--process-id {parsed.process_id} is not in 0 .. {parsed.num_processes - 1}")
    return parsed


def _checkpoints(arguments: Sequence[str]) -> int:
    """List, verify or copy checkpoints."""
    if arguments and arguments[0] == "copy":
        parser = _Parser(prog="python -m runner checkpoints copy", usage=_USAGE)
        parser.add_argument("source", help="a run's directory or URL, or DIRECTORY/checkpoints/NAME")
        parser.add_argument("target", help="the directory or URL of a run")
        parsed = parser.parse_args(arguments[1:])
        return _copy_checkpoint(parsed.source, parsed.target)
    parser = _Parser(prog="python -m runner checkpoints", usage=_USAGE)
    parser.add_argument("where", metavar="SPEC_OR_DIRECTORY")
    parser.add_argument("--verify", action="store_true", help="read every file and compare it with its manifest")
    parsed = parser.parse_args(arguments)
    audit, storage = importlib.import_module("runner.checkpoint.inspection"), importlib.import_module("runner.storage")
    lines, is_good = audit.report(storage.open_store(_directory_of(parsed.where)), parsed.verify)
    print("\n".join(lines))
    return EXIT_DONE if is_good else EXIT_FAILED


def _copy_checkpoint(source: str, target: str) -> int:
    audit, storage = importlib.import_module("runner.checkpoint.copy"), importlib.import_module("runner.storage")
    directory, name = storage.split_checkpoint(source)
    copied = audit.copy(storage.open_store(directory), name, storage.open_store(target))
    print(f"copied and verified: {target.rstrip('/')}/checkpoints/{copied}")
    return EXIT_DONE


def _verify_resume(arguments: Sequence[str]) -> int:
    """Prove resume with the user's own job."""
    parser = _Parser(prog="python -m runner verify-resume", usage=_USAGE)
    parser.add_argument("spec", metavar="SPEC")
    parser.add_argument("--steps", type=int, default=30, metavar="N", help="how far both runs go; default 30")
    parser.add_argument("--kills", type=int, default=3, metavar="K", help="default 3")
    parser.add_argument("--processes", type=int, default=1, metavar="P", help="of the job, on this machine; default 1")
    parser.add_argument("--devices-per-process", type=int, metavar="M", help="fake M CPU devices in each process")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the moments of the kills; default 0")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parsed = parser.parse_args(arguments)
    verify = importlib.import_module("runner.command.verify_resume")
    if parsed.kills < 0 or parsed.processes < 1 or parsed.steps < parsed.kills + 3:
        given = f"--steps {parsed.steps} --kills {parsed.kills} --processes {parsed.processes}"
        raise InvalidError(f"{given}: needs a process, no negative number of kills, and 3 steps more than kills")
    options = [word for override in parsed.set for word in ("--set", override)]
    request = verify.Request(
        (parsed.spec, *options),
        parsed.steps,
        parsed.kills,
        parsed.processes,
        parsed.devices_per_process,
        parsed.seed,
    )
    with tempfile.TemporaryDirectory(prefix="verify-resume-") as scratch:
        return int(verify.verify(request, pathlib.Path(scratch)))


def _plan(arguments: Sequence[str]) -> int:
    """Say what the job would do on hardware that is not here."""
    parser = _Parser(prog="python -m runner plan", usage=_USAGE)
    parser.add_argument("spec", metavar="SPEC")
    parser.add_argument("--topology", metavar="ACCELERATOR", help="instead of the spec's topology.accelerator")
    parser.add_argument("--json", action="store_true", help="for scripts")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--search", action="store_true", help="rank meshes, micro-batches and what the job declares")
    parser.add_argument("--chips", choices=["auto"], help="the smallest slice that ends the run in time")
    parser.add_argument("--hours", type=float, metavar="H", help="for --chips auto")
    parsed = parser.parse_args(arguments)
    if (parsed.chips is None) != (parsed.hours is None) or (parsed.hours is not None and not parsed.hours > 0):
        raise InvalidError("--chips auto needs --hours H, a positive number, and --hours needs --chips auto")
    overrides = [*parsed.set, *([f"topology.accelerator={parsed.topology}"] if parsed.topology else [])]
    plan = importlib.import_module("runner.plan.command")
    return int(plan.plan(plan.Request(parsed.spec, tuple(overrides), parsed.json, parsed.search, parsed.hours)))


def _directory_of(where: str) -> str:
    """The directory that a spec names, or `where` itself."""
    if not where.endswith((".yaml", ".yml")):
        return where
    spec = importlib.import_module("runner.spec")
    return str(spec.validate_spec(spec.load_document(where, [])).directory)


def _run(parsed: argparse.Namespace, notice: StopNotice) -> None:
    """Run the job, from the spec to its end. jax is imported only once the spec's top level is good."""
    spec_module = importlib.import_module("runner.spec")
    document = spec_module.load_document(parsed.spec, parsed.set)
    spec = spec_module.validate_spec(document)
    job_class = spec_module.load_job_class(document, importlib.import_module("runner.job").RestoreableJob)
    if job_class.needs_topology and spec.topology is None:
        raise document.error("", f"missing key topology: {job_class.__name__} needs one")
    job = job_class(spec, document)
    cluster = _place(parsed, spec.deadlines.start_seconds)
    if cluster is not None:
        notice.expect_peers()
    job.compile_cache.open()
    for library in ("absl", "urllib3", "google", "azure", "botocore"):  # what they would print is told in one line
        logging.getLogger(library).setLevel(logging.CRITICAL)
    is_elastic = spec.topology is not None and spec.topology.elastic
    hosts = importlib.import_module("runner.hosts.join").start(cluster, spec.deadlines, is_elastic)
    sys.excepthook = _end_on_bug
    notice.join(hosts if hosts.num_processes > 1 else None)
    importlib.import_module("runner.hosts.gcp_preemption").watch(notice.ask)
    code = EXIT_DONE
    try:
        job(hosts, notice)
    except RunnerError as error:
        warn(str(error))
        code = error.exit_code
        if isinstance(error, PeerLostError):
            end_process(code)
    hosts.leave(code)
    end_process(code)


def _place(parsed: argparse.Namespace, deadline_seconds: float) -> "Cluster | None":
    """Where this process stands, as the command line or else the engine says; None if it is alone."""
    module = importlib.import_module("runner.hosts.placement")
    if parsed.coordinator is None:
        return module.detect(deadline_seconds)
    if parsed.num_processes == 1:
        return None
    return module.Cluster(parsed.coordinator, parsed.num_processes, parsed.process_id)


def _end_on_bug(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """End with 1 after the traceback."""
    traceback.print_exception(kind, error, trace)
    sys.stderr.flush()
    end_process(EXIT_FAILED)


def main(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code."""
    notice = StopNotice()
    notice.listen()
    with contextlib.suppress(ValueError):
        sys.path.remove("")
    sys.path.insert(0, os.getcwd())
    try:
        if arguments and arguments[0] == "schema":
            return int(importlib.import_module("runner.command.schema").main(arguments[1:]))
        if arguments and arguments[0] == "checkpoints":
            return _checkpoints(arguments[1:])
        if arguments and arguments[0] == "plan":
            return _plan(arguments[1:])
        if arguments and arguments[0] == "verify-resume":
            return _verify_resume(arguments[1:])
        _run(_parse(arguments), notice)
    except RunnerError as error:
        warn(str(error))
        return error.exit_code
    except OSError as error:
        if arguments and arguments[0] != "checkpoints":
            raise
        warn(str(error))
        return EXIT_RETRYABLE
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
