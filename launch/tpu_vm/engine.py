"""Engine `tpu-vm`: a queued resource of Google Cloud, the committed code on all of its hosts, and their supervision.

`run` determines the machines to request and the commit to ship; uncommitted files are not shipped. `_TpuVmJob` runs the
job, from the request for machines to their deletion:

1. Request the machines, unless they exist, and wait until they are ACTIVE.
2. Attend every host again and again, the slices in parallel: a host without the code gets it, a host without the job
   starts it, and all report its status. Meanwhile show the log of the first host.
3. If the machines are lost, delete what is left of the resource and start over at 1; the job resumes its last save.
4. When the job has ended, delete the machines.

Each host runs its part under a detached supervisor of its own, which restarts it by exit code. The job therefore needs
this command only for its start, and for new machines after a preemption. The command keeps no state: each step queries
the current state, so the launch may be stopped and run again at any time, and starts nothing twice.
"""

import hashlib
import re
import shlex
import shutil
import signal
import tempfile
import threading
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from launch.checks import SkipChecks, check_job
from launch.code import RequirementsOption, RunnerOption, read_code
from launch.options import LaunchArguments, restart_arguments, set_arguments
from launch.supervisor import combine_exit_codes
from launch.tpu_vm.gcloud import (
    CREATE_TIME,
    MAX_TRIES,
    Gcloud,
    HostPrograms,
    HostStatus,
    LogTail,
    QueuedResource,
    execute,
    find_error_line,
    parse_log_lines,
    parse_statuses,
    raise_user_error,
)
from runner.accelerator import Accelerator, parse_accelerator
from runner.console import say, warn, write_text
from runner.errors import EXIT_DONE, EXIT_PREEMPTED, InvalidError, PreemptedError, RetryableError
from runner.process import list_stop_signals
from runner.spec import parse_document, validate_spec
from runner.storage import find_extra, run_in_parallel

HostIndex = tuple[int, int]  # number of the slice, and of the worker in it
_LOST = ("PREEMPTED", "TERMINATED")  # states of a node that does not come back
_DRAIN_SECONDS = 60.0
_MAX_NAME_CHARACTERS = 60
_MAX_ARGUMENT_BYTES = 131_072  # of one argument with its final zero, on Linux
_NAME = re.compile(rf"[a-z]([a-z0-9-]{{0,{_MAX_NAME_CHARACTERS - 2}}}[a-z0-9])?")


@dataclass(frozen=True)
class _Machines:
    """Number of hosts of each slice, and the time of the request in Unix seconds, if known."""

    sizes: list[int]
    created: int | None


