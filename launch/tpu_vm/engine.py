"""Engine `tpu-vm`: a queued resource of Google Cloud, the committed code on all of its hosts, and their supervision.

Each host runs its part under a detached supervisor of its own, which restarts it by exit code. So the job needs this
command only to be started, and to get new machines after a preemption. Run again, the command finds what exists and
goes on from it; it starts nothing twice. This module turns command line and spec into the machines to request and the
commit to ship, with nothing that is not committed; `job` carries it out.
"""

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
from typing import Annotated

import typer

from launch.options import LaunchArguments, MaxRestarts, set_arguments
from launch.tpu_vm.gcloud import Gcloud, QueuedResource
from launch.tpu_vm.host import HostPrograms
from launch.tpu_vm.job import TpuVmJob
from runner.accelerator import Accelerator, parse_accelerator
from runner.console import say, warn
from runner.errors import EXIT_DONE, EXIT_PREEMPTED, InvalidError
from runner.process import list_stop_signals
from runner.spec import parse_document, validate_spec
from runner.storage import find_extra

_MAX_NAME_CHARACTERS = 60
_MAX_ARGUMENT_BYTES = 131_072  # of one argument with its final zero, on Linux
_NAME = re.compile(rf"[a-z]([a-z0-9-]{{0,{_MAX_NAME_CHARACTERS - 2}}}[a-z0-9])?")


@dataclass(frozen=True, kw_only=True)
class TpuVmArguments(LaunchArguments):
    """Arguments of `launch tpu-vm`."""

    zone: Annotated[str, typer.Option(metavar="ZONE", help="Zone of the machines, such as us-west4-a.")]
    project: Annotated[
        str | None, typer.Option(metavar="PROJECT", show_default="gcloud's own", help="Project of Google Cloud.")
    ] = None
    name: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", show_default="the spec's name", help="Name of the queued resource and its machines."
        ),
    ] = None
    spot: Annotated[bool, typer.Option("--spot", help="Request machines that may be preempted.")] = False
    reserved: Annotated[bool, typer.Option("--reserved", help="Request machines of a reservation.")] = False
    runtime_version: Annotated[
        str | None,
        typer.Option(metavar="VERSION", show_default="the one for JAX on that TPU", help="Runtime of the TPU VMs."),
    ] = None
    service_account: Annotated[
        str | None, typer.Option(metavar="ACCOUNT", help="Account with which the machines access the bucket.")
    ] = None
    network: Annotated[str | None, typer.Option(metavar="NETWORK", help="Network of the machines.")] = None
    subnetwork: Annotated[str | None, typer.Option(metavar="SUBNETWORK", help="Subnetwork of the machines.")] = None
    internal_ips: Annotated[
        bool, typer.Option("--internal-ips", help="Request machines without external addresses.")
    ] = False
    environment_file: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="File of NAME=value lines for the job, such as keys. It is copied to the machines, and never part of "
            "a command or a log.",
        ),
    ] = None
    max_restarts: MaxRestarts = 100
    keep: Annotated[bool, typer.Option("--keep", help="Keep the machines when the job is done or has failed.")] = False
    poll_seconds: Annotated[float, typer.Option(metavar="N", help="Time between two polls.")] = 30.0
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the gcloud commands, and run none.")] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.poll_seconds < threading.TIMEOUT_MAX:
            raise InvalidError(f"--poll-seconds {self.poll_seconds:g}: needs a positive number of seconds")
        if self.environment_file is not None and ":" in self.environment_file:
            raise InvalidError(
                f"--environment-file {self.environment_file}: needs a path without ':', which scp would split"
            )
        if self.environment_file is not None and not Path(self.environment_file).is_file():
            raise InvalidError(f"--environment-file {self.environment_file}: no such file")


@dataclass(frozen=True)
class Commit:
    """A commit of the project.

    Attributes:
        hash: full hash.
        subject: first line of the message.
        spec: path of the spec in the commit, with forward slashes.
        spec_text: the spec as committed.
        archive: content of the commit, as a tar.gz.
        uncommitted: lines of `git status`: changed and new files, which are not in the archive.
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
        """Digest of the archive, by which a host recognises a complete copy."""
        return hashlib.sha256(self.archive).hexdigest()


def read_checked_out_commit(spec: str) -> Commit:
    """Read the checked-out commit of the repository around this directory, which must contain the spec.

    Raises:
        InvalidError: there is no repository, no commit, or no such spec in it.
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
        raise InvalidError(f"{spec} is not in commit {commit[:12]}; commit it, only commits are shipped") from None
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


