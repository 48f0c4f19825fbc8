"""Environment of a start: versions, CPUs, the git commit of the job's code, hosts, file system. Imports no jax.

It is a detail of the event `start`, and is recorded in every manifest. Process 0 collects it. Bit-identical results are
promised only for equal hardware and versions, so a resume reports the differences.
"""

import errno
import fcntl
import functools
import hashlib
import inspect
import math
import netrc
import os
import platform
import re
import shutil
import socket
import subprocess
import urllib.parse
import uuid
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from runner.errors import InvalidError
from runner.process import count_cpus, read_node_name
from runner.storage import JsonObject, Key
from runner.storage.local import NO_LINK, try_lock
from runner.storage.store import fsync, is_missing_call, make_directory, retry_stale, translate_errors

ENVIRONMENT_KEYS = (
    Key("versions", dict, "Versions of Python, runner, jax, jaxlib, libtpu, flax and optax, as far as installed."),
    Key("hosts", list, "Host name of each process."),
    Key(
        "cpus",
        int,
        "CPUs available to process 0, or NPROC. On a CPU, XLA splits sums over this many threads, so another number "
        "gives other bits.",
    ),
    Key(
        "options",
        dict,
        "Environment variables that make JAX or XLA compute otherwise on process 0 (`XLA_FLAGS`, `JAX_ENABLE_X64`, "
        "`JAX_RANDOM_SEED_OFFSET` and every other one of JAX that may change a bit), "
        "as far as they are set. Other values may give other bits.",
    ),
    Key("commit", str, "Commit of the git checkout that contains the job's class; absent if there is none."),
    Key("dirty", bool, "True if tracked files there differ from the commit; absent if there is no checkout."),
)
# Details of the event `start` alone: a manifest has no use for them.
MACHINE_KEYS = (
    Key("engine", str, "Engine that has started the job: `slurm`, `kubernetes` or `tpu-vm`; absent if it is unknown."),
    Key("nodes", list, "Name that the engine has for the machine of each process, or else the host name."),
    Key("machines", list, "Digest of the machine id of each process, 16 hexadecimal digits; empty where it has none."),
    Key("gpus", list, "Beginnings of the UUIDs of the GPUs of each process's machine; absent if none has GPUs."),
)
ENGINE = "RUNNER_ENGINE"  # set by launchers whose engine does not name itself
_MACHINE_ID, _GPU_FILES = Path("/etc/machine-id"), Path("/proc/driver/nvidia/gpus")
SUBMITTED = "RUNNER_SUBMITTED"  # Unix seconds, set by the engine or the user
_GIT_SECONDS = 2.0  # deadline of each git command; a slower repository is left out
_DISTRIBUTIONS = ("runner", "jax", "jaxlib", "libtpu", "flax", "optax")
_OPTIONS = ("LIBTPU_INIT_ARGS", "NVIDIA_TF32_OVERRIDE", "XLA_FLAGS")
# Every variable of JAX counts, since each version of JAX has others, except those that begin with one of these words:
# logs, caches, places, devices and checks, which change no bit.
_JAX_PREFIX = "JAX_"
_HARMLESS_VARIABLES = (
    "JAX_ARRAY_GARBAGE_COLLECTION_GUARD",
    "JAX_CAPTURED_CONSTANTS_",
    "JAX_CHECK_",
    "JAX_COMPILATION_CACHE_",
    "JAX_COMPILER_DETAILED_LOGGING",
    "JAX_COORDINATOR",
    "JAX_CPU_GET_",
    "JAX_CROSS_HOST_",
    "JAX_CUDA_VISIBLE_DEVICES",
    "JAX_DEBUG_",
    "JAX_DISTRIBUTED_",
    "JAX_DUMP_",
    "JAX_ERROR_CHECKING_",
    "JAX_ENABLE_CHECKS",
    "JAX_ENABLE_COMPILATION_CACHE",
    "JAX_ENABLE_PREEMPTION_SERVICE",
    "JAX_ENABLE_RECOVERABILITY",
    "JAX_EXPLAIN_",
    "JAX_INCLUDE_",
    "JAX_LOCAL_DEVICE_IDS",
    "JAX_LOG",
    "JAX_NUMPY_",
    "JAX_NUM_CPU_DEVICES",
    "JAX_NUM_PROCESSES",
    "JAX_PERSISTENT_CACHE_",
    "JAX_PLATFORM",
    "JAX_PPRINT_",
    "JAX_PROCESS_",
    "JAX_RAISE_PERSISTENT_CACHE_",
    "JAX_ROCM_VISIBLE_DEVICES",
    "JAX_SHARE_BINARY_",
    "JAX_SOURCE_URL_",
    "JAX_TRACE",
    "JAX_TRANSFER_GUARD",
)
# Flags that change no bit. The number of devices is recorded as such.
_HARMLESS_FLAGS = ("--xla_dump_", "--xla_force_host_platform_device_count=")
_MAX_NAMED_HOSTS = 4


