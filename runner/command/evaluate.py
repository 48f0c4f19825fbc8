"""`python -m runner evaluate`: the loss of a run's weights on data. Claims nothing; works beside the run."""

import argparse
import json
from collections.abc import Sequence

from runner.command.appending import append, refuse_inside, steps_in
from runner.command.arguments import Parser, check_placement, directory_of
from runner.command.looking import looking
from runner.command.run import placement_of
from runner.data.extra import import_extra
from runner.errors import EXIT_DONE, EXIT_RETRYABLE, RunnerError
from runner.hosts.agreement import Hosts
from runner.hosts.join import start
from runner.hosts.preemption import end_process
from runner.inference.evaluation import Request, evaluate, follow, parse_source
from runner.inference.opening import NEWEST, Opened, open_run
from runner.inference.scoring import lines_of
from runner.terminal import say, warn


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
            refuse_inside(parsed.output, run.store)
        request = Request(
            None if parsed.data is None else parse_source(parsed.data),
            None if parsed.all else parsed.step,
            parsed.weights,
        )
        deadlines = run.job.spec.deadlines
        placement = placement_of(parsed, deadlines.start_seconds)
        run.get_ready()
        hosts = start(placement, deadlines)
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


def _print(run: Opened, request: Request, hosts: Hosts, parsed: argparse.Namespace) -> None:
    if parsed.harness is not None:
        _print_harness(run, hosts, parsed)
        return
    known: list[int] = hosts.main_first(lambda: [] if parsed.output is None else steps_in(parsed.output))
    if parsed.follow:
        records = follow(run, request.data, hosts, known.__contains__, weights=request.weights)
    else:
        records = evaluate(run, request, hosts)
    for record in records:
        for line in [json.dumps(record)] if parsed.json else lines_of(record):
            say(line)
        if parsed.output is not None:
            append(parsed.output, record)


def _print_harness(run: Opened, hosts: Hosts, parsed: argparse.Namespace) -> None:
    module = import_extra("runner.inference.harness", "lm-eval")
    checkpoint = hosts.main_first(lambda: run.find(parsed.step))
    record = module.evaluate(run, checkpoint, parsed.harness.split(","), parsed.include_path)
    if hosts.is_main:
        for line in [json.dumps(record)] if parsed.json else module.lines_of(record):
            say(line)


def _print_as_one_of_several(run: Opened, request: Request, hosts: Hosts, parsed: argparse.Namespace) -> None:
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
