"""The job on TPU VMs of Google Cloud: a queued resource, the committed code on all of its hosts, and their care.

Each host runs its part under a supervisor of its own, detached, which starts it again by exit code; so the job needs
this command only to be started, and to be given new machines after a preemption. Run again, the command finds what is
there and goes on from it; it starts nothing twice. This module turns the command line and the spec into what is asked
for and what is shipped; `job` sees it through.

The code that is shipped to machines: one commit, whole, and nothing that is not committed.
"""

import argparse
import hashlib
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

from launch.options import natural, set_arguments
from launch.tpu_vm.gcloud import Gcloud, Resource
from launch.tpu_vm.host import HostPrograms
from launch.tpu_vm.job import TpuVmJob
from runner.accelerator import Accelerator, parse_accelerator
from runner.console import say, warn
from runner.errors import EXIT_DONE, EXIT_PREEMPTED, InvalidError
from runner.process import list_stop_signals
from runner.spec import Document, ExecutionSpec, parse_document, validate_spec
from runner.storage import find_extra


@dataclass(frozen=True)
class Commit:
    """A commit of the project.

    Attributes:
        hash: in full.
        subject: the first line of its message.
        spec: path of the spec inside it, with forward slashes.
        spec_text: the spec as committed.
        archive: all of it, as a tar.gz.
        uncommitted: what `git status` lists: changed and new files, which are not in it.
    """

    hash: str
    subject: str
    spec: str
    spec_text: str
    archive: bytes
    uncommitted: tuple[str, ...]

    @property
    def short(self) -> str:
        """The hash as people write it."""
        return self.hash[:12]

    @property
    def sha256(self) -> str:
        """Digest of the archive, by which a host knows that all of it has come."""
        return hashlib.sha256(self.archive).hexdigest()


def checked_out_commit(spec: str) -> Commit:
    """The checked-out commit of the repository around this directory, which must hold the spec.

    Raises `InvalidError` if there is no repository, no commit, or no such spec in it.
    """
    try:
        root = Path(_git(Path.cwd(), "rev-parse", "--show-toplevel").decode().strip())
        commit = _git(root, "rev-parse", "--verify", "HEAD").decode().strip()
    except (OSError, subprocess.CalledProcessError):
        raise InvalidError(f"{Path.cwd()} has no git commit; what is shipped to machines is a commit") from None
    try:
        path = Path(spec).resolve().relative_to(root.resolve()).as_posix()
        spec_text = _git(root, "show", f"{commit}:{path}").decode()
    except (ValueError, subprocess.CalledProcessError):
        raise InvalidError(f"{spec} is not in commit {commit[:12]}; only what is committed is shipped") from None
    return Commit(
        commit,
        _git(root, "log", "-1", "--format=%s", commit).decode().strip(),
        path,
        spec_text,
        _git(root, "archive", "--format=tar.gz", commit),
        tuple(_git(root, "status", "--porcelain").decode().splitlines()),
    )


def _git(directory: Path, *arguments: str) -> bytes:
    return subprocess.run(["git", "-C", str(directory), *arguments], capture_output=True, check=True).stdout


