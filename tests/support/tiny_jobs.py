"""Tiny jobs that take seconds to compile and milliseconds per step, and readers of their run directories.

Importing this module opens a compile cache that is shared by all processes of the test session.
"""

import copy
import hashlib
import itertools
import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.sharding import Mesh

from experiments.counter import Counter
from experiments.gpt import PretrainGPT
from runner import BaseTrainer, ExecutionSpec, RestoreableJob
from runner.attempts.compile_cache import CompileCache
from runner.distributed.preemption import StopNotice
from runner.errors import PreemptedError
from runner.parallel.mesh import AXES, make_mesh
from runner.storage import LocalStore, parse_lines, read_json
from tests.support import simulated_devices
from tests.support.arrays import CountBright

CompileCache().open()

ROOT = Path(__file__).resolve().parents[2]
TEXT = "".join(f"{number} squared is {number * number}.\n" for number in range(1500))

# All factorisations of 8 devices into data x fsdp x tensor.
FACTORISATIONS = [sizes for sizes in itertools.product((1, 2, 4, 8), repeat=3) if sizes[0] * sizes[1] * sizes[2] == 8]
# The daily tests use tensor alone, fsdp alone and all three axes; the soak tests use all factorisations.
_DAILY = ((1, 1, 8), (1, 8, 1), (2, 2, 2))
MESHES = [sizes if sizes in _DAILY else pytest.param(sizes, marks=pytest.mark.soak) for sizes in FACTORISATIONS]

# Each axis alone over 4 devices, all pairs over 2 x 4, and two triples over 2 x 2 x 2.
AXIS_MESHES = [
    *({axis: 4} for axis in AXES),
    *({first: 2, second: 4} for first, second in itertools.combinations(AXES, 2)),
    {"fsdp": 2, "sequence": 2, "expert": 2},
    {"data": 2, "sequence": 2, "tensor": 2},
]


def make_full_mesh(data: int, fsdp: int, tensor: int) -> Mesh:
    return make_mesh({"data": data, "fsdp": fsdp, "tensor": tensor})


def make_partial_mesh(sizes: Mapping[str, int]) -> Mesh:
    """Make a mesh over the first devices, as many as the product of the axis sizes."""
    return make_mesh(sizes, jax.devices()[: math.prod(sizes.values())])


def format_mesh(sizes: Mapping[str, int]) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in sizes.items())


