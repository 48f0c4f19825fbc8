"""The command: a word names one of the commands in `runner.cli`, anything else is a SPEC to run.

From here to the training loop: `runner.cli.run` joins the hosts and calls the job, `RestoreableJob.__call__` in
`runner/job.py` claims the directory and restores, and `BaseTrainer.run` in `runner/trainer.py` is the loop.
"""

from runner.huge_pages import restart_with_huge_pages

if __name__ == "__main__":
    restart_with_huge_pages()  # ahead of imports, which would be made twice

import argparse
import contextlib
import importlib
import os
import sys
from collections.abc import Sequence

from runner.cli.arguments import Helped, Parser, check_placement
from runner.console import warn
from runner.distributed.clock import Clock
from runner.distributed.preemption import StopNotice
from runner.errors import EXIT_DONE, EXIT_FAILED, RunnerError, error_from_exit
from runner.spec import load_document, validate_spec

# Imported when they are asked for: most of them bring jax, which checking a spec must not wait for.
COMMANDS = {
    "plan": "runner.cli.plan",
    "status": "runner.cli.status",
    "evaluate": "runner.cli.evaluate",
    "sample": "runner.cli.sample",
    "metrics": "runner.cli.metrics",
    "profile": "runner.cli.profile",
    "report": "runner.cli.report",
    "dashboard": "runner.cli.dashboard",
    "checkpoints": "runner.cli.checkpoints",
    "export": "runner.cli.export",
    "verify-resume": "runner.cli.verify_resume",
    "schema": "runner.cli.schema",
}
RUN = "runner.cli.run"


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser("runner", description="Run the job that a spec describes.")
    parser.add_argument("spec", metavar="SPEC", help=f"YAML ExecutionSpec, or a command: {', '.join(COMMANDS)}")
    parser.add_set()
    parser.add_argument("--profile", metavar="START:STOP", help="as --set logging.profile=START:STOP")
    parser.add_placement()
    parsed = parser.parse_args(arguments)
    if parsed.profile is not None:
        parsed.set.append(f"logging.profile={parsed.profile}")
    check_placement(parsed)
    return parsed


def main(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code."""
    clock = Clock.since_process_start()
    stop = StopNotice(clock)
    stop.install_signal_handlers()
    with contextlib.suppress(ValueError):
        sys.path.remove("")
    sys.path.insert(0, os.getcwd())
    try:
        if arguments and arguments[0] in COMMANDS:
            return int(importlib.import_module(COMMANDS[arguments[0]]).main(arguments[1:]))
        parsed = _parse(arguments)
        document = load_document(parsed.spec, parsed.set)
        spec = validate_spec(document)
        importlib.import_module(RUN).run(parsed, document, spec, stop, clock)
    except RunnerError as error:
        warn(str(error))
        return error.exit_code
    except Helped:
        return EXIT_DONE
    except SystemExit as error:
        warn(str(error_from_exit(error)))
        return EXIT_FAILED
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
