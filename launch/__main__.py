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


def main(arguments: Sequence[str]) -> int:
    """Parse and run one launch; returns the job's exit code."""
    parser = argparse.ArgumentParser(prog="python -m launch")
    engines = parser.add_subparsers(dest="engine", required=True)
    engine = engines.add_parser("local", help="run the job as several processes on this machine")
    engine.add_argument("spec", metavar="SPEC")
    engine.add_argument("--processes", type=_positive, default=1, metavar="N")
    engine.add_argument("--devices-per-process", type=_positive, metavar="M", help="fake M CPU devices in each process")
    engine.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="passed on to the runner")
    parsed = parser.parse_args(arguments)
    options = [word for override in parsed.set for word in ("--set", override)]
    return local.run([parsed.spec, *options], parsed.processes, parsed.devices_per_process)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
