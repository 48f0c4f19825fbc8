import json
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from runner.data import Dataset, load_global_batch
from tests.data.datasets import KINDS, load_kind
from tests.support import simulated_devices


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def dataset(kind: str, directory: Path) -> Dataset:
    return load_kind(kind, directory)


def make_sharding(data: int, fsdp: int, tensor: int, *axes: object) -> NamedSharding:
    devices = np.array(jax.devices()[: data * fsdp * tensor]).reshape(data, fsdp, tensor)
    return NamedSharding(Mesh(devices, ("data", "fsdp", "tensor")), PartitionSpec(*(axes or (None, ("data", "fsdp")))))


SPLITS: list[tuple[int, int, tuple]] = [
    (2, 8, (2, 2, 2)),
    (1, 16, (1, 1, 1)),
    (1, 16, (8, 1, 1)),
    (2, 8, (2, 4, 1)),
    (4, 4, (1, 2, 4)),
    (16, 1, (1, 1, 8)),
    (2, 8, (2, 2, 2, "data", "fsdp", "tensor")),
    (2, 8, (2, 2, 2, None, None, ("data", "tensor"))),
]
# Daily: all splits of one kind, and one split of every kind.
CASES = [
    pytest.param(kind, *split, marks=() if kind in ("tokens", "arrays") or split == SPLITS[0] else pytest.mark.soak)
    for kind in KINDS
    for split in SPLITS
    if "array" not in kind or len(split[2]) < 6  # which have no sequences to shard
]


@pytest.mark.parametrize(("kind", "S", "B", "sharding"), CASES)
def test_a_step_holds_the_same_examples_on_every_mesh_and_split(
    dataset: Dataset, S: int, B: int, sharding: tuple
) -> None:
    for split in ("train", *dataset.validation):
        batch = load_global_batch(
            dataset, split, 1, accumulate_steps=S, micro_batch=B, sharding=make_sharding(*sharding)
        )
        expected = dataset.read(split, 16, 16)
        assert set(batch) == set(expected) == set(dataset.fields)
        for field, array in batch.items():
            assert (array.shape, array.dtype) == ((S, B, *dataset.fields[field].shape), dataset.fields[field].dtype)
            np.testing.assert_array_equal(np.asarray(array).reshape(16, *array.shape[2:]), expected[field])


def test_replicated_sequences_are_read_once_and_in_one_call(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: Counter[int] = Counter()
    calls: list[int] = []
    read_dataset = Dataset.read_numbers

    def counted(self: Dataset, split: str, numbers: np.ndarray) -> object:
        reads.update(numbers.tolist())
        calls.append(len(numbers))
        return read_dataset(self, split, numbers)

    monkeypatch.setattr(Dataset, "read_numbers", counted)
    load_global_batch(dataset, "train", 3, accumulate_steps=2, micro_batch=8, sharding=make_sharding(2, 2, 2))
    assert reads == Counter(range(48, 64))
    assert calls == [16]


def test_any_step_can_be_read_directly(dataset: Dataset) -> None:
    sharding = make_sharding(1, 1, 1)
    batch = load_global_batch(dataset, "train", 10**9, accumulate_steps=1, micro_batch=4, sharding=sharding)
    for name, values in dataset.read("train", 4 * 10**9, 4).items():
        np.testing.assert_array_equal(batch[name][0], values)


NUM_DEVICES = 4
HOST_PROGRAM = """
import json
import sys
from pathlib import Path

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from runner.data import Dataset, load_global_batch
from tests.data.datasets import load_kind

jax.distributed.initialize(f"127.0.0.1:{sys.argv[1]}", int(sys.argv[2]), int(sys.argv[3]))
read = []
read_dataset = Dataset.read_numbers

def record(self, split, numbers):
    read.extend(numbers.tolist())
    return read_dataset(self, split, numbers)

Dataset.read_numbers = record
sharding = NamedSharding(Mesh(jax.devices(), ("data",)), PartitionSpec(None, "data"))
found = {}
for kind in sys.argv[5:]:
    dataset = load_kind(kind, Path(sys.argv[4]))
    read.clear()
    batch = load_global_batch(dataset, "train", 5, accumulate_steps=2, micro_batch=4, sharding=sharding)
    held = {name: [shard.data[:, 0].tolist() for shard in array.addressable_shards] for name, array in batch.items()}
    found[kind] = sorted(read), held
print(json.dumps(found))
"""


@pytest.mark.parametrize(
    ("num_hosts", "kinds"),
    [(2, ("tokens", "arrays")), *(pytest.param(number, KINDS, marks=pytest.mark.soak) for number in (1, 2, 4))],
)
@pytest.mark.soak
def test_a_host_reads_only_the_sequences_of_its_devices(
    num_hosts: int, kinds: tuple[str, ...], directory: Path
) -> None:
    datasets = {kind: load_kind(kind, directory) for kind in kinds}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    each = NUM_DEVICES // num_hosts
    hosts = [
        subprocess.Popen(
            [sys.executable, "-c", HOST_PROGRAM, port, str(num_hosts), str(process_id), str(directory), *kinds],
            env=simulated_devices.environment(each),
            cwd=Path(__file__).parents[2],
            stdout=subprocess.PIPE,
            text=True,
        )
        for process_id in range(num_hosts)
    ]
    outputs = [json.loads(host.communicate(timeout=600)[0].splitlines()[-1]) for host in hosts]
    for kind, dataset in datasets.items():
        expected = dataset.read("train", 40, 8)
        for process_id, output in enumerate(outputs):
            read, held = output[kind]
            own = [[device, NUM_DEVICES + device] for device in range(process_id * each, (process_id + 1) * each)]
            assert read == sorted(40 + row for rows in own for row in rows)
            assert held == {name: [field[rows].tolist() for rows in own] for name, field in expected.items()}
