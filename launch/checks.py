"""Checks before a job is submitted: those of `python -m runner plan --quick`, in a process of their own.

A launcher imports no jax, and runs on a machine that may have other files, another network and other credentials than
the hosts of the job. So a problem of its files is refused only if the hosts share its file systems, and a service that
it cannot reach is only printed.
"""

import glob
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from launch.options import LaunchArguments, set_arguments
from runner.attempts.environment import run_git
from runner.console import warn
from runner.errors import InvalidError
from runner.spec import load_document
from runner.storage import JsonObject

_DEADLINE_SECONDS = 300.0
_FILES_MAX = 1000  # that are looked for in the repository
SkipChecks = Annotated[bool, typer.Option("--skip-checks", help="Do not check the job as plan --quick does.")]


def list_unshipped_data(arguments: LaunchArguments) -> list[str]:
    """Return a line for each data source whose files are here, and not all in the repository that goes to the hosts."""
    data = load_document(arguments.spec, arguments.overrides).data.get("config")
    lines = []
    for key, source in _iterate_sources(data, "config"):
        files = [os.path.relpath(name) for name in itertools.islice(glob.iglob(source, recursive=True), _FILES_MAX)]
        tracked = (run_git(Path.cwd(), "ls-files", "-z", "--", *files) or "").split("\0") if files else []
        if any(name not in tracked and not any(each.startswith(f"{name}/") for each in tracked) for name in files):
            lines.append(f"{key}={source}: files of this machine that no commit has; each host needs them at this path")
    return lines


def _iterate_sources(value: Any, key: str) -> Iterator[tuple[str, str]]:
    """Iterate over the keys `source` of a spec, with their values that may be paths."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, each in items:
        if name == "source" and isinstance(each, str) and "://" not in each:
            yield f"{key}.{name}", each
        yield from _iterate_sources(each, f"{key}.{name}")


def check_job(arguments: LaunchArguments, *, has_shared_files: bool, topology: str | None = None) -> None:
    """Refuse a job that `plan` would refuse, and print what only its hosts can tell.

    `has_shared_files` is True if the hosts see the files of this machine. `topology` is the accelerator of a job whose
    spec names no number. Raises `InvalidError` with all problems. If the checks cannot be made, a line says so.
    """
    try:
        found = _plan(arguments.spec, set_arguments(arguments.overrides), topology)
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
    for line in [*own, *warnings, *([] if has_shared_files else list_unshipped_data(arguments))]:
        warn(f"launch: {line}")
    if own:
        warn("launch: whether the hosts have the same problem cannot be told from here")


def check_runs(
    spec: str, runs: Mapping[str, Sequence[str]], *, has_shared_files: bool, topology: str | None
) -> JsonObject:
    """Refuse runs of a sweep that `plan` would refuse, all in one process; return what their rows have.

    `runs` are the overrides of each run by its description. The result has `total_steps`, `row_steps`,
    `evaluation_steps` and `evaluates` of the first run. Raises `InvalidError` with all problems.
    """
    try:
        text = json.dumps([*runs.values()])
        found = _plan(spec, ["--variants"], topology, text, _DEADLINE_SECONDS + len(runs))
        problems: dict[str, list[str]] = {}
        warnings: dict[str, None] = {}
        for name, each in zip(runs, found, strict=True):
            own = each["service_problems"] if has_shared_files else each["local_problems"] + each["service_problems"]
            warnings |= dict.fromkeys([line for line in each["problems"] if line in own] + each["warnings"])
            for line in each["problems"]:
                if line not in own:
                    problems.setdefault(line, []).append(name)
        facts: JsonObject = found[0]["facts"]
    except (OSError, ValueError, LookupError, TypeError, subprocess.TimeoutExpired) as error:
        warn(f"launch: the runs were not checked, since plan --quick gave no result ({type(error).__name__})")
        return {}
    if problems:
        # A problem of all runs is that of the spec.
        lines = [
            f"all runs: {line}" if len(names) == len(runs) > 1 else f"run {names[0]}{_count_others(names)}: {line}"
            for line, names in problems.items()
        ]
        raise InvalidError("\n".join([*lines, "nothing was started; to start nevertheless, add --skip-checks"]))
    for line in warnings:
        warn(f"launch: {line}")
    return facts


def _count_others(names: Sequence[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""


def _plan(
    spec: str, words: Sequence[str], topology: str | None, text: str = "", seconds: float = _DEADLINE_SECONDS
) -> Any:
    """Return what `plan --quick --json` finds, with `text` on its standard input."""
    command = ["-m", "runner", "plan", spec, "--quick", "--json", *words]
    if topology is not None:
        command += ["--topology", topology]
    done = subprocess.run([sys.executable, *command], input=text.encode(), capture_output=True, timeout=seconds)
    return json.loads(done.stdout)
