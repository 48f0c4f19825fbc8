"""A command of the project run to its end, in the directory of the checkout."""

import os
import subprocess
import sys
from collections.abc import Mapping

from runner.process import bind_to_parent
from tests.benchmarks.accelerator.size import ROOT
from tests.benchmarks.accelerator.turn import tail


class CommandError(Exception):
    """A command ended with another code than it may."""


def run_module(*words: str, codes: tuple[int, ...] = (0,), changes: Mapping[str, str] | None = None) -> tuple[int, str]:
    """Exit code and standard output of `python -m WORDS`. Raises `CommandError` if the code is none of `codes`."""
    found = subprocess.run(
        bind_to_parent([sys.executable, "-m", *words]),
        cwd=ROOT,
        env=os.environ | (changes or {}),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
    )
    if found.returncode not in codes:
        raise CommandError(f"{' '.join(words[:3])} ended with {found.returncode}: {tail(found.stdout + found.stderr)}")
    return found.returncode, found.stdout