@dataclass(frozen=True)
class _TpuVmJob:
    """A launch."""

    resource: QueuedResource  # machines to request
    programs: HostPrograms  # programs that run on each host
    # Files that each host gets, in order, as paths here to names in its home directory. Those of the code come last,
    # since a host that has them counts as complete.
    files: dict[str, str]
    gcloud: Gcloud  # executor of the resource's commands
    poll_seconds: float  # time between two polls, and between two tries
    keeps_machines: bool  # True if the machines stay when the job has ended

    def list_commands(self) -> list[list[str]]:
        """Return every command of an undisturbed launch, in order, with one poll where there are many."""
        resource, nodes = self.resource, self.resource.nodes
        commands = [resource.describe(), resource.create(), resource.describe()]
        commands += [resource.describe_node(node) for node in nodes]
        for node in nodes:
            # The first attendance finds the hosts empty, the second one starts the job on them.
            ship = [resource.scp(node, *file) for file in self.files.items()]
            attend = self._attend_command(node, CREATE_TIME)
            commands += [attend, *ship, attend]
        commands.append(self._tail_command(1))
        if self.keeps_machines:
            return commands + [self._stop_command(node) for node in nodes]
        return [*commands, resource.delete()]

    def run(self) -> int:
        """Run the job to its end, on new machines whenever they are lost, and return its exit code.

        Raises:
            RetryableError: the machines are not available or cannot be reached.
            PreemptedError: another user or process has deleted the machines.
        """
        name = self.resource.name
        while True:
            self._await_machines()
            code = self._await_end()
            if code is not None:
                break
            say(f"launch: {name} was preempted; requesting machines again, on which the job resumes its last save")
            self.gcloud.delete()
        if self.keeps_machines:
            delete = shlex.join(self.resource.delete())
            say(f"launch: the job ended with {code}; the machines stay. To delete them: {delete}")
            run_in_parallel([partial(execute, self._stop_command(node)) for node in self.resource.nodes])
        else:
            say(f"launch: the job ended with {code}; deleting {name}")
            self.gcloud.delete()
        return code

    def _await_machines(self) -> None:
        """Request the machines if there are none, and return once they are ACTIVE."""
        name = self.resource.name
        is_requested = False
        seen: str | None = None
        while True:
            state = self.gcloud.read_state()
            if state is None:
                if seen is not None:
                    raise self._make_deleted_error()
                if not is_requested:
                    say(f"launch: requesting {name}")
                    self.gcloud.create()
                    is_requested = True
                    continue
            else:
                if seen is None and not is_requested:
                    say(f"launch: {name} exists already; assuming that it belongs to this job")
                if state.name != seen:
                    say(f"launch: {name} is {state.name}")
                if state.name == "ACTIVE":
                    return
                # A failure that was there before this launch belongs to an earlier one, and is replaced below.
                if state.name == "FAILED" and (is_requested or seen is not None):
                    if not self.keeps_machines:
                        self.gcloud.delete()
                    raise RetryableError(f"{name} FAILED: {state.error or 'gcloud gives no reason'}")
                seen = state.name
                if state.name in ("SUSPENDED", "FAILED"):  # left by an earlier launch or a preemption
                    self.gcloud.delete()
                    is_requested, seen = False, None
                    continue
            time.sleep(self.poll_seconds)

    def _await_end(self) -> int | None:
        """Bring every host to a running job and return its exit code, or None if the machines were lost."""
        log_tail: LogTail | None = None
        num_failures = 0
        try:
            while (machines := self._read_machines()) is not None:
                # The code is shipped where it is missing.
                attend = [
                    partial(self._attend_slice, node, size, machines.created)
                    for node, size in zip(self.resource.nodes, machines.sizes, strict=True)
                ]
                try:
                    slices = run_in_parallel(attend)
                except RetryableError as error:
                    # Connections may break; the job continues without this command.
                    num_failures += 1
                    if num_failures == MAX_TRIES:
                        raise RetryableError(
                            f"{error}; {self.resource.name} is left as it is, run the same command again to re-attach"
                        ) from None
                    time.sleep(self.poll_seconds)
                    continue
                num_failures = 0
                hosts = {(index, worker): host for index, found in enumerate(slices) for worker, host in found.items()}
                num_started = sum(host.state == "started" for host in hosts.values())
                if num_started:
                    say(f"launch: started on {num_started} of {len(hosts)} hosts")
                log_tail = log_tail or self._start_log_tail(hosts[0, 0])
                code = find_exit_code(hosts)
                if code is not None:
                    # The log is that of the first host; if another host failed, this one may wait for it, and print
                    # nothing more.
                    if hosts[0, 0].code is not None:
                        log_tail.finish(_DRAIN_SECONDS)
                    self._show_failed_log(hosts)
                    return code
                time.sleep(self.poll_seconds)
            return None
        finally:
            if log_tail is not None:
                log_tail.abandon()

    def _read_machines(self) -> _Machines | None:
        """Return the machines, or None if some of them are lost."""
        state = self.gcloud.read_state()
        if state is None:
            raise self._make_deleted_error()
        nodes = run_in_parallel([partial(self.gcloud.read_node, node) for node in self.resource.nodes])
        sizes = [node.num_workers for node in nodes if node is not None and node.state not in _LOST]
        # A job needs all of its slices, so the loss of one is the loss of the machines.
        if state.name != "ACTIVE" or len(sizes) < len(nodes):
            return None
        return _Machines(sizes, state.created)

    def _attend_slice(self, node: str, size: int, created: int | None) -> dict[int, HostStatus]:
        """Return the status of every host of a slice, after shipping the code where it is missing.

        Raises:
            RetryableError: a host does not answer.
        """
        found = self._attend(node, size, created)
        if any(status.state == "empty" for status in found.values()):
            say(f"launch: shipping commit {self.programs.commit} to the {size} hosts of {node}")
            for file in self.files.items():
                code, _, errors = execute(self.resource.scp(node, *file))
                if code != 0:
                    raise_user_error(errors)
                    raise RetryableError(find_error_line(errors))
            found = self._attend(node, size, created)
        return found

    def _attend(self, node: str, size: int, created: int | None) -> dict[int, HostStatus]:
        _, output, errors = execute(self._attend_command(node, created))
        found = parse_statuses(output)
        # The statuses say more than the exit code, which is a single one for all hosts.
        if set(found) != set(range(size)):
            raise_user_error(errors)
            raise RetryableError(f"{len(found)} of {size} hosts of {node} answer: {find_error_line(errors)}")
        return found

    def _start_log_tail(self, first: HostStatus) -> LogTail:
        if first.state != "started":
            say(f"launch: attached to the job on {self.resource.name}, of commit {first.commit}")
            if first.commit != self.programs.commit:
                warn(f"launch: WARNING: commit {self.programs.commit} is shipped only if machines are requested again")
        first_line = 1 if first.state == "started" else None
        return LogTail(self._tail_command, first_line, self.poll_seconds)

    def _show_failed_log(self, hosts: dict[HostIndex, HostStatus]) -> None:
        """Show the end of the log of the first host that failed, unless it is the one whose log is shown anyway."""
        failed = min((index for index, host in hosts.items() if host.code), default=(0, 0))
        if failed == (0, 0):
            return
        slice_index, worker = failed
        node = self.resource.nodes[slice_index]
        _, output, _ = execute(self.resource.ssh(node, str(worker), self.programs.tail(None)), _DRAIN_SECONDS)
        say(f"launch: worker {worker} of {node} ended with {hosts[failed].code}; the last lines of its log:")
        for line in parse_log_lines(output):
            say(f"[{worker}] {line}")

    def _make_deleted_error(self) -> PreemptedError:
        return PreemptedError(
            f"{self.resource.name} was deleted by somebody else; run the same command again to continue the job"
        )

    def _attend_command(self, node: str, submit_time: int | str | None) -> list[str]:
        return self.resource.ssh(node, "all", self.programs.attend(submit_time))

    def _stop_command(self, node: str) -> list[str]:
        return self.resource.ssh(node, "all", self.programs.stop())

    def _tail_command(self, first_line: int | None) -> list[str]:
        return self.resource.ssh(self.resource.nodes[0], "0", self.programs.tail(first_line))