def collect_environment(job_class: type, hosts: list[str]) -> JsonObject:
    """Return the values of `ENVIRONMENT_KEYS`; `hosts` has the host name of each process."""
    found = {"versions": collect_versions(), "hosts": hosts, "cpus": count_xla_threads(), "options": collect_options()}
    return found | find_commit(job_class)


def describe_machine() -> JsonObject:
    """Return the machine of this process: host name, name for the engine, digest of its id, and its GPUs."""
    # The id itself is confidential according to machine-id(5).
    machine_id = _read_text(_MACHINE_ID)
    # Directories are named after PCI addresses, by which CUDA orders GPUs of one kind.
    texts = map(_read_text, sorted(_GPU_FILES.glob("*/information")))
    found = (re.search(r"GPU UUID:\s*(GPU-[0-9a-f]{8})", text) for text in texts)
    return {
        "host": socket.gethostname(),
        "node": read_node_name(),
        "machine": hashlib.sha256(f"runner {machine_id}".encode()).hexdigest()[:16] if machine_id else "",
        "gpus": [match[1] for match in found if match is not None],
    }


def collect_machines(machines: Sequence[JsonObject], variables: Mapping[str, str] = os.environ) -> JsonObject:
    """Return the values of `MACHINE_KEYS`; `machines` has the result of `describe_machine` of each process."""
    engine = variables.get(ENGINE) or ("slurm" if variables.get("SLURM_JOB_ID") else None)
    found = {"nodes": [each["node"] for each in machines], "machines": [each["machine"] for each in machines]}
    gpus = [each["gpus"] for each in machines]
    return ({"engine": engine} if engine else {}) | found | ({"gpus": gpus} if any(gpus) else {})


def _read_text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def read_submit_time() -> JsonObject:
    """Return the time at which the job was submitted, as the detail `submitted` of `start`; empty if it is unknown."""
    try:
        seconds = float(os.environ.get(SUBMITTED, ""))
    except ValueError:
        return {}
    return {"submitted": seconds} if 0 < seconds < math.inf else {}


def count_xla_threads() -> int:
    """Return the number of threads that XLA uses on a CPU."""
    given = os.environ.get("NPROC", "")
    return int(given) if given.isdecimal() and int(given) > 0 else count_cpus()


