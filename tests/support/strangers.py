"""Clients of another program that connect to a port of a job."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence

PAUSE_SECONDS = 0.02
NUM_MANY = 600  # connections, more than any port of the runner keeps
FLOOD = b"x" * (1 << 18)
HUGE = (
    b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000000000000000\r\n\r\n",
    b'{"process_id": 1' + b"0" * 5000 + b"}\n",
    b"token" + b" " * 5000 + b"\n",
    b"[" * 100_000 + b"\n",
)

Act = Callable[[socket.socket], None]  # called again and again, until it raises `OSError` or the test has ended


def _drip(client: socket.socket) -> None:
    client.send(b"x")


def _flood(client: socket.socket) -> None:
    client.send(FLOOD)


def _send_huge(client: socket.socket) -> None:
    for line in HUGE:
        client.send(line)


# Number of clients and what each of them does, by name.
STRANGERS: dict[str, tuple[int, Act]] = {
    "silent": (20, lambda client: None),
    "dripping": (20, _drip),
    "flooding": (4, _flood),
    "huge": (20, _send_huge),
    "many": (NUM_MANY, lambda client: None),
}


def _connect(port: int) -> socket.socket:
    deadline = time.monotonic() + 20
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), 20)
        except ConnectionRefusedError:  # it is about to listen
            assert time.monotonic() < deadline
            time.sleep(PAUSE_SECONDS)


@contextlib.contextmanager
def attack(port: int, kind: str) -> Iterator[Sequence[socket.socket]]:
    """Give the clients of a kind, which have connected to the port, and end them."""
    number, act = STRANGERS[kind]
    clients = [_connect(port) for _ in range(number)]
    is_over = threading.Event()

    def work(own: Sequence[socket.socket]) -> None:
        while not is_over.wait(PAUSE_SECONDS):
            for client in own:
                with contextlib.suppress(OSError):
                    client.setblocking(False)
                    act(client)

    thread = threading.Thread(target=work, args=(clients,))
    thread.start()
    try:
        yield clients
    finally:
        is_over.set()
        thread.join()
        for client in clients:
            client.close()


def count_closed(clients: Sequence[socket.socket]) -> int:
    """Return how many of the clients the other end has closed."""
    closed = 0
    for client in clients:
        client.setblocking(False)
        try:
            closed += client.recv(1 << 16) == b""
        except BlockingIOError:
            continue
        except OSError:
            closed += 1
    return closed