def merge(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Set dotted keys of `base` to copies of the values; a later key may modify a section set by an earlier one."""
    for dotted, value in changes.items():
        section = base
        *parents, key = dotted.split(".")
        for parent in parents:
            section = section.setdefault(parent, {})
        section[key] = copy.deepcopy(value)
    return base


def make_gpt_document(directory: Path, **changes: Any) -> dict[str, Any]:
    """Return the spec of a GPT with a few thousand parameters; `changes` are dotted keys."""
    text = directory.parent / "text.txt"
    if not text.exists():
        text.write_text(TEXT)
    config = {
        "model": {"layers": 2, "heads": 4, "width": 32},
        "data": {"source": str(text), "sequence_length": 16},
        "optimizer": {"learning_rate": 1.0e-3},
        "schedule": {"warmup_steps": 2, "final_learning_rate": 1.0e-4},
        "train": {"total_steps": 8, "global_batch_examples": 16},
        "eval": {"every_steps": 4, "batches": 2},
    }
    document = {
        "name": "tiny",
        "job": "experiments.gpt:PretrainGPT",
        "directory": str(directory),
        "topology": {"mesh": {"data": "auto", "fsdp": 1, "tensor": 1}},
        "checkpoint": {"every_steps": 100},
        "logging": {"every_steps": 1},
        "config": config,
    }
    return merge(document, changes)


def make_gpt_spec(directory: Path, **changes: Any) -> ExecutionSpec:
    return ExecutionSpec.model_validate(make_gpt_document(directory, **changes))


def make_gpt(directory: Path, job_class: type[BaseTrainer] = PretrainGPT, **changes: Any) -> BaseTrainer:
    return job_class(make_gpt_spec(directory, **changes))


def get_job_name(job_class: type[RestoreableJob]) -> str:
    return f"{job_class.__module__}:{job_class.__qualname__}"


def make_counter(directory: Path, job_class: type[Counter] = Counter, **changes: Any) -> Counter:
    document = {
        "name": "count",
        "job": "experiments.counter:Counter",
        "directory": str(directory),
        "checkpoint": {"every_steps": 10},
        "config": {"total_steps": 40, "width": 64},
    }
    return job_class(ExecutionSpec.model_validate(merge(document, changes)))


class RecordingTrainer(BaseTrainer):
    """Trainer that records a digest of every training example, by step and index in the global batch."""

    def batch(self, slice="train", step=None):
        batch = super().batch(slice, step)
        if slice == "train":
            S, B, *_ = batch["padding_mask"].shape
            rows: dict[int, str] = {}
            for shards in zip(*(batch[field].addressable_shards for field in sorted(batch)), strict=True):
                micros, examples = range(S)[shards[0].index[0]], range(B)[shards[0].index[1]]
                fields = [jax.device_get(shard.data) for shard in shards]
                for (m, micro), (e, example) in itertools.product(enumerate(micros), enumerate(examples)):
                    content = b"".join(field[m, e].tobytes() for field in fields)
                    rows[micro * B + example] = hashlib.sha256(content).hexdigest()
            path = self.store.root / "rows" / f"{step}.{self.attempt.hosts.process_id}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(rows))
        return batch


class RecordingGPT(RecordingTrainer, PretrainGPT):
    """GPT that records its training sequences."""


class RecordingCountBright(RecordingTrainer, CountBright):
    """Trainer on arrays that records its training examples."""


def read_recorded_rows(directory: Path, step: int) -> dict[str, str]:
    """Return the digest of each sequence of a step by its index in the global batch, from all processes."""
    paths = (directory / "rows").glob(f"{step}.*")
    return {row: digest for path in paths for row, digest in json.loads(path.read_text()).items()}


class StopAfter(StopNotice):
    """Stop notice that arrives when `job` has completed `step` steps."""

    def __init__(self, job: RestoreableJob, step: int):
        super().__init__()
        self._job, self._step = job, step

    def poll(self) -> bool:
        return self._job.step >= self._step


def make_mesh_options(data: int, fsdp: int, tensor: int) -> dict[str, Any]:
    return {"topology.mesh": {"data": data, "fsdp": fsdp, "tensor": tensor}}


def environment(devices: int | None = None, **changes: str) -> dict[str, str]:
    """Return the environment of a subprocess with `devices` simulated devices, or that of this process."""
    return (dict(os.environ) if devices is None else simulated_devices.environment(devices)) | changes


def start_python(*arguments: str, devices: int | None = None, **changes: str) -> "subprocess.Popen[str]":
    """Start `python ARGUMENTS` at the root of the repository, with both output streams in one pipe."""
    return subprocess.Popen(
        [sys.executable, *arguments],
        env=environment(devices, **changes),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for_output(process: "subprocess.Popen[str]", timeout: float = 600) -> str:
    """Wait for a process, check that it exits with 0, and return its output."""
    output, _ = process.communicate(timeout=timeout)
    assert process.returncode == 0, output
    return output


def read_rows(directory: Path) -> list[Any]:
    """Return the rows of metrics.jsonl."""
    return parse_lines((directory / "metrics.jsonl").read_bytes())


def read_trajectory(directory: Path) -> list[Any]:
    """Return the rows without the speed metrics, which differ between runs."""
    return [{key: value for key, value in row.items() if not key.startswith("perf/")} for row in read_rows(directory)]


def read_outcome(directory: Path) -> tuple[list[Any], Any]:
    """Return the trajectory and the result."""
    return read_trajectory(directory), read_json(LocalStore(directory), "result.json")


def stop_after(job: RestoreableJob, step: int) -> None:
    """Run `job` until it has completed `step` steps."""
    with pytest.raises(PreemptedError):
        job(stop=StopAfter(job, step))


def are_leaves_equal(a: Any, b: Any) -> bool:
    """Return True if two pytrees of arrays are bit-identical, on whatever devices they are placed."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(x.dtype == y.dtype and jax.device_get(x).tobytes() == jax.device_get(y).tobytes() for x, y in pairs)