def run(arguments: TpuVmArguments) -> int:
    """Run the job to its end on machines of its own; return its exit code, or 75 if only this command was stopped."""
    commit = read_checked_out_commit(arguments.spec)
    document = parse_document(commit.spec_text, arguments.spec, arguments.overrides)
    spec = validate_spec(document)
    name = arguments.name or make_resource_name(spec.name)
    if _NAME.fullmatch(name) is None:
        raise InvalidError(f"--name {name}: needs a lower case letter, then such letters, digits and hyphens")
    with document.errors_at("topology.accelerator"):
        resource = _make_resource(arguments, spec.topology.accelerator if spec.topology else "any", name)
    extra = find_extra(spec.directory)
    if extra is None:
        reason = f"{spec.directory} is on the disk of a TPU VM, which is deleted with it; needs gs://, s3:// or az://"
        raise document.error("directory", reason)
    programs = HostPrograms(
        name,
        commit.short,
        f"{name}-{commit.short}.tar.gz",
        commit.sha256,
        ("tpu", extra),
        (commit.spec, *set_arguments(arguments.overrides), "--max-restarts", str(arguments.max_restarts)),
        None if arguments.environment_file is None else f"{name}.environment",
    )
    gcloud = Gcloud(resource, arguments.poll_seconds)

    def make_job(directory: str) -> TpuVmJob:
        """Make the launch, with the archive in a directory of this machine."""
        files = {str(Path(directory, programs.archive)): programs.archive}
        if arguments.environment_file is not None and programs.environment is not None:
            files = {arguments.environment_file: programs.environment} | files
        return TpuVmJob(resource, programs, files, gcloud, arguments.poll_seconds, arguments.keep)

    # The kernel refuses longer arguments, which must not come out once machines have been requested.
    commands = make_job("").list_commands()
    longest = max(len(word.encode()) for command in commands for word in command)
    if longest >= _MAX_ARGUMENT_BYTES:
        raise InvalidError(f"--set: makes a command of {longest} bytes, needs less than {_MAX_ARGUMENT_BYTES}")
    warn(f"launch: ships commit {commit.short} ({commit.subject})")
    if commit.uncommitted:
        changed = ", ".join(line[3:] for line in commit.uncommitted[:3]) + ", ..." * (len(commit.uncommitted) > 3)
        warn(f"launch: WARNING: UNCOMMITTED CHANGES ARE NOT SHIPPED ({len(commit.uncommitted)}): {changed}")
    if arguments.dry_run:
        say(shlex.join(["git", "archive", "--format=tar.gz", f"--output={programs.archive}", commit.hash]))
        for command in commands:
            say(shlex.join(command))
        return EXIT_DONE
    if shutil.which("gcloud") is None:
        raise InvalidError("gcloud is not on the PATH; install the Google Cloud CLI and run gcloud auth login")
    for number in list_stop_signals():  # SIGHUP of a terminal that closes is one of them
        signal.signal(number, signal.default_int_handler)
    try:
        with tempfile.TemporaryDirectory(prefix="launch-tpu-vm-") as scratch:
            Path(scratch, programs.archive).write_bytes(commit.archive)
            return make_job(scratch).run()
    except KeyboardInterrupt:
        say(f"launch: leaving {resource.name} as it is; a job that runs there continues. Run this command again to")
        say(f"launch: re-attach, or delete the machines: {shlex.join(resource.delete())}")
        return EXIT_PREEMPTED


def make_resource_name(name: str) -> str:
    """Return the name of a run in Google Cloud's form: lower case letters, digits and hyphens, a letter first."""
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return (plain if plain[:1].isalpha() else f"run-{plain}")[:_MAX_NAME_CHARACTERS].strip("-")


def _make_resource(arguments: TpuVmArguments, accelerator_name: str, name: str) -> QueuedResource:
    """Make the queued resource. Raises `InvalidError` for an accelerator that queued resources do not have."""
    accelerator: Accelerator | None = parse_accelerator(accelerator_name)
    if accelerator is None or accelerator.chip.gcloud_prefix is None or accelerator.num_chips is None:
        found = "any" if accelerator is None else accelerator.name
        raise InvalidError(f"{found} is not a slice that queued resources have; needs one such as v5e-16 or 2xv4-8")
    _ = accelerator.shape  # raises if there is no such slice
    chip = accelerator.chip
    request = [
        f"--accelerator-type={chip.gcloud_prefix}-{accelerator.num_chips * chip.gcloud_units_per_chip}",
        f"--runtime-version={arguments.runtime_version or chip.gcloud_runtime}",
    ]
    optional = {
        "service-account": arguments.service_account,
        "network": arguments.network,
        "subnetwork": arguments.subnetwork,
    }
    request += [f"--{option}={value}" for option, value in optional.items() if value is not None]
    flags = {"spot": arguments.spot, "reserved": arguments.reserved, "internal-ips": arguments.internal_ips}
    request += [f"--{flag}" for flag, is_given in flags.items() if is_given]
    location = [f"--zone={arguments.zone}"]
    if arguments.project is not None:
        location.append(f"--project={arguments.project}")
    ssh_options = ("--internal-ip",) if arguments.internal_ips else ()
    return QueuedResource(name, accelerator.num_slices, tuple(location), tuple(request), ssh_options)
