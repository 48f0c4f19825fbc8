"""What the command lines of several engines share."""

import argparse
from collections.abc import Sequence


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


def runner_arguments(spec: str, overrides: Sequence[str]) -> list[str]:
    """What follows `python`: the one command that every host runs."""
    return ["-m", "runner", spec, *(word for override in overrides for word in ("--set", override))]
