"""Checks before a job is submitted: those of `python -m runner plan --quick`, in a process of their own.

A launcher imports no jax, and runs on a machine that may have other files, another network and other credentials than
the hosts of the job. So a problem of its files is refused only if the hosts share its file systems, and a service that
it cannot reach is only printed.
"""

import json
import subprocess
import sys
from typing import Annotated

import typer

from launch.options import LaunchArguments, set_arguments
from runner.console import warn
from runner.errors import InvalidError

_DEADLINE_SECONDS = 300.0
SkipChecks = Annotated[bool, typer.Option("--skip-checks", help="Do not check the job as plan --quick does.")]


def check_job(arguments: LaunchArguments, *, has_shared_files: bool) -> None:
    """Refuse a job that `plan` would refuse, and print what only its hosts can tell.

    `has_shared_files` is True if the hosts see the files of this machine. Raises `InvalidError` with all problems. If
    the checks cannot be made, a line says so.
    """
    command = ["-m", "runner", "plan", arguments.spec, "--quick", "--json", *set_arguments(arguments.overrides)]
    try:
        done = subprocess.run(
            [sys.executable, *command], stdin=subprocess.DEVNULL, capture_output=True, timeout=_DEADLINE_SECONDS
        )
        found = json.loads(done.stdout)
        problems, warnings, own = found["problems"], found["warnings"], found["service_problems"]
        if not has_shared_files:
            own = [*found["local_problems"], *own]
    except (OSError, ValueError, LookupError, TypeError, subprocess.TimeoutExpired) as error:
        warn(f"launch: the job was not checked, since plan --quick gave no result ({type(error).__name__})")
        return
    refused = [line for line in problems if line not in own]
    if refused:
        ending = "not submitted, since plan refuses the job; to submit it nevertheless, add --skip-checks"
        raise InvalidError("\n".join([*refused, ending]))
    for line in [*own, *warnings]:
        warn(f"launch: {line}")
    if own:
        warn("launch: whether the hosts have the same problem cannot be told from here")
