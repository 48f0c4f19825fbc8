"""`python -m runner evaluate`: the loss of a run's weights on data. Claims nothing; works beside the run."""

import argparse
import json
from collections.abc import Sequence

from runner.command.arguments import Parser, check_placement, directory_of
from runner.command.looking import looking
from runner.command.run import placement_of
from runner.errors import EXIT_DONE, EXIT_RETRYABLE, RunnerError
from runner.hosts.agreement import Hosts
from runner.hosts.join import start
from runner.hosts.preemption import end_process
from runner.inference.evaluation import Request, evaluate, parse_source
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
    parser.add_argument("--json", action="store_true", help="an object a line for each step, at full precision")
    parser.add_placement()
    parsed = parser.parse_args(arguments)
    check_placement(parsed)
    with looking():
        run = open_run(directory_of(parsed.where))
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


def _print(run: Opened, request: Request, hosts: Hosts, parsed: argparse.Namespace) -> None:
    for record in evaluate(run, request, hosts):
        for line in [json.dumps(record)] if parsed.json else lines_of(record):
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
