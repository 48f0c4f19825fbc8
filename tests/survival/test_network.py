"""Hosts with a network of their own each (Linux network namespaces): one is cut off, one is slow."""

import contextlib
import os
import queue
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from runner.process import find_free_port
from tests.support.job_process import Attempt, Job, make_uninterrupted_run

pytestmark = pytest.mark.soak
SPEC = "specs/counter.yaml"
OPTIONS = ("config.width=64", "config.total_steps=3000", "checkpoint.every_steps=50", "logging.every_steps=1")
PACE = "config.step_seconds=0.02"


def run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)


class Network:
    """Three hosts on one switch; host k has the address 10.77.0.(k+1), and its own name stands for it."""

    def __init__(self) -> None:
        assert os.geteuid() == 0, "needs root"
        assert shutil.which("ip") and shutil.which("ethtool"), "apt-get install iproute2 ethtool"  # noqa: PT018
        self.clear()
        run("ip", "link", "add", "rswitch", "type", "bridge")
        run("ip", "link", "set", "rswitch", "up")
        for host in range(3):
            run("ip", "netns", "add", f"rhost{host}")
            run("ip", "link", "add", f"rport{host}", "type", "veth", "peer", "name", "eth0", "netns", f"rhost{host}")
            run("ip", "link", "set", f"rport{host}", "master", "rswitch", "up")
            self.inside(host, "ip", "address", "add", f"10.77.0.{host + 1}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                self.inside(host, "ip", "link", "set", device, "up")
            hosts = Path(f"/etc/netns/rhost{host}/hosts")
            hosts.parent.mkdir(parents=True, exist_ok=True)
            hosts.write_text(f"127.0.0.1 localhost\n10.77.0.{host + 1} {os.uname().nodename}\n")

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
        for device in ("rswitch", "rfar"):
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


@pytest.fixture
def network() -> Iterator[Network]:
    network = Network()
    yield network
    network.clear()


class HostAttempt(Attempt):
    """The command on one host of a network."""

    def __init__(self, job: Job, host: int, port: int):
        self.host = host
        place = ["--coordinator", f"10.77.0.1:{port}", "--num-processes", "3", "--process-id", str(host)]
        super().__init__(job, ["runner", *job.arguments, *place], job.devices)

    def _command(self, arguments: Sequence[str]) -> list[str]:
        return ["ip", "netns", "exec", f"rhost{self.host}", *super()._command(arguments)]


def start(job: Job) -> list[HostAttempt]:
    port = find_free_port()
    return [HostAttempt(job, host, port) for host in range(3)]


def test_a_network_partition_is_reported_and_changes_no_bit(network, tmp_path):
    job = Job(SPEC, tmp_path / "run", (*OPTIONS, PACE))
    attempts = start(job)
    attempts[0].wait_until(lambda: job.newest() >= 100, "step 100")
    network.cut(2)
    for attempt in attempts:
        attempt.expect(76)
        assert "Traceback" not in attempt.output
    for attempt in attempts[:2]:
        assert "the job cannot continue: process 2" in attempt.output, attempt.report("does not name the lost host")
    assert "process 0 has not responded" in attempts[2].output
    network.heal(2)
    for attempt in start(job.with_options("config.step_seconds=0")):
        attempt.expect(0)
    assert job.events("restore")[-1]["step"] >= 100
    assert job.result() == make_uninterrupted_run(SPEC, OPTIONS).result()


def test_a_slow_host_is_named_as_a_straggler(network, tmp_path):
    job = Job(SPEC, tmp_path / "run", (*OPTIONS, PACE))
    with network.delay(1, 0.2):
        attempts = start(job)
        attempts[0].wait_until(lambda: job.events("straggler"), "a straggler")
        for attempt in attempts:
            attempt.expect(0, 900)
    assert all(found["late"] == [1] for found in job.events("straggler") if found["late"])
    assert "straggler: process 1 reached step" in attempts[0].output
    assert job.result() == make_uninterrupted_run(SPEC, OPTIONS).result()
