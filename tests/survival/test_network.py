"""Hosts with a network of their own each (Linux network namespaces): one is cut off, one is slow."""

import contextlib
import os
import queue
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner.process import find_free_port
from tests.support.job_process import (
    Attempt,
    Job,
    kill_all_when,
    list_common_steps,
    list_copied_steps,
    make_uninterrupted_run,
)

pytestmark = pytest.mark.soak
SPEC = "specs/counter.yaml"
OPTIONS = ("config.width=64", "config.total_steps=3000", "checkpoint.every_steps=50", "logging.every_steps=1")
PACE = "config.step_seconds=0.02"


def run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)


LOOPBACKS = {"IPv4": "127.0.0.1", "IPv6": "::1"}
PREFIXES = {"IPv4": ("10.77.0.", 24), "IPv6": ("fd77::", 64)}


class Network:
    """Three hosts on one switch; the name of host k, `rhost{k}`, stands for its address, which ends with k + 1.

    They have addresses of one family alone, but for the loopback.
    """

    def __init__(self, family: str) -> None:
        prefix, num_bits = PREFIXES[family]
        self.addresses = [f"{prefix}{host + 1}" for host in range(3)]
        assert os.geteuid() == 0, "needs root"
        assert shutil.which("ip") and shutil.which("ethtool"), "apt-get install iproute2 ethtool"  # noqa: PT018
        self.clear()
        run("ip", "link", "add", "rswitch", "type", "bridge")
        run("ip", "link", "set", "rswitch", "up")
        for host in range(3):
            run("ip", "netns", "add", f"rhost{host}")
            run("ip", "link", "add", f"rport{host}", "type", "veth", "peer", "name", "eth0", "netns", f"rhost{host}")
            run("ip", "link", "set", f"rport{host}", "master", "rswitch", "up")
            no_detection = ["nodad"] if family == "IPv6" else []
            address = f"{self.addresses[host]}/{num_bits}"
            self.inside(host, "ip", "address", "add", address, "dev", "eth0", *no_detection)
            for device in ("lo", "eth0"):
                self.inside(host, "ip", "link", "set", device, "up")
            hosts = Path(f"/etc/netns/rhost{host}/hosts")
            hosts.parent.mkdir(parents=True, exist_ok=True)
            hosts.write_text(f"{LOOPBACKS[family]} localhost\n{self.addresses[host]} rhost{host}\n")

    def inside(self, host: int, *words: str) -> None:
        """Run a command on a host."""
        run("ip", "netns", "exec", f"rhost{host}", *words)

    def cut(self, host: int) -> None:
        """Unplug a host."""
        run("ip", "link", "set", f"rport{host}", "down")

    def heal(self, host: int) -> None:
        """Plug it in again."""
        run("ip", "link", "set", f"rport{host}", "up")

    @contextlib.contextmanager
    def delay(self, host: int, seconds: float) -> Iterator[None]:
        """Hold back all that a host sends: a longer cable, between its port and the switch."""
        run("ip", "link", "set", f"rport{host}", "nomaster")
        run("ip", "link", "add", "rfar", "type", "veth", "peer", "name", "rnear")
        run("ip", "link", "set", "rnear", "master", "rswitch", "up")
        run("ip", "link", "set", "rfar", "up")
        for device in ("rfar", "rnear", f"rport{host}"):
            run("ethtool", "-K", device, "tx", "off", "gso", "off", "tso", "off", "gro", "off")
        for other in range(3):
            self.inside(other, "ethtool", "-K", "eth0", "tx", "off", "gso", "off", "tso", "off", "gro", "off")
        with _open(f"rport{host}") as port, _open("rfar") as far:
            for source, target, hold_seconds in ((port, far, seconds), (far, port, 0.0)):
                threading.Thread(target=_carry, args=(source, target, hold_seconds), daemon=True).start()
            yield

    def clear(self) -> None:
        """Delete the hosts, the switch and their interfaces."""
        for host in range(3):
            subprocess.run(["ip", "netns", "delete", f"rhost{host}"], capture_output=True)
            shutil.rmtree(f"/etc/netns/rhost{host}", ignore_errors=True)
        # The kernel deletes the interfaces of a deleted host later, and the next test needs their names at once.
        for device in ("rswitch", "rfar", *(f"rport{host}" for host in range(3))):
            subprocess.run(["ip", "link", "delete", device], capture_output=True)


def _open(device: str) -> socket.socket:
    every_protocol = 0x0003
    opened = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(every_protocol))
    opened.bind((device, every_protocol))
    return opened