def collect_options(variables: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment variables that make JAX or XLA compute otherwise, without flags that change no bit."""
    of_jax = [name for name in variables if name.startswith(_JAX_PREFIX) and not name.startswith(_HARMLESS_VARIABLES)]
    flags = {
        name: [flag for flag in variables.get(name, "").split() if not flag.startswith(_HARMLESS_FLAGS)]
        for name in sorted((*_OPTIONS, *of_jax))
    }
    return {name: " ".join(present) for name, present in flags.items() if present}


def collect_versions() -> dict[str, str]:
    """Return the versions of Python and of the installed distributions, by name."""
    found = {"python": platform.python_version()}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def validate_versions(places: Sequence[tuple[str, Mapping[str, str]]]) -> None:
    """Raise `InvalidError` if a process has another version of Python or of a distribution than process 0.

    `places` has the host name and `collect_versions` of each process.
    """
    main_host, needed = places[0]
    for process, (host, versions) in enumerate(places):
        for name in sorted({*needed, *versions}):
            found, other = versions.get(name, "none"), needed.get(name, "none")
            if found != other:
                raise InvalidError(
                    f"process {process} on {host} has {name} {found}, process 0 on {main_host} has {other}; give every "
                    "host the same image"
                )


def find_commit(job_class: type) -> JsonObject:
    """Return the commit of the git checkout that contains a class, and whether tracked files differ from it.

    Empty if there is no such checkout, no git, or no answer in time.
    """
    try:
        path = Path(inspect.getfile(job_class)).resolve()
    except (OSError, TypeError):  # The class was typed into an interpreter.
        return {}
    commit = run_git(path.parent, "rev-parse", "HEAD")
    if commit is None or run_git(path.parent, "check-ignore", str(path)) is not None:
        return {}  # A package installed below a checkout, in a virtual environment, is not part of its commit.
    changes = run_git(path.parent, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit.strip()} | ({} if changes is None else {"dirty": bool(changes.strip())})


def run_git(directory: Path, *arguments: str) -> str | None:
    """Return the output of a git command in a directory; None if there is no git, or it fails or takes too long."""
    try:
        result = subprocess.run(
            ["git", "-C", str(directory), *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_GIT_SECONDS,
            # `git status` would otherwise write the index, and could disturb a git command of the user.
            env=os.environ | {"GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout if result.returncode == 0 else None


def compare_environments(before: JsonObject, now: JsonObject) -> list[str]:
    """Return the differences between two environments, a few words each. A key that one of them lacks is ignored."""

    def has_changed(key: str) -> bool:
        return key in before and key in now and before[key] != now[key]

    found = []
    old, new = before.get("versions", {}), now.get("versions", {})
    found += [f"{name} {old[name]} -> {new[name]}" for name in new if name in old and old[name] != new[name]]
    if has_changed("cpus"):
        found.append(f"cpus {before['cpus']} -> {now['cpus']}")
    if has_changed("options"):
        for name in sorted({*before["options"], *now["options"]}):
            flags = [str(each["options"].get(name, "")).split() for each in (before, now)]
            gone = [flag for flag in flags[0] if flag not in flags[1]]
            added = [flag for flag in flags[1] if flag not in flags[0]]
            if gone or added:
                found.append(f"{name} {' '.join(gone) or 'none'} -> {' '.join(added) or 'none'}")
    if has_changed("commit"):
        found.append(f"commit {before['commit'][:12]} -> {now['commit'][:12]}")
    if has_changed("dirty"):
        found.append("uncommitted changes now" if now["dirty"] else "no uncommitted changes any more")
    # A different order of the same hosts does not concern the user.
    if has_changed("hosts") and sorted(before["hosts"]) != sorted(now["hosts"]):
        found.append(f"hosts {_format_hosts(before['hosts'])} -> {_format_hosts(now['hosts'])}")
    return found


def _format_hosts(hosts: list[str]) -> str:
    distinct = sorted(set(hosts))
    return ", ".join(distinct) if len(distinct) <= _MAX_NAMED_HOSTS else f"({len(distinct)} of them)"


# The directory.


class FileSystem(NamedTuple):
    """Calls that the file system of a directory has."""

    has_links: bool
    has_locks: bool
    flushes_directories: bool

    def list_missing(self) -> list[str]:
        """Return what is missing, in words."""
        names = ("hard links", "locks", "flushes of directories")
        return [name for name, is_there in zip(names, self, strict=True) if not is_there]


@functools.cache
def probe_file_system(directory: Path) -> FileSystem:
    """Return what the file system of a directory offers. Creates the directory; tried once in each process.

    Raises `InvalidError` if a run cannot be kept there, whatever is done, and the errors of `translate_errors` if the
    directory cannot be written now, or not by this user.
    """
    top = directory / f".probe.{uuid.uuid4().hex[:8]}"
    first, second = top / "first", top / "second"

    def read(path: Path) -> bytes:
        return retry_stale(path.read_bytes)

    def create(content: bytes) -> bool:
        try:
            with retry_stale(lambda: open(first, "xb")) as file:
                file.write(content)
        except FileExistsError:
            return False
        return read(first) == content

    def flush() -> bool:
        fsync(first, is_strict=True)
        return True

    def append() -> bool:
        descriptor = retry_stale(lambda: os.open(first, os.O_WRONLY | os.O_APPEND))
        try:
            return os.write(descriptor, b"2") == 1 and read(first) == b"12"
        finally:
            os.close(descriptor)

    def replace() -> bool:
        retry_stale(lambda: second.write_bytes(b"old"))
        os.replace(first, second)
        return read(second) == b"12" and os.listdir(top) == ["second"]

    def rename_directory() -> bool:
        (top / "old").mkdir()
        retry_stale(lambda: (top / "old" / "file").write_bytes(b"1"))
        os.rename(top / "old", top / "new")
        is_moved = read(top / "new" / "file") == b"1" and not (top / "old").exists()
        shutil.rmtree(top / "new")
        return is_moved

    def need(what: str, act: Callable[[], bool]) -> None:
        reason = "it did something else"
        try:
            if act():
                return
        except OSError as error:
            # Another error, such as that of a full disk, says nothing about the kind of the file system.
            if not is_missing_call(error):
                raise
            reason = error.strerror or str(error)
        raise InvalidError(
            f"{directory}: its file system cannot {what} ({reason}), which a run needs; use a directory on another one "
            "(.github/docs/directory.md lists what it must offer)"
        )

    def has(act: Callable[[], object], *codes: int) -> bool:
        try:
            act()
        except OSError as error:
            if not is_missing_call(error) and error.errno not in codes:
                raise
            return False
        return True

    def has_locks() -> bool:
        # Of a whole file (`flock`), and of a range (`fcntl`), which libraries use.
        descriptor = retry_stale(lambda: os.open(second, os.O_RDWR))
        try:
            return try_lock(descriptor, fcntl.LOCK_EX) and has(
                lambda: fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB), errno.ENOLCK
            )
        finally:
            os.close(descriptor)

    with translate_errors(directory):
        make_directory(directory)
        top.mkdir()
        try:
            need("create a file with O_EXCL", lambda: create(b"1"))
            need("refuse to create a file that exists (O_EXCL)", lambda: not create(b"2"))
            need("flush a file (fsync)", flush)
            need("append to a file", append)
            need("rename a file over another", replace)
            need("rename a directory", rename_directory)
            return FileSystem(
                has_links=has(lambda: os.link(second, first), *NO_LINK),
                has_locks=has_locks(),
                flushes_directories=has(lambda: fsync(top, is_strict=True)),
            )
        finally:
            shutil.rmtree(top, ignore_errors=True)


def has_wandb_key() -> bool:
    """Return True if wandb can log in on this machine without asking for a key. Does not import wandb."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urllib.parse.urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host or "") is not None
    except (OSError, netrc.NetrcParseError):
        return False
