"""Rendezvous of processes, and the names of missing ones."""

import contextlib
import ipaddress
import itertools
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest

from runner.distributed import rendezvous
from runner.distributed.rendezvous import Placement, get_bind_address, wait_for_peers
from runner.errors import RetryableError, StorageError
from runner.process import find_free_port


@dataclass
class Directory:
    """Directory of a run, as its processes see it."""

    addresses: dict[int, str | None] = field(default_factory=dict)
    run_id: str | None = "run"
    running_attempt: int | None = None
    problem: str = ""


@dataclass
class FakeMembers:
    """`Members` of one process."""

    directory: Directory
    process: int
    run_id: str | None = None

    def announce(self, address):
        self.run_id = self.directory.run_id
        if self.run_id is not None:
            self.directory.addresses[self.process] = address

    def list_addresses(self):
        waiting = sorted(self.directory.addresses.items())
        return [address for other, address in waiting if address is not None and 0 < other < self.process]

    def find_running_attempt(self):
        if self.directory.problem:
            raise StorageError(self.directory.problem)
        return self.directory.running_attempt


def meet_all(present, num_processes, deadline_seconds, is_elastic=False, port=None, directory=None, delays=()):
    """Return the result of each present process: its placement, or the error message."""
    coordinator = f"127.0.0.1:{port or find_free_port()}"
    directory = directory or Directory()
    addresses = set()

    def one(process):
        time.sleep(dict(delays).get(process, 0))
        members = FakeMembers(directory, process) if is_elastic else None
        try:
            meeting = wait_for_peers(Placement(coordinator, num_processes, process), deadline_seconds, members)
            addresses.add(meeting.placement.coordinator)
            assert len(addresses) == 1, "one process 0"
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


@pytest.fixture
def announces_soon(monkeypatch):
    monkeypatch.setattr(rendezvous, "ANNOUNCE_SECONDS", 0.2)


def meet_in_parallel(scenarios):
    """Return the results of several jobs that begin at the same moment; each consists of arguments of `meet_all`."""
    with ThreadPoolExecutor(len(scenarios)) as pool:
        return list(pool.map(lambda arguments: meet_all(is_elastic=True, **arguments), scenarios))


def test_the_lowest_process_of_an_elastic_job_takes_the_role_of_process_0(announces_soon):
    groups = [present for count in (1, 2, 3) for present in itertools.combinations((1, 2, 3), count)]
    met = meet_in_parallel([{"present": group, "num_processes": 4, "deadline_seconds": 4} for group in groups])
    assert met == [[(index, len(group)) for index in range(len(group))] for group in groups]


@pytest.mark.soak
def test_processes_follow_one_that_comes_late(announces_soon):
    """Those that have joined another process leave it for a lower one."""
    groups = [(group, late) for group in ([0, 1, 2], [1, 2, 3]) for late in group]
    common = {"num_processes": 4, "deadline_seconds": 8}  # which a busy machine, too, passes only after all have met
    met = meet_in_parallel([common | {"present": group, "delays": [(late, 0.7)]} for group, late in groups])
    assert met == [[(0, 3), (1, 3), (2, 3)]] * 6


def test_an_elastic_job_does_not_begin_without_process_0_before_there_is_a_run(announces_soon):
    messages = meet_all([1, 2], 3, 1, is_elastic=True, directory=Directory(run_id=None))
    assert all("process 0 of 3 at 127.0.0.1:" in message for message in messages)
    assert all("could not be reached within 1 s" in message for message in messages)


def test_an_elastic_job_that_runs_on_other_hosts_does_not_begin_again(announces_soon):
    common = {"num_processes": 4, "deadline_seconds": 1.5}
    groups = [(0,), (0, 2), (1,), (1, 2), (2, 1)]
    met = meet_in_parallel([common | {"present": group, "directory": Directory(running_attempt=7)} for group in groups])
    message = "attempt 7 runs the job on other hosts; run the same command again to join them"
    assert met == [[message] * len(group) for group in groups]


def test_an_elastic_job_does_not_begin_if_its_directory_does_not_tell_who_runs(announces_soon):
    common = {"num_processes": 4, "deadline_seconds": 1.5}
    met = meet_in_parallel(
        [common | {"present": group, "directory": Directory(problem="503")} for group in [(0, 2), (1, 2)]]
    )
    assert met == [["503", "503"]] * 2


def test_processes_that_lose_the_one_that_they_have_joined_meet_again(announces_soon):
    """Their deadline has passed when process 1 leaves them for process 0, which comes late."""
    coordinator, directory = f"127.0.0.1:{find_free_port()}", Directory()
    deadlines_seconds = {0: 3.0, 1: 3.0, 2: 1.5, 3: 1.5}

    def join(process):
        time.sleep(2.2 if process == 0 else 0)
        members = FakeMembers(directory, process)
        placement = Placement(coordinator, 4, process)
        met = wait_for_peers(placement, deadlines_seconds[process], members).placement
        return met.process_id, met.num_processes, met.coordinator

    with ThreadPoolExecutor(4) as pool:
        met = list(pool.map(join, range(4)))
    assert [place[:2] for place in met] == [(index, 4) for index in range(4)]
    assert {place[2] for place in met} == {coordinator}