def _carry(source: socket.socket, target: socket.socket, hold_seconds: float) -> None:
    """Send on each frame so long after it came, until the sockets are closed."""
    frames: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()

    def send() -> None:
        while True:
            due, frame = frames.get()
            time.sleep(max(due - time.monotonic(), 0.0))
            with contextlib.suppress(OSError):
                target.send(frame)

    threading.Thread(target=send, daemon=True).start()
    with contextlib.suppress(OSError):
        while True:
            frame, address = source.recvfrom(1 << 16)
            if address[2] != socket.PACKET_OUTGOING:
                frames.put((time.monotonic() + hold_seconds, frame))


@pytest.fixture(params=PREFIXES)
def network(request: pytest.FixtureRequest) -> Iterator[Network]:
    network = Network(request.param)
    yield network
    network.clear()


class HostAttempt(Attempt):
    """The command on one host of a network, under the name of that host."""

    def __init__(self, network: Network, job: Job, host: int, port: int):
        self.host = host
        address = network.addresses[0]
        coordinator = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
        named = ["unshare", "--uts", "sh", "-c", f'hostname rhost{self.host}; exec "$@"', "sh"]
        self._wrapper = ["ip", "netns", "exec", f"rhost{self.host}", *named]
        place = ["--coordinator", coordinator, "--num-processes", "3", "--process-id", str(host)]
        super().__init__(job, ["runner", *job.arguments, *place], job.devices)


def start(network: Network, job: Job) -> list[HostAttempt]:
    port = find_free_port()
    return [HostAttempt(network, job, host, port) for host in range(3)]


def test_a_network_partition_is_reported_and_changes_no_bit(network, tmp_path):
    job = Job(SPEC, tmp_path / "run", (*OPTIONS, PACE))
    attempts = start(network, job)
    attempts[0].wait_until(lambda: job.newest() >= 100, "step 100")
    network.cut(2)
    for attempt in attempts:
        attempt.expect(76)
        assert "Traceback" not in attempt.output
    for attempt in attempts[:2]:
        assert "the job cannot continue: process 2" in attempt.output, attempt.report("does not name the lost host")
    assert "process 0 has not responded" in attempts[2].output
    network.heal(2)
    for attempt in start(network, job.with_options("config.step_seconds=0")):
        attempt.expect(0)
    assert job.events("restore")[-1]["step"] >= 100
    assert job.result() == make_uninterrupted_run(SPEC, OPTIONS).result()


@pytest.mark.parametrize("lost", [0, 2])
def test_a_host_that_lost_its_fast_tier_reads_the_replica_of_another_host(network, lost, tmp_path):
    fast = (f"checkpoint.local_directory={tmp_path / 'fast'}", "checkpoint.local_every_steps=3")
    job = Job(SPEC, tmp_path / "run", (*OPTIONS, *fast, "checkpoint.local_replicas=1", PACE))
    attempts = start(network, job)

    def find_step() -> int:
        """Return the newest step that all have, with a copy of the part of process 0, which others do not have."""
        copied = list_copied_steps(tmp_path / "fast", 0, 1)
        return max(copied.intersection(list_common_steps(tmp_path / "fast", 3)), default=0)

    kill_all_when(attempts, lambda: find_step() > max(60, job.newest()), "a copy beyond the durable step")
    step = find_step()
    assert "all copies of a part are on one host" not in attempts[0].output
    (directory,) = (tmp_path / "fast").glob(f"*/{lost}")
    assert (directory / "host").read_text() == f"rhost{lost}"
    shutil.rmtree(directory)
    for attempt in start(network, job.with_options("config.step_seconds=0")):
        attempt.expect(0)
    (restore,) = job.events("restore")
    assert (restore["step"], restore["tier"], restore["from_replicas"]) == (step, "fast", [lost])
    assert job.result() == make_uninterrupted_run(SPEC, OPTIONS).result()


def test_a_slow_host_is_named_as_a_straggler(network, tmp_path):
    job = Job(SPEC, tmp_path / "run", (*OPTIONS, PACE))
    with network.delay(1, 0.2):
        attempts = start(network, job)
        attempts[0].wait_until(lambda: job.events("straggler"), "a straggler")
        for attempt in attempts:
            attempt.expect(0, 900)
    assert all(found["late"] == [1] for found in job.events("straggler") if found["late"])
    assert "straggler: process 1 reached step" in attempts[0].output
    assert job.result() == make_uninterrupted_run(SPEC, OPTIONS).result()
