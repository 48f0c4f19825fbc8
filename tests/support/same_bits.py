"""State and metrics, as bytes, of a job with `config.train.same_bits_devices` on a given number of devices."""

from typing import Any

import jax
import numpy as np
import pytest

from runner.parallel.mesh import AXES
from runner.train import compile
from runner.train.layout import list_batch_layouts
from runner.trainer import BaseTrainer
from tests.support.simulated_devices import USER_COMPILER_OPTIONS

DEVICES, STEPS = 8, 3
DEVICE_COUNTS = (1, 2, DEVICES)
SAME_BITS_OPTIONS: dict[str, Any] = {
    **{f"topology.mesh.{axis}": 1 for axis in AXES},
    "topology.mesh.data": "auto",
    "config.train.micro_batch_examples": 1,
    "config.train.same_bits_devices": DEVICES,
}


def use_user_compiler_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile steps with the options of users instead of the fast ones of tests."""
    monkeypatch.setattr(compile, "make_compiler_options", lambda *_: USER_COMPILER_OPTIONS)


def compute_bits(job: BaseTrainer, devices: int) -> dict[str, bytes]:
    """Run some steps and a validation step, and return the bytes of state, metrics and validation results by name."""
    train_setup = job.setup_builder.build(jax.devices()[:devices])
    layout = list_batch_layouts(job.config, train_setup.mesh)[0]
    train_step = train_setup.compile_train(job.train_step, layout).executable
    val_step = train_setup.compile_val(job.val_step, train_setup.abstract_state, layout)
    state, metrics = train_setup.init_state(), []
    for step in range(STEPS):
        state, loss, meta = train_step(state, layout.batch(job.setup_builder.dataset, "train", step), train_setup.key)
        metrics.append((loss, meta))
    found = {
        "state": state,
        "metrics": metrics,
        "validation": val_step(state, layout.batch(job.setup_builder.dataset, "train", 0)),
    }
    return {jax.tree_util.keystr(path): _bits(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(found)}


def _bits(leaf: Any) -> bytes:
    is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.device_get(jax.random.key_data(leaf) if is_key else leaf)).tobytes()
