"""One job on one queued resource, from the request for machines to their end.

1. Ask for the machines, unless they are there, and wait until they are ACTIVE.
2. Look at every host again and again: one that lacks the code gets it, one that does not run the job is told to start
   it, and all say how the job stands there. Meanwhile the first host's log is shown.
3. If the machines are lost, delete what is left of the resource and begin at 1; the job goes on from its last save.
4. When the job has ended, delete the machines.

Nothing is remembered here: each step asks what is there, so the launch may be stopped and run again at any moment.
"""

import shlex
import time
from dataclasses import dataclass

from launch.supervisor import job_code
from launch.tpu_vm.gcloud import MOST_TRIES, Gcloud, Resource, check, execute, first_line
from launch.tpu_vm.host import CREATE_TIME, HostPrograms, HostStatus, LogTail, answers, lines_of_log, log_begins_at
from runner.console import say, warn
from runner.errors import EXIT_DONE, PreemptedError, RetryableError

HostIndex = tuple[int, int]  # its slice, and the worker that it is of that slice
_LOST = ("PREEMPTED", "TERMINATED")  # states of a node that comes back only as another one
_DRAIN_SECONDS = 60.0


@dataclass(frozen=True)
class _Machines:
    """What a launch has: the number of hosts of each slice, and when it was asked for, in Unix seconds, if known."""

    sizes: list[int]
    created: int | None


