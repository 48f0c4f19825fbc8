"""What the command lines of several engines share."""

import argparse
import math
from collections.abc import Sequence

from runner.spec import Checkpoint

GRACE_SECONDS = 300


def positive(text: str) -> int:
    """An integer of at least 1, for argparse."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return number


def natural(text: str) -> int:
    """An integer of at least 0, for argparse."""
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{text} is negative")
    return number


def add_grace_seconds(parser: argparse.ArgumentParser, meaning: str) -> None:
    """`--grace-seconds`: what a job that is asked to stop gets to save its state."""
    parser.add_argument(
        "--grace-seconds",
        type=positive,
        metavar="N",
        help=f"{meaning}; default checkpoint.grace_seconds, else {GRACE_SECONDS}",
    )


def grace_seconds(parsed: argparse.Namespace, checkpoint: Checkpoint) -> int:
    """What the command line gives, else what the spec says, in whole seconds."""
    return math.ceil(parsed.grace_seconds or checkpoint.grace_seconds or GRACE_SECONDS)


def runner_arguments(spec: str, overrides: Sequence[str]) -> list[str]:
    """What follows `python`: the one command that every host runs."""
    return ["-m", "runner", spec, *set_arguments(overrides)]


def set_arguments(overrides: Sequence[str]) -> list[str]:
    """`--set` once for each override."""
    return [word for override in overrides for word in ("--set", override)]
