"""`python -m runner verify-resume`: prove resume on this machine, with the user's own job."""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

from runner.command.arguments import Parser
from runner.command.resume_proof import Trial, verify
from runner.errors import InvalidError
from runner.job import RestoreableJob
from runner.spec import load_document, load_job_class, validate_config, validate_spec


def main(arguments: Sequence[str]) -> int:
    """Run the command; its exit code is 1 if the bits differ."""
    parser = Parser("runner verify-resume")
    parser.add_argument("spec", metavar="SPEC")
    parser.add_argument("--steps", type=int, default=30, metavar="N", help="how far both runs go; default 30")
    parser.add_argument("--kills", type=int, default=3, metavar="K", help="default 3")
    parser.add_argument("--processes", type=int, default=1, metavar="P", help="of the job, on this machine; default 1")
    parser.add_argument(
        "--devices-per-process",
        type=_numbers,
        metavar="M[,M...]",
        help="fake M CPU devices in each process; of several numbers each start of the killed run has the next one",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the moments of the kills; default 0")
    parser.add_set()
    parsed = parser.parse_args(arguments)
    if parsed.kills < 0 or parsed.processes < 1 or parsed.steps < parsed.kills + 3:
        given = f"--steps {parsed.steps} --kills {parsed.kills} --processes {parsed.processes}"
        raise InvalidError(f"{given}: needs a process, no negative number of kills, and 3 steps more than kills")
    options = [word for override in parsed.set for word in ("--set", override)]
    trial = Trial(
        (parsed.spec, *options),
        parsed.steps,
        parsed.kills,
        parsed.processes,
        parsed.devices_per_process,
        parsed.seed,
        _output_keys(parsed.spec, parsed.set),
    )
    with tempfile.TemporaryDirectory(prefix="verify-resume-") as scratch:
        return verify(trial, Path(scratch))


def _numbers(text: str) -> list[int]:
    """Positive numbers with commas between them; argparse says which option has others."""
    words = text.split(",")
    if not all(word.isdecimal() and int(word) for word in words):
        raise argparse.ArgumentTypeError(f"{text!r}: needs numbers of devices, such as 4 or 8,2,1")
    return [*map(int, words)]


def _output_keys(spec: str, overrides: Sequence[str]) -> list[str]:
    """Dotted keys of the spec that say where the job writes beside its directory. Raises `InvalidError`."""
    document = load_document(spec, overrides)
    validate_spec(document)
    job_class: type[RestoreableJob] = load_job_class(document, RestoreableJob)
    return [f"config.{key}" for key in sorted(validate_config(document, job_class.Config).output_keys)]