HELP = "run the job on TPU VMs of Google Cloud, through a queued resource"
_LONGEST_NAME = 60
_MOST_ARGUMENT_BYTES = 131_072  # of one argument, and the zero after it, on Linux
_NAME = re.compile(rf"[a-z]([a-z0-9-]{{0,{_LONGEST_NAME - 2}}}[a-z0-9])?")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this engine."""
    parser.add_argument("--zone", required=True, help="such as us-west4-a")
    parser.add_argument("--project", help="default: gcloud's own")
    parser.add_argument("--name", help="of the queued resource and its machines; default: the spec's name")
    parser.add_argument("--spot", action="store_true", help="machines that may be preempted; default: on demand")
    parser.add_argument("--reserved", action="store_true", help="machines of a reservation")
    parser.add_argument("--runtime-version", help="of the TPU VMs; default: the one for JAX on that TPU")
    parser.add_argument("--service-account", help="that the machines reach the bucket with")
    parser.add_argument("--network")
    parser.add_argument("--subnetwork")
    parser.add_argument("--internal-ips", action="store_true", help="machines without external addresses")
    parser.add_argument(
        "--environment-file",
        metavar="FILE",
        help="NAME=value lines for the job, such as keys; copied to the machines, never part of a command or a log",
    )
    parser.add_argument("--max-restarts", type=natural, default=100, metavar="N", help="after 76; default 100")
    parser.add_argument("--keep", action="store_true", help="leave the machines when the job is done or has failed")
    parser.add_argument("--poll-seconds", type=_seconds, default=30.0, metavar="N", help="between looks; default 30")
    parser.add_argument("--dry-run", action="store_true", help="print the gcloud commands, run none")


def _seconds(text: str) -> float:
    """A pause, for argparse."""
    seconds = float(text)
    if not 0 < seconds < threading.TIMEOUT_MAX:
        raise argparse.ArgumentTypeError(f"{text} is no number of seconds to wait")
    return seconds


def run(parsed: argparse.Namespace) -> int:
    """Run the job to its end on machines of its own; its exit code, or 75 if only this command was stopped."""
    commit = checked_out_commit(parsed.spec)
    document = parse_document(commit.spec_text, parsed.spec, parsed.set)
    spec = validate_spec(document)
    name = parsed.name or _resource_name(spec.name)
    if _NAME.fullmatch(name) is None:
        raise InvalidError(f"--name {name}: needs a lower case letter, then such letters, digits and hyphens")
    resource = _resource(parsed, _accelerator(document, spec), name)
    host = _host(parsed, commit, document, spec, resource.name)
    gcloud = Gcloud(resource, parsed.poll_seconds)
    commands = TpuVmJob(resource, host, _files(parsed, host, ""), gcloud, parsed.poll_seconds, parsed.keep).plan()
    longest = max(len(word.encode()) for command in commands for word in command)
    if longest >= _MOST_ARGUMENT_BYTES:
        raise InvalidError(f"--set: makes a command of {longest} bytes, needs less than {_MOST_ARGUMENT_BYTES}")
    for line in _about(commit):
        warn(line)
    if parsed.dry_run:
        say(shlex.join(["git", "archive", "--format=tar.gz", f"--output={host.archive}", commit.hash]))
        for command in commands:
            say(shlex.join(command))
        return EXIT_DONE
    if shutil.which("gcloud") is None:
        raise InvalidError("gcloud is not on the PATH; install the Google Cloud CLI and run gcloud auth login")
    for number in list_stop_signals():  # a terminal that closes is one
        signal.signal(number, signal.default_int_handler)
    try:
        with tempfile.TemporaryDirectory(prefix="launch-tpu-vm-") as scratch:
            Path(scratch, host.archive).write_bytes(commit.archive)
            files = _files(parsed, host, scratch)
            return TpuVmJob(resource, host, files, gcloud, parsed.poll_seconds, parsed.keep).run()
    except KeyboardInterrupt:
        say(f"launch: leaving {resource.name} as it is; a job that runs there goes on. Run this command again to")
        say(f"launch: re-attach, or delete the machines: {shlex.join(resource.delete())}")
        return EXIT_PREEMPTED


def _files(parsed: argparse.Namespace, host: HostPrograms, directory: str) -> dict[str, str]:
    """What each host gets: paths here, the archive in `directory` -> names in its home directory."""
    archive = {str(Path(directory, host.archive)): host.archive}
    return archive if host.environment is None else {parsed.environment_file: host.environment} | archive


def _about(commit: Commit) -> list[str]:
    """Which code is shipped, and which is not."""
    lines = [f"launch: ships commit {commit.short} ({commit.subject})"]
    if commit.uncommitted:
        files = ", ".join(line[3:] for line in commit.uncommitted[:3]) + ", ..." * (len(commit.uncommitted) > 3)
        lines.append(f"launch: WARNING: UNCOMMITTED CHANGES ARE NOT SHIPPED ({len(commit.uncommitted)}): {files}")
    return lines


def _accelerator(document: Document, spec: ExecutionSpec) -> Accelerator:
    """The slices to ask for. Raises `InvalidError` for what queued resources do not have."""
    key = "topology.accelerator"
    try:
        found = parse_accelerator(spec.topology.accelerator if spec.topology else "any")
        if found is None or found.chip.gcloud_prefix is None or found.num_chips is None:
            name = "any" if found is None else found.name
            raise InvalidError(f"{name} is no slice that queued resources have; needs one such as v5e-16 or 2xv4-8")
        _ = found.shape  # raises if there is no such slice
    except InvalidError as error:
        raise document.error(key, str(error)) from None
    return found


def _resource_name(name: str) -> str:
    """The name of a run as Google Cloud accepts it: lower case letters, digits and hyphens, a letter first."""
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return (plain if plain[:1].isalpha() else f"run-{plain}")[:_LONGEST_NAME].strip("-")


def _resource(parsed: argparse.Namespace, accelerator: Accelerator, name: str) -> Resource:
    chip = accelerator.chip
    assert accelerator.num_chips is not None
    runtime = parsed.runtime_version or chip.gcloud_runtime
    request = [
        f"--accelerator-type={chip.gcloud_prefix}-{accelerator.num_chips * chip.gcloud_units_per_chip}",
        f"--runtime-version={runtime}",
    ]
    for option in ("service_account", "network", "subnetwork"):
        if getattr(parsed, option) is not None:
            request.append(f"--{option.replace('_', '-')}={getattr(parsed, option)}")
    request += [f"--{flag}" for flag in ("spot", "reserved") if getattr(parsed, flag)]
    request += ["--internal-ips"] * parsed.internal_ips
    location = [f"--zone={parsed.zone}"] + [f"--project={parsed.project}"] * (parsed.project is not None)
    ssh_options = ["--internal-ip"] * parsed.internal_ips
    return Resource(name, accelerator.num_slices, tuple(location), tuple(request), tuple(ssh_options))


def _host(
    parsed: argparse.Namespace, commit: Commit, document: Document, spec: ExecutionSpec, name: str
) -> HostPrograms:
    """What is run on each host. Raises `InvalidError` if its disk, which goes with it, would hold the checkpoints."""
    extra = find_extra(spec.directory)
    if extra is None:
        reason = f"{spec.directory} is on the disk of a TPU VM, which is deleted with it; needs gs://, s3:// or az://"
        raise document.error("directory", reason)
    if parsed.environment_file is not None and ":" in parsed.environment_file:
        raise InvalidError(
            f"--environment-file {parsed.environment_file}: needs a path without ':', which scp takes apart"
        )
    if parsed.environment_file is not None and not Path(parsed.environment_file).is_file():
        raise InvalidError(f"--environment-file {parsed.environment_file}: no such file")
    return HostPrograms(
        name,
        commit.short,
        f"{name}-{commit.short}.tar.gz",
        commit.sha256,
        ("tpu", extra),
        (commit.spec, *set_arguments(parsed.set), "--max-restarts", str(parsed.max_restarts)),
        None if parsed.environment_file is None else f"{name}.environment",
    )