def find_exit_code(hosts: dict[HostIndex, HostStatus]) -> int | None:
    """Return the exit code of the job, None while it runs.

    The job has ended once a host has failed for good, because the others would wait for it in vain, or once the first
    host has succeeded, because it exits last.
    """
    codes = {index: host.code for index, host in hosts.items() if host.code is not None}
    if any(codes.values()):
        return combine_exit_codes(list(codes.values()))
    return EXIT_DONE if codes.get((0, 0)) == EXIT_DONE or len(codes) == len(hosts) else None


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
    runner: RunnerOption = None
    requirements: RequirementsOption = None
    keep: Annotated[bool, typer.Option("--keep", help="Keep the machines when the job is done or has failed.")] = False
    poll_seconds: Annotated[float, typer.Option(metavar="N", help="Time between two polls.")] = 30.0
    is_skip_checks: SkipChecks = False
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


def run(arguments: TpuVmArguments) -> int:
    """Run the job to its end on machines of its own; return its exit code, or 75 if only this command was stopped."""
    # The spec is validated as committed, since that is what the hosts will read.
    code = read_code(arguments.spec, arguments.runner, arguments.requirements)
    document = parse_document(code.spec_text, arguments.spec, arguments.overrides)
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
    words = [code.spec, *set_arguments(arguments.overrides), *restart_arguments(arguments)]
    archive = f"{name}-{code.short}.tar.gz"
    contents = {archive: code.archive} | code.runner.files
    digests = [word for file, content in contents.items() for word in (hashlib.sha256(content).hexdigest(), file)]
    programs = HostPrograms(
        name,
        code.short,
        archive,
        digests,
        # The files are in the home directory, and the code in a directory of the job's directory.
        code.list_package_words(("tpu", extra), f"{code.root}/../.."),
        str(code.directory),
        tuple(words),
        None if arguments.environment_file is None else f"{name}.environment",
    )
    gcloud = Gcloud(resource, arguments.poll_seconds)

    def make_job(directory: str) -> _TpuVmJob:
        """Make the launch, with the files of the code in a directory of this machine."""
        files = {str(Path(directory, file)): file for file in contents}
        if arguments.environment_file is not None and programs.environment is not None:
            # Copied before the code, because a host with the code starts the job, which reads this file.
            files = {arguments.environment_file: programs.environment} | files
        return _TpuVmJob(resource, programs, files, gcloud, arguments.poll_seconds, arguments.keep)

    # The kernel refuses longer arguments. Check this before machines are requested.
    commands = make_job("").list_commands()
    longest = max(len(word.encode()) for command in commands for word in command)
    if longest >= _MAX_ARGUMENT_BYTES:
        raise InvalidError(f"--set: makes a command of {longest} bytes, needs less than {_MAX_ARGUMENT_BYTES}")
    if not arguments.is_skip_checks:
        check_job(arguments, has_shared_files=False)
    code.announce()
    if arguments.dry_run:
        pack = ["git", "archive", "--format=tar.gz", f"--output={archive}", code.hash]
        write_text("".join(f"{shlex.join(command)}\n" for command in (pack, *commands)), is_program=True)
        return EXIT_DONE
    if shutil.which("gcloud") is None:
        raise InvalidError("gcloud is not on the PATH; install the Google Cloud CLI and run gcloud auth login")
    for number in list_stop_signals():  # SIGHUP of a terminal that closes is one of them
        signal.signal(number, signal.default_int_handler)
    try:
        with tempfile.TemporaryDirectory(prefix="launch-tpu-vm-") as scratch:
            for file, content in contents.items():
                Path(scratch, file).write_bytes(content)
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
