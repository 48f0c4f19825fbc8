"""`python -m launch ENGINE SPEC ...`."""

import argparse
import sys
from collections.abc import Sequence

from launch import local
from launch.kubernetes import engine as kubernetes
from launch.options import check_texts
from launch.slurm import engine as slurm
from launch.tpu_vm import engine as tpu_vm
from runner.console import warn
from runner.errors import RunnerError

ENGINES = {"local": local, "slurm": slurm, "jobset": kubernetes, "tpu-vm": tpu_vm}


def main(arguments: Sequence[str]) -> int:
    """Parse and run one launch; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m launch")
    engines = parser.add_subparsers(dest="engine", required=True)
    for name, module in ENGINES.items():
        engine = engines.add_parser(name, help=module.HELP, description=module.__doc__)
        engine.add_argument("spec", metavar="SPEC")
        engine.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="passed on to the runner")
        module.add_arguments(engine)
    parsed = parser.parse_args(arguments)
    try:
        check_texts(parsed)
        return ENGINES[parsed.engine].run(parsed)
    except RunnerError as error:
        warn(str(error))
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
