"""Trainer whose model has a toy kernel, which doubles numbers and can be faulty in its test.

The environment of a process says how: `KERNEL_FAULT` is the name of a fault, `KERNEL_PROCESS` the only process that has
it, and `KERNEL_SECONDS` the time that a case may take.
"""

import functools
import os
import time
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from runner.train import kernel_check
from runner.train.kernel_check import KernelCase, KernelTrial, get_kernel_use
from tests.support.bigram import BigramTrainer

FAULT, PROCESS, SECONDS = "KERNEL_FAULT", "KERNEL_PROCESS", "KERNEL_SECONDS"
if SECONDS in os.environ:
    kernel_check.CASE_SECONDS = float(os.environ[SECONDS])
    kernel_check._SLACK_SECONDS = 2.0
FAULTS = ("wrong", "a wrong gradient", "not finite", "wrong once in ten", "raises")


class Calls:
    """Number of trials that were made in this process, and of calls of faulty kernels."""

    trials = 0
    faulty = 0


def disturb(fault: str, values: np.ndarray) -> np.ndarray:
    """Return what a faulty kernel makes of right results."""
    Calls.faulty += 1
    if fault == "hangs":
        time.sleep(10_000)
    if fault == "raises":
        raise ValueError("no such instruction")
    if fault == "not finite":
        return np.where(np.arange(values.size) == 3, np.float32(np.nan), values)
    if fault == "wrong once in ten" and Calls.faulty % 10 != 7:
        return values
    return values + np.float32(0.01) * (np.arange(values.size) == 3)


def make_trial(fault: str) -> KernelTrial:
    Calls.trials += 1

    def run(form: Any, x: jax.Array, g: jax.Array) -> Any:
        out, pull_back = jax.vjp(form, x)
        return out, *pull_back(g)

    def faulty(x: jax.Array, g: jax.Array) -> Any:
        out, gradient = run(lambda x: 2 * x, x, g)
        call = functools.partial(jax.pure_callback, functools.partial(disturb, fault), out)
        return (out, call(gradient)) if fault == "a wrong gradient" else (call(out), gradient)

    kernel = functools.partial(run, lambda x: 2 * x)
    x, g = np.random.default_rng(0).normal(size=(2, 16)).astype(np.float32)
    return KernelTrial(faulty if fault else kernel, functools.partial(run, lambda x: x + x), (x, g))


def make_case(fault: str = "", kernel: str = "double", **facts: Any) -> KernelCase:
    return KernelCase(
        kernel, "doubling", "ours", "a sum", {"size": 16, **facts}, "float32", functools.partial(make_trial, fault)
    )


def get_fault() -> str:
    """Return the fault that this process has."""
    fault, process = os.environ.get(FAULT, ""), os.environ.get(PROCESS)
    return fault if process is None or int(process) == jax.process_index() else ""


class DoublingModel(nn.Module):
    """Bigram model whose logits are doubled by the kernel, or otherwise by a sum."""

    size: int

    @nn.compact
    def __call__(self, x_BxT: jax.Array, *, deterministic: bool) -> Any:
        logits_BxTxV = nn.Embed(self.size, self.size, name="table")(x_BxT)
        use = get_kernel_use()
        if not use.is_allowed("double"):
            return logits_BxTxV + logits_BxTxV + jnp.float32(0.5)  # what a run computes shows which one it has
        use.record(make_case(get_fault()))
        return 2 * logits_BxTxV


class DoublingTrainer(BigramTrainer):
    """Trainer of the model with the toy kernel."""

    def model(self) -> Any:
        return DoublingModel(self.vocabulary_size)
