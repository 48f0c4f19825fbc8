"""What a job with `config.train.same_bits_devices` makes on some of the devices here: every bit of a few steps."""

from typing import Any

import jax
import numpy as np
import pytest

from runner.parallel.mesh import AXES
from runner.train import compile
from runner.train.compile import list_batch_layouts
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
    """Else steps are compiled as tests are: in little time."""
    monkeypatch.setattr(compile, "make_compiler_options", lambda *_: USER_COMPILER_OPTIONS)


def compute_bits(job: BaseTrainer, devices: int) -> dict[str, bytes]:
    """By name the state after some steps, what these told, and what the validation step finds then."""
    train_setup = job.setup_builder.build(jax.devices()[:devices])
    layout = list_batch_layouts(job.config, train_setup.mesh)[0]
    train_step = train_setup.compile_train(job.train_step, layout).executable
    val_step = train_setup.compile_val(job.val_step, train_setup.abstract_state, layout)
    state, told = train_setup.init_state(), []
    for step in range(STEPS):
        state, loss, meta = train_step(state, layout.batch(job.setup_builder.dataset, "train", step), train_setup.key)
        told.append((loss, meta))
    found = {
        "state": state,
        "told": told,
        "judged": val_step(state, layout.batch(job.setup_builder.dataset, "train", 0)),
    }
    return {jax.tree_util.keystr(path): _bits(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(found)}


def _bits(leaf: Any) -> bytes:
    is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.device_get(jax.random.key_data(leaf) if is_key else leaf)).tobytes()