@dataclass(frozen=True)
class TpuVmJob:
    """A launch.

    Attributes:
        files: what each host gets, in order: paths here -> names in its home directory. The archive comes last, as a
            host that has it is one that has all.
        poll_seconds: between two looks, and between two tries.
        is_kept: whether the machines stay when the job has ended.
    """

    resource: Resource
    host: HostPrograms
    files: dict[str, str]
    gcloud: Gcloud
    poll_seconds: float
    is_kept: bool

    def plan(self) -> list[list[str]]:
        """Every command of a launch that nothing disturbs, in order, with one look where there are many."""
        resource, nodes = self.resource, self.resource.nodes
        commands = [resource.describe(), resource.create(), resource.describe()]
        commands += [resource.describe_node(node) for node in nodes]
        for node in nodes:
            ship = [resource.scp(node, *file) for file in self.files.items()]
            attend = self._attend(node, CREATE_TIME)
            commands += [attend, *ship, attend]
        commands.append(self._tail(1))
        return commands + ([self._stop(node) for node in nodes] if self.is_kept else [resource.delete()])

    def run(self) -> int:
        """Machines, job, machines again if they are lost; the exit code of the job.

        Raises `RetryableError` if the machines cannot be had or reached, `PreemptedError` if somebody deletes them.
        """
        name = self.resource.name
        while True:
            self._await_machines()
            code = self._await_end()
            if code is not None:
                break
            say(f"launch: {name} was preempted; asking for machines again, where the job goes on from its last save")
            self.gcloud.delete()
        if self.is_kept:
            delete = shlex.join(self.resource.delete())
            say(f"launch: the job ended with {code}; the machines stay. To delete them: {delete}")
            for node in self.resource.nodes:
                execute(self._stop(node))
        else:
            say(f"launch: the job ended with {code}; deleting {name}")
            self.gcloud.delete()
        return code

    def _await_machines(self) -> None:
        """Return once the resource is ACTIVE."""
        name = self.resource.name
        is_requested = False
        seen: str | None = None
        while True:
            state = self.gcloud.state()
            if state is None:
                if seen is not None:
                    raise self._deleted()
                if not is_requested:
                    say(f"launch: requesting {name}")
                    self.gcloud.create()
                    is_requested = True
                    continue
            else:
                if seen is None and not is_requested:
                    say(f"launch: {name} is there already, and is taken for this job's own")
                if state.name != seen:
                    say(f"launch: {name} is {state.name}")
                if state.name == "ACTIVE":
                    return
                if state.name == "FAILED" and (is_requested or seen is not None):
                    if not self.is_kept:
                        self.gcloud.delete()
                    raise RetryableError(f"{name} FAILED: {state.error or 'gcloud gives no reason'}")
                seen = state.name
                if state.name in ("SUSPENDED", "FAILED"):  # what an earlier launch or a preemption has left
                    self.gcloud.delete()
                    is_requested, seen = False, None
                    continue
            time.sleep(self.poll_seconds)

    def _await_end(self) -> int | None:
        """Bring every host to a running job and wait for its end; None if the machines were lost."""
        log_tail: LogTail | None = None
        num_failures = 0
        try:
            while (machines := self._machines()) is not None:
                try:
                    hosts = self._attend_all(machines)
                except RetryableError as error:
                    num_failures += 1
                    if num_failures == MOST_TRIES:
                        left = f"{self.resource.name} is left as it is, run the same command again to re-attach"
                        raise RetryableError(f"{error}; {left}") from None
                    time.sleep(self.poll_seconds)
                    continue
                num_failures = 0
                num_started = sum(host.state == "started" for host in hosts.values())
                if num_started:
                    say(f"launch: started on {num_started} of {len(hosts)} hosts")
                log_tail = log_tail or self._make_log_tail(hosts)
                code = verdict(hosts)
                if code is not None:
                    if hosts[0, 0].code is not None:
                        log_tail.finish(_DRAIN_SECONDS)
                    self._show_failed(hosts)
                    return code
                time.sleep(self.poll_seconds)
            return None
        finally:
            if log_tail is not None:
                log_tail.abandon()

    def _machines(self) -> _Machines | None:
        """What is there now; None if the machines are lost."""
        state = self.gcloud.state()
        if state is None:
            raise self._deleted()
        nodes = [self.gcloud.node(node) for node in self.resource.nodes]
        sizes = [node.num_workers for node in nodes if node is not None and node.state not in _LOST]
        if state.name != "ACTIVE" or len(sizes) < len(nodes):
            return None
        return _Machines(sizes, state.created)

    def _attend_all(self, machines: _Machines) -> dict[HostIndex, HostStatus]:
        """What every host says; ships the code where it is not. Raises `RetryableError` if one cannot be asked."""
        hosts: dict[HostIndex, HostStatus] = {}
        for index, (node, size) in enumerate(zip(self.resource.nodes, machines.sizes, strict=True)):
            found = self._answers(node, size, machines.created)
            if any(answer.state == "empty" for answer in found.values()):
                say(f"launch: shipping commit {self.host.commit} to the {size} hosts of {node}")
                for file in self.files.items():
                    code, _, errors = execute(self.resource.scp(node, *file))
                    if code != 0:
                        check(errors)
                        raise RetryableError(first_line(errors))
                found = self._answers(node, size, machines.created)
            hosts |= {(index, worker): answer for worker, answer in found.items()}
        return hosts

    def _answers(self, node: str, size: int, created: int | None) -> dict[int, HostStatus]:
        _, output, errors = execute(self._attend(node, created))
        found = answers(output)
        if set(found) != set(range(size)):  # more telling than the exit code, which speaks for all hosts at once
            check(errors)
            raise RetryableError(f"{len(found)} of {size} hosts of {node} answer: {first_line(errors)}")
        return found

    def _make_log_tail(self, hosts: dict[HostIndex, HostStatus]) -> LogTail:
        first = hosts[0, 0]
        if first.state != "started":
            say(f"launch: attached to the job on {self.resource.name}, of commit {first.commit}")
            if first.commit != self.host.commit:
                warn(f"launch: WARNING: commit {self.host.commit} is shipped only if machines are requested again")
        return LogTail(self._tail, log_begins_at, 1 if first.state == "started" else None, self.poll_seconds)

    def _show_failed(self, hosts: dict[HostIndex, HostStatus]) -> None:
        """The end of the log of the first host that failed, unless it is the one whose log is shown anyway."""
        failed = min((index for index, host in hosts.items() if host.code), default=(0, 0))
        if failed == (0, 0):
            return
        slice_index, worker = failed
        node = self.resource.nodes[slice_index]
        _, output, _ = execute(self.resource.ssh(node, str(worker), self.host.tail(None)), _DRAIN_SECONDS)
        say(f"launch: worker {worker} of {node} ended with {hosts[failed].code}; the last lines of its log:")
        for line in lines_of_log(output):
            say(f"[{worker}] {line}")

    def _deleted(self) -> PreemptedError:
        return PreemptedError(f"{self.resource.name} was deleted by somebody else; run the same command again to go on")

    def _attend(self, node: str, submitted: int | str | None) -> list[str]:
        return self.resource.ssh(node, "all", self.host.attend(submitted))

    def _stop(self, node: str) -> list[str]:
        return self.resource.ssh(node, "all", self.host.stop())

    def _tail(self, first_line: int | None) -> list[str]:
        return self.resource.ssh(self.resource.nodes[0], "0", self.host.tail(first_line))


def verdict(hosts: dict[HostIndex, HostStatus]) -> int | None:
    """The exit code of the job, None while it runs.

    One host that has given up is the end, since the others wait for it in vain; so is the first host's success, since
    it leaves last.
    """
    codes = {index: host.code for index, host in hosts.items() if host.code is not None}
    if any(codes.values()):
        return job_code(list(codes.values()))
    return EXIT_DONE if codes.get((0, 0)) == EXIT_DONE or len(codes) == len(hosts) else None
