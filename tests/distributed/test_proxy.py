"""Proxies in the environment, through which no connection between the processes of a job may go."""

import json
import os
import socket
import subprocess
import sys
import threading

import pytest

from runner.distributed.rendezvous import bypass_proxies
from runner.process import find_free_port
from tests.support.job_process import ROOT

# Environment, and its exceptions after the host of process 0 was added; None where it must stay as it is.
ENVIRONMENTS = [
    ({}, None),
    ({"http_proxy": ""}, None),
    ({"http_proxy": "p:1"}, {"no_proxy": "10.0.0.1"}),
    ({"HTTPS_PROXY": "p:1", "no_proxy": "a, .b.c,,"}, {"no_proxy": "a,.b.c,10.0.0.1"}),
    ({"all_proxy": "p:1", "NO_PROXY": "a"}, {"no_proxy": "a,10.0.0.1"}),
    ({"ALL_PROXY": "p:1", "NO_PROXY": "a", "no_proxy": "b"}, {"no_proxy": "b,10.0.0.1"}),
    (
        {"grpc_proxy": "p:1", "no_grpc_proxy": "a", "no_proxy": "b"},
        {"no_grpc_proxy": "a,10.0.0.1", "no_proxy": "b,10.0.0.1"},
    ),
    ({"GRPC_PROXY": "p:1", "no_proxy": "10.0.0.1"}, {"no_proxy": "10.0.0.1"}),
]


@pytest.mark.parametrize(("given", "exceptions"), ENVIRONMENTS)
def test_the_host_of_process_0_is_added_to_the_exceptions_of_proxies(given, exceptions):
    variables = dict(given)
    bypass_proxies(variables, "10.0.0.1:8476")
    assert variables == given | (exceptions or {})


@pytest.mark.parametrize(
    ("address", "host"),
    [("[fd00::7]:80", "fd00::7"), ("node-3.cluster:80", "node-3.cluster"), ("10.0.0.1:80", "10.0.0.1")],
)
def test_the_exception_is_the_host_alone(address, host):
    variables = {"http_proxy": "p:1"}
    bypass_proxies(variables, address)
    assert variables["no_proxy"] == host


JOIN = """
import json, sys
import jax
from runner.distributed.rendezvous import Placement, join_job
from runner.spec import Deadlines
for address in json.loads(sys.argv[1]):
    hosts = join_job(Placement(address, 2, int(sys.argv[2])), Deadlines(start_seconds=10))
    hosts.barrier()
    jax.distributed.shutdown()
print("joined")
"""


def test_processes_join_past_a_proxy():
    names = ["http_proxy", "https_proxy", "grpc_proxy", "all_proxy"]
    asked = []

    def serve(proxy):
        while True:
            try:
                connection, _ = proxy.accept()
            except OSError:
                return
            with connection:
                asked.append(connection.recv(1000))

    with socket.create_server(("127.0.0.1", 0)) as proxy:
        threading.Thread(target=serve, args=(proxy,), daemon=True).start()
        url = f"http://127.0.0.1:{proxy.getsockname()[1]}"
        kept = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
        variables = kept | dict.fromkeys(names + [name.upper() for name in names], url)
        addresses = json.dumps([f"{host}:{find_free_port()}" for host in ("127.0.0.1", "[::1]", "localhost")])
        commands = [[sys.executable, "-c", JOIN, addresses, str(process)] for process in range(2)]
        processes = [
            subprocess.Popen(
                command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            for command in commands
        ]
        outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert not asked, outputs
    assert all(output.endswith("joined\n") for output in outputs), outputs
