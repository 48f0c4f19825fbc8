"""Host offload of the optimizer state changes where it lies, and nothing else."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from runner import BaseTrainer
from runner.checkpoint import save
from runner.checkpoint.arrays import ArrayWriter
from runner.checkpoint.fingerprint import list_leaf_names
from runner.checkpoint.leaves import is_on_host
from runner.checkpoint.save import DoubleBuffer
from runner.errors import InvalidError
from runner.train import setup
from tests.support.tiny_jobs import make_gpt, stop_after

OFFLOAD = {"config.memory.offload_optimizer": True, "checkpoint.every_steps": 3}


def get_fingerprint(job: BaseTrainer) -> str:
    assert job.store.root is not None
    return str(json.loads((job.store.root / "result.json").read_text())["fingerprint"])


def list_on_host(job: BaseTrainer) -> list[str]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(job.state)
    return [jax.tree_util.keystr(path, simple=True, separator=".") for path, leaf in leaves if is_on_host(leaf)]


@pytest.mark.soak
def test_an_offloaded_optimizer_gives_the_same_bits_over_a_resume(tmp_path: Path):
    usual = make_gpt(tmp_path / "usual")
    usual()
    stopped = make_gpt(tmp_path / "run", **OFFLOAD)
    stop_after(stopped, 5)
    moments = list_on_host(stopped)
    assert moments
    assert all(name.startswith("opt_state.") for name in moments)
    assert len(moments) == 2 * len(jax.tree.leaves(stopped.state.params))
    last = make_gpt(tmp_path / "run", **OFFLOAD)
    last()
    assert list_on_host(last) == moments
    assert get_fingerprint(last) == get_fingerprint(usual)


@pytest.mark.soak
def test_the_optimizer_can_be_offloaded_in_a_part_of_a_run(tmp_path: Path):
    usual = make_gpt(tmp_path / "usual")
    usual()
    stop_after(make_gpt(tmp_path / "run", **OFFLOAD), 5)
    device = make_gpt(tmp_path / "run", **{**OFFLOAD, "config.memory.offload_optimizer": False})
    stop_after(device, 6)
    assert list_on_host(device) == []
    last = make_gpt(tmp_path / "run", **OFFLOAD)
    last()
    assert get_fingerprint(last) == get_fingerprint(usual)


CHANGES: dict[str, dict[str, Any]] = {
    "adafactor": {"config.optimizer.name": "adafactor"},
    "schedule-free, from weights": {
        "config.optimizer.name": "schedule_free_adamw",
        "config.schedule": {"name": "constant", "warmup_steps": 2},
    },
    "averages": {"config.ema": {"decays": [0.9]}},
    "bfloat16": {"config.precision": {"params": "bfloat16", "compute": "bfloat16"}},
    "ordered sums": {"config.train.same_bits_devices": 8, "config.train.micro_batch_examples": 2},
    "documents": {"config.data.packing": "documents"},
    "fsdp": {"topology.mesh": {"data": 1, "fsdp": "auto"}},
}


@pytest.mark.soak
@pytest.mark.parametrize("name", CHANGES)
def test_every_kind_of_step_gives_the_same_bits_offloaded(tmp_path: Path, name: str):
    changes = CHANGES[name]
    if "from weights" in name:
        make_gpt(tmp_path / "base")()
        changes = {**changes, "checkpoint.init_from": str(tmp_path / "base")}
    usual, offloaded = make_gpt(tmp_path / "usual", **changes), make_gpt(tmp_path / "on", **OFFLOAD, **changes)
    usual()
    offloaded()
    assert list_on_host(offloaded)
    assert get_fingerprint(offloaded) == get_fingerprint(usual)


def test_a_device_without_pinned_host_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(setup.mesh_rules, "has_host_memory", lambda mesh: False)
    with pytest.raises(InvalidError, match=r"config\.memory\.offload_optimizer: .*pinned host memory"):
        make_gpt(tmp_path / "run", **OFFLOAD)()
    assert not (tmp_path / "run" / "events.jsonl").exists()


class NoDoubleBuffer(DoubleBuffer):
    """The buffer of another device than a CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.is_needed = False


@pytest.mark.soak
def test_a_save_reads_other_host_memory_than_the_next_step_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """On a GPU numpy's view of pinned host memory keeps the next step from reusing it, so that the step fails."""
    monkeypatch.setattr(save, "DoubleBuffer", NoDoubleBuffer)
    job = make_gpt(tmp_path / "run", **{**OFFLOAD, "checkpoint.every_steps": 8})
    start = ArrayWriter.start
    num_shared = []

    def watch(writer: ArrayWriter, target: str, leaves: dict[str, jax.Array], error: Exception | None = None) -> Any:
        own = dict(zip(list_leaf_names(job.state), jax.tree.leaves(job.state), strict=True))
        moments = [name for name in leaves if is_on_host(leaves[name])]
        assert moments
        num_shared.append(
            sum(
                np.shares_memory(np.asarray(saved.data), np.asarray(trained.data))
                for name in moments
                for saved, trained in zip(leaves[name].addressable_shards, own[name].addressable_shards, strict=True)
            )
        )
        return start(writer, target, leaves)

    monkeypatch.setattr(ArrayWriter, "start", watch)
    job()
    assert num_shared == [0]
