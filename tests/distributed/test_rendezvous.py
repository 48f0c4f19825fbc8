"""Rendezvous of processes, and the names of missing ones."""

import contextlib
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from runner.distributed.rendezvous import Placement, get_bind_address, wait_for_peers
from runner.errors import RetryableError
from runner.process import find_free_port


def meet_all(present, num_processes, deadline_seconds, is_elastic=False, port=None):
    """Return the result of each present process: its placement, or the error message."""
    coordinator = f"127.0.0.1:{port or find_free_port()}"

    def one(process):
        try:
            meeting = wait_for_peers(Placement(coordinator, num_processes, process), deadline_seconds, is_elastic)
            place = meeting.placement
            assert sorted(meeting.peer_sockets) == ([0] if place.process_id else list(range(1, place.num_processes)))
        except RetryableError as error:
            return str(error)
        return place.process_id, place.num_processes

    with ThreadPoolExecutor(len(present)) as pool:
        return list(pool.map(one, present))


def test_processes_keep_their_numbers_if_all_join():
    assert meet_all([3, 1, 0, 2], 4, 20) == [(3, 4), (1, 4), (0, 4), (2, 4)]


def test_missing_processes_are_named_on_every_process_that_joined():
    message = "processes 1, 3 of 4 did not join within 1 s; run the same command again"
    assert meet_all([0, 2], 4, 1) == [message, message]
    assert meet_all([0], 2, 1) == ["process 1 of 2 did not join within 1 s; run the same command again"]


def test_a_missing_process_0_is_named():
    (message,) = meet_all([1], 2, 1)
    assert message.startswith("process 0 of 2 at 127.0.0.1:")
    assert "could not be reached within 1 s" in message


def test_an_elastic_job_renumbers_the_processes_that_joined():
    assert meet_all([0, 2, 3], 4, 1, is_elastic=True) == [(0, 3), (1, 3), (2, 3)]
    assert meet_all([0], 4, 1, is_elastic=True) == [(0, 1)]


def join_and_end(port, process):
    """Join as a process that ends while it waits for the answer."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1) as connection:
            connection.sendall(f'{{"process_id": {process}}}\n'.encode())
            time.sleep(0.2)
            return
        time.sleep(0.05)


@pytest.mark.parametrize("ended", [1, 2])
def test_a_process_that_ends_in_the_wait_has_not_joined(ended):
    port = find_free_port()
    others = [process for process in range(4) if process not in (ended, 3)]
    with ThreadPoolExecutor(1) as pool:
        pool.submit(join_and_end, port, ended)
        assert meet_all(others, 4, 2, is_elastic=True, port=port) == [(0, 2), (1, 2)]


def test_a_process_that_ends_in_the_wait_may_come_again():
    port = find_free_port()

    def join(process):
        return wait_for_peers(Placement(f"127.0.0.1:{port}", 3, process), 20, False).placement.num_processes

    def join_again():
        join_and_end(port, 2)
        time.sleep(1)
        return join(2)

    with ThreadPoolExecutor(3) as pool:
        found = [pool.submit(join, 0), pool.submit(join_again)]
        time.sleep(0.5)
        # Process 2 has joined once by now, and has ended.
        found.append(pool.submit(join, 1))
        assert [each.result() for each in found] == [3, 3, 3]


def test_an_unknown_connection_is_ignored():
    port = find_free_port()

    def knock(words):
        for _ in range(100):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1) as connection:
                connection.sendall(words)
                return True
            time.sleep(0.02)
        return False

    with ThreadPoolExecutor(4) as pool:
        words = (b"GET / HTTP/1.0\r\n\r\n", b'{"process_id": 99}\n', b"[]\n", b"")
        strangers = [pool.submit(knock, line) for line in words]
        assert meet_all([0], 2, 3, port=port) == ["process 1 of 2 did not join within 3 s; run the same command again"]
        assert all(stranger.result() for stranger in strangers)


# Answers of something else on the port of process 0, and the reason that is given.
WRONG_ANSWERS = {
    b"": "the connection ended before an answer",
    b"HTTP/1.0 400 Bad Request\r\n\r\n": "Expecting value",
    b"[0, 1]\n": "the answer is not one of this protocol",
    b"{}\n": "no 'error' in the answer",
    b'{"error": null}\n': "no 'present' in the answer",
    b'{"error": null, "present": 2}\n': "'int' object is not iterable",
    b'{"error": null, "present": [null]}\n': "int() argument",
    b'{"error": null, "present": [Infinity]}\n': "cannot convert float infinity to integer",
    b'{"error": null, "present": [0, 7]}\n': "the answer leaves this process out",
}


@pytest.mark.parametrize("answer", WRONG_ANSWERS, ids=lambda answer: answer.decode().strip() or "nothing")
def test_a_wrong_answer_is_asked_for_again_after_a_pause(answer):
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        joining = pool.submit(meet_all, [1], 2, 0.5, port=server.getsockname()[1])
        server.settimeout(0.1)
        num_connections = 0
        while not joining.done():
            with contextlib.suppress(TimeoutError):
                connection, _ = server.accept()
                num_connections += 1
                with connection:
                    connection.recv(100)
                    connection.sendall(answer)
    (message,) = joining.result()
    assert f"({WRONG_ANSWERS[answer]}" in message
    assert 1 <= num_connections <= 4  # 0, 0.2 and 0.4 s after the start


def test_a_host_name_binds_every_interface():
    assert get_bind_address(Placement("10.0.0.1:80", 2, 0)) == "10.0.0.1:80"
    assert get_bind_address(Placement("[fe80::1]:80", 2, 0)) == "[fe80::1]:80"
    assert get_bind_address(Placement("node-3.cluster:80", 2, 0)) == "[::]:80"
    assert meet_all([0, 1], 2, 20) == [(0, 2), (1, 2)]


def test_a_port_in_use_is_reported():
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(RetryableError, match="cannot listen on"):
        wait_for_peers(Placement(f"127.0.0.1:{taken.getsockname()[1]}", 2, 0), 1, is_elastic=False)
