"""What a start runs with: versions, CPUs, the commit of the job's code, the hosts. Main host only; knows no jax.

It stands in the event `start` and in every manifest. Only the same hardware and versions promise the same bits, so a
resume says what has changed.
"""

import inspect
import math
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

from runner.process import count_cpus
from runner.records import Key
from runner.storage import JsonObject

ENVIRONMENT_KEYS = (
    Key("versions", dict, "Of Python, runner, jax, jaxlib and libtpu, as far as they are installed."),
    Key("hosts", list, "Name of the host of each process."),
    Key(
        "cpus",
        int,
        "CPUs that process 0 may use, or NPROC. On a CPU sums are split over so many threads: others are other bits.",
    ),
    Key("commit", str, "Of the git checkout that holds the job's class; absent if there is none."),
    Key("dirty", bool, "Whether tracked files there differ from it; absent likewise."),
)
SUBMITTED = "RUNNER_SUBMITTED"  # Unix seconds; the engine's or the user's word
GIT_SECONDS = 2.0  # for each question; a repository that is slower than that is left out
_DISTRIBUTIONS = ("runner", "jax", "jaxlib", "libtpu")
_NAMED_HOSTS_MAX = 4


def collect_environment(job_class: type, hosts: list[str]) -> JsonObject:
    """The values of `ENVIRONMENT_KEYS`; `hosts` has a name for each process."""
    return {"versions": collect_versions(), "hosts": hosts, "cpus": count_xla_threads()} | find_commit(job_class)


def read_submit_time() -> JsonObject:
    """When the engine was asked for the job, under the key of the event `start`; empty if nobody says."""
    try:
        seconds = float(os.environ.get(SUBMITTED, ""))
    except ValueError:
        return {}
    return {"submitted": seconds} if 0 < seconds < math.inf else {}


def count_xla_threads() -> int:
    """The threads that XLA makes on a CPU."""
    given = os.environ.get("NPROC", "")
    return int(given) if given.isdecimal() and int(given) > 0 else count_cpus()


def collect_versions() -> dict[str, str]:
    """Version by name, of Python and of what is installed."""
    found = {"python": platform.python_version()}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def find_commit(job_class: type) -> JsonObject:
    """The commit of the git checkout that holds the code of a class, and whether tracked files differ from it.

    Empty where there is no such checkout, no git, or no answer in time.
    """
    try:
        path = Path(inspect.getfile(job_class)).resolve()
    except (OSError, TypeError):  # typed into an interpreter
        return {}
    commit = _git(path.parent, "rev-parse", "HEAD")
    if commit is None or _git(path.parent, "check-ignore", str(path)) is not None:
        return {}  # what is installed below a checkout is not of its commit
    changes = _git(path.parent, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit} if changes is None else {"commit": commit, "dirty": bool(changes)}


def _git(directory: Path, *question: str) -> str | None:
    """The answer of git, None if it fails."""
    try:
        result = subprocess.run(
            ["git", "-C", str(directory), *question],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=GIT_SECONDS,
            env=os.environ | {"GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None


def compare_environments(before: JsonObject, now: JsonObject) -> list[str]:
    """What is another since `before`, a few words each; what one of the two does not know is no change."""

    def has_changed(key: str) -> bool:
        return key in before and key in now and before[key] != now[key]

    found = []
    old, new = before.get("versions", {}), now.get("versions", {})
    found += [f"{name} {old[name]} -> {new[name]}" for name in new if name in old and old[name] != new[name]]
    if has_changed("cpus"):
        found.append(f"cpus {before['cpus']} -> {now['cpus']}")
    if has_changed("commit"):
        found.append(f"commit {before['commit'][:12]} -> {now['commit'][:12]}")
    if has_changed("dirty"):
        found.append("uncommitted changes now" if now["dirty"] else "no uncommitted changes any more")
    if has_changed("hosts") and sorted(before["hosts"]) != sorted(now["hosts"]):
        found.append(f"hosts {_names(before['hosts'])} -> {_names(now['hosts'])}")
    return found


def _names(hosts: list[str]) -> str:
    """Who they are, or how many if they are many."""
    distinct = sorted(set(hosts))
    return ", ".join(distinct) if len(distinct) <= _NAMED_HOSTS_MAX else f"({len(distinct)} of them)"
