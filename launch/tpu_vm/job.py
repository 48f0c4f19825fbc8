"""One job on one queued resource, from the request for machines to their end.

1. Request the machines, unless they exist, and wait until they are ACTIVE.
2. Attend every host again and again: a host without the code gets it, a host without the job starts it, and all report
   its status. Meanwhile show the log of the first host.
3. If the machines are lost, delete what is left of the resource and start over at 1; the job resumes its last save.
4. When the job has ended, delete the machines.

Nothing is remembered here: each step asks what exists, so the launch may be stopped and run again at any time.
"""

import shlex
import time
from dataclasses import dataclass

from launch.supervisor import combine_exit_codes
from launch.tpu_vm.gcloud import MAX_TRIES, Gcloud, QueuedResource, execute, find_error_line, raise_user_error
from launch.tpu_vm.host import (
    CREATE_TIME,
    HostPrograms,
    HostStatus,
    LogTail,
    parse_log_lines,
    parse_log_start,
    parse_statuses,
)
from runner.console import say, warn
from runner.errors import EXIT_DONE, PreemptedError, RetryableError

HostIndex = tuple[int, int]  # number of the slice, and of the worker in it
_LOST = ("PREEMPTED", "TERMINATED")  # states of a node that does not come back
_DRAIN_SECONDS = 60.0


@dataclass(frozen=True)
class _Machines:
    """Number of hosts of each slice, and the time of the request in Unix seconds, if known."""

    sizes: list[int]
    created: int | None


@dataclass(frozen=True)
class TpuVmJob:
    """A launch.

    Attributes:
        resource: machines to request.
        programs: programs that run on each host.
        files: files that each host gets, in order, as paths here to names in its home directory. The archive comes
            last, since a host that has it counts as complete.
        gcloud: executor of the resource's commands.
        poll_seconds: time between two polls, and between two tries.
        keeps_machines: True if the machines stay when the job has ended.
    """

    resource: QueuedResource
    programs: HostPrograms
    files: dict[str, str]
    gcloud: Gcloud
    poll_seconds: float
    keeps_machines: bool

    def list_commands(self) -> list[list[str]]:
        """Return every command of an undisturbed launch, in order, with one poll where there are many."""
        resource, nodes = self.resource, self.resource.nodes
        commands = [resource.describe(), resource.create(), resource.describe()]
        commands += [resource.describe_node(node) for node in nodes]
        for node in nodes:
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
            RetryableError: the machines cannot be had or reached.
            PreemptedError: somebody else has deleted the machines.
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
            for node in self.resource.nodes:
                execute(self._stop_command(node))
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
                try:
                    hosts = self._attend_all(machines)
                except RetryableError as error:
                    # Connections break; the job itself does not need this command to go on.
                    num_failures += 1
                    if num_failures == MAX_TRIES:
                        raise RetryableError(
                            f"{error}; {self.resource.name} is left as it is, run the same command again to re-attach"
                        ) from None
                    time.sleep(self.poll_seconds)
                    continue
                num_failures = 0
                num_started = sum(host.state == "started" for host in hosts.values())
                if num_started:
                    say(f"launch: started on {num_started} of {len(hosts)} hosts")
                log_tail = log_tail or self._start_log_tail(hosts[0, 0])
                code = find_exit_code(hosts)
                if code is not None:
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
        nodes = [self.gcloud.read_node(node) for node in self.resource.nodes]
        sizes = [node.num_workers for node in nodes if node is not None and node.state not in _LOST]
        if state.name != "ACTIVE" or len(sizes) < len(nodes):
            return None
        return _Machines(sizes, state.created)

    def _attend_all(self, machines: _Machines) -> dict[HostIndex, HostStatus]:
        """Return the status of every host, after shipping the code where it is missing.

        Raises:
            RetryableError: a host does not answer.
        """
        hosts: dict[HostIndex, HostStatus] = {}
        for index, (node, size) in enumerate(zip(self.resource.nodes, machines.sizes, strict=True)):
            found = self._attend(node, size, machines.created)
            if any(status.state == "empty" for status in found.values()):
                say(f"launch: shipping commit {self.programs.commit} to the {size} hosts of {node}")
                for file in self.files.items():
                    code, _, errors = execute(self.resource.scp(node, *file))
                    if code != 0:
                        raise_user_error(errors)
                        raise RetryableError(find_error_line(errors))
                found = self._attend(node, size, machines.created)
            hosts |= {(index, worker): status for worker, status in found.items()}
        return hosts

    def _attend(self, node: str, size: int, created: int | None) -> dict[int, HostStatus]:
        _, output, errors = execute(self._attend_command(node, created))
        found = parse_statuses(output)
        # The statuses tell more than the exit code, which is one for all hosts.
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
        return LogTail(self._tail_command, parse_log_start, first_line, self.poll_seconds)

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

    The job has ended once a host has given up, since the others wait for it in vain, or once the first host has
    succeeded, since it leaves last.
    """
    codes = {index: host.code for index, host in hosts.items() if host.code is not None}
    if any(codes.values()):
        return combine_exit_codes(list(codes.values()))
    return EXIT_DONE if codes.get((0, 0)) == EXIT_DONE or len(codes) == len(hosts) else None
