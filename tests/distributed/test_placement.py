"""Placement of processes from the launch environment of each engine."""

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from runner.distributed.rendezvous import Placement, detect_placement
from runner.errors import InvalidError

ROOT = Path(__file__).parents[2]
TORCHRUN = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "WORLD_SIZE": "4", "RANK": "3"}
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_NODELIST": "n[0-1]",
    "SLURM_NTASKS": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
}
OPEN_MPI = {
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}


@pytest.fixture
def set_engine(monkeypatch):
    """Set the variables of one engine and unset all others."""
    for name in list(os.environ):
        if name.startswith(("SLURM", "OMPI", "PMI", "TPU", "MEGASCALE", "MASTER", "KUBERNETES", "JAX_COORDINATOR")):
            monkeypatch.delenv(name)

    def set_all(variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return set_all


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({}, None),
        (TORCHRUN, Placement("10.0.0.1:29501", 4, 3)),
        (TORCHRUN | {"JAX_COORDINATOR_PORT": "1234"}, Placement("10.0.0.1:1234", 4, 3)),
        (TORCHRUN | {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, Placement("10.0.0.1:29501", 4, 3, (1,))),
        (TORCHRUN | {"WORLD_SIZE": "1", "RANK": "0"}, None),
        (SLURM, Placement("n0:61447", 2, 1)),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_LOCALID": "2"}, Placement("n0:61447", 2, 1, (2,))),
        # With --gpus-per-task each task sees its GPU alone, as number 0.
        (
            SLURM | {"SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_LOCALID": "2", "CUDA_VISIBLE_DEVICES": "0"},
            Placement("n0:61447", 2, 1, None),
        ),
        (
            SLURM | {"SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_LOCALID": "2", "CUDA_VISIBLE_DEVICES": "0,1,2,3"},
            Placement("n0:61447", 2, 1, (2,)),
        ),
        (SLURM | {"SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, None),
        (SLURM | {"SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, None),
        (OPEN_MPI, Placement("10.96.0.1:62624", 8, 5, (1,))),
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, None),
    ],
)
def test_the_placement_follows_the_launch_environment(set_engine, variables, place):
    set_engine(variables)
    assert detect_placement(5) == place


@pytest.mark.parametrize(
    "claim",
    [
        {"SLURM_STEP_NUM_TASKS": "4"},
        {"OMPI_COMM_WORLD_SIZE": "2"},
        {"PMI_SIZE": "16"},
        {"WORLD_SIZE": "2", "RANK": "0"},
        {"MEGASCALE_NUM_SLICES": "2"},
        {"TPU_WORKER_HOSTNAMES": "a,b,c,d"},
    ],
)
def test_a_process_that_cannot_find_its_peers_is_rejected(set_engine, claim):
    set_engine(claim)
    with pytest.raises(InvalidError, match=r"says that this is one of several .* give --coordinator HOST:PORT"):
        detect_placement(5)


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        (TORCHRUN | {"MASTER_PORT": "http"}, "cannot be read"),
        (TORCHRUN | {"MASTER_PORT": "65535"}, "65536 is no port"),
        (TORCHRUN | {"WORLD_SIZE": "four"}, "cannot be read"),
        (TORCHRUN | {"RANK": "4"}, "this is process 4 of 4"),
        (TORCHRUN | {"RANK": "-1"}, "this is process -1 of 4"),
        (SLURM | {"SLURM_PROCID": "x"}, "cannot be read"),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "2(x1)"}, "cannot be read"),
        (SLURM | {"SLURM_PROCID": "5"}, "this is process 5 of 2"),
        (SLURM | {"SLURM_JOB_ID": "x"}, "cannot be read"),
        (SLURM | {"JAX_COORDINATOR_PORT": "70000"}, "70000 is no port"),
    ],
)
def test_a_launch_environment_that_contradicts_itself_is_rejected(set_engine, variables, reason):
    set_engine(variables)
    with pytest.raises(InvalidError, match=rf"{reason}.*; give --coordinator HOST:PORT"):
        detect_placement(5)


METADATA = {
    "agent-worker-number": "2",
    "worker-network-endpoints": "unknown:unknown:127.0.0.1,unknown:unknown:10.0.0.3,unknown:unknown:10.0.0.4",
    "tpu-env": "ACCELERATOR_TYPE: 'v5litepod-12'\n",
}
TPU_VM_VARIABLES = """
import json, os
import jax  # where there are no chips it says that there is no metadata server
os.environ.pop("TPU_SKIP_MDS_QUERY", None)
from runner.distributed.rendezvous import detect_placement
place = detect_placement(5)
print(json.dumps([place.coordinator, place.num_processes, place.process_id]))
"""


class Metadata(BaseHTTPRequestHandler):
    """The metadata server of a TPU VM."""

    def do_GET(self):
        value = METADATA.get(self.path.rpartition("/")[2])
        self.send_response(404 if value is None else 200)
        self.end_headers()
        self.wfile.write((value or "").encode())

    def log_message(self, *arguments):
        pass


def read_tpu_vm_placement(**variables):
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TPU")}
    environment |= {"JAX_FORCE_TPU_INIT": "1", "JAX_PLATFORMS": "cpu"} | variables
    output = subprocess.run(
        [sys.executable, "-c", TPU_VM_VARIABLES], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    return json.loads(output.stdout.splitlines()[-1])


def test_a_tpu_vm_reads_its_placement_from_the_metadata_server():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Metadata)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"127.0.0.1:{server.server_address[1]}"
    assert read_tpu_vm_placement(GCE_METADATA_IP=address) == ["127.0.0.1:8482", 3, 2]
    server.shutdown()


def test_hosts_of_several_slices_on_kubernetes_are_numbered_by_slice():
    variables = {"TPU_WORKER_HOSTNAMES": "a,b", "TPU_WORKER_ID": "1"}
    slices = {"MEGASCALE_COORDINATOR_ADDRESS": "localhost", "MEGASCALE_NUM_SLICES": "2", "MEGASCALE_SLICE_ID": "1"}
    assert read_tpu_vm_placement(**variables, **slices) == ["localhost:8482", 4, 3]
