"""`python -m runner evaluate`: the loss of a run's weights on data. Claims nothing; works beside the run.

A file of one's own that grows by an object a line, one for each step, and is gone on with after a kill.
"""

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path

from runner.cli.arguments import Parser, check_placement, directory_of, looking
from runner.cli.run import placement_of
from runner.console import say, warn
from runner.distributed.agreement import Hosts
from runner.distributed.preemption import end_process
from runner.distributed.rendezvous import join_job
from runner.errors import EXIT_DONE, EXIT_RETRYABLE, InvalidError, RunnerError
from runner.inference.evaluate import EvaluationRequest, evaluate, follow, format_record, parse_source
from runner.inference.open_run import NEWEST, ReadOnlyRun, open_run
from runner.spec.imports import import_extra
from runner.storage import JsonObject, Store, encode_line, parse_lines


def validate_outside_run(path: str, store: Store) -> None:
    """Raise `InvalidError` if a file would lie in the directory of a run, which owns all that is there."""
    if store.root is not None and Path(path).resolve().is_relative_to(store.root.resolve()):
        raise InvalidError(f"--output {path}: lies in the directory of the run, which alone writes there; name another")


def steps_in(path: str) -> list[int]:
    """The steps that have a line; a line that a kill has torn is taken away. Raises `InvalidError`."""
    try:
        content = Path(path).read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise InvalidError(f"--output {path}: {error}") from error
    whole = content[: content.rfind(b"\n") + 1]
    if whole != content:
        os.truncate(path, len(whole))
    return [record["step"] for record in parse_lines(whole) if type(record.get("step")) is int]


def append(path: str, record: JsonObject) -> None:
    """Add a line, durable when this returns."""
    with open(path, "ab") as file:
        file.write(encode_line(record))
        file.flush()
        os.fsync(file.fileno())


def main(arguments: Sequence[str]) -> int:
    """Run the command, the same on every host; the main host prints."""
    parser = Parser("runner evaluate")
    parser.add_argument("where", metavar="SPEC_OR_DIRECTORY")
    parser.add_argument("--data", metavar="SOURCE", help="as config.data.validation takes it; default: the run's sets")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--step", default=NEWEST, metavar="N", help="newest (default), best, or a step's number")
    which.add_argument("--all", action="store_true", help="every step that is there")
    parser.add_weights()
    which.add_argument("--follow", action="store_true", help="every step, as the run commits it, until it is done")
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="with --follow: append an object a line, and go on behind what is there"
    )
    parser.add_argument("--harness", metavar="TASKS", help="tasks of lm-evaluation-harness, between commas, instead")
    parser.add_argument("--include-path", metavar="DIR", help="with --harness: where tasks of one's own are")
    parser.add_argument("--json", action="store_true", help="an object a line for each step, at full precision")
    parser.add_placement()
    parsed = parser.parse_args(arguments)
    check_placement(parsed)
    _check(parser, parsed)
    with looking():
        run = open_run(directory_of(parsed.where))
        if parsed.output is not None:
            validate_outside_run(parsed.output, run.store)
        request = EvaluationRequest(
            None if parsed.data is None else parse_source(parsed.data),
            None if parsed.all else parsed.step,
            parsed.weights,
        )
        deadlines = run.job.spec.deadlines
        placement = placement_of(parsed, deadlines.start_seconds)
        run.prepare_process()
        hosts = join_job(placement, deadlines)
        if hosts.num_processes == 1:
            _print(run, request, hosts, parsed)
            return EXIT_DONE
        _print_as_one_of_several(run, request, hosts, parsed)
    return EXIT_DONE


def _check(parser: Parser, parsed: argparse.Namespace) -> None:
    if parsed.output is not None and not parsed.follow:
        parser.error("--output goes with --follow")
    if parsed.include_path is not None and parsed.harness is None:
        parser.error("--include-path goes with --harness")
    if parsed.harness is not None and (parsed.follow or parsed.all or parsed.data):
        parser.error("--harness goes with --step alone")


def _print(run: ReadOnlyRun, request: EvaluationRequest, hosts: Hosts, parsed: argparse.Namespace) -> None:
    if parsed.harness is not None:
        _print_harness(run, hosts, parsed)
        return
    known: list[int] = hosts.run_on_main(lambda: [] if parsed.output is None else steps_in(parsed.output))
    if parsed.follow:
        records = follow(run, request.data, hosts, known.__contains__, weights=request.weights)
    else:
        records = evaluate(run, request, hosts)
    for record in records:
        for line in [json.dumps(record)] if parsed.json else format_record(record):
            say(line)
        if parsed.output is not None:
            append(parsed.output, record)


def _print_harness(run: ReadOnlyRun, hosts: Hosts, parsed: argparse.Namespace) -> None:
    module = import_extra("runner.inference.harness", "lm-eval")
    checkpoint = hosts.run_on_main(lambda: run.find_checkpoint(parsed.step))
    record = module.evaluate_tasks(run, checkpoint, parsed.harness.split(","), parsed.include_path)
    if hosts.is_main:
        for line in [json.dumps(record)] if parsed.json else module.format_record(record):
            say(line)


def _print_as_one_of_several(
    run: ReadOnlyRun, request: EvaluationRequest, hosts: Hosts, parsed: argparse.Namespace
) -> None:
    """Ends the process, once all others know that it does: whoever waited for it would take it for a crash."""
    code = EXIT_DONE
    try:
        _print(run, request, hosts, parsed)
        hosts.barrier()
    except (RunnerError, OSError) as error:
        warn(str(error))
        code = error.exit_code if isinstance(error, RunnerError) else EXIT_RETRYABLE
    hosts.leave(code)
    end_process(code)
