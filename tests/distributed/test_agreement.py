"""Broadcasts, gathers and barriers of `Hosts`, in one process and in two real ones."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from runner.distributed.key_value import MAX_DECISIONS
from runner.distributed.rendezvous import join_job
from runner.errors import InvalidError
from runner.spec import Deadlines

ROOT = Path(__file__).parents[2]


@pytest.fixture
def single_host():
    return join_job(None, Deadlines())


def test_a_single_process_is_process_0_and_agrees_with_itself(single_host):
    assert (single_host.process_id, single_host.num_processes, single_host.is_main) == (0, 1, True)
    assert single_host.agree({"step": 3}) == {"step": 3}
    assert single_host.gather("x") == ["x"]
    assert single_host.run_on_main(lambda: 7) == 7
    single_host.barrier()
    single_host.leave(0)


def test_a_single_process_raises_invalid_errors_of_process_0(single_host):
    def refuse():
        raise InvalidError("no")

    with pytest.raises(InvalidError, match="no"):
        single_host.run_on_main(refuse)


def test_other_errors_on_process_0_propagate(single_host):
    with pytest.raises(ZeroDivisionError):
        single_host.run_on_main(lambda: 1 / 0)


PROGRAM = """
import json, sys, time
from runner.errors import InvalidError, PeerLostError
from runner.distributed.rendezvous import Placement, join_job
from runner.spec import Deadlines

hosts = join_job(Placement(sys.argv[1], 2, int(sys.argv[2])), Deadlines())
me = hosts.process_id
result = {"me": [me, hosts.num_processes, hosts.is_main]}
result["agree"] = [hosts.agree({"step": 3 + me}), hosts.agree(f"second {me}")]
result["gather"] = hosts.gather([me, None])
result["run_on_main"] = hosts.run_on_main(lambda: f"done by {me}")

def refuse():
    raise InvalidError(f"refused by {me}")

try:
    hosts.run_on_main(refuse)
except InvalidError as error:
    result["refused"] = str(error)
hosts.barrier()
result["tick"] = hosts.agree_on_tick(10 + me)
result["many"] = [hosts.agree(number + me) for number in range(300)] == list(range(300))
result["num_keys"] = len(hosts.store._client.key_value_dir_get("runner"))
result["after"] = hosts.agree("still in step")
if me == 0:
    try:
        hosts.gather("on time", deadline_seconds=1)
    except PeerLostError as error:
        result["late"] = [str(error), error.exit_code]
    hosts.announce_stop()
else:
    hosts.await_stop()
print(json.dumps(result), flush=True)
hosts.leave(0)
"""


@pytest.fixture(scope="module")
def outputs_of_two():
    """Return the outputs of two real processes, in order of process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, address, str(process)], cwd=ROOT, env=os.environ, stdout=subprocess.PIPE
        )
        for process in range(2)
    ]
    outputs = [process.communicate(timeout=600)[0] for process in processes]
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def test_agree_broadcasts_the_value_of_process_0(outputs_of_two):
    assert [host["me"] for host in outputs_of_two] == [[0, 2, True], [1, 2, False]]
    for host in outputs_of_two:
        assert host["agree"] == [{"step": 3}, "second 0"]
        assert host["run_on_main"] == "done by 0"
        assert host["after"] == "still in step"


def test_gather_returns_every_value_in_order_of_process(outputs_of_two):
    for host in outputs_of_two:
        assert host["gather"] == [[0, None], [1, None]]
        assert host["tick"] == 11


def test_hundreds_of_decisions_leave_few_keys(outputs_of_two):
    for host in outputs_of_two:
        assert host["many"]
        assert 0 < host["num_keys"] <= MAX_DECISIONS + 3 * 2 + 2, "of decisions, gathers and stop ticks"


def test_an_invalid_error_of_process_0_is_raised_everywhere(outputs_of_two):
    assert [host["refused"] for host in outputs_of_two] == ["refused by 0"] * 2


def test_a_deadline_names_the_missing_process(outputs_of_two):
    message, code = outputs_of_two[0]["late"]
    assert message.startswith("process 1 of 2 did not arrive within 1 s")
    assert code == 76
