"""Disconnected and crashed processes, and the exit code of a process that receives SIGABRT."""

import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from runner.distributed import key_value
from runner.distributed.agreement import Liveness
from runner.distributed.key_value import KeyValueStore
from tests.support.coordinator import MemoryCoordinator
from tests.support.job_process import drop_plugin_messages

ROOT = Path(__file__).parents[2]


@pytest.fixture
def three_processes():
    """Three processes: the coordinator, process 0's view of the others, and the others' sockets."""
    coordinator = MemoryCoordinator(3)
    pairs = {process: socket.socketpair() for process in (1, 2)}
    mine = {process: pair[0] for process, pair in pairs.items()}
    yield coordinator, Liveness(KeyValueStore(coordinator), 0, 3, mine), {p: pair[1] for p, pair in pairs.items()}
    for pair in pairs.values():
        for end in pair:
            end.close()


def test_a_disconnected_process_has_crashed_unless_it_exited_in_order(three_processes):
    coordinator, main, ends = three_processes
    assert (main.find_disconnected(), main.find_crashed()) == ([], [])
    ends[2].close()
    assert (main.find_disconnected(), main.find_crashed()) == ([2], [2])
    Liveness(KeyValueStore(coordinator), 1, 3, {}).leave(2)
    assert (main.find_disconnected(), main.find_crashed()) == ([2], [2])
    ends[1].close()
    assert (main.find_disconnected(), main.find_crashed(), main.read_departures()) == ([1, 2], [2], {1: 2})


def test_process_0_leaves_last(three_processes):
    coordinator, main, _ = three_processes
    leaving = threading.Thread(target=main.leave, args=(0,))
    leaving.start()
    coordinator.wait_until(lambda: coordinator.list_keys() == [f"{key_value.DEPARTURES}/0"])
    for process in (1, 2):
        assert leaving.is_alive()
        Liveness(KeyValueStore(coordinator), process, 3, {}).leave(0)
    leaving.join()
    assert len(coordinator.list_keys()) == 3


def test_a_single_process_leaves_at_once():
    Liveness(KeyValueStore(None), 0, 1, {}).leave(0)


ABORT = """
import os, sys
from runner.distributed.key_value import KeyValueStore
from runner.distributed.agreement import Liveness, install_abort_handler
from tests.support.coordinator import MemoryCoordinator
from tests.support.job_process import drop_plugin_messages

install_abort_handler()
liveness = Liveness(KeyValueStore(MemoryCoordinator(2)), 1, 2, {})
if "judge" in sys.argv:
    liveness.set_abort_callback(lambda: print("judged", flush=True))
if "leave" in sys.argv:
    liveness.leave(75)
os.abort()
"""


@pytest.mark.parametrize(
    ("words", "code", "said", "warned"),
    [
        pytest.param([], 76, "", "peer lost: another process of the job died", marks=pytest.mark.soak),
        (["judge"], 76, "judged\n", "peer lost: another process of the job died"),
        pytest.param(["leave"], 75, "", "", marks=pytest.mark.soak),
        (["judge", "leave"], 75, "", ""),
    ],
)
def test_an_abort_is_a_lost_peer_unless_this_process_was_leaving(words, code, said, warned):
    ended = subprocess.run([sys.executable, "-c", ABORT, *words], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout) == (code, said)
    said_to_user = drop_plugin_messages(ended.stderr)
    assert said_to_user.startswith(warned)
    assert bool(said_to_user) == bool(warned)
