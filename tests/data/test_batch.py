from collections import Counter
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from runner.data import Dataset, global_batch
from tests.data.corpus import load, write_bin

T = 8


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    return load(write_bin(tmp_path / "a.bin", np.arange(3000)), cache=tmp_path, sequence_length=T)


def make_sharding(data: int, fsdp: int, tensor: int, *axes: object) -> NamedSharding:
    devices = np.array(jax.devices()[: data * fsdp * tensor]).reshape(data, fsdp, tensor)
    return NamedSharding(Mesh(devices, ("data", "fsdp", "tensor")), PartitionSpec(*(axes or (None, ("data", "fsdp")))))


@pytest.mark.parametrize(
    ("S", "B", "sharding"),
    [
        (1, 16, (1, 1, 1)),
        (1, 16, (8, 1, 1)),
        (2, 8, (2, 4, 1)),
        (2, 8, (2, 2, 2)),
        (4, 4, (1, 2, 4)),
        (16, 1, (1, 1, 8)),
        (2, 8, (2, 2, 2, "data", "fsdp", "tensor")),
        (2, 8, (2, 2, 2, None, None, ("data", "tensor"))),
    ],
)
@pytest.mark.parametrize("split", ["train", "validation"])
def test_a_step_holds_the_same_examples_on_every_mesh_and_split(
    dataset: Dataset, S: int, B: int, sharding: tuple, split: str
) -> None:
    batch = global_batch(dataset, split, 4, accumulate_steps=S, micro_batch=B, sharding=make_sharding(*sharding))
    expected = dataset.rows(split, 4 * 16, 16)
    assert list(batch) == ["x", "y", "padding_mask"]
    for field, array in batch.items():
        assert array.shape == (S, B, T)
        np.testing.assert_array_equal(np.asarray(array).reshape(16, T), getattr(expected, field))
    assert (batch["x"].dtype, batch["padding_mask"].dtype) == (np.int32, np.bool_)


def test_every_row_is_read_once_however_often_it_is_replicated(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: Counter[int] = Counter()
    rows = Dataset.rows

    def counted(self: Dataset, split: str, first: int, count: int) -> object:
        reads.update(range(first, first + count))
        return rows(self, split, first, count)

    monkeypatch.setattr(Dataset, "rows", counted)
    global_batch(dataset, "train", 3, accumulate_steps=2, micro_batch=8, sharding=make_sharding(2, 2, 2))
    assert reads == Counter(range(48, 64))


def test_any_step_is_reached_at_once(dataset: Dataset) -> None:
    sharding = make_sharding(1, 1, 1)
    batch = global_batch(dataset, "train", 10**9, accumulate_steps=1, micro_batch=4, sharding=sharding)
    np.testing.assert_array_equal(batch["x"][0], dataset.rows("train", 4 * 10**9, 4).x)
