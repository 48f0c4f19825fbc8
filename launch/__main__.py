"""`python -m launch ENGINE SPEC ...`."""

import argparse
import sys
from collections.abc import Sequence

from launch import local


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return number


def _natural(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{text} is negative")
    return number


def main(arguments: Sequence[str]) -> int:
    """Parse and run one launch; returns the job's exit code."""
    parser = argparse.ArgumentParser(prog="python -m launch")
    engines = parser.add_subparsers(dest="engine", required=True)
    engine = engines.add_parser("local", help="run the job as several processes on this machine")
    engine.add_argument("spec", metavar="SPEC")
    engine.add_argument("--processes", type=_positive, default=1, metavar="N")
    engine.add_argument("--devices-per-process", type=_positive, metavar="M", help="fake M CPU devices in each process")
    engine.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="passed on to the runner")
    engine.add_argument("--max-restarts", type=_natural, default=100, metavar="N", help="after 76; default 100")
    engine.add_argument(
        "--grace-seconds", type=_positive, default=300, metavar="N", help="from a signal to kill -9; 300"
    )
    parsed = parser.parse_args(arguments)
    return local.run(
        parsed.spec,
        parsed.set,
        parsed.processes,
        parsed.devices_per_process,
        parsed.max_restarts,
        parsed.grace_seconds,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
