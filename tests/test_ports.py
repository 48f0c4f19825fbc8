"""Every port that the runner opens, beside clients that are silent, slow or many: they hold up nothing."""

import contextlib
import http.client
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from runner.checkpoint.parts import PartDirectory
from runner.checkpoint.replicas import Replicas
from runner.dashboard import server
from runner.distributed import rendezvous
from runner.distributed.rendezvous import Placement, wait_for_peers
from runner.errors import RetryableError
from runner.process import find_free_port
from tests.support.coordinator import MemoryCoordinator
from tests.support.strangers import NUM_MANY, STRANGERS, attack, count_closed

Use = Callable[[], None]  # asks for the service of a port, and fails if there is none
START_SECONDS = 20.0  # less than silent clients may take one after the other


@contextlib.contextmanager
def open_rendezvous(tmp_path: Path) -> Iterator[tuple[int, Use]]:
    port = find_free_port()
    first, second = (Placement(f"127.0.0.1:{port}", 2, process) for process in range(2))
    with ThreadPoolExecutor(1) as pool:
        meeting = pool.submit(wait_for_peers, first, START_SECONDS)

        def join() -> None:
            found = [wait_for_peers(second, START_SECONDS), meeting.result()]
            assert [sorted(each.peer_sockets) for each in found] == [[0], [1]]
            for each in found:
                for connection in each.peer_sockets.values():
                    connection.close()

        yield port, join


@contextlib.contextmanager
def open_replicas(tmp_path: Path) -> Iterator[tuple[int, Use]]:
    hosts = MemoryCoordinator(2).hosts()[0]
    path = tmp_path / "copies" / "1" / "3" / "blocks"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"content")
    replicas = Replicas(PartDirectory(tmp_path), hosts, [1], "token")
    replicas._addresses = {0: ("127.0.0.1", replicas.port)}

    def fetch() -> None:
        assert replicas.fetch(3, 0, 1, "blocks", 0, None) == b"content"

    try:
        yield replicas.port, fetch
    finally:
        replicas.close()
        shutil.rmtree(tmp_path)


@contextlib.contextmanager
def open_dashboard(tmp_path: Path) -> Iterator[tuple[int, Use]]:
    def answer(environ: dict[str, Any], start: Callable[..., Any]) -> list[bytes]:
        start("200 OK", [("Content-Length", "2")])
        return [b"ok"]

    web = server.make_server(answer, "127.0.0.1", 0)  # type: ignore[arg-type] - any application
    thread = threading.Thread(target=web.run, daemon=True)
    thread.start()
    port = web.effective_listen[0][1]

    def get() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        with contextlib.closing(connection):
            connection.request("GET", "/")
            assert connection.getresponse().read() == b"ok"

    try:
        yield port, get
    finally:
        web.close()
        thread.join(60)


# A port, and the connections that it keeps.
PORTS = {
    "rendezvous": (open_rendezvous, rendezvous.MAX_STRANGERS),
    "replicas": (open_replicas, rendezvous.MAX_STRANGERS),
    "dashboard": (open_dashboard, server.CONNECTIONS_MAX),
}


@pytest.mark.daily(6)
@pytest.mark.parametrize("kind", STRANGERS)
@pytest.mark.parametrize("port", PORTS)
def test_strangers_neither_hold_up_a_port_nor_take_threads(port: str, kind: str, tmp_path: Path) -> None:
    opened, max_connections = PORTS[port]
    with opened(tmp_path / "port") as (number, use):
        use_threads = threading.active_count()
        with attack(number, kind) as clients:
            deadline = time.monotonic() + 60
            while kind == "many" and count_closed(clients) < NUM_MANY - max_connections:
                assert time.monotonic() < deadline, "the port keeps too many connections"
                time.sleep(0.05)
            use()
            assert threading.active_count() <= use_threads + 2  # that of the attack, and one that has answered `use`


@pytest.mark.parametrize("kind", ["silent", "dripping"])
def test_a_connection_ends_some_time_after_it_began(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "GREETING_SECONDS", 0.3)
    with open_replicas(tmp_path / "port") as (number, _), attack(number, kind) as clients:
        deadline = time.monotonic() + 30
        while count_closed(clients) < len(clients):
            assert time.monotonic() < deadline
            time.sleep(0.05)


@pytest.mark.daily(2)
@pytest.mark.parametrize("kind", STRANGERS)
def test_strangers_do_not_prolong_a_start(kind: str) -> None:
    port = find_free_port()
    with ThreadPoolExecutor(1) as pool:
        meeting = pool.submit(wait_for_peers, Placement(f"127.0.0.1:{port}", 2, 0), 1.0)
        with attack(port, kind), pytest.raises(RetryableError, match="process 1 of 2 did not join within 1 s"):
            meeting.result(timeout=30)


def test_a_slow_answer_does_not_prolong_a_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program may listen where process 0 is expected."""
    monkeypatch.setattr(rendezvous, "_ANSWER_SECONDS", 0.5)
    is_over = threading.Event()

    def drip(listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            connection, _ = listener.accept()
            with connection:
                while not is_over.wait(0.02):
                    connection.send(b" ")

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(2) as pool:
        pool.submit(drip, listener)
        joining = pool.submit(wait_for_peers, Placement(f"127.0.0.1:{listener.getsockname()[1]}", 2, 1), 1.0)
        try:
            with pytest.raises(RetryableError, match="could not be reached within 1 s"):
                joining.result(timeout=30)
        finally:
            is_over.set()
