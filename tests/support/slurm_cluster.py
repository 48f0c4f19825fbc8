"""Real SLURM cluster on this machine: munged, slurmctld and a slurmd for each node.

The nodes are named 127.0.0.1, 127.0.0.2 and so on. All are addresses of this machine, so the name of the first node,
where JAX connects to process 0, resolves without an entry in /etc/hosts. It needs root, as slurmd does.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from runner.process import read_creation_ticks
from tests.support.simulated_devices import environment

NODES = ("127.0.0.1", "127.0.0.2")
DEADLINE_SECONDS = 180.0
_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "squeue")
_SLURMD_TIMEOUT_SECONDS = 5
_CREDENTIAL_SECONDS = 5  # SLURM's minimum; a requeued job waits as long (reason BeginTime), by default 120 s


def _free_ports(number: int) -> list[int]:
    with contextlib.ExitStack() as sockets:
        probes = [sockets.enter_context(socket.socket()) for _ in range(number)]
        for probe in probes:
            probe.bind(("", 0))
        return [probe.getsockname()[1] for probe in probes]


def wait_until(happens: Callable[[], object], what: str, report: Callable[[], str]) -> None:
    """Wait until `happens()`; fail with `report()` at the deadline."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not happens():
        assert time.monotonic() < deadline, f"not within {DEADLINE_SECONDS:.0f} s: {what}\n{report()}"
        time.sleep(0.1)


class SlurmCluster:
    """Cluster of nodes with one core each; `variables` is the environment of SLURM's commands."""

    def __init__(self, directory: Path, nodes: Sequence[str] = NODES):
        missing = [name for name in _PROGRAMS if shutil.which(name, path=_search_path()) is None]
        assert not missing, f"{', '.join(missing)} not found; apt-get install -y slurm-wlm munge"
        assert os.geteuid() == 0, "slurmd needs root"
        self.directory, self.nodes = directory, nodes
        self.variables = environment(1) | {"SLURM_CONF": str(directory / "slurm.conf"), "PATH": _search_path()}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._configure()
        key, munge_socket = directory / "munge.key", directory / "munge.socket"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        files = [f"--{kind}-file={directory}/munge.{kind}" for kind in ("key", "pid", "log", "seed")]
        self._start("munged", "munged", "--foreground", "--force", f"--socket={munge_socket}", *files)
        wait_until(munge_socket.exists, "munged's socket", self.report)
        self._start("slurmctld", "slurmctld", "-D", "-c")
        for node in nodes:
            self.start_node(node)
        idle = f"{len(nodes)} idle"
        wait_until(lambda: self.command("sinfo", "-h", "-o", "%D %t") == idle, "all nodes are idle", self.report)

    def _configure(self) -> None:
        directory, host = self.directory, socket.gethostname().partition(".")[0]
        controller_port, *ports = _free_ports(1 + len(self.nodes))
        (directory / "state").mkdir()
        lines = [
            "ClusterName=mini",
            f"SlurmctldHost={host}(127.0.0.1)",
            f"SlurmctldPort={controller_port}",
            "SlurmUser=root",
            "AuthType=auth/munge",
            f"AuthInfo=socket={directory}/munge.socket,cred_expire={_CREDENTIAL_SECONDS}",
            f"StateSaveLocation={directory}/state",
            f"SlurmctldPidFile={directory}/slurmctld.pid",
            f"SlurmctldLogFile={directory}/slurmctld.log",
            f"SlurmdSpoolDir={directory}/spool-%n",
            f"SlurmdPidFile={directory}/slurmd-%n.pid",
            f"SlurmdLogFile={directory}/slurmd-%n.log",
            "ProctrackType=proctrack/linuxproc",
            "TaskPlugin=task/none",
            "SelectType=select/cons_tres",
            "SelectTypeParameters=CR_Core",
            "SchedulerParameters=sched_interval=1,bf_interval=1",
            f"SlurmdTimeout={_SLURMD_TIMEOUT_SECONDS}",
            "ReturnToService=2",
            "MpiDefault=none",
            *(
                f"NodeName={node} NodeHostname={host} NodeAddr={node} Port={port} CPUs=1"
                for node, port in zip(self.nodes, ports, strict=True)
            ),
            "PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP",
        ]
        (directory / "slurm.conf").write_text("\n".join(lines) + "\n")

    def _start(self, name: str, *command: str) -> None:
        log = (self.directory / f"{name}.output").open("ab")
        with log:
            self._daemons[name] = subprocess.Popen(
                command, env=self.variables, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def start_node(self, node: str) -> None:
        (self.directory / f"spool-{node}").mkdir(exist_ok=True)
        self._start(node, "slurmd", "-D", "-N", node)

    def kill_node(self, node: str) -> None:
        """Kill -9 the slurmd of a node; the job steps that it started continue without supervision."""
        self._daemons[node].kill()
        self._daemons[node].wait()

    def command(self, *words: str) -> str:
        """Run a SLURM command and return its output, or an empty string if it fails."""
        result = subprocess.run(words, env=self.variables, capture_output=True, text=True, timeout=60)
        return result.stdout.strip() if result.returncode == 0 else ""

    def job(self, job_id: str) -> dict[str, str]:
        """Return the fields of a job that scontrol shows."""
        words = self.command("scontrol", "--oneliner", "show", "job", job_id).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def find_runner_pids(self, job_id: str, process_id: int) -> list[int]:
        """Return the pids of the runner processes of a task, the oldest first: its trainer, and then its standby."""
        wanted = {f"SLURM_JOB_ID={job_id}".encode(), f"SLURM_PROCID={process_id}".encode()}
        ages: dict[int, int] = {}
        for path in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if path.name.isdecimal() and wanted <= set((path / "environ").read_bytes().split(b"\0")):
                    words = (path / "cmdline").read_bytes().split(b"\0")
                    if words[1:3] == [b"-m", b"runner"] and (ticks := read_creation_ticks(int(path.name))) is not None:
                        ages[int(path.name)] = ticks
        return sorted(ages, key=ages.__getitem__)

    def find_task_pid(self, job_id: str, process_id: int) -> int:
        pids = self.find_runner_pids(job_id, process_id)
        assert pids, f"no process is task {process_id} of job {job_id}"
        return pids[0]

    def report(self) -> str:
        """Return the queue, the nodes and the last lines of all logs."""
        logs = sorted([*self.directory.glob("*.log"), *self.directory.glob("*.output")])
        parts = [f"--- {path.name}\n" + "\n".join(path.read_text().splitlines()[-15:]) for path in logs]
        return "\n".join([self.command("squeue"), self.command("sinfo", "-N"), *parts])

    def stop(self) -> None:
        """Cancel all jobs and stop the daemons."""
        self.command("scancel", "--user=root")
        with contextlib.suppress(AssertionError):
            wait_until(lambda: not self.command("squeue", "--noheader"), "no job is left", self.report)
        for name in (*self.nodes, "slurmctld", "munged"):
            daemon = self._daemons.get(name)
            if daemon is not None and daemon.poll() is None:
                daemon.send_signal(signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    daemon.wait(20)
                daemon.kill()


def _search_path() -> str:
    return f"{os.environ['PATH']}:/usr/sbin:/sbin"