def test_a_process_that_waits_at_another_says_that_it_waits(announces_soon):
    """So that a job that runs without both grows once both wait."""
    directory = Directory(running_attempt=7)
    meet_all([0, 2], 4, 1.5, is_elastic=True, directory=directory)
    assert {*directory.addresses} == {0, 2}
    assert directory.addresses[2] is None


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", socket.gethostname(), "no-such-host.invalid", "192.0.2.7"])
def test_an_address_of_loopback_is_announced_only_where_process_0_has_one(name):
    host = rendezvous._find_own_host(f"{name}:80")
    is_loopback = host is not None and ipaddress.ip_address(host).is_loopback
    assert is_loopback == (name in ("localhost", "127.0.0.1"))


def test_an_elastic_job_of_all_hosts_begins_at_once(announces_soon):
    assert meet_all([0, 1], 2, 20, is_elastic=True, directory=Directory(running_attempt=7)) == [(0, 2), (1, 2)]


@pytest.mark.daily(1)
@pytest.mark.parametrize("listens", [True, False])
def test_a_notice_of_a_dead_process_keeps_no_process_from_its_role(announces_soon, listens):
    """Its address may be one on which another program listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        stopped = threading.Event()

        def answer():
            server.settimeout(0.1)
            while not stopped.is_set():
                with contextlib.suppress(TimeoutError):
                    server.accept()[0].close()

        address = f"127.0.0.1:{server.getsockname()[1] if listens else find_free_port()}"
        with ThreadPoolExecutor(1) as pool:
            pool.submit(answer)
            try:
                met = meet_all([2, 3], 4, 2, is_elastic=True, directory=Directory({1: address}))
            finally:
                stopped.set()
    assert met == [(0, 2), (1, 2)]


def test_a_process_of_another_run_does_not_join(announces_soon):
    """The address in a notice may have become one of another job."""
    directory = Directory()
    with ThreadPoolExecutor(1) as pool:
        meeting = pool.submit(meet_all, [1], 3, 2, True, None, directory)
        while 1 not in directory.addresses:
            time.sleep(0.01)
        host, _, port = directory.addresses[1].rpartition(":")
        for greeting in (b'{"process_id": 2, "run": "other"}', b'{"process_id": 2}', b'{"process_id": 2, "run": null}'):
            with socket.create_connection((host, int(port)), 5) as stranger:
                stranger.sendall(greeting + b"\n")
                assert stranger.recv(100) == b""
        assert meeting.result() == [(0, 1)]


def join_and_end(port, process):
    """Join as a process that ends while it waits for the answer."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1) as connection:
            connection.sendall(f'{{"process_id": {process}}}\n'.encode())
            time.sleep(0.2)
            return
        time.sleep(0.05)


@pytest.mark.daily(1)
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
        return wait_for_peers(Placement(f"127.0.0.1:{port}", 3, process), 20).placement.num_processes

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
    b"{}\n": "no 'joined' in the answer",
    b'{"joined": null}\n': "int() argument",
    b'{"joined": 1}\n': "the answer is of no lower process",
    b'{"joined": 0}\n': "the connection ended before an answer",
    b'{"joined": 0}\n{}\n': "no 'error' in the answer",
    b'{"joined": 0}\n{"error": null}\n': "no 'present' in the answer",
    b'{"joined": 0}\n{"error": null, "present": 2}\n': "'int' object is not iterable",
    b'{"joined": 0}\n{"error": null, "present": [0, 1]}\n': "cannot unpack non-iterable int object",
    b'{"joined": 0}\n{"error": null, "present": [[0]]}\n': "not enough values to unpack",
    b'{"joined": 0}\n{"error": null, "present": [[null, 1]]}\n': "int() argument",
    b'{"joined": 0}\n{"error": null, "present": [[0, Infinity]]}\n': "cannot convert float infinity to integer",
    b'{"joined": 0}\n{"error": null, "present": [[0, 0]]}\n': "the answer leaves this process out",
    b'{"joined": 0}\n{"error": null, "present": [[0, 7]]}\n': "the answer has processes that the job does not have",
    b'{"joined": 0}\n{"error": null, "present": [[-9, 1]]}\n': "the answer has processes that the job does not have",
    b'{"joined": 0}\n{"error": null, "present": [[0, 1], [1, 1]]}\n': "the answer has processes that the job does not",
    b'{"joined": 0}\n{"error": null, "present": [[1, 0]]}\n': "the answer has processes that the job does not have",
}


def meet_with_answer(answer):
    """Return the error of a process to which the port of process 0 gives an answer, and how often it has asked."""
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
    return message, num_connections


def test_a_wrong_answer_is_asked_for_again_after_a_pause():
    with ThreadPoolExecutor(len(WRONG_ANSWERS)) as pool:
        met = list(pool.map(meet_with_answer, WRONG_ANSWERS))
    for (answer, reason), (message, num_connections) in zip(WRONG_ANSWERS.items(), met, strict=True):
        assert f"({reason}" in message, answer
        assert 1 <= num_connections <= 4, answer  # 0, 0.2 and 0.4 s after the start


def test_a_host_name_binds_every_interface():
    assert get_bind_address(Placement("10.0.0.1:80", 2, 0)) == "10.0.0.1:80"
    assert get_bind_address(Placement("[fe80::1]:80", 2, 0)) == "[fe80::1]:80"
    assert get_bind_address(Placement("node-3.cluster:80", 2, 0)) == "[::]:80"
    assert meet_all([0, 1], 2, 20) == [(0, 2), (1, 2)]


def test_a_port_in_use_is_reported():
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(RetryableError, match="cannot listen on"):
        wait_for_peers(Placement(f"127.0.0.1:{taken.getsockname()[1]}", 2, 0), 1)
